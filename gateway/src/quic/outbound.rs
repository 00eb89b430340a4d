//! What waits to be written to one connection: bounded, filled from any thread without waiting, emptied by the connection's writer.
//!
//! A client that does not read fills it up to [`OUTBOUND_LEN_MAX`]; then the connection is given up (it resumes) and nothing more is taken in.

use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::BytesMut;
use tokio::sync::Notify;
use wire::{CONNECTION_CHANNEL, Disconnect, DisconnectCode, ServerMessage, Text, encode};

/// Bytes that may wait for a slow client.
pub const OUTBOUND_LEN_MAX: usize = 32 << 20;
/// Bytes below which there is room for messages that need not be written now.
pub const OUTBOUND_LEN_ROOM: usize = 4 << 20;
/// Where the channel stands in a message.
const CHANNEL_AT: usize = 4;

struct State {
    buffer: BytesMut,
    /// Why the connection ends once the buffer is written.
    end: Option<DisconnectCode>,
    /// Channels whose session has ended here.
    ended: Vec<u16>,
}

pub struct Outbound {
    state: Mutex<State>,
    wake: Notify,
    /// Written, or ended.
    drained: Notify,
}

/// What the writer has to do next.
pub enum Next {
    Write(BytesMut),
    End(DisconnectCode),
    Wait,
}

impl Default for Outbound {
    fn default() -> Self {
        Self {
            state: Mutex::new(State {
                buffer: BytesMut::new(),
                end: None,
                ended: Vec::new(),
            }),
            wake: Notify::new(),
            drained: Notify::new(),
        }
    }
}

impl Outbound {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a message that is encoded already, for this channel.
    pub fn push(&self, channel: u16, encoded: &[u8]) {
        let mut state = self.lock();
        if !state.takes() {
            drop(state);
            self.drained.notify_waiters();
            return;
        }
        let at = state.buffer.len() + CHANNEL_AT;
        state.buffer.extend_from_slice(encoded);
        state.buffer[at..at + 2].copy_from_slice(&channel.to_le_bytes());
        drop(state);
        self.wake.notify_one();
    }

    /// Adds an unnumbered message.
    pub fn send(&self, channel: u16, message: &ServerMessage) {
        let mut state = self.lock();
        if state.takes() {
            encode(message, channel, 0, &mut state.buffer);
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Says why a channel carries no session (any more); its owner here knows.
    pub fn refuse_channel(&self, channel: u16, code: DisconnectCode) {
        self.send(channel, &disconnect(code));
    }

    /// Says why a session ends that something else has ended; the connection goes on and learns it by [`Outbound::take_ended`].
    pub fn end_channel(&self, channel: u16, code: DisconnectCode) {
        self.send(channel, &disconnect(code));
        self.lock().ended.push(channel);
        self.wake.notify_one();
    }

    /// Channels ended since the last call.
    pub fn take_ended(&self) -> Vec<u16> {
        std::mem::take(&mut self.lock().ended)
    }

    /// Says why and ends the connection when that is written.
    pub fn end(&self, code: DisconnectCode) {
        let mut state = self.lock();
        if state.end.is_none() {
            encode(&disconnect(code), CONNECTION_CHANNEL, 0, &mut state.buffer);
            state.end = Some(code);
        }
        drop(state);
        self.wake.notify_one();
        self.drained.notify_waiters();
    }

    /// Whether what can wait would be taken now.
    pub fn has_room(&self) -> bool {
        let state = self.lock();
        state.end.is_none() && state.buffer.len() < OUTBOUND_LEN_ROOM
    }

    /// Returns when there is room for what can wait; false when the connection ends.
    pub async fn room(&self) -> bool {
        loop {
            let mut drained = std::pin::pin!(self.drained.notified());
            drained.as_mut().enable();
            {
                let state = self.lock();
                if state.end.is_some() {
                    return false;
                }
                if state.buffer.len() < OUTBOUND_LEN_ROOM {
                    return true;
                }
            }
            drained.await;
        }
    }

    pub fn next(&self) -> Next {
        let mut state = self.lock();
        match state.end {
            Some(DisconnectCode::SlowConsumer) => Next::End(DisconnectCode::SlowConsumer),
            Some(code) if state.buffer.is_empty() => Next::End(code),
            None if state.buffer.is_empty() => Next::Wait,
            _ => {
                self.drained.notify_waiters();
                Next::Write(state.buffer.split())
            }
        }
    }

    pub async fn woken(&self) {
        self.wake.notified().await;
    }
}

impl State {
    /// False once the connection ends, or when the client has let too much pile up.
    fn takes(&mut self) -> bool {
        if self.end.is_none() && self.buffer.len() >= OUTBOUND_LEN_MAX {
            self.end = Some(DisconnectCode::SlowConsumer);
        }
        self.end.is_none()
    }
}

fn disconnect(code: DisconnectCode) -> ServerMessage {
    Disconnect {
        code: code.code(),
        text: Text::truncated(&code.to_string()),
    }
    .into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::{ServerHeartbeat, take};

    #[test]
    fn a_client_that_does_not_read_is_given_up_at_the_bound() {
        let outbound = Outbound::default();
        let mut one = BytesMut::new();
        encode::<ServerMessage>(&ServerHeartbeat { time_ns: 1 }.into(), 0, 9, &mut one);
        let pushes = OUTBOUND_LEN_MAX.div_ceil(one.len());
        for _ in 0..pushes {
            outbound.push(7, &one);
        }
        assert!(matches!(outbound.next(), Next::Write(_)), "at the bound");
        for _ in 0..=pushes {
            outbound.push(7, &one);
        }
        assert!(
            matches!(outbound.next(), Next::End(DisconnectCode::SlowConsumer)),
            "one past it"
        );
    }

    #[test]
    fn messages_get_their_channel() {
        let outbound = Outbound::default();
        let mut one = BytesMut::new();
        encode::<ServerMessage>(&ServerHeartbeat { time_ns: 1 }.into(), 0, 9, &mut one);
        outbound.push(7, &one);
        let Next::Write(mut bytes) = outbound.next() else {
            panic!("something to write");
        };
        let (header, _) = take::<ServerMessage>(&mut bytes).unwrap().unwrap();
        assert_eq!((header.channel, header.sequence), (7, 9));
    }
}
