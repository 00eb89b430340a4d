//! What one session on a connection knows: the last number received, the next client sequence, and the requests
//! not yet answered for good, which a resume compares with the server's last client sequence.
//!
//! Invariant: client sequences grow by one, each is used once. Cost: one small map entry a request in flight,
//! at most [`UNANSWERED_MAX`].

use std::collections::BTreeMap;

use tokio::sync::oneshot;
use wire::{ClientMessage, LoginAccepted};

use crate::connection::{Error, LoginOptions, SessionInfo};

/// Most requests in flight; a client past it has lost contact.
pub const UNANSWERED_MAX: usize = 1 << 20;

/// A request in flight with its place among all requests of the connection.
#[derive(Clone, Copy)]
pub struct Sent {
    pub order: u64,
    pub message: ClientMessage,
}

/// One session's state on the client's side.
pub struct Channel {
    pub options: LoginOptions,
    /// Last number received.
    pub last_sequence: u64,
    next_client_seq: u64,
    unanswered: BTreeMap<u64, Sent>,
    /// Logged in on the present connection: requests may be sent.
    pub live: bool,
    /// Who waits for the answer to the login.
    pub login: Option<oneshot::Sender<Result<SessionInfo, Error>>>,
}

/// What to do with a numbered message.
#[derive(Debug, PartialEq, Eq)]
pub enum Numbered {
    Next,
    /// The original report of a request that was sent twice.
    Seen,
    Gap {
        expected: u64,
    },
}

impl Channel {
    pub fn new(options: LoginOptions) -> Self {
        Self {
            last_sequence: options.last_sequence,
            options,
            next_client_seq: 1,
            unanswered: BTreeMap::new(),
            live: false,
            login: None,
        }
    }

    pub fn is_full(&self) -> bool {
        self.unanswered.len() >= UNANSWERED_MAX
    }

    /// Numbers a request that acts.
    pub fn sent(&mut self, order: u64, message: ClientMessage) -> u64 {
        let client_seq = self.next_client_seq;
        self.next_client_seq += 1;
        let earlier = self.unanswered.insert(client_seq, Sent { order, message });
        assert!(earlier.is_none(), "a client sequence is used once");
        client_seq
    }

    pub fn answered(&mut self, client_seq: u64) {
        self.unanswered.remove(&client_seq);
    }

    pub fn numbered(&mut self, sequence: u64) -> Numbered {
        if sequence <= self.last_sequence {
            Numbered::Seen
        } else if sequence == self.last_sequence + 1 {
            self.last_sequence = sequence;
            Numbered::Next
        } else {
            Numbered::Gap {
                expected: self.last_sequence + 1,
            }
        }
    }

    /// Takes the server's answer to the login over. Only a login from now may skip numbers.
    pub fn accepted(&mut self, info: &LoginAccepted) -> Result<(), Error> {
        let expected = self.last_sequence + 1;
        let from_now = self.options.from_now && self.last_sequence == 0;
        if info.next_sequence != expected && !(from_now && info.next_sequence > expected) {
            return Err(Error::Gap {
                expected,
                got: info.next_sequence,
            });
        }
        self.last_sequence = info.next_sequence - 1;
        self.next_client_seq = self.next_client_seq.max(info.last_client_seq + 1);
        Ok(())
    }

    /// What the server has never seen, oldest first: to be sent again with the same sequences.
    pub fn unseen(&self, last_client_seq: u64) -> impl Iterator<Item = (u64, Sent)> {
        self.unanswered
            .range(last_client_seq.saturating_add(1)..)
            .map(|(client_seq, sent)| (*client_seq, *sent))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::Cancel;

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
        let cancel = Cancel {
            client_order_id: 1,
            engine_order_id: 0,
        };
        for order in 0..5 {
            channel.sent(order, cancel.into());
        }
        channel.answered(4);
        let again: Vec<_> = channel.unseen(2).map(|(seq, _)| seq).collect();
        assert_eq!(again, [3, 5]);
        assert_eq!(channel.unseen(u64::MAX).count(), 0);
    }

    // rows: R343
    #[test]
    fn r343_numbers_have_no_gap_and_no_duplicate() {
        let mut channel = channel();
        assert!(channel.accepted(&accepted(7, 1)).is_ok());
        assert_eq!(channel.numbered(1), Numbered::Next);
        assert_eq!(channel.numbered(1), Numbered::Seen);
        assert_eq!(channel.numbered(3), Numbered::Gap { expected: 2 });
        assert_eq!(channel.numbered(2), Numbered::Next);
        let cancel = Cancel {
            client_order_id: 1,
            engine_order_id: 0,
        };
        assert_eq!(channel.sent(0, cancel.into()), 8);
        // A resume that would leave a hole is no resume.
        assert!(channel.accepted(&accepted(8, 5)).is_err());
        assert!(channel.accepted(&accepted(8, 3)).is_ok());
    }
}
