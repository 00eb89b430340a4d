//! Reads the journal offline: recomputes the numbered messages of every session, and checks that
//! each cancel on disconnect came when it was due.
//!
//! A session is away from the journalled time of its `CloseSession`. A restart of the server
//! restarts the grace of the sessions that are away. It counts from the first record of the new
//! process if that is a `CloseSession`, and else from some time between spawn and readiness.

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

/// A restart of the server, in nanoseconds of the wall clock since 1970.
#[derive(Clone, Copy, Debug)]
pub struct Restart {
    /// Time just before the process was started.
    pub spawned_ns: u64,
    /// Time at which the process had reported ready.
    pub ready_ns: u64,
}

/// When cancel-on-disconnect is due.
#[derive(Clone, Copy, Debug)]
pub struct Terms {
    pub grace: Duration,
    /// Longest delay of the cancel after the end of the grace.
    pub late: Duration,
}

/// Findings in the journal.
#[derive(Debug, Default)]
pub struct Journal {
    pub records: u64,
    /// By session key: the session's messages from number 1 on, as bytes on channel 0.
    pub messages: HashMap<Id128, Vec<Bytes>>,
    /// By session key: journalled times of `CloseSession`, in nanoseconds since 1970.
    pub ends: HashMap<Id128, Vec<u64>>,
    /// Cancels on disconnect that ended orders, and the number of those orders.
    pub cancels: u64,
    pub cancelled_orders: u64,
    /// Smallest and largest delay from a session's end to its cancel, in journal time. Ends known
    /// only as an interval are left out.
    pub smallest: Option<Duration>,
    pub largest: Option<Duration>,
    /// Sessions with open orders that returned within the grace.
    pub returns: u64,
    /// Violations.
    pub violations: Vec<String>,
}

/// When a session with cancel-on-disconnect went away. After some restarts only an interval is
/// known.
#[derive(Clone, Copy, Debug)]
struct Away {
    earliest_ns: u64,
    latest_ns: u64,
    is_overdue: bool,
}

struct Verifier<'a> {
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
/// If the journal is damaged, or the books compute other events than the recorded ones.
pub fn read(dir: &Path, restarts: &[Restart], terms: Terms) -> Journal {
    let node = NodeId::new(1).expect("1 is a node number");
    let mut verifier = Verifier {
        state: State::new(node, sequencer::limits()),
        node,
        restarts,
        terms,
        away: HashMap::new(),
        messages: HashMap::new(),
        ends: HashMap::new(),
        found: Journal::default(),
    };
    let read = Folder::new(dir).dump(1..=u64::MAX, |record| verifier.step(&record));
    read.unwrap_or_else(|error| {
        panic!(
            "the journal in {} fails verification: {error}",
            dir.display()
        )
    });
    verifier.finish()
}

impl Verifier<'_> {
    fn step(&mut self, record: &Record) -> Result<(), String> {
        self.found.records += 1;
        self.note_restart(record);
        self.check_overdue(record.command.time_ns);
        let cancels = self.on_command(record);
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
                    self.add_violation(
                        record,
                        &format!("an order of {session:?} is cancelled before it is due"),
                    );
                }
            }
            let messages = self.messages.entry(report.session).or_default();
            messages.push(encoded(&message, report.number));
            if messages.len() as u64 != report.number {
                let (session, number) = (report.session, report.number);
                self.add_violation(
                    record,
                    &format!("{session:?} lacks a message before {number}"),
                );
            }
        }
        if let Some(session) = cancels {
            self.check_cancel(record, session, ended);
        }
        Ok(())
    }

    /// Applies a session command to `away` and `ends`. Returns the session of a cancel on
    /// disconnect.
    fn on_command(&mut self, record: &Record) -> Option<SessionIx> {
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
                self.add_violation(record, "cancel-on-disconnect of more than one session");
            }
            _ => {}
        }
        None
    }

    /// Checks that a cancel on disconnect is not early and has ended all orders of the session.
    /// [`Verifier::check_overdue`] detects late ones.
    fn check_cancel(&mut self, record: &Record, session: SessionIx, ended: u64) {
        let Some(away) = self.away.remove(&session) else {
            return self.add_violation(record, &format!("{session:?} is not away"));
        };
        let (time_ns, grace_ns) = (record.command.time_ns, nanos(self.terms.grace));
        if time_ns < away.earliest_ns + grace_ns {
            let early = away.earliest_ns + grace_ns - time_ns;
            self.add_violation(
                record,
                &format!("orders of {session:?} are cancelled {early} ns early"),
            );
        }
        if self.has_orders(session) {
            self.add_violation(
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

    /// Restarts the grace of all sessions that are away, at the first record of a new process.
    fn note_restart(&mut self, record: &Record) {
        while let Some((restart, later)) = self.restarts.split_first()
            && record.command.time_ns >= restart.spawned_ns
        {
            self.restarts = later;
            // The new process first closes the sessions that were connected. The time of these
            // commands is the start of the grace of all others, too.
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

    /// Adds a violation for each session that still has orders after grace and allowed delay.
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
                self.found.violations.push(text);
            }
        }
    }

    fn has_orders(&self, session: SessionIx) -> bool {
        let row = self.state.core().admission().session(session);
        row.is_some_and(|row| row.open_orders > 0)
    }

    fn add_violation(&mut self, record: &Record, what: &str) {
        let at = record.command.sequence;
        self.found.violations.push(format!("record {at}: {what}"));
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

/// Encodes a numbered message on channel 0, the form in which messages are compared.
pub fn encoded(message: &ServerMessage, number: u64) -> Bytes {
    let mut bytes = BytesMut::with_capacity(wire::NUMBERED_LEN_MAX);
    encode(message, 0, number, &mut bytes);
    bytes.freeze()
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("duration fits 64 bits")
}
