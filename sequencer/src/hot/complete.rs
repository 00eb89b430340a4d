//! Completion of commands: drains the engines' reports and completes commands in sequence.
//!
//! A complete command goes into admission's state, its messages to the fronts of the sessions they
//! concern, its record into the journal's buffer.

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
    /// The session of the request has been answered.
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

/// The report of a command that has opened a session.
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
    /// Polls the hot thread's own engines, drains all reports, completes commands. True when it did
    /// work.
    pub(super) fn pump(&mut self) -> bool {
        let mut did_work = false;
        let mut is_expiry_new = false;
        let mut at = 0;
        while at < self.busy.len() {
            let place = self.busy[at];
            did_work |= self.engine_pool.step(place);
            let (core, flights) = (&mut self.core, &mut self.flights);
            let (scan_limiter, clock) = (&mut self.scan_limiter, &self.config.clock);
            let engine_ring = &mut self.engine_rings[place];
            let expiry_ns = engine_ring.next_expiry_ns;
            did_work |= engine_ring.drain(|report| match report {
                // Applied when its command completes.
                engine_ring::Report::Event(event) => flights.event(event),
                engine_ring::Report::Quote(instrument, quote) => core.quote(*instrument, *quote),
                engine_ring::Report::Done {
                    sequence, looks, ..
                } => {
                    if *looks > 0 {
                        let member = flights.member(*sequence);
                        scan_limiter.charge(member, clock.now_ns(), u64::from(*looks));
                    }
                    flights.done(*sequence);
                }
                engine_ring::Report::Nothing => {}
            });
            is_expiry_new |= expiry_ns != engine_ring.next_expiry_ns;
            if engine_ring.is_idle() {
                self.busy.swap_remove(at);
            } else {
                at += 1;
            }
        }
        if is_expiry_new {
            self.find_next_expiry();
        }
        while self.complete_next() {
            did_work = true;
        }
        if !did_work && !self.flights.is_empty() {
            self.check_engine_pool();
        }
        did_work
    }

    /// Completes the next command if it is ready: admission's state, messages to the fronts
    /// (*accepted*), record into the journal's buffer. No request is taken in between.
    pub(super) fn complete_next(&mut self) -> bool {
        let is_last = self.flights.len() == 1;
        let Some(flight) = self.flights.complete() else {
            return false;
        };
        let command = &flight.command;
        self.tally.events += flight.events.len() as u64;
        if is_last && std::mem::take(&mut self.is_last_owed) {
            let book = self.core.begin(command);
            assert!(book.is_none(), "an order command creates no book");
        }
        let cause = Cause::of(command);
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
        for event in &flight.events {
            if let Event::Trade(trade) = &event.event {
                Self::count_trade(&mut self.meters, &self.core, trade);
            }
            self.core.event(event, &cause, &mut router);
        }
        let events = flight.events.len();
        self.core.end(&cause, &command.command, events, &mut router);
        if let ReplyTo::Ring { port, tag } = flight.owed {
            let (has_answered, stamp) = (router.has_answered, router.stamp);
            if let Command::OpenSession(open) = &command.command {
                let opened = opened(self.core.admission(), tag, stamp.sequence, open);
                route(&mut self.rings, &mut self.routes, port, opened);
            } else if !has_answered {
                self.rings[port].put(|| Report::Submitted { tag, stamp });
            }
        }
        let member = command.command.member();
        let bytes = self.keep.append(command, &flight.events);
        let gathered = gather(&mut self.sweeping, command, &flight.events);
        if let ReplyTo::Reply(reply) = &mut flight.owed
            && !matches!(reply, Reply::None)
        {
            let reply = std::mem::replace(reply, Reply::None);
            // Before the answer: a read after it is not older than the answer.
            let sequence = &self.stats.sequence;
            sequence.store(self.core.sequence().get(), Ordering::Release);
            let command = flight.command;
            let events = gathered.unwrap_or_else(|| flight.take_events());
            reply.send(Ok(Record { command, events }));
        }
        self.flights.leave();
        self.count_bytes(member, bytes);
        true
    }

    /// Applies the last command to admission's state, if that is still due.
    #[inline]
    pub(super) fn begin_last(&mut self) {
        if std::mem::take(&mut self.is_last_owed) {
            let last = self.flights.last().expect("an owed command is in flight");
            let book = self.core.begin(last);
            assert!(book.is_none(), "an order command creates no book");
        }
    }
}
