//! Client-side state of one session: last number received, next client sequence, and the requests
//! without a final answer. A resume compares these requests with the server's last client sequence.
//!
//! Invariant: client sequences grow by one, and each is used once. Cost: 80 bytes per request since
//! the oldest unanswered one, for at most [`UNANSWERED_MAX`] requests. Sending allocates only while
//! the queue of unanswered requests grows.

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use wire::{Amend, Cancel, CancelAllAfter, HEADER_LEN, LoginAccepted, MassCancel, NewOrder};

use crate::{Error, LoginOptions};

/// Maximum number of requests since the oldest unanswered one. At the maximum no request is sent.
pub const UNANSWERED_MAX: usize = 1 << 20;

/// Bytes kept per request. The longest request with a client sequence fits.
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

/// A request as sent, kept for a resume.
#[derive(Clone, Copy)]
pub struct Sent {
    /// Position among the requests of all sessions of the connection.
    pub position: u64,
    /// Bytes of the message, 0 = answered.
    length: u8,
    bytes: [u8; REQUEST_LEN_MAX],
}

impl Sent {
    /// The whole message with its header. A resume sends it unchanged.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.length)]
    }
}

/// Login state of a session: requests may be sent in `Live` only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Not logged in on the current connection.
    LoggedOut,
    /// The first login is unanswered.
    LoggingIn,
    /// The login of a resume is unanswered.
    Resuming,
    /// Logged in again, while other sessions are not. Unseen requests are resent before new ones.
    Resumed { last_client_seq: u64 },
    /// Requests may be sent.
    Live,
}

/// Client-side state of one session.
pub struct Channel {
    pub options: LoginOptions,
    /// Last number received.
    pub last_sequence: u64,
    pub phase: Phase,
    /// Unanswered retransmit requests of the caller: request id and message numbers.
    resends: Vec<(u32, RangeInclusive<u64>)>,
    next_client_seq: u64,
    /// Requests with consecutive client sequences, the last one below `next_client_seq`. The first
    /// is unanswered.
    unanswered: VecDeque<Sent>,
}

/// Result of checking a message's number.
#[derive(Debug, PartialEq, Eq)]
pub enum SequenceCheck {
    Next,
    /// An earlier message that the caller has requested with `Retransmit`.
    Resent,
    /// An earlier message that was not requested: the report of a request that was sent twice.
    Duplicate,
}

impl Channel {
    pub fn new(options: LoginOptions) -> Self {
        Self {
            last_sequence: options.last_sequence,
            options,
            phase: Phase::LoggingIn,
            resends: Vec::new(),
            next_client_seq: 1,
            unanswered: VecDeque::new(),
        }
    }

    /// Client sequence of the next request.
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
    pub fn sent(&mut self, position: u64, request: &[u8]) {
        let mut bytes = [0; REQUEST_LEN_MAX];
        bytes[..request.len()].copy_from_slice(request);
        self.unanswered.push_back(Sent {
            position,
            length: request.len() as u8,
            bytes,
        });
        self.next_client_seq += 1;
    }

    /// Notes that the caller has requested these numbers with `Retransmit`.
    pub fn request_resend(&mut self, request_id: u32, range: RangeInclusive<u64>) {
        self.resends.push((request_id, range));
    }

    /// Notes that the server has answered a retransmit request.
    pub fn resend_answered(&mut self, request_id: u32) {
        if let Some(at) = self.resends.iter().position(|(id, _)| *id == request_id) {
            self.resends.remove(at);
        }
    }

    /// Drops the retransmit requests of a lost connection. The server does not answer them.
    pub fn clear_resends(&mut self) {
        self.resends.clear();
    }

    /// Notes the final answer to a request. Ignores an unknown client sequence.
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

    /// Client sequence of the oldest kept request.
    fn oldest(&self) -> u64 {
        self.next_client_seq - self.unanswered.len() as u64
    }

    /// Compares a message's number with the expected one, and advances it if they are equal.
    ///
    /// # Errors
    /// [`Error::Gap`]: a number is missing.
    pub fn check_sequence(&mut self, sequence: u64) -> Result<SequenceCheck, Error> {
        let expected = self.last_sequence.saturating_add(1);
        if sequence < expected {
            let mut resends = self.resends.iter();
            let is_requested = resends.any(|(_, range)| range.contains(&sequence));
            return Ok(match is_requested {
                true => SequenceCheck::Resent,
                false => SequenceCheck::Duplicate,
            });
        }
        if sequence > expected {
            return Err(Error::Gap {
                expected,
                got: sequence,
            });
        }
        self.last_sequence = sequence;
        Ok(SequenceCheck::Next)
    }

    /// Applies the server's answer to a login. Only the first login may skip numbers, with the
    /// option `from_now`. A resume may not: the skipped messages may be reports of its requests.
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
        self.options.from_now = false;
        if info.last_client_seq >= self.next_client_seq {
            // The server has seen every request of this client, so none is sent again.
            self.unanswered.clear();
            self.next_client_seq = info.last_client_seq.saturating_add(1);
        }
        Ok(())
    }

    /// Unanswered requests after `last_client_seq`, oldest first. A resume sends them unchanged.
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
        for position in 0..5 {
            channel.sent(position, &[1]);
        }
        channel.answered(4);
        let resent: Vec<_> = channel.unseen(2).map(|sent| sent.position).collect();
        assert_eq!(resent, [2, 4]);
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
        assert!(matches!(channel.check_sequence(1), Ok(SequenceCheck::Next)));
        assert!(matches!(
            channel.check_sequence(1),
            Ok(SequenceCheck::Duplicate)
        ));
        let gap = channel.check_sequence(3);
        assert!(matches!(
            gap,
            Err(Error::Gap {
                expected: 2,
                got: 3
            })
        ));
        assert!(matches!(channel.check_sequence(2), Ok(SequenceCheck::Next)));
        assert_eq!(channel.next_client_seq().unwrap(), 8);
        // A resume that leaves a gap fails.
        assert!(channel.accepted(&accepted(8, 5)).is_err());
        assert!(channel.accepted(&accepted(8, 3)).is_ok());
    }

    #[test]
    fn a_client_without_answers_is_stopped() {
        let mut channel = channel();
        for position in 0..UNANSWERED_MAX as u64 {
            channel.sent(position, &[1]);
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
