//! One load as a state machine without I/O: requests when they are due, then the answers that are
//! still due, then the cancel of what is open. The drivers below carry it.
//!
//! The loop is open: request `n` is due `n / rate` after the begin, whatever the answers do, and
//! its latency counts from that moment. A platform that stalls therefore costs every request that
//! was due meanwhile (no coordinated omission).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use client::{Connection, Error, Report, Reports, spinning};
use wire::{BOTH_SIDES, ClientMessage, MassCancel, ServerMessage};

use super::plan::Plan;
use super::tally::{Pending, Tally};

/// How long answers are waited for after the last request, and after an interrupt.
const DRAIN: Duration = Duration::from_secs(10);
const DRAIN_INTERRUPTED: Duration = Duration::from_secs(2);
/// Longest time between two looks at the interrupt.
const LOOK: Duration = Duration::from_millis(50);

/// Sends a message on a channel: the client sequence, or `None` when the connection is full.
type Send<'a> = &'a mut dyn FnMut(u16, &ClientMessage) -> Result<Option<u64>, Error>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Offering,
    /// Waits for answers until then.
    Draining(Instant),
    /// Cancels what is open and waits for it until then.
    Clearing(Instant),
    Done,
}

/// A load on its way.
pub struct Run {
    plan: Plan,
    pub tally: Tally,
    pending: Vec<Pending>,
    /// Requests without an answer, a session.
    window: usize,
    per_s: u64,
    begun: Instant,
    /// Requests that will have been due.
    total: u64,
    /// The next request; those before it were sent.
    next: u64,
    /// A request that the connection had no room for.
    unsent: Option<(u16, ClientMessage)>,
    is_held: bool,
    /// The last request that found every session at its bound.
    held: Option<u64>,
    interrupted: Arc<AtomicBool>,
    phase: Phase,
    instrument: u32,
    /// Sessions whose open orders are to be cancelled, and those whose cancel has no answer.
    to_clear: u16,
    clearing: u16,
}

impl Run {
    /// Begins now.
    pub fn new(
        plan: Plan,
        instrument: u32,
        per_s: u64,
        total: u64,
        window: usize,
        interrupted: Arc<AtomicBool>,
    ) -> Self {
        let channels = plan.channels();
        Self {
            plan,
            tally: Tally::default(),
            pending: (0..channels).map(|_| Pending::default()).collect(),
            window,
            per_s,
            begun: Instant::now(),
            total,
            next: 0,
            unsent: None,
            is_held: false,
            held: None,
            interrupted,
            phase: Phase::Offering,
            instrument,
            to_clear: channels,
            clearing: 0,
        }
    }

    /// When a request is due, after the begin.
    fn due(&self, number: u64) -> Duration {
        let ns = u128::from(number) * 1_000_000_000 / u128::from(self.per_s);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// Does what is due; when to look again, at the latest, or `None` at the end.
    ///
    /// # Errors
    /// The connection takes no requests any more.
    pub fn step(&mut self, now: Instant, send: Send) -> Result<Option<Instant>, Error> {
        let since = now.saturating_duration_since(self.begun);
        if self.phase == Phase::Offering {
            self.offer(now, since, send)?;
        }
        if let Phase::Draining(until) = self.phase
            && (now >= until || self.pending.iter().all(|pending| pending.len() == 0))
        {
            self.phase = Phase::Clearing(now + DRAIN);
        }
        if let Phase::Clearing(until) = self.phase {
            self.clear(send)?;
            if now >= until || (self.to_clear == 0 && self.clearing == 0) {
                self.phase = Phase::Done;
            }
        }
        Ok(match self.phase {
            Phase::Offering if !self.is_held => {
                Some((self.begun + self.due(self.next)).min(now + LOOK))
            }
            Phase::Done => None,
            _ => Some(now + LOOK),
        })
    }

    fn offer(&mut self, now: Instant, since: Duration, send: Send) -> Result<(), Error> {
        let is_interrupted = self.interrupted.load(Ordering::Relaxed);
        if is_interrupted {
            self.total = self.total.min(self.due_count(since));
        }
        self.is_held = false;
        while self.next < self.total && self.due(self.next) <= since {
            if !self.send_next(now, send)? {
                self.is_held = true;
                break;
            }
        }
        self.tally.offered = self.due_count(since).min(self.total).max(self.next);
        self.tally.elapsed = since;
        // What a full window still holds is waited for, like an answer.
        let is_late = since > self.due(self.total) + DRAIN;
        if self.next == self.total || is_late || is_interrupted {
            let patience = if is_interrupted {
                DRAIN_INTERRUPTED
            } else {
                DRAIN
            };
            self.phase = Phase::Draining(now + patience);
        }
        Ok(())
    }

    /// Requests that are due by then.
    fn due_count(&self, since: Duration) -> u64 {
        let count = since.as_nanos() * u128::from(self.per_s) / 1_000_000_000 + 1;
        u64::try_from(count).unwrap_or(u64::MAX)
    }

    /// Sends the next request; false when no session or the connection has room for it.
    fn send_next(&mut self, now: Instant, send: Send) -> Result<bool, Error> {
        let request = match self.unsent.take() {
            Some(request) => Some(request),
            None => {
                let (pending, window) = (&self.pending, self.window);
                let has_room = |channel: u16| pending[usize::from(channel)].len() < window;
                self.plan.next(has_room)
            }
        };
        let Some((channel, message)) = request else {
            let is_new = self.held.replace(self.next) != Some(self.next);
            self.tally.held += u64::from(is_new);
            return Ok(false);
        };
        let Some(client_seq) = send(channel, &message)? else {
            self.unsent = Some((channel, message));
            return Ok(false);
        };
        let due = self.due(self.next);
        self.pending[usize::from(channel)].sent(client_seq, due);
        let delay = now.saturating_duration_since(self.begun + due);
        self.tally.sent(delay);
        self.next += 1;
        Ok(true)
    }

    fn clear(&mut self, send: Send) -> Result<(), Error> {
        while self.to_clear > 0 {
            let all = MassCancel {
                scope: 0,
                instrument: self.instrument,
                side: BOTH_SIDES,
            };
            if send(self.to_clear - 1, &all.into())?.is_none() {
                return Ok(());
            }
            self.to_clear -= 1;
            self.clearing += 1;
        }
        Ok(())
    }

    /// Takes a report into account that has come at this moment.
    ///
    /// # Errors
    /// The exchange has ended a session.
    pub fn report(&mut self, report: &Report, at: Instant) -> anyhow::Result<()> {
        let since = at.saturating_duration_since(self.begun);
        let channel = report.channel;
        let Some(pending) = self.pending.get_mut(usize::from(channel)) else {
            return Ok(());
        };
        match &report.message {
            ServerMessage::Accepted(m) => {
                if let Some(due) = pending.due(m.client_seq) {
                    self.tally.accepted(since.saturating_sub(due));
                }
            }
            ServerMessage::Rejected(m) => {
                if pending.answered(m.client_seq).is_some() {
                    self.tally.refused(m.reason.as_str());
                    self.plan.ended(channel, m.client_order_id);
                } else {
                    // Of a mass cancel: there is no other request.
                    self.clearing = self.clearing.saturating_sub(1);
                }
            }
            ServerMessage::MassCancelled(done) if done.remaining == 0 => {
                self.clearing = self.clearing.saturating_sub(1);
            }
            ServerMessage::Fill(m) => {
                self.tally.trades += u64::from(m.aggressor == 1);
                if m.open_lots == 0 {
                    self.plan.ended(channel, m.client_order_id);
                }
            }
            ServerMessage::Disconnect(end) => {
                bail!(
                    "the exchange ended session {channel}: {}",
                    end.text.as_str()
                )
            }
            message => {
                if let ServerMessage::Cancelled(m) = message {
                    self.plan.ended(channel, m.client_order_id);
                }
                if let Some(due) = pending.answered(message.answers()) {
                    self.tally.acknowledged(since.saturating_sub(due));
                }
            }
        }
        Ok(())
    }
}

/// Carries a run over the async client.
pub async fn drive(
    run: &mut Run,
    connection: &Connection,
    reports: &mut Reports,
) -> anyhow::Result<()> {
    let send = &mut |channel, message: &ClientMessage| connection.try_send(channel, *message);
    while let Some(next) = run.step(Instant::now(), send)? {
        tokio::select! {
            biased;
            report = reports.recv() => {
                let report = report.context("the connection is gone")??;
                run.report(&report, report.received_at)?;
                while let Some(report) = reports.try_recv() {
                    let report = report?;
                    run.report(&report, report.received_at)?;
                }
            }
            () = tokio::time::sleep_until(next.into()) => {}
        }
    }
    Ok(())
}

/// Carries a run over the spinning client, on this thread.
pub fn spin(run: &mut Run, connection: &mut spinning::Connection) -> anyhow::Result<()> {
    loop {
        let send = &mut |channel, message: &ClientMessage| connection.send(channel, message);
        if run.step(Instant::now(), send)?.is_none() {
            return Ok(());
        }
        connection.poll()?;
        while let Some(report) = connection.recv() {
            run.report(&report, Instant::now())?;
        }
    }
}
