//! Room in the engines' rings. Orders and amends leave a reserve, so that cancels find slots when
//! orders do not.

use std::time::Instant;

use types::InstrumentIx;
use types::command::Route;

use super::{Hot, ROOM_WAIT};
use crate::engine_ring::EngineRing;
use crate::port::SubmitError;

impl Hot {
    /// True when every engine ring of the route has room. `is_order`: for a new order or an amend.
    #[inline]
    pub(super) fn has_room(&self, route: Route, is_order: bool) -> bool {
        let has_room = |engine_ring: &EngineRing| engine_ring.has_room(is_order);
        match route {
            Route::Admission => true,
            Route::Instrument(ix) => self.engine_rings.get(ix.index()).is_none_or(has_room),
            Route::AllInstruments => self.engine_rings.iter().all(has_room),
            Route::Listed => self.listed_rings().all(has_room),
        }
    }

    /// Waits until the route has room, at most [`ROOM_WAIT`] after `since`, with reports drained
    /// meanwhile.
    ///
    /// # Errors
    /// `BUSY`: the time is over, or a wait for the same engine has timed out and it has reported
    /// nothing since.
    #[cold]
    pub(super) fn await_room(
        &mut self,
        route: Route,
        is_order: bool,
        since: Instant,
    ) -> Result<(), SubmitError> {
        while !self.has_room(route, is_order) {
            self.pump_or_yield();
            let is_over = since.elapsed() > ROOM_WAIT;
            let is_at_end = is_over || self.has_timed_out(route, is_order);
            if is_at_end && !self.has_room(route, is_order) {
                if is_over {
                    self.mark_timed_out(route, is_order);
                }
                return Err(SubmitError::Busy);
            }
        }
        Ok(())
    }

    /// True while a wait for an engine without room has timed out.
    fn has_timed_out(&self, route: Route, is_order: bool) -> bool {
        let has_timed_out =
            |engine_ring: &EngineRing| engine_ring.has_timed_out && !engine_ring.has_room(is_order);
        match route {
            Route::Admission => false,
            Route::Instrument(ix) => self.engine_rings.get(ix.index()).is_some_and(has_timed_out),
            Route::AllInstruments => self.engine_rings.iter().any(has_timed_out),
            Route::Listed => self.listed_rings().any(has_timed_out),
        }
    }

    fn mark_timed_out(&mut self, route: Route, is_order: bool) {
        let is_named = |at: usize| match route {
            Route::Admission => false,
            Route::Instrument(ix) => at == ix.index(),
            Route::AllInstruments => true,
            Route::Listed => {
                let named = InstrumentIx(at as u32);
                let found = self
                    .listed
                    .binary_search_by_key(&named, |order| order.instrument);
                found.is_ok()
            }
        };
        for (at, engine_ring) in self.engine_rings.iter_mut().enumerate() {
            engine_ring.has_timed_out |= is_named(at) && !engine_ring.has_room(is_order);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use admission::{AmendRequest, CancelRequest, FundRequest, NewRequest, OrderRef, Request};
    use types::{
        AssetIx, CancelReason, Command, HoldKind, Id128, InstrumentId, InstrumentParams,
        InstrumentSpec, Lots, Minor, SessionIx, Side, Ticks, UserId, UserIx,
    };

    use super::*;
    use crate::backlog::Backlog;
    use crate::config::{Config, Layout};
    use crate::core::Core;
    use crate::engine_ring::{Engine, connect};
    use crate::hot::nothing;
    use crate::port::Gate;
    use crate::sink::JournalSink;
    use crate::stats::Stats;

    const SLOTS: usize = 16;
    const USER: UserIx = UserIx(0);

    fn apply(core: &mut Core, request: &Request) {
        let mut envelope = nothing();
        let admission = core.admission();
        let admitted = admission.admit_into(request, envelope.time_ns, &mut envelope.command);
        admitted.expect("admitted");
        envelope.sequence = core.sequence().next();
        core.apply(&envelope);
    }

    /// Two instruments and a user with money.
    fn market() -> Core {
        let mut core = Core::new(crate::limits::limits());
        for name in ["BOND-1", "BOND-2"] {
            let spec = InstrumentSpec::new(&InstrumentParams {
                band_high: Ticks(10_000_000),
                ..InstrumentParams::new(InstrumentId::new(name).expect("an id"))
            });
            let spec = spec.expect("consistent");
            apply(&mut core, &Request::SetInstrument(spec));
        }
        let user = UserId::new("alice").expect("an id");
        apply(&mut core, &Request::BindUser(user));
        let fund = FundRequest {
            hold_id: Id128::from_u128(1),
            kind: HoldKind::Trading,
            user: USER,
            asset: AssetIx::MONEY,
            amount_minor: Minor(100_000_000_000),
            funding_seq: 1,
            key_hash: Id128::NONE,
        };
        apply(&mut core, &Request::Fund(fund));
        core
    }

    /// A hot thread whose first instrument has an engine that only the test polls.
    fn hot_with_idle_engine() -> (Hot, Engine) {
        let mut config = Config::new(Path::new("unused"));
        config.layout = Layout::Shared;
        config.ring_capacity = SLOTS;
        let (gate, backlog) = (Arc::new(Gate::new(&config)), Arc::new(Backlog::default()));
        let (sink, stats) = (JournalSink::Null, Arc::new(Stats::default()));
        let mut hot = Hot::new(config, market(), gate, sink, backlog, stats);
        let books = [0, 1].map(|at| hot.core.places()[at].take());
        let [idle, polled] = books.map(|book| book.expect("a new book"));
        let (engine_ring, engine) = connect(idle, SLOTS);
        hot.engine_rings.push(engine_ring);
        // For the pool's thread.
        hot.open_engine_ring(polled);
        (hot, engine)
    }

    fn order() -> Request {
        Request::New(NewRequest {
            limit_checked: true,
            ..NewRequest::limit(InstrumentIx(0), USER, Side::Buy, Ticks(100), Lots(2))
        })
    }

    fn amend(order: OrderRef) -> Request {
        Request::Amend(AmendRequest {
            order,
            user: USER,
            session: SessionIx::NONE,
            client_seq: 0,
            price: None,
            quantity: Some(Lots(3)),
            new_client_order_id: 0,
            limit_checked: true,
            key_hash: Id128::NONE,
        })
    }

    fn cancel(order: OrderRef) -> Request {
        Request::Cancel(CancelRequest {
            order,
            user: USER,
            session: SessionIx::NONE,
            client_seq: 0,
            reason: CancelReason::UserRequest,
            key_hash: Id128::NONE,
        })
    }

    #[test]
    fn cancels_find_slots_in_an_engines_ring_when_orders_and_amends_find_none() {
        let (mut hot, mut engine) = hot_with_idle_engine();
        let mut open = Vec::new();
        for _ in 0..SLOTS - SLOTS / 8 {
            assert_eq!(hot.own_request(&order()), Ok(()));
            let Some(Command::New(new)) = hot.in_flight.last().map(|last| last.command) else {
                panic!("an order is in flight");
            };
            open.push(OrderRef::Handle(new.handle));
        }
        for request in [order(), amend(open[0]), order()] {
            assert_eq!(hot.own_request(&request), Err(SubmitError::Busy));
        }
        for order in &open[..SLOTS / 8] {
            assert_eq!(hot.own_request(&cancel(*order)), Ok(()));
        }
        let one_too_many = hot.own_request(&cancel(open[2]));
        assert_eq!(one_too_many, Err(SubmitError::Busy), "no slot is left");
        while !hot.in_flight.is_empty() {
            engine.step();
            hot.pump();
        }
        assert_eq!(hot.core.admission().orders().count(), open.len() - 2);
        for request in [order(), amend(open[2]), cancel(open[3])] {
            assert_eq!(hot.own_request(&request), Ok(()));
        }
        while !hot.in_flight.is_empty() {
            engine.step();
            hot.pump();
        }
    }
}
