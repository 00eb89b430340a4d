//! The two tasks of an async connection. One reads the stream and delivers reports, the other
//! writes the output of [`crate::Sessions`].
//!
//! The reader reserves a slot in [`crate::Reports`] before it parses a message, so an aborted task
//! loses no report. A slow consumer of reports pauses the reader, and QUIC's flow control then
//! pauses the server.

use std::sync::Arc;
use std::time::Instant;

use bytes::{Buf, BytesMut};
use tokio::sync::mpsc::Permit;

use crate::Error;
use crate::connection::Shared;
use crate::sessions::{Event, Report};

pub async fn read(
    mut receive: quinn::RecvStream,
    quic: quinn::Connection,
    shared: Arc<Shared>,
    epoch: u64,
) {
    let mut buffer = BytesMut::new();
    let error = loop {
        match receive.read_chunk(usize::MAX, true).await {
            Ok(Some(chunk)) => buffer.extend_from_slice(&chunk.bytes),
            Ok(None) | Err(_) => break close_error(&quic),
        }
        match consume(&mut buffer, &shared, epoch).await {
            Ok(true) => {}
            Ok(false) => return,
            Err(error) => break error,
        }
    };
    quic.close(0u32.into(), b"");
    shared.lost(epoch, &error);
    // The caller may have dropped its reports.
    let _ = shared.reports.send(Err(error)).await;
}

/// Consumes the complete messages of the buffer. Returns false after the connection was replaced.
/// Dropped reports end the connection, as the server ends one whose messages are not read.
async fn consume(buffer: &mut BytesMut, shared: &Shared, epoch: u64) -> Result<bool, Error> {
    let received_at = Instant::now();
    loop {
        let Ok(place) = shared.reports.reserve().await else {
            return Err(Error::Stream);
        };
        let received = {
            let mut state = shared.lock();
            if state.epoch != epoch {
                return Ok(false);
            }
            state.sessions.receive(received_at, buffer)?
        };
        let Some((length, event)) = received else {
            return Ok(true);
        };
        buffer.advance(length);
        deliver(place, shared, event)?;
    }
}

fn deliver(
    place: Permit<'_, Result<Report, Error>>,
    shared: &Shared,
    event: Event,
) -> Result<(), Error> {
    match event {
        Event::Report(report) => place.send(Ok(report)),
        Event::LoggedIn { report, info } => {
            place.send(Ok(report));
            shared.answer(report.channel, Ok(info));
        }
        Event::LoginFailed { channel, error } => shared.answer(channel, Err(error)),
        Event::Ended { report, error } => {
            place.send(Ok(report));
            return Err(error);
        }
        Event::Ignored => {}
    }
    Ok(())
}

/// The connection's close reason, or [`Error::Stream`] if it has none.
fn close_error(quic: &quinn::Connection) -> Error {
    quic.close_reason().map_or(Error::Stream, Error::of_close)
}

pub async fn write(
    mut send: quinn::SendStream,
    quic: quinn::Connection,
    shared: Arc<Shared>,
    epoch: u64,
) {
    let mut bytes = Vec::new();
    loop {
        let due = {
            let mut state = shared.lock();
            if state.epoch != epoch {
                return; // Lost, or replaced by a resume.
            }
            let now = Instant::now();
            state.sessions.handle_timeout(now);
            state.sessions.poll_transmit(now, &mut bytes);
            state.sessions.poll_timeout()
        };
        if bytes.is_empty() {
            let Some(due) = due else { return };
            tokio::select! {
                () = shared.wake.notified() => {}
                () = tokio::time::sleep_until(due.into()) => {}
                _ = quic.closed() => return,
            }
            continue;
        }
        shared.room.notify_waiters();
        if send.write_all(&bytes).await.is_err() {
            return; // The reader reports the cause.
        }
        bytes.clear();
    }
}
