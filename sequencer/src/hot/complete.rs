//! Completion of commands: drains the engines' reports and completes commands in sequence.
//!
//! Completion applies a command to admission's state, sends its messages to the fronts of their
//! sessions, and appends its record to the journal's buffer.

use std::sync::atomic::Ordering;

use admission::{Admission, Rates, ReportSink};
use types::command::{Cause, MemberGroup, OpenSession};
use types::{Command, Event, Sequence, SessionIx};

use super::lists::gather;
use super::{Hot, NO_PORT};
use crate::engine_ring;
use crate::in_flight::ReplyTo;
use crate::port::Reply;
use crate::record::Record;
use crate::ring_port::{HotRingPort, Opened, Report, Stamp};

/// Sends the numbered messages of one command to the fronts that have the sessions.
struct Router<'a> {
    rings: &'a mut [HotRingPort],
    /// Ring of each session.
    routes: &'a [u16],
    stamp: Stamp,
    /// A message of the command answers its request.
    has_answered: bool,
}

impl ReportSink for Router<'_> {
    #[inline]
    fn report(&mut self, report: &admission::Report) {
        let port = self.routes.get(report.session.index());
        let port = usize::from(port.copied().unwrap_or(NO_PORT));
        if let Some(ring) = self.rings.get_mut(port) {
            self.has_answered |= report.client_seq != 0;
            ring.put(|| Report::SessionMessage(self.stamp, *report));
        }
    }
}

/// Routes a session's messages to the front that has opened it.
#[cold]
fn route(rings: &mut [HotRingPort], routes: &mut Vec<u16>, port: usize, opened: Opened) {
    let SessionIx(session) = opened.session;
    let at = session as usize;
    if routes.len() <= at {
        routes.resize(at + 1, NO_PORT);
    }
    let to = u16::try_from(port).expect("fronts are few");
    let before = usize::from(std::mem::replace(&mut routes[at], to));
    if before != port
        && let Some(ring) = rings.get_mut(before)
    {
        let (session, epoch) = (opened.session, opened.epoch);
        ring.put(|| Report::TakenOver { session, epoch });
    }
    rings[port].put(|| Report::Opened(opened));
}

/// The report for a command that has opened a session.
#[cold]
fn opened(admission: &Admission, tag: u64, epoch: Sequence, open: &OpenSession) -> Opened {
    let row = admission.session(open.session);
    let row = row.expect("its command is applied");
    let user = admission.user(open.user);
    Opened {
        tag,
        epoch,
        session: open.session,
        user: open.user,
        stp_group: open.stp_group,
        group: user.map_or(MemberGroup::NONE, |user| user.group),
        rates: user.map_or_else(Rates::default, |user| admission.rates(user)),
        client_seq: row.client_seq,
        last_number: row.last_number,
        cancel_all_at_ns: row.cancel_all_at_ns,
    }
}

impl Hot {
    /// Drains the engines' reports and completes commands. True when it did work.
    #[inline(always)]
    pub(super) fn pump(&mut self) -> bool {
        match self.busy.is_empty() {
            true => self.complete_all(),
            false => self.pump_busy(),
        }
    }

    #[inline(always)]
    fn complete_all(&mut self) -> bool {
        let mut did_work = false;
        while self.in_flight.has_complete() {
            did_work |= self.complete_next();
        }
        did_work
    }

    fn pump_busy(&mut self) -> bool {
        let mut did_work = false;
        let mut at = 0;
        while at < self.busy.len() {
            let place = self.busy[at];
            let (core, in_flight) = (&mut self.core, &mut self.in_flight);
            let (scan_limiter, clock) = (&mut self.scan_limiter, &self.config.clock);
            let engine_ring = &mut self.engine_rings[place];
            let expiry_ns = engine_ring.next_expiry_ns;
            did_work |= engine_ring.drain(|report| match report {
                // Applied to admission when its command completes.
                engine_ring::Report::Event(event) => in_flight.event(event),
                engine_ring::Report::Quote(instrument, quote) => core.quote(*instrument, *quote),
                engine_ring::Report::Done {
                    sequence,
                    fok_visits,
                    ..
                } => {
                    let visits_max = in_flight.done(*sequence);
                    if visits_max > 0 {
                        let member = in_flight.member(*sequence);
                        scan_limiter.release(member, visits_max);
                        if *fok_visits > 0 {
                            scan_limiter.charge(member, clock.now_ns(), u64::from(*fok_visits));
                        }
                    }
                }
                engine_ring::Report::Nothing => {}
            });
            if expiry_ns != engine_ring.next_expiry_ns {
                self.expiries.set(place, engine_ring.next_expiry_ns);
            }
            if engine_ring.is_idle() {
                self.busy.swap_remove(at);
            } else {
                at += 1;
            }
        }
        did_work |= self.complete_all();
        if !did_work && !self.in_flight.is_empty() {
            self.check_engine_pool();
        }
        did_work
    }

    /// Completes commands during a wait. When there are none to complete, their records are handed
    /// over, and other threads get the core.
    pub(super) fn pump_or_yield(&mut self) {
        if !self.pump() {
            self.keep.flush(false);
            std::thread::yield_now();
        }
    }

    /// Completes the first command in flight, if all its engines have finished; true if so.
    ///
    /// Its messages mean *accepted*. No request is admitted in between.
    pub(super) fn complete_next(&mut self) -> bool {
        let is_last = self.in_flight.len() == 1;
        let Some(entry) = self.in_flight.complete() else {
            return false;
        };
        let command = &entry.command;
        self.tally.events += entry.events.len() as u64;
        let cause = Cause::of(command);
        if is_last && std::mem::take(&mut self.is_last_unapplied) {
            let book = self.core.begin(command, &cause);
            assert!(book.is_none(), "an order command creates no book");
        }
        let mut router = Router {
            rings: &mut self.rings,
            routes: &self.routes,
            stamp: Stamp {
                sequence: command.sequence,
                time_ns: command.time_ns,
                received_ns: command.received_ns,
            },
            has_answered: false,
        };
        self.core.report(&cause, &command.command, &mut router);
        for event in &entry.events {
            if let Event::Trade(trade) = &event.event {
                Self::count_trade(&mut self.meters, &self.core, trade);
            }
            self.core.event(event, &cause, &mut router);
        }
        let events = entry.events.len();
        self.core.end(&cause, &command.command, events, &mut router);
        if let ReplyTo::Ring { port, tag } = entry.reply_to {
            let (has_answered, stamp) = (router.has_answered, router.stamp);
            if let Command::OpenSession(open) = &command.command {
                let opened = opened(self.core.admission(), tag, stamp.sequence, open);
                route(&mut self.rings, &mut self.routes, port, opened);
            } else if !has_answered {
                self.rings[port].put(|| Report::Submitted { tag, stamp });
            }
        }
        let bytes = self.keep.append(command, &entry.events);
        let gathered = gather(&mut self.sweeping, command, &entry.events);
        if let ReplyTo::Reply(reply) = &mut entry.reply_to
            && !matches!(reply, Reply::None)
        {
            let reply = std::mem::replace(reply, Reply::None);
            // Published before the answer: a read after the answer is not older than it.
            let sequence = &self.stats.sequence;
            sequence.store(self.core.sequence().get(), Ordering::Release);
            let command = entry.command;
            let events = gathered.unwrap_or_else(|| entry.take_events());
            reply.send(Ok(Record { command, events }));
        }
        let member = entry.member;
        self.in_flight.remove_first();
        self.count_bytes(member, bytes);
        true
    }

    /// Applies the last command to admission's state, unless it was applied.
    #[inline(always)]
    pub(super) fn begin_last(&mut self) {
        if self.is_last_unapplied {
            self.begin_unapplied();
        }
    }

    #[inline(never)]
    fn begin_unapplied(&mut self) {
        self.is_last_unapplied = false;
        let last = self.in_flight.last();
        let last = last.expect("an unapplied command is in flight");
        let book = self.core.begin(last, &Cause::of(last));
        assert!(book.is_none(), "an order command creates no book");
    }
}
