//! One connection and its stream.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use quinn_proto::{Connection, ConnectionHandle, StreamId, Transmit, WriteError};

/// Identifies a connection of an endpoint; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// Datagrams that a connection has sent, and those it considers lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packets {
    pub sent: u64,
    pub lost: u64,
}

/// Time limit for the peer to acknowledge the last bytes in an orderly close.
const FINISH_MAX: Duration = Duration::from_secs(1);
/// Capacity above which the buffer of waiting bytes shrinks once most of them are written.
const KEPT_BYTES: usize = 512 << 10;

/// State of a connection's close.
pub(crate) enum End {
    Open,
    /// Reads nothing more. Closes with this code once the peer has acknowledged all written bytes,
    /// or at `until`.
    Finishing {
        code: u32,
        reason: Bytes,
        until: Instant,
        is_finished: bool,
    },
    /// Closes in this round.
    Close {
        code: u32,
        reason: Bytes,
    },
    /// The driver has been notified.
    Closed,
}

/// A connection with its owner's data.
pub struct Link<T> {
    pub user: T,
    pub(crate) key: Key,
    pub(crate) handle: ConnectionHandle,
    pub(crate) quic: Connection,
    pub(crate) stream: Option<StreamId>,
    pub(crate) is_connected: bool,
    pub(crate) end: End,
    /// Bytes to write to the stream, from `out_at` on.
    pub(crate) out: Vec<u8>,
    pub(crate) out_at: usize,
    /// Bytes that quinn-proto has accepted, and when it last did.
    pub(crate) written: u64,
    pub(crate) written_at: Option<Instant>,
    /// Bytes read from the stream and not consumed by the driver.
    pub(crate) rest: Bytes,
    /// Start of an incomplete message.
    pub(crate) carry: Vec<u8>,
    pub(crate) is_readable: bool,
    /// The peer has stopped the stream, and the driver has not been notified.
    pub(crate) is_stopped: bool,
    /// The driver has paused: it gets the following bytes in the next round.
    pub(crate) is_paused: bool,
    pub(crate) is_touched: bool,
    /// When [`crate::Driver::timeout`] is called.
    pub(crate) deadline: Option<Instant>,
    /// This connection's entries in the endpoint's timers, the earliest one last.
    pub(crate) scheduled: Vec<Instant>,
    /// Datagrams that the kernel's full buffer did not accept.
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
            written: 0,
            written_at: None,
            rest: Bytes::new(),
            carry: Vec::new(),
            is_readable: false,
            is_stopped: false,
            is_paused: false,
            is_touched: false,
            deadline: None,
            scheduled: Vec::new(),
            unsent: None,
        }
    }

    pub fn key(&self) -> Key {
        self.key
    }

    pub fn remote_address(&self) -> SocketAddr {
        self.quic.remote_address()
    }

    /// Buffer for bytes to the peer. The owner appends; `Endpoint::flush` sends.
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

    /// Bytes that quinn-proto has not accepted: appended in this round, or held back by the peer's
    /// flow control or the send window.
    pub fn waiting_bytes(&self) -> usize {
        self.out.len() - self.out_at
    }

    /// Bytes that quinn-proto has accepted since the connection began.
    pub fn written_bytes(&self) -> u64 {
        self.written
    }

    /// When quinn-proto last accepted bytes; `None` before the first. While bytes wait, it accepts
    /// more only after the peer has read or acknowledged some.
    pub fn written_at(&self) -> Option<Instant> {
        self.written_at
    }

    /// Replaces the deadline at which [`crate::Driver::timeout`] is called; `None` = never.
    pub fn set_deadline(&mut self, at: Option<Instant>) {
        self.deadline = at;
    }

    /// True until a close is requested or has happened.
    pub fn is_open(&self) -> bool {
        matches!(self.end, End::Open)
    }

    /// Closes the connection once the peer has acknowledged all written bytes, at the latest after
    /// one second.
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

    /// Closes the connection in this round. Unsent bytes are dropped.
    pub fn close(&mut self, code: u32, reason: &str) {
        if !matches!(self.end, End::Closed) {
            let reason = Bytes::copy_from_slice(reason.as_bytes());
            self.end = End::Close { code, reason };
        }
    }

    pub(crate) fn drop_output(&mut self) {
        self.out.clear();
        self.out_at = 0;
    }

    /// As [`Link::write`], and records the progress.
    pub(crate) fn flush(&mut self, now: Instant) {
        let waiting = self.waiting_bytes();
        self.write();
        let written = waiting - self.waiting_bytes();
        if written > 0 {
            self.written += written as u64;
            self.written_at = Some(now);
        }
    }

    /// Moves the waiting bytes into quinn-proto's buffers.
    fn write(&mut self) {
        let Some(id) = self.stream else { return };
        while self.out_at < self.out.len() {
            match self.quic.send_stream(id).write(&self.out[self.out_at..]) {
                Ok(count) => self.out_at += count,
                Err(WriteError::Blocked) => break,
                // The peer has stopped the stream: the bytes are dropped.
                Err(_) => self.out_at = self.out.len(),
            }
        }
        if self.out_at == self.out.len() {
            self.out.clear();
            self.out_at = 0;
        } else if self.out_at >= self.out.len() / 2 {
            // Amortised: at most one byte is moved per byte written.
            self.out.drain(..self.out_at);
            self.out_at = 0;
        }
        if self.out.capacity() > KEPT_BYTES && self.out.len() < KEPT_BYTES / 4 {
            self.out.shrink_to(KEPT_BYTES / 2);
        }
    }

    /// Earliest of QUIC's timeout, the owner's deadline and the end of an orderly close.
    pub(crate) fn next_deadline(&mut self) -> Option<Instant> {
        let ending = match &self.end {
            End::Finishing { until, .. } => Some(*until),
            _ => None,
        };
        let own = [self.quic.poll_timeout(), self.deadline, ending];
        own.into_iter().flatten().min()
    }
}
