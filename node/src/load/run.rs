//! A load as a state machine without I/O: it sends due requests, drains answers and cancels open
//! orders. [`drive`] and [`spin`] run it.
//!
//! Open loop: request `n` is due at `n / rate` after the start, independent of answers, and its
//! latency counts from that time. So a stall of the platform adds to the latency of every request
//! that is due during the stall (no coordinated omission).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use client::{Connection, Error, Report, Reports, spinning};
use wire::{BOTH_SIDES, ClientMessage, MassCancel, ServerMessage};

use super::plan::Plan;
use super::tally::{Pending, Tally};

/// Longest wait for answers after the last request, and after an interrupt.
const DRAIN: Duration = Duration::from_secs(10);
const DRAIN_INTERRUPTED: Duration = Duration::from_secs(2);
/// Longest interval between two steps, which check for an interrupt.
const STEP_MAX: Duration = Duration::from_millis(50);

/// Sends a message on a channel. Returns its client sequence; `None` if the connection is full.
type Send<'a> = &'a mut dyn FnMut(u16, &ClientMessage) -> Result<Option<u64>, Error>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Offering,
    /// Waits for answers until this time.
    Draining(Instant),
    /// Cancels open orders and waits for the answers until this time.
    Clearing(Instant),
    Done,
}

/// A running load.
pub struct Run {
    plan: Plan,
    pub tally: Tally,
    pending: Vec<Pending>,
    /// Maximum unanswered requests per session.
    window: usize,
    per_s: u64,
    begun: Instant,
    /// Number of requests of the whole load.
    total: u64,
    /// Number of the next request.
    next: u64,
    /// A request that a full connection did not accept; sent next.
    unsent: Option<(u16, ClientMessage)>,
    /// The next request is due, but no session or the connection has room.
    is_held: bool,
    /// Number of the last request counted in [`Tally::delayed_by_window`].
    held: Option<u64>,
    interrupted: Arc<AtomicBool>,
    phase: Phase,
    instrument: u32,
    /// Sessions still to cancel, and unanswered cancels.
    to_clear: u16,
    clearing: u16,
}

impl Run {
    /// Starts the clock.
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

    /// Due time of a request, from the start.
    fn due(&self, number: u64) -> Duration {
        let ns = u128::from(number) * 1_000_000_000 / u128::from(self.per_s);
        Duration::from_nanos(u64::try_from(ns).unwrap_or(u64::MAX))
    }

    /// Does the work that is due now. Returns the latest time of the next call; `None` at the end.
    ///
    /// # Errors
    /// The connection accepts no more requests.
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
                Some((self.begun + self.due(self.next)).min(now + STEP_MAX))
            }
            Phase::Done => None,
            _ => Some(now + STEP_MAX),
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
        // Requests held by full windows are waited for as long as answers.
        let is_late = since > self.due(self.total) + DRAIN;
        if self.next == self.total || is_late || is_interrupted {
            let wait = if is_interrupted {
                DRAIN_INTERRUPTED
            } else {
                DRAIN
            };
            self.phase = Phase::Draining(now + wait);
        }
        Ok(())
    }

    /// Number of requests due at `since` after the start.
    fn due_count(&self, since: Duration) -> u64 {
        let count = since.as_nanos() * u128::from(self.per_s) / 1_000_000_000 + 1;
        u64::try_from(count).unwrap_or(u64::MAX)
    }

    /// Sends the next request; false if no session or the connection has room.
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
            self.tally.delayed_by_window += u64::from(is_new);
            return Ok(false);
        };
        let Some(client_seq) = send(channel, &message)? else {
            self.unsent = Some((channel, message));
            return Ok(false);
        };
        let due = self.due(self.next);
        self.pending[usize::from(channel)].sent(client_seq, due);
        let delay = now.saturating_duration_since(self.begun + due);
        self.tally.record_sent(delay);
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

    /// Processes a report received at `at`.
    ///
    /// # Errors
    /// The exchange ended a session.
    pub fn report(&mut self, report: &Report, at: Instant) -> anyhow::Result<()> {
        let since = at.saturating_duration_since(self.begun);
        let channel = report.channel;
        let Some(pending) = self.pending.get_mut(usize::from(channel)) else {
            return Ok(());
        };
        match &report.message {
            ServerMessage::Accepted(m) => {
                if let Some(due) = pending.due(m.client_seq) {
                    self.tally.record_accepted(since.saturating_sub(due));
                }
            }
            ServerMessage::Rejected(m) => {
                if pending.answered(m.client_seq).is_some() {
                    self.tally.record_refused(m.reason.as_str());
                    self.plan.ended(channel, m.client_order_id);
                } else {
                    // Only a mass cancel is not in `pending`.
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
                    self.tally.record_durable_answer(since.saturating_sub(due));
                }
            }
        }
        Ok(())
    }
}

/// Drives a run with the async client.
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
                let report = report.context("the connection was lost")??;
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

/// Drives a run with the spinning client, on this thread.
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
