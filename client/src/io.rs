//! The two tasks of a connection: one reads the stream, checks numbers and hands reports on; one writes what
//! callers have put into the buffer.
//!
//! A report counts as received only when it has a place in [`crate::Reports`]: a task that is stopped halfway
//! has received nothing. A reader of reports that falls behind stops the reading, and so, through QUIC's flow
//! control, the server.

use std::sync::Arc;
use std::time::Instant;

use bytes::BytesMut;
use wire::{
    CONNECTION_CHANNEL, ClientMessage, Disconnect, DisconnectCode, Header, Heartbeat,
    ServerMessage, encode, take,
};

use crate::channel::Numbered;
use crate::connection::{Error, Report, Shared, State};

/// Whether a message goes to the caller.
enum Next {
    Deliver,
    Drop,
    /// Deliver, then the connection is over.
    End(Error),
}

pub async fn read(mut receive: quinn::RecvStream, quic: quinn::Connection, shared: Arc<Shared>) {
    let mut buffer = BytesMut::new();
    let error = loop {
        let (header, message) = match next_message(&mut receive, &mut buffer, &quic).await {
            Ok(next) => next,
            Err(error) => break error,
        };
        let received_at = Instant::now();
        let Ok(place) = shared.reports.reserve().await else {
            return;
        };
        let next = match note(&mut shared.lock(), &header, &message) {
            Ok(next) => next,
            Err(error) => break error,
        };
        if !matches!(next, Next::Drop) {
            place.send(Ok(Report {
                channel: header.channel,
                sequence: header.sequence,
                message,
                received_at,
            }));
        }
        if let Next::End(error) = next {
            break error;
        }
    };
    quic.close(0u32.into(), b"");
    shared.lost(&error);
    // Nobody listening is no error of the connection.
    let _ = shared.reports.send(Err(error)).await;
}

/// Takes a message into account.
fn note(state: &mut State, header: &Header, message: &ServerMessage) -> Result<Next, Error> {
    if let ServerMessage::InstrumentDefinition(definition) = message {
        state.instruments.insert(definition.instrument, *definition);
    }
    if header.channel == CONNECTION_CHANNEL {
        return Ok(match message {
            ServerMessage::Disconnect(message) => Next::End(disconnected(message)),
            _ => Next::Deliver,
        });
    }
    let Some(session) = state.channels.get_mut(&header.channel) else {
        return Ok(Next::Drop); // A session given up while its messages were on the way.
    };
    match message {
        ServerMessage::LoginAccepted(info) => {
            let answer = session.accepted(info).map(|()| *info);
            if let Some(waiting) = session.login.take() {
                // Whoever logged in may have given up already.
                let _ = waiting.send(answer);
            }
            if info.heartbeat_ms > 0 {
                let half = std::time::Duration::from_millis(u64::from(info.heartbeat_ms) / 2);
                state.heartbeat = state.heartbeat.min(half);
            }
            Ok(Next::Deliver)
        }
        ServerMessage::Disconnect(message) => {
            session.live = false;
            match session.login.take() {
                Some(waiting) => {
                    let _ = waiting.send(Err(disconnected(message)));
                    Ok(Next::Drop)
                }
                None => {
                    state.channels.remove(&header.channel);
                    Ok(Next::Deliver)
                }
            }
        }
        _ => {
            let next = match header.sequence {
                0 => Next::Deliver,
                sequence => match session.numbered(sequence) {
                    Numbered::Next => Next::Deliver,
                    Numbered::Seen => Next::Drop,
                    Numbered::Gap { expected } => {
                        return Err(Error::Gap {
                            expected,
                            got: sequence,
                        });
                    }
                },
            };
            if message.answers() != 0 {
                session.answered(message.answers());
            }
            Ok(next)
        }
    }
}

fn disconnected(message: &Disconnect) -> Error {
    Error::Disconnected {
        code: DisconnectCode::from_code(message.code),
        text: message.text.as_str().to_owned(),
    }
}

async fn next_message(
    receive: &mut quinn::RecvStream,
    buffer: &mut BytesMut,
    quic: &quinn::Connection,
) -> Result<(Header, ServerMessage), Error> {
    loop {
        if let Some(next) = take(buffer)? {
            return Ok(next);
        }
        match receive.read_chunk(usize::MAX, true).await {
            Ok(Some(chunk)) => buffer.extend_from_slice(&chunk.bytes),
            Ok(None) | Err(_) => return Err(lost(quic)),
        }
    }
}

/// The reason of a stream's end is the connection's, where there is one.
fn lost(quic: &quinn::Connection) -> Error {
    match quic.close_reason() {
        Some(quinn::ConnectionError::ApplicationClosed(close)) => Error::Disconnected {
            code: u16::try_from(close.error_code.into_inner())
                .ok()
                .and_then(DisconnectCode::from_code),
            text: String::from_utf8_lossy(&close.reason).into_owned(),
        },
        Some(reason) => Error::Lost(reason),
        None => Error::Stream,
    }
}

pub async fn write(mut send: quinn::SendStream, quic: quinn::Connection, shared: Arc<Shared>) {
    let mut bytes = BytesMut::new();
    loop {
        let heartbeat = {
            let mut state = shared.lock();
            std::mem::swap(&mut bytes, &mut state.outbound);
            state.heartbeat
        };
        if bytes.is_empty() {
            tokio::select! {
                () = shared.wake.notified() => continue,
                () = tokio::time::sleep(heartbeat) => {
                    encode(&ClientMessage::from(Heartbeat {}), CONNECTION_CHANNEL, 0, &mut bytes);
                }
                _ = quic.closed() => return,
            }
        }
        shared.room.notify_waiters();
        if send.write_all(&bytes).await.is_err() {
            return; // The reader tells why.
        }
        bytes.clear();
    }
}
