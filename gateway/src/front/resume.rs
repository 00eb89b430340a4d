//! Resumes: a client that logs in again is sent the messages that it lacks, as fast as it reads. A
//! delayed login waits among them until its connection has space for the answer.
//!
//! Sessions take turns, a bounded number per round:
//!
//! - A session that was sent messages has a turn in the next round too.
//! - A session that waits for space in its connection, or for its user's look-up limit, has its
//!   next turn after a round in which the front did other work.
//! - A session whose messages are being read from the journal has no turn until they arrive.
//!
//! Messages read from the journal are kept until all are sent. Their look-up counts as in progress
//! until then, which bounds the memory. If the client reads nothing for [`FETCHED_KEPT`], they are
//! dropped and read again later.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use bytes::Bytes;
use wire::DisconnectCode;

use super::connection::send_pulled;
use super::desk::FrontRequest;
use super::session::At;
use super::state::State;
use super::{Front, RESUME_BYTES, RESUME_MESSAGES};

/// Turns per round of ready sessions, and of waiting sessions. Bounds a round of the front, which
/// may run on the hot thread.
const READY_TURNS: usize = 16;
const WAITING_TURNS: usize = 8;
/// How long messages read from the journal are kept for a client that reads nothing. After that
/// their memory and look-up are free for others.
const FETCHED_KEPT: Duration = Duration::from_secs(5);

/// Outcome of a session's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    /// Messages were sent, and more are missing.
    Sent,
    /// The session waits for space in its connection or for its user's look-up limit.
    Waits,
    /// The session leaves the queue: nothing is missing, the client is gone, or messages are being
    /// read.
    Over,
}

/// Sessions whose clients lack messages or the answer to a login, each at most once.
#[derive(Debug, Default)]
pub struct Resuming {
    ready: VecDeque<At>,
    waiting: VecDeque<At>,
    /// Number of sessions at the front of `waiting` that have had no turn since the last `retry`.
    untried: usize,
}

impl Resuming {
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.waiting.is_empty()
    }

    fn push(&mut self, at: At) {
        self.ready.push_back(at);
    }

    /// Makes each waiting session have a turn. Call it after other work of the front.
    pub fn retry(&mut self) {
        self.untried = self.waiting.len();
    }

    /// Runs the turns of one round. True while another round may send something.
    fn round(&mut self, mut turn: impl FnMut(At) -> Turn) -> bool {
        let ready = self.ready.len().min(READY_TURNS);
        let waiting = self.untried.min(WAITING_TURNS);
        self.untried -= waiting;
        for nth in 0..ready + waiting {
            let queue = match nth < ready {
                true => &mut self.ready,
                false => &mut self.waiting,
            };
            let at = queue.pop_front().expect("counted above");
            match turn(at) {
                Turn::Sent => self.ready.push_back(at),
                Turn::Waits => self.waiting.push_back(at),
                Turn::Over => {}
            }
        }
        !self.ready.is_empty() || self.untried > 0
    }
}

impl State {
    /// Queues a session whose client lacks messages or the answer to its login.
    pub(super) fn begin_resume(&mut self, at: At) {
        let session = self.sessions.row(at);
        if !std::mem::replace(&mut session.is_resuming, true) {
            self.resuming.push(at);
        }
    }

    /// Requests the messages before the session's window. False when the session has to wait.
    fn fetch(&mut self, at: At) -> bool {
        let session = self.sessions.row(at);
        let front_request = FrontRequest::Messages {
            session: (at, session.epoch),
            ix: session.ix,
            after: session.sent,
            retransmit_through: None,
        };
        let is_fetching = self.look_up(at, front_request);
        self.sessions.row(at).is_fetching = is_fetching;
        is_fetching
    }
}

impl Front {
    /// Runs one round of resumes. True while another round may send something.
    pub(super) fn resume(&mut self, now: Instant) -> bool {
        let mut resuming = std::mem::take(&mut self.state.resuming);
        let may_send = resuming.round(|at| {
            let turn = self.resume_one(now, at);
            if turn == Turn::Over {
                self.state.sessions.row(at).is_resuming = false;
            }
            turn
        });
        self.state.resuming = resuming;
        may_send
    }

    fn resume_one(&mut self, now: Instant, at: At) -> Turn {
        if !self.complete_login(now, at) {
            return Turn::Waits;
        }
        let session = self.state.sessions.get(at);
        let lacks_messages = !session.is_following && !session.is_fetching;
        let Some(owner) = session.owner.filter(|_| lacks_messages) else {
            return Turn::Over;
        };
        let is_older = session.fetched.is_empty() && session.sent + 1 < session.window.first();
        // Checked first, since the look-up of a connection costs a poll of it.
        if is_older && !self.state.may_look_up(session.user) {
            return Turn::Waits;
        }
        let Some(link) = self.endpoint.link(owner.connection) else {
            return Turn::Over;
        };
        if link.waiting_bytes() >= RESUME_BYTES {
            let unread = link.waiting_bytes();
            let session = self.state.sessions.row(at);
            if unread < session.unread {
                session.fetched_at = now;
            }
            session.unread = unread;
            let is_idle = now.saturating_duration_since(session.fetched_at) >= FETCHED_KEPT;
            if !session.fetched.is_empty() && is_idle {
                self.state.drop_fetched(at);
            }
            return Turn::Waits;
        }
        if is_older {
            return match self.state.fetch(at) {
                true => Turn::Over,
                false => Turn::Waits,
            };
        }
        let (session, pool) = self.state.sessions.parts(at);
        // Messages read from the journal may be newer than the last that this front has released.
        let through = session.released.min(session.sent + RESUME_MESSAGES as u64);
        let is_fetched = !session.fetched.is_empty();
        if is_fetched {
            session.fetched_at = now;
            let count = session.fetched.len().min((through - session.sent) as usize);
            let messages = session.fetched.range(..count).map(|bytes| &bytes[..]);
            send_pulled(link, now, owner.channel, messages);
            drop(session.fetched.drain(..count));
            session.sent += count as u64;
        } else {
            let numbers = session.sent + 1..=through;
            let messages = numbers.map(|number| session.window.get(pool, number));
            send_pulled(link, now, owner.channel, messages);
            session.sent = through;
        }
        session.is_following = session.sent == session.released;
        let is_over = session.is_following;
        if is_fetched && (is_over || session.fetched.is_empty()) {
            session.fetched = VecDeque::new();
            self.state.end_look_up(at);
        }
        match is_over {
            true => Turn::Over,
            false => Turn::Sent,
        }
    }

    /// Keeps messages that were read from the journal until they are sent. Ends the session if the
    /// read failed.
    pub(super) fn on_resume_messages(
        &mut self,
        now: Instant,
        at: At,
        after: u64,
        outcome: Result<Vec<Bytes>, DisconnectCode>,
    ) {
        let session = self.state.sessions.row(at);
        session.is_fetching = false;
        match outcome {
            Ok(messages) => {
                if session.sent == after {
                    session.fetched = messages.into();
                    session.fetched_at = now;
                } else {
                    self.state.end_look_up(at);
                }
                self.state.begin_resume(at);
            }
            Err(code) => {
                self.state.end_look_up(at);
                self.end_session(now, at, code);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round has a bounded number of turns however many sessions wait. The session that can send
    /// has a turn in each round. Each waiting session has one turn per `retry`.
    // rows: R343
    #[test]
    fn r343_a_round_of_resumes_has_a_bounded_number_of_turns() {
        const WAITING: At = 1_000;
        let mut resuming = Resuming::default();
        (0..=WAITING).for_each(|at| resuming.push(at));
        // The last one alone can send.
        let mut turns = vec![0; WAITING + 1];
        let round = |resuming: &mut Resuming, turns: &mut Vec<u32>| {
            let mut count = 0;
            let may_send = resuming.round(|at| {
                count += 1;
                turns[at] += 1;
                match at == WAITING {
                    true => Turn::Sent,
                    false => Turn::Waits,
                }
            });
            assert!(count <= READY_TURNS + WAITING_TURNS, "{count}");
            assert!(may_send, "the last one can send");
        };
        while turns[WAITING] == 0 {
            round(&mut resuming, &mut turns);
        }
        assert!(turns[..WAITING].iter().all(|turns| *turns == 1));
        // Without `retry` the waiting sessions have no turn.
        for nth in 1..10 {
            assert_eq!(turns[WAITING], nth);
            round(&mut resuming, &mut turns);
        }
        assert!(turns[..WAITING].iter().all(|turns| *turns == 1));
        resuming.retry();
        for nth in 10..10 + WAITING.div_ceil(WAITING_TURNS) as u32 {
            assert_eq!(turns[WAITING], nth);
            round(&mut resuming, &mut turns);
        }
        assert!(turns[..WAITING].iter().all(|turns| *turns == 2));
    }

    #[test]
    fn a_session_without_a_further_turn_leaves_and_waiting_ones_are_no_work() {
        let mut resuming = Resuming::default();
        resuming.push(1);
        resuming.push(2);
        let waits = |at| match at {
            1 => Turn::Over,
            _ => Turn::Waits,
        };
        assert!(!resuming.round(waits), "nothing can be sent");
        assert!(!resuming.is_empty());
        assert!(!resuming.round(|_| panic!("no turn without an arrival")));
        resuming.retry();
        assert!(!resuming.round(|_| Turn::Over));
        assert!(resuming.is_empty());
        resuming.retry();
        assert!(!resuming.round(|_| panic!("none is left")));
    }
}
