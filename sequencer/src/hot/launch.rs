//! Start of admitted commands: to the books in layout `fused`, else to the rings of their engines.

use types::command::{Amend, Cancel, Cause, Listed, New, Route};
use types::{Command, UserIx};

use super::Hot;
use crate::engine_ring::{EngineRing, connect};
use crate::expiries::NEVER;
use crate::in_flight::ReplyTo;

impl Hot {
    /// Starts the admitted command and sends it to its engines. Orders are applied to admission
    /// later; see [`Hot::begin_last`].
    #[inline(always)]
    pub(super) fn launch(&mut self, reply_to: ReplyTo) {
        let place = self.in_flight.vacant();
        match place.command {
            Command::New(New {
                instrument, user, ..
            })
            | Command::Cancel(Cancel {
                instrument, user, ..
            })
            | Command::Amend(Amend {
                instrument,
                user,
                new_client_order_id: 0,
                ..
            }) => {
                self.start(1, user, reply_to);
                self.is_last_unapplied = true;
                self.send_last(instrument.index());
            }
            Command::Amend(Amend {
                instrument, user, ..
            }) => {
                self.renaming = (place.sequence, user);
                self.start(1, user, reply_to);
                self.is_last_unapplied = true;
                self.send_last(instrument.index());
            }
            _ => self.launch_other(reply_to),
        }
    }

    /// As [`Hot::launch`], for other commands, which are applied to admission at once.
    #[cold]
    fn launch_other(&mut self, reply_to: ReplyTo) {
        let envelope = self.in_flight.vacant();
        if let Some(book) = self.core.begin(envelope, &Cause::of(envelope)) {
            if self.is_fused {
                self.expiries.set(self.core.places().len(), NEVER);
                self.core.places().push(Some(book));
            } else {
                self.core.places().push(None);
                self.open_engine_ring(book);
            }
        }
        let envelope = *self.in_flight.vacant();
        let member = envelope.command.member();
        match envelope.command.route() {
            Route::Admission => {
                self.start(0, member, reply_to);
                self.complete_funding(&envelope.command);
            }
            Route::Instrument(ix) => {
                self.start(1, member, reply_to);
                self.send_last(ix.index());
            }
            Route::AllInstruments => {
                let books = self.core.places().len();
                self.start(books, member, reply_to);
                for at in 0..books {
                    self.send_last(at);
                }
            }
            Route::Listed => self.launch_listed(reply_to),
        }
        self.watch_sessions(&envelope);
        self.watch_clock(&envelope.command);
    }

    /// Marks the admitted command as in flight at the engines of `books` books.
    #[inline(always)]
    pub(super) fn start(&mut self, books: usize, member: UserIx, reply_to: ReplyTo) {
        let engines = if self.is_fused { 0 } else { books };
        self.in_flight.start(engines, member, reply_to);
        self.tally.commands += 1;
        self.tally.in_flight_max = self.tally.in_flight_max.max(self.in_flight.len() as u64);
    }

    /// Applies the last command in flight to a book, or sends it to the book's engine. It cannot
    /// complete before all its engines have it.
    #[inline]
    pub(super) fn send_last(&mut self, at: usize) {
        match self.is_fused {
            true => self.match_last(at, None),
            false => self.push_last(at),
        }
    }

    /// Applies the last command in flight to a book, in layout `fused`.
    pub(super) fn match_last(&mut self, at: usize, listed: Option<&[Listed]>) {
        let (command, mut events) = self.in_flight.last_with_events();
        let each = |event: &_| events.push(event);
        let matched = self.core.match_command(at, command, listed, each);
        if matched.fok_visits > 0 {
            let (member, now_ns) = (command.command.member(), self.config.clock.now_ns());
            let visits = u64::from(matched.fok_visits);
            self.scan_limiter.charge(member, now_ns, visits);
        }
        if matched.expiry_before_ns != matched.expiry_ns {
            self.expiries.set(at, matched.expiry_ns.unwrap_or(NEVER));
        }
    }

    pub(super) fn push_last(&mut self, at: usize) {
        // There is room, but an engine that has reported may not have freed the slot yet.
        self.push_blocking(at, EngineRing::push);
        self.engine_pool.unpark(at);
        if self.engine_rings[at].is_first() {
            self.busy.push(at);
        }
    }

    pub(super) fn open_engine_ring(&mut self, book: Box<engine::Book>) {
        let (engine_ring, engine) = connect(book, self.config.ring_capacity);
        let at = self.engine_rings.len();
        self.expiries.set(at, engine_ring.next_expiry_ns);
        self.engine_rings.push(engine_ring);
        self.engine_pool.add(engine);
    }
}
