//! A small market for admission's tests: real books, and events that wait until the test applies
//! them.
#![allow(dead_code)]

use std::collections::VecDeque;

use admission::*;
use engine::{Book, BookConfig, EventSink};
use types::command::{Cause, SetBudget};
use types::*;

/// 2024-01-01, noon in Moscow.
pub const START_NS: u64 = 1_704_099_600_000_000_000;

pub fn spec(name: &str, band_high: i64) -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        decimals: 2,
        band_high: Ticks(band_high),
        ..InstrumentParams::new(InstrumentId::new(name).unwrap())
    })
    .unwrap()
}

#[derive(Clone, Default)]
pub struct Queue {
    pub events: VecDeque<EventEnvelope>,
    pub quote: Quote,
}

impl EventSink for Queue {
    fn event(&mut self, event: &EventEnvelope) {
        self.events.push_back(*event);
    }

    fn quote(&mut self, _: InstrumentIx, quote: Quote) {
        self.quote = quote;
    }
}

/// A command or event that was applied; the steps in order replay a run.
#[derive(Clone, Copy, Debug)]
pub enum Step {
    Command(Envelope),
    Event(EventEnvelope),
}

pub struct Market {
    pub room: Admission,
    pub books: Vec<Book>,
    pub queues: Vec<Queue>,
    pub time_ns: u64,
    pub steps: Vec<Step>,
    pub effects: Vec<Effect>,
}

impl Market {
    /// Without instruments and users.
    pub fn empty() -> Self {
        Self::with_room_for(64)
    }

    pub fn with_room_for(orders_max: u32) -> Self {
        Self {
            room: Admission::new(AdmissionConfig {
                orders_max,
                ..AdmissionConfig::default()
            }),
            books: Vec::new(),
            queues: Vec::new(),
            time_ns: START_NS,
            steps: Vec::new(),
            effects: Vec::new(),
        }
    }

    /// One instrument, and two users with an unlimited budget and 10,000.00 roubles and 1,000 units
    /// each in trading holds.
    pub fn small() -> Self {
        Self::with_two_users(64)
    }

    /// As [`Market::small`], one day later: the budgets have ended.
    pub fn empty_day() -> Self {
        let mut market = Self::small();
        market.time_ns += 24 * 3_600 * 1_000_000_000;
        market
    }

    /// As [`Market::small`], with this many order slots.
    pub fn with_two_users(orders_max: u32) -> Self {
        let mut market = Self::with_room_for(orders_max);
        let ix = market.instrument(spec("BOND-1", 100_000));
        for name in ["alice", "bob"] {
            let user = market.user(name);
            market.fund(user, AssetIx::MONEY, 1_000_000);
            market.fund(user, AssetIx::units(ix), 100_000);
            market.budget(user, i64::MAX);
        }
        market
    }

    pub fn instrument(&mut self, spec: InstrumentSpec) -> InstrumentIx {
        let Command::SetInstrument(c) = self.submit(Request::SetInstrument(spec)).unwrap() else {
            panic!("another command");
        };
        c.spec.ix
    }

    pub fn user(&mut self, name: &str) -> UserIx {
        let id = UserId::new(name).unwrap();
        let Command::BindUser(c) = self.submit(Request::BindUser(id)).unwrap() else {
            panic!("another command");
        };
        c.user
    }

    pub fn fund(&mut self, user: UserIx, asset: AssetIx, amount: i64) -> HoldIx {
        let id = 1_000 + u128::from(user.0) * 100 + u128::from(asset.get());
        let seq = self
            .room
            .hold_ix(Id128::from_u128(id))
            .map_or(0, |ix| self.room.hold(ix).unwrap().funding_seq);
        let request = FundRequest {
            hold_id: Id128::from_u128(id),
            kind: HoldKind::Trading,
            user,
            asset,
            amount_minor: Minor(amount),
            funding_seq: seq + 1,
            key_hash: Id128::NONE,
        };
        let Command::Fund(c) = self.submit(Request::Fund(request)).unwrap() else {
            panic!("another command");
        };
        c.hold
    }

    pub fn budget(&mut self, user: UserIx, amount: i64) {
        self.submit(Request::SetBudget(SetBudget {
            user,
            day: moscow_day(self.time_ns),
            limit_minor: Minor(amount),
            left_minor: Minor(amount),
        }))
        .unwrap();
    }

    pub fn session(&mut self, user: UserIx, key: u128) -> SessionIx {
        let request = SessionRequest {
            key: Id128::from_u128(key),
            user,
            stp_group: None,
            cancel_on_disconnect: true,
        };
        let Command::OpenSession(c) = self.submit(Request::OpenSession(request)).unwrap() else {
            panic!("another command");
        };
        c.session
    }

    /// Admits and applies a request. The books run at once; their events wait in the queues.
    pub fn submit(&mut self, request: Request) -> Result<Command, Reject> {
        let now = self.time_ns + 1_000;
        let command = self.room.admit(&request, now)?;
        assert_eq!(
            self.room.admit(&request, now),
            Ok(command),
            "admit only reads"
        );
        self.run(command);
        Ok(command)
    }

    pub fn run(&mut self, command: Command) {
        self.time_ns += 1_000;
        let envelope = Envelope {
            sequence: self.room.sequence().next(),
            time_ns: self.time_ns,
            received_ns: self.time_ns,
            command,
        };
        let mut listed = Vec::new();
        self.room.list(&command, &mut listed);
        self.room.apply_command(&envelope, &Cause::of(&envelope));
        self.steps.push(Step::Command(envelope));
        if let Command::SetInstrument(c) = &command
            && c.spec.ix.index() == self.books.len()
        {
            let config = BookConfig {
                orders: 64,
                levels: 1_024,
            };
            self.books.push(Book::new(c.spec, config));
            self.queues.push(Queue::default());
        }
        for (at, book) in self.books.iter_mut().enumerate() {
            let ix = InstrumentIx(at as u32);
            let routed = match command.route() {
                Route::Admission => false,
                Route::Instrument(named) => named == ix,
                Route::AllInstruments => true,
                Route::Listed => {
                    let mut of_book = listed.clone();
                    of_book.retain(|order| order.instrument == ix);
                    book.apply_listed(&envelope, &of_book, &mut self.queues[at]);
                    false
                }
            };
            if routed {
                book.apply(&envelope, &mut self.queues[at]);
            }
        }
    }

    /// Applies the next waiting event of an instrument; false when none waits.
    pub fn drain_one(&mut self, at: usize) -> bool {
        let Some(event) = self.queues[at].events.pop_front() else {
            return false;
        };
        let cause = cause_of(&self.steps, &event);
        let effects = self.room.apply_event(&event, &cause, &mut ());
        self.effects.extend(effects.iter());
        self.steps.push(Step::Event(event));
        if self.queues[at].events.is_empty() {
            self.room
                .set_quote(InstrumentIx(at as u32), self.queues[at].quote);
        }
        true
    }

    pub fn drain(&mut self) {
        for at in 0..self.queues.len() {
            while self.drain_one(at) {}
        }
        self.room.check_invariants();
    }

    /// Admits and applies a request with all its events.
    pub fn execute(&mut self, request: Request) -> Result<Command, Reject> {
        let result = self.submit(request);
        self.drain();
        result
    }

    /// Admits, applies and numbers a request as the node does, with no events waiting; returns the
    /// messages.
    pub fn messages_of(&mut self, request: Request) -> Vec<Report> {
        let command = self.room.admit(&request, self.time_ns + 1_000);
        self.messages_of_command(command.expect("is admitted"))
    }

    /// As [`Market::messages_of`], for an admitted command.
    pub fn messages_of_command(&mut self, command: Command) -> Vec<Report> {
        assert!(self.queues.iter().all(|queue| queue.events.is_empty()));
        self.run(command);
        let Some(Step::Command(envelope)) = self.steps.last().copied() else {
            panic!("no command");
        };
        let (cause, mut reports) = (Cause::of(&envelope), Vec::new());
        self.room.report_command(&cause, &command, &mut reports);
        let mut events = 0;
        for queue in &mut self.queues {
            while let Some(event) = queue.events.pop_front() {
                self.room.apply_event(&event, &cause, &mut reports);
                events += 1;
            }
        }
        self.room.report_end(&cause, &command, events, &mut reports);
        self.room.check_invariants();
        reports
    }

    /// Places an order that must be admitted; returns its handle.
    pub fn place(&mut self, request: NewRequest) -> Handle {
        let Ok(Command::New(c)) = self.execute(Request::New(request)) else {
            panic!("not admitted: {request:?}");
        };
        c.handle
    }

    pub fn refuse(&mut self, request: Request) -> Reject {
        let before = self.room.state_hash();
        let reject = self.execute(request).unwrap_err();
        assert_eq!(self.room.state_hash(), before, "a refusal changes nothing");
        reject
    }

    pub fn money(&self, user: u32) -> HoldTotals {
        let hold = self
            .room
            .default_hold(UserIx(user), AssetIx::MONEY)
            .unwrap();
        self.room.hold_totals(hold)
    }

    pub fn units(&self, user: u32) -> HoldTotals {
        let asset = AssetIx::units(InstrumentIx(0));
        let hold = self.room.default_hold(UserIx(user), asset).unwrap();
        self.room.hold_totals(hold)
    }
}

/// A good-till-cancelled limit order of the first instrument, without session.
pub fn limit(user: u32, side: Side, price: i64, quantity: u64) -> NewRequest {
    NewRequest::limit(
        InstrumentIx(0),
        UserIx(user),
        side,
        Ticks(price),
        Lots(quantity),
    )
}

pub fn market_order(user: u32, side: Side, quantity: u64) -> NewRequest {
    NewRequest {
        order_type: OrderType::Market,
        time_in_force: TimeInForce::Ioc,
        price: None,
        ..limit(user, side, 1, quantity)
    }
}

pub fn cancel(user: u32, order: OrderRef) -> Request {
    Request::Cancel(CancelRequest {
        order,
        user: UserIx(user),
        session: SessionIx::NONE,
        client_seq: 0,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    })
}

pub fn amend(user: u32, order: Handle, price: Option<i64>, quantity: Option<u64>) -> Request {
    Request::Amend(AmendRequest {
        order: OrderRef::Handle(order),
        user: UserIx(user),
        session: SessionIx::NONE,
        client_seq: 0,
        price: price.map(Ticks),
        quantity: quantity.map(Lots),
        new_client_order_id: 0,
        limit_checked: false,
        key_hash: Id128::NONE,
    })
}

/// The cause of an event: its command is among the steps.
pub fn cause_of(steps: &[Step], event: &EventEnvelope) -> Cause {
    let command = steps.iter().rev().find_map(|step| match step {
        Step::Command(envelope) if envelope.sequence == event.sequence => Some(envelope),
        _ => None,
    });
    Cause::of(command.expect("an event follows its command"))
}
