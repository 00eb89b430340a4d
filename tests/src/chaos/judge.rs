//! Reads the journal: recomputes every session's numbered messages offline, and checks that
//! cancel-on-disconnect came when it was due.
//!
//! Only the journal's own times count: a session is away from the time of its `CloseSession`, and
//! after a restart of the server from the first record of the new process.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use replica::State;
use sequencer::inspect::Folder;
use sequencer::{Record, Stamp};
use types::command::MassScope;
use types::{CancelReason, Command, Id128, NodeId, SessionIx};
use wire::{ServerMessage, encode};

/// A restart of the server, wall clock in nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub struct Restart {
    /// Just before the process was started.
    pub spawned_ns: u64,
    /// The process has reported ready.
    pub ready_ns: u64,
}

/// When cancel-on-disconnect is due.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub grace: Duration,
    /// Longest delay after the grace; never earlier.
    pub late: Duration,
}

/// Findings of the walk over the journal.
#[derive(Debug, Default)]
pub struct Journal {
    pub records: u64,
    /// By session key: the session's messages from number 1 on, as bytes on channel 0.
    pub messages: HashMap<Id128, Vec<Bytes>>,
    /// Times at which each session ended, restarts included, nanoseconds since 1970.
    pub ends: HashMap<Id128, Vec<u64>>,
    /// Cancels on disconnect that ended orders, and the number of those orders.
    pub cancels: u64,
    pub cancelled_orders: u64,
    /// Delay from the session's end to the cancel, in journal time, where both times are exact.
    pub smallest: Option<Duration>,
    pub largest: Option<Duration>,
    /// Sessions with open orders that returned within the grace.
    pub returns: u64,
    /// Violations.
    pub wrong: Vec<String>,
}

/// When a session with cancel-on-disconnect went away; after some restarts known only as a span.
#[derive(Clone, Copy, Debug)]
struct Away {
    earliest_ns: u64,
    latest_ns: u64,
    is_overdue: bool,
}

struct Walk<'a> {
    state: State,
    node: NodeId,
    restarts: &'a [Restart],
    terms: Terms,
    away: HashMap<SessionIx, Away>,
    messages: HashMap<SessionIx, Vec<Bytes>>,
    ends: HashMap<SessionIx, Vec<u64>>,
    found: Journal,
}

/// Reads a journal at rest from its first record to its last.
///
/// # Panics
/// If it is damaged, or the books compute events other than the recorded ones.
pub fn read(dir: &Path, restarts: &[Restart], terms: Terms) -> Journal {
    let node = NodeId::new(1).expect("1 is a node number");
    let mut walk = Walk {
        state: State::new(node, sequencer::limits()),
        node,
        restarts,
        terms,
        away: HashMap::new(),
        messages: HashMap::new(),
        ends: HashMap::new(),
        found: Journal::default(),
    };
    let walked = Folder::new(dir).dump(1..=u64::MAX, |record| walk.step(&record));
    walked.unwrap_or_else(|error| {
        panic!(
            "the journal in {} fails verification: {error}",
            dir.display()
        )
    });
    walk.finish()
}

impl Walk<'_> {
    fn step(&mut self, record: &Record) -> Result<(), String> {
        self.found.records += 1;
        self.note_restart(record);
        self.check_overdue(record.command.time_ns);
        let cancels = self.before(record);
        let applied = self
            .state
            .apply(record)
            .map_err(|error| error.to_string())?;
        let stamp = Stamp {
            sequence: applied.cause.sequence,
            time_ns: applied.cause.time_ns,
            received_ns: applied.cause.received_ns,
        };
        let mut ended = 0;
        for report in &applied.reports {
            let message = gateway::session_message(self.node, &stamp, report);
            if let ServerMessage::Cancelled(cancelled) = &message
                && cancelled.reason == CancelReason::CancelOnDisconnect
            {
                ended += 1;
                if cancels != Some(report.session) {
                    let session = report.session;
                    self.wrong(
                        record,
                        &format!("an order of {session:?} is cancelled before it is due"),
                    );
                }
            }
            let messages = self.messages.entry(report.session).or_default();
            messages.push(encoded(&message, report.number));
            if messages.len() as u64 != report.number {
                let (session, number) = (report.session, report.number);
                self.wrong(
                    record,
                    &format!("{session:?} lacks a message before {number}"),
                );
            }
        }
        if let Some(session) = cancels {
            self.after_cancel(record, session, ended);
        }
        Ok(())
    }

    /// Applies the command to the sessions; returns the session whose orders it cancels on
    /// disconnect.
    fn before(&mut self, record: &Record) -> Option<SessionIx> {
        match record.command.command {
            Command::CloseSession(close) => {
                let time_ns = record.command.time_ns;
                self.ends.entry(close.session).or_default().push(time_ns);
                let row = self.state.core().admission().session(close.session);
                if row.is_some_and(|row| row.cancel_on_disconnect) && !close.keep_orders {
                    self.away.insert(close.session, Away::at(time_ns));
                }
            }
            Command::OpenSession(open) => {
                let was_away = self.away.remove(&open.session).is_some();
                self.found.returns += u64::from(was_away && self.has_orders(open.session));
            }
            Command::MassCancel(cancel) if cancel.reason == CancelReason::CancelOnDisconnect => {
                if let MassScope::Session(session) = cancel.scope {
                    return Some(session);
                }
                self.wrong(record, "cancel-on-disconnect of more than one session");
            }
            _ => {}
        }
        None
    }

    /// Checks a cancel on disconnect: not too early, not too late, all orders.
    fn after_cancel(&mut self, record: &Record, session: SessionIx, ended: u64) {
        let Some(away) = self.away.remove(&session) else {
            return self.wrong(record, &format!("{session:?} is not away"));
        };
        let (time_ns, grace_ns) = (record.command.time_ns, nanos(self.terms.grace));
        if time_ns < away.earliest_ns + grace_ns {
            let early = away.earliest_ns + grace_ns - time_ns;
            self.wrong(
                record,
                &format!("orders of {session:?} are cancelled {early} ns early"),
            );
        }
        if self.has_orders(session) {
            self.wrong(
                record,
                &format!("{session:?} still has orders after the cancel"),
            );
        }
        if ended == 0 {
            return;
        }
        self.found.cancels += 1;
        self.found.cancelled_orders += ended;
        if away.earliest_ns == away.latest_ns {
            let delay = Duration::from_nanos(time_ns - away.latest_ns);
            let found = &mut self.found;
            found.smallest = Some(found.smallest.map_or(delay, |other| other.min(delay)));
            found.largest = Some(found.largest.map_or(delay, |other| other.max(delay)));
        }
    }

    /// First record of a new process: absent sessions count as away from here on.
    fn note_restart(&mut self, record: &Record) {
        while let Some((restart, later)) = self.restarts.split_first()
            && record.command.time_ns >= restart.spawned_ns
        {
            self.restarts = later;
            // Sessions that were connected are closed first, at the time from which the others
            // count.
            let away = match record.command.command {
                Command::CloseSession(_) => Away::at(record.command.time_ns),
                _ => Away {
                    earliest_ns: restart.spawned_ns,
                    latest_ns: restart.ready_ns,
                    is_overdue: false,
                },
            };
            self.away.values_mut().for_each(|old| *old = away);
        }
    }

    fn check_overdue(&mut self, now_ns: u64) {
        let allowed = nanos(self.terms.grace + self.terms.late);
        let admission = self.state.core().admission();
        for (session, away) in &mut self.away {
            let has_orders = admission
                .session(*session)
                .is_some_and(|row| row.open_orders > 0);
            if has_orders && !away.is_overdue && now_ns > away.latest_ns + allowed {
                away.is_overdue = true;
                let late = Duration::from_nanos(now_ns - away.latest_ns);
                let text =
                    format!("at {now_ns}: {session:?} still has orders {late:?} after its end");
                self.found.wrong.push(text);
            }
        }
    }

    fn has_orders(&self, session: SessionIx) -> bool {
        let row = self.state.core().admission().session(session);
        row.is_some_and(|row| row.open_orders > 0)
    }

    fn wrong(&mut self, record: &Record, what: &str) {
        let at = record.command.sequence;
        self.found.wrong.push(format!("record {at}: {what}"));
    }

    fn finish(mut self) -> Journal {
        let admission = self.state.core().admission();
        let key = |session: SessionIx| admission.session(session).map(|row| row.key);
        for (session, messages) in self.messages.drain() {
            if let Some(key) = key(session) {
                self.found.messages.insert(key, messages);
            }
        }
        for (session, ends) in self.ends.drain() {
            if let Some(key) = key(session) {
                self.found.ends.insert(key, ends);
            }
        }
        self.found
    }
}

impl Away {
    fn at(time_ns: u64) -> Self {
        Self {
            earliest_ns: time_ns,
            latest_ns: time_ns,
            is_overdue: false,
        }
    }
}

/// A numbered message as bytes on channel 0, the form in which messages are compared.
pub fn encoded(message: &ServerMessage, number: u64) -> Bytes {
    let mut bytes = BytesMut::with_capacity(wire::NUMBERED_LEN_MAX);
    encode(message, 0, number, &mut bytes);
    bytes.freeze()
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("duration fits 64 bits")
}
