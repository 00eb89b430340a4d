//! State of one session on a connection: the last number received, the next client sequence, and
//! the requests without a final answer, which a resume compares with the server's last client
//! sequence.
//!
//! Invariant: client sequences grow by one, each is used once. Cost: a slot of 80 bytes per request
//! since the oldest unanswered one, at most [`UNANSWERED_MAX`]. Nothing is allocated once the ring
//! has reached its size.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use wire::{Amend, Cancel, CancelAllAfter, HEADER_LEN, LoginAccepted, MassCancel, NewOrder};

use crate::{Error, LoginOptions};

/// Requests since the oldest unanswered one. A client past it has lost contact.
pub const UNANSWERED_MAX: usize = 1 << 20;

/// Bytes kept per request: the longest request that acts fits.
const REQUEST_LEN_MAX: usize = 64;

const _: () = {
    let lengths = [
        NewOrder::LEN,
        Cancel::LEN,
        Amend::LEN,
        MassCancel::LEN,
        CancelAllAfter::LEN,
    ];
    let mut at = 0;
    while at < lengths.len() {
        assert!(HEADER_LEN + lengths[at] <= REQUEST_LEN_MAX);
        at += 1;
    }
};

/// A request without a final answer, as sent, with its position among all of the connection.
#[derive(Clone, Copy)]
pub struct Sent {
    pub order: u64,
    /// 0 = answered.
    length: u8,
    bytes: [u8; REQUEST_LEN_MAX],
}

impl Sent {
    /// The whole message with its header: channel and client sequence do not change.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

/// Whether requests may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not logged in on the current connection.
    Out,
    /// The first login is unanswered.
    LoggingIn,
    /// The login of a resume is unanswered.
    Resuming,
    /// Logged in by a resume, other sessions are not yet. Unseen requests are sent first.
    Back { last_client_seq: u64 },
    /// Requests may be sent.
    Live,
}

/// Client-side state of one session.
pub struct Channel {
    pub options: LoginOptions,
    /// Last number received.
    pub last_sequence: u64,
    pub phase: Phase,
    /// Numbers that the caller requested again, by request id, until the server has answered.
    again: Vec<(u32, RangeInclusive<u64>)>,
    next_client_seq: u64,
    /// Requests of the client sequences just below `next_client_seq`; the first is unanswered.
    unanswered: VecDeque<Sent>,
}

/// What to do with a numbered message.
#[derive(Debug, PartialEq, Eq)]
pub enum Numbered {
    Next,
    /// Requested again.
    Again,
    /// The original report of a request that was sent twice.
    Seen,
}

impl Channel {
    pub fn new(options: LoginOptions) -> Self {
        Self {
            last_sequence: options.last_sequence,
            options,
            phase: Phase::LoggingIn,
            again: Vec::new(),
            next_client_seq: 1,
            unanswered: VecDeque::new(),
        }
    }

    /// Client sequence of the next request that acts.
    ///
    /// # Errors
    /// [`Error::TooManyUnanswered`].
    pub fn next_client_seq(&self) -> Result<u64, Error> {
        if self.unanswered.len() >= UNANSWERED_MAX {
            return Err(Error::TooManyUnanswered);
        }
        Ok(self.next_client_seq)
    }

    /// Keeps a request that is sent under [`Channel::next_client_seq`].
    pub fn sent(&mut self, order: u64, request: &[u8]) {
        let mut bytes = [0; REQUEST_LEN_MAX];
        bytes[..request.len()].copy_from_slice(request);
        self.unanswered.push_back(Sent {
            order,
            length: request.len() as u8,
            bytes,
        });
        self.next_client_seq += 1;
    }

    /// The caller asks for these numbers once more.
    pub fn ask_again(&mut self, request_id: u32, range: RangeInclusive<u64>) {
        self.again.push((request_id, range));
    }

    /// The server has answered a request for numbers once more.
    pub fn asked_again(&mut self, request_id: u32) {
        if let Some(at) = self.again.iter().position(|(id, _)| *id == request_id) {
            self.again.remove(at);
        }
    }

    /// The connection that the requests went to is gone.
    pub fn forget_asked(&mut self) {
        self.again.clear();
    }

    pub fn answered(&mut self, client_seq: u64) {
        let Some(at) = client_seq.checked_sub(self.oldest()) else {
            return;
        };
        let slot = usize::try_from(at).ok();
        if let Some(sent) = slot.and_then(|at| self.unanswered.get_mut(at)) {
            sent.length = 0;
        }
        while self.unanswered.front().is_some_and(|sent| sent.length == 0) {
            self.unanswered.pop_front();
        }
    }

    /// Client sequence of the first slot.
    fn oldest(&self) -> u64 {
        self.next_client_seq - self.unanswered.len() as u64
    }

    /// Accounts for the number of a message.
    ///
    /// # Errors
    /// [`Error::Gap`]: a number is missing.
    pub fn numbered(&mut self, sequence: u64) -> Result<Numbered, Error> {
        let expected = self.last_sequence.saturating_add(1);
        if sequence < expected {
            let mut asked = self.again.iter();
            let is_wanted = asked.any(|(_, range)| range.contains(&sequence));
            return Ok(match is_wanted {
                true => Numbered::Again,
                false => Numbered::Seen,
            });
        }
        if sequence > expected {
            return Err(Error::Gap {
                expected,
                got: sequence,
            });
        }
        self.last_sequence = sequence;
        Ok(Numbered::Next)
    }

    /// Adopts the server's answer to the login. Only a login from now may skip numbers.
    ///
    /// # Errors
    /// [`Error::Gap`]: numbered messages are missing.
    pub fn accepted(&mut self, info: &LoginAccepted) -> Result<(), Error> {
        let expected = self.last_sequence.saturating_add(1);
        let from_now = self.options.from_now && self.last_sequence == 0;
        if info.next_sequence != expected && !(from_now && info.next_sequence > expected) {
            return Err(Error::Gap {
                expected,
                got: info.next_sequence,
            });
        }
        self.last_sequence = info.next_sequence - 1;
        if info.last_client_seq >= self.next_client_seq {
            // The server has seen more than this client has sent, so nothing is sent again.
            self.unanswered.clear();
            self.next_client_seq = info.last_client_seq.saturating_add(1);
        }
        Ok(())
    }

    /// Requests the server has not seen, oldest first: to be sent again, sequences unchanged.
    pub fn unseen(&self, last_client_seq: u64) -> impl Iterator<Item = &Sent> {
        let seen = last_client_seq
            .saturating_add(1)
            .saturating_sub(self.oldest());
        let seen = usize::try_from(seen).unwrap_or(usize::MAX);
        let unseen = self.unanswered.iter().skip(seen);
        unseen.filter(|sent| sent.length != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channel() -> Channel {
        Channel::new(LoginOptions::new("token", "a"))
    }

    fn accepted(last_client_seq: u64, next_sequence: u64) -> LoginAccepted {
        LoginAccepted {
            session: 0,
            last_client_seq,
            next_sequence,
            node: 1,
            throttle_per_s: 0,
            heartbeat_ms: 0,
            cancel_all_at_ns: 0,
            time_ns: 0,
        }
    }

    // rows: R343
    #[test]
    fn r343_only_what_the_server_has_not_seen_is_sent_again() {
        let mut channel = channel();
        for order in 0..5 {
            channel.sent(order, &[1]);
        }
        channel.answered(4);
        let again: Vec<_> = channel.unseen(2).map(|sent| sent.order).collect();
        assert_eq!(again, [2, 4]);
        channel.answered(1);
        channel.answered(99);
        assert_eq!(channel.unseen(0).count(), 3);
        assert_eq!(channel.unseen(2).count(), 2);
        assert_eq!(channel.unseen(5).count(), 0);
        assert!(channel.accepted(&accepted(7, 1)).is_ok());
        assert_eq!(channel.unseen(0).count(), 0);
        assert_eq!(channel.next_client_seq().unwrap(), 8);
    }

    // rows: R343
    #[test]
    fn r343_numbers_have_no_gap_and_no_duplicate() {
        let mut channel = channel();
        assert!(channel.accepted(&accepted(7, 1)).is_ok());
        assert!(matches!(channel.numbered(1), Ok(Numbered::Next)));
        assert!(matches!(channel.numbered(1), Ok(Numbered::Seen)));
        let gap = channel.numbered(3);
        assert!(matches!(
            gap,
            Err(Error::Gap {
                expected: 2,
                got: 3
            })
        ));
        assert!(matches!(channel.numbered(2), Ok(Numbered::Next)));
        assert_eq!(channel.next_client_seq().unwrap(), 8);
        // A resume that leaves a gap fails.
        assert!(channel.accepted(&accepted(8, 5)).is_err());
        assert!(channel.accepted(&accepted(8, 3)).is_ok());
    }

    #[test]
    fn a_client_without_answers_is_stopped() {
        let mut channel = channel();
        for order in 0..UNANSWERED_MAX as u64 {
            channel.sent(order, &[1]);
        }
        let refused = channel.next_client_seq();
        assert!(matches!(refused, Err(Error::TooManyUnanswered)));
        channel.answered(1);
        assert_eq!(
            channel.next_client_seq().unwrap(),
            UNANSWERED_MAX as u64 + 1
        );
    }
}
