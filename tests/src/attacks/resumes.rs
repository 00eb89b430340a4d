//! Sessions of one connection that repeatedly resume from their first message, all at once. The
//! messages that have left their windows come from the journal.

use std::time::{Duration, Instant};

use wire::{CONNECTION_CHANNEL, Cancel, ClientMessage, Heartbeat, Logout};

use super::line::{self, Counts, Line};
use super::{Attack, Outcome, Target};

/// More sessions than the journal look-ups that a user may have at a time.
const SESSIONS: u16 = 10;
/// Messages of each session, more than its window keeps.
const MESSAGES: u64 = 17_000;
/// Requests per millisecond that create the messages, within the rates of user and sessions.
const FILL_PER_MS: u128 = 16;
/// Packets from one resume of all sessions to the next.
const ROUND: u64 = 10_000;
/// Longest wait for the last messages. The sessions of a user are read from the journal in turn.
const DRAIN: Duration = Duration::from_secs(60);
/// Pause after which the user's rate of logins admits all sessions again.
const LOGIN_PAUSE: Duration = Duration::from_secs(1);

/// Logs the sessions in again before they have received all messages of their last login.
pub struct Resumes {
    line: Line,
    token: String,
    /// Logins sent.
    logins_sent: u64,
}

fn name(channel: u16) -> String {
    format!("resumed-{channel}")
}

fn unknown(client_order_id: u64) -> ClientMessage {
    Cancel {
        client_order_id,
        engine_order_id: 0,
    }
    .into()
}

/// Number of the last received message of a session.
fn last_number(counts: &Counts, channel: u16) -> u64 {
    let next = counts.next_numbers.get(&channel);
    next.map_or(0, |next| next.saturating_sub(1))
}

impl Resumes {
    pub fn begin(target: &Target) -> Self {
        let mut line = Line::open(target.trading, line::config());
        for channel in 0..SESSIONS {
            line.login(channel, &target.token, &name(channel), 0);
        }
        let mut resumes = Self {
            line,
            token: target.token.clone(),
            logins_sent: u64::from(SESSIONS),
        };
        resumes.fill();
        resumes
    }

    /// Sends the first [`MESSAGES`] requests of each session, except those that an earlier run
    /// sent. Each is refused, which creates a message.
    fn fill(&mut self) {
        let seen = self.line.counts().last_seqs.clone();
        let begun = Instant::now();
        let mut sent = 0u64;
        for client_seq in 1..=MESSAGES {
            for channel in (0..SESSIONS).filter(|channel| seen[channel] < client_seq) {
                let request = unknown(client_seq);
                while u128::from(sent) >= begun.elapsed().as_millis() * FILL_PER_MS
                    || !self.line.append(channel, client_seq, &request)
                {
                    assert!(self.line.ended().is_none(), "the connection has ended");
                    self.line.poll();
                    std::thread::sleep(Duration::from_micros(250));
                }
                sent += 1;
            }
            self.line.flush();
        }
        self.line.drain(sent, DRAIN);
    }

    /// Logs every session out and in again from its first message.
    fn resume(&mut self) {
        for channel in 0..SESSIONS {
            self.line.append(channel, 0, &Logout {}.into());
            let login = Line::resume_message(&self.token, &name(channel));
            self.logins_sent += u64::from(self.line.append(channel, 0, &login));
        }
        self.line.flush();
    }
}

impl Attack for Resumes {
    fn packet(&mut self, number: u64) {
        if number.is_multiple_of(ROUND) && self.line.counts().answered_logins() >= self.logins_sent
        {
            self.resume();
        }
        let heartbeat = ClientMessage::from(Heartbeat {});
        self.line.append(CONNECTION_CHANNEL, 0, &heartbeat);
        self.line.flush();
    }

    fn poll(&mut self) {
        self.line.poll();
    }

    fn finish(mut self: Box<Self>) -> Outcome {
        let logins_sent = self.logins_sent;
        let is_answered = |counts: &Counts| counts.answered_logins() >= logins_sent;
        self.line.wait(DRAIN, is_answered);
        self.line.wait(LOGIN_PAUSE, |_| false);
        self.resume();
        let resumed_at = Instant::now();
        let logins_sent = self.logins_sent;
        self.line.wait(DRAIN, |counts| {
            let mut channels = 0..SESSIONS;
            counts.answered_logins() >= logins_sent
                && channels.all(|channel| last_number(counts, channel) >= MESSAGES)
        });
        let seconds = resumed_at.elapsed().as_secs_f64();
        let counts = self.line.counts().clone();
        let mut violations = Vec::new();
        for channel in 0..SESSIONS {
            let last = last_number(&counts, channel);
            if last < MESSAGES {
                violations.push(format!("session {channel} resumed {last} of {MESSAGES}"));
            }
        }
        if counts.gaps > 0 || self.line.ended().is_some() {
            let ended = self.line.ended();
            violations.push(format!("{} messages missing, end {ended:?}", counts.gaps));
        }
        let logins = counts.logins;
        let summary = format!(
            "{logins_sent} logins, {logins} accepted, {} numbered messages, those of the last \
             resume within {seconds:.1} s, {} datagrams: {counts}",
            counts.numbered,
            self.line.packets()
        );
        Outcome {
            summary,
            violations,
        }
    }
}
