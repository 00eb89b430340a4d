//! Resumes: a client that logs in again is sent the messages that it lacks, as fast as it reads. A
//! delayed login waits among them until its connection has space for the answer.
//!
//! Sessions take turns (`fair_queue`). A session whose messages are being read from the journal has
//! no turn until they arrive.
//!
//! Messages read from the journal are kept until all are sent. Their look-up counts as in progress
//! until then, which bounds the memory. A client that reads nothing for `unread_timeout_ms` is
//! disconnected.

use std::collections::VecDeque;
use std::time::Instant;

use bytes::Bytes;
use transport::Key;
use wire::DisconnectCode;

use super::connection::{append_pulled, has_unread_pulled, send_pulled};
use super::desk::FrontRequest;
use super::fair_queue::{FairQueue, Turn};
use super::session::At;
use super::state::State;
use super::{Front, RESUME_BYTES, RESUME_MESSAGES};

/// Sessions whose clients lack messages or the answer to a login.
pub type Resuming = FairQueue<At>;

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
        let through = session.next_fetch_through();
        let front_request = FrontRequest::Messages {
            session: (at, session.epoch),
            login: session.login(),
            ix: session.ix,
            after: session.sent,
            through,
            is_retransmit: false,
        };
        let is_fetching = self.look_up(at, front_request);
        if is_fetching {
            let session = self.sessions.row(at);
            (session.is_fetching, session.fetch_through) = (true, through);
        }
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

    /// True if the client has read enough for more of what it has asked for, false if that waits;
    /// `None` if the connection has ended. Polls the connection only when the wait begins.
    pub(super) fn has_space(&mut self, now: Instant, connection: Key) -> Option<bool> {
        let link = self.endpoint.peek(connection)?;
        let has_space = link.waiting_bytes() < RESUME_BYTES;
        if !has_space
            && !has_unread_pulled(link)
            && let Some(link) = self.endpoint.link(connection)
        {
            // From now on the client has to read, as if the messages were appended.
            append_pulled(link, now, |_| {});
        }
        Some(has_space)
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
        if is_older && !self.state.may_look_up(session.user) {
            return Turn::Waits;
        }
        match self.has_space(now, owner.connection) {
            None => return Turn::Over,
            Some(false) => return Turn::Waits,
            Some(true) => {}
        }
        if is_older {
            return match self.state.fetch(at) {
                true => Turn::Over,
                false => Turn::Waits,
            };
        }
        let Some(link) = self.endpoint.link(owner.connection) else {
            return Turn::Over;
        };
        let (session, pool) = self.state.sessions.parts(at);
        // Messages read from the journal may be newer than the last that this front has released.
        let through = session.released.min(session.sent + RESUME_MESSAGES as u64);
        let is_fetched = !session.fetched.is_empty();
        if is_fetched {
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
            session.fetch_through = u64::MAX;
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
