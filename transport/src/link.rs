//! One connection and its stream.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn_proto::{Connection, ConnectionHandle, StreamId, Transmit, WriteError};

/// Names a connection of an endpoint; never used for another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// Datagrams that a connection has sent, and those of them that it takes for lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packets {
    pub sent: u64,
    pub lost: u64,
}

/// How long an orderly end waits until the peer has acknowledged the last bytes.
const FINISH_MAX: Duration = Duration::from_secs(1);

/// How far the end of a connection is.
pub(crate) enum End {
    Open,
    /// Nothing is read any more; closes with this code once everything written is acknowledged.
    Finishing {
        code: u32,
        reason: Bytes,
        until: Instant,
        is_finished: bool,
    },
    /// To be closed in this round.
    Close {
        code: u32,
        reason: Bytes,
    },
    /// The driver has been told.
    Closed,
}

/// A connection with what its owner keeps of it.
pub struct Link<T> {
    pub user: T,
    pub(crate) key: Key,
    pub(crate) handle: ConnectionHandle,
    pub(crate) quic: Connection,
    pub(crate) stream: Option<StreamId>,
    pub(crate) is_connected: bool,
    pub(crate) end: End,
    /// Bytes to be written to the stream, from `out_at` on.
    pub(crate) out: Vec<u8>,
    pub(crate) out_at: usize,
    /// Read from the stream and not taken by the driver.
    pub(crate) rest: Bytes,
    /// The beginning of a message whose end has not come.
    pub(crate) carry: Vec<u8>,
    pub(crate) is_readable: bool,
    pub(crate) is_touched: bool,
    /// When the driver wants to look at the connection.
    pub(crate) deadline: Option<Instant>,
    /// Earliest entry of it among the endpoint's timers.
    pub(crate) scheduled: Option<Instant>,
    /// What the kernel's buffer had no room for.
    pub(crate) unsent: Option<(Transmit, Vec<u8>)>,
}

impl<T> Link<T> {
    pub(crate) fn new(key: Key, handle: ConnectionHandle, quic: Connection, user: T) -> Self {
        Self {
            user,
            key,
            handle,
            quic,
            stream: None,
            is_connected: false,
            end: End::Open,
            out: Vec::new(),
            out_at: 0,
            rest: Bytes::new(),
            carry: Vec::new(),
            is_readable: false,
            is_touched: false,
            deadline: None,
            scheduled: None,
            unsent: None,
        }
    }

    pub fn key(&self) -> Key {
        self.key
    }

    pub fn remote_address(&self) -> SocketAddr {
        self.quic.remote_address()
    }

    /// The buffer behind which bytes for the peer are appended; sent at the end of the round.
    pub fn out(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// Datagrams since the connection began.
    pub fn packets(&self) -> Packets {
        let stats = self.quic.stats();
        Packets {
            sent: stats.path.sent_packets,
            lost: stats.path.lost_packets,
        }
    }

    /// Bytes that the peer's flow control and the connection's send window have not let through.
    pub fn waiting_bytes(&self) -> usize {
        self.out.len() - self.out_at
    }

    /// Calls [`crate::Driver::timeout`] at this moment, or not at all; replaces the one before.
    pub fn set_deadline(&mut self, at: Option<Instant>) {
        self.deadline = at;
    }

    /// True until an end was asked for or has happened.
    pub fn is_open(&self) -> bool {
        matches!(self.end, End::Open)
    }

    /// Ends the connection once the peer has what was written, within a second at most.
    pub fn finish(&mut self, now: Instant, code: u32, reason: &str) {
        if self.is_open() {
            self.end = End::Finishing {
                code,
                reason: Bytes::copy_from_slice(reason.as_bytes()),
                until: now + FINISH_MAX,
                is_finished: false,
            };
        }
    }

    /// Ends the connection in this round, whatever waits.
    pub fn close(&mut self, code: u32, reason: &str) {
        if !matches!(self.end, End::Closed) {
            let reason = Bytes::copy_from_slice(reason.as_bytes());
            self.end = End::Close { code, reason };
        }
    }

    /// Moves what waits into quinn-proto's buffers.
    pub(crate) fn write(&mut self) {
        let Some(id) = self.stream else { return };
        while self.out_at < self.out.len() {
            match self.quic.send_stream(id).write(&self.out[self.out_at..]) {
                Ok(count) => self.out_at += count,
                Err(WriteError::Blocked) => break,
                // The peer does not want the stream any more: the connection ends for another reason.
                Err(_) => self.out_at = self.out.len(),
            }
        }
        if self.out_at == self.out.len() {
            self.out.clear();
            self.out_at = 0;
        } else if self.out_at >= self.out.len() / 2 {
            // Amortized: each byte is moved once at most for each byte written.
            self.out.drain(..self.out_at);
            self.out_at = 0;
        }
    }

    /// Earliest moment at which something happens by itself.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        let ending = match &self.end {
            End::Finishing { until, .. } => Some(*until),
            _ => None,
        };
        let own = [self.quic.poll_timeout(), self.deadline, ending];
        own.into_iter().flatten().min()
    }
}
