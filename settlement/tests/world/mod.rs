//! A market in miniature for settlement's tests: real books, money admitted by the room's own fold, and a naive twin of the ledger that refuses
//! whatever is not covered.
#![allow(dead_code)]

pub mod ledger;
pub mod services;

use engine::{Book, BookConfig, EventSink};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use settlement::fold::Fold;
use types::command::*;
use types::*;

pub const NODE: u8 = 1;
pub const USERS: u32 = 6;
pub const INSTRUMENTS: u32 = 2;
/// Money of each user's trading hold, in kopecks, and units, in minor units.
pub const FUNDED: i64 = 50_000_000;

#[derive(Clone, Debug)]
pub struct Record {
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
}

#[derive(Default)]
struct Events(Vec<EventEnvelope>);

impl EventSink for Events {
    fn event(&mut self, event: &EventEnvelope) {
        self.0.push(*event);
    }

    fn quote(&mut self, _: InstrumentIx, _: Quote) {}
}

pub struct Market {
    pub rng: SmallRng,
    pub admission: Fold,
    books: Vec<Book>,
    pub records: Vec<Record>,
    pub time_ns: u64,
    generation: u32,
    funding_seq: u64,
    pools: u32,
    /// What happens when two orders of one user meet.
    pub stp: StpMode,
}

pub fn node() -> NodeId {
    NodeId::new(NODE).unwrap()
}

pub fn spec(ix: u32, tick: &str, lot: &str, decimals: u8) -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        ix: InstrumentIx(ix),
        id: InstrumentId::new(&format!("BOND-{ix}")).unwrap(),
        decimals,
        tick_size: tick.parse().unwrap(),
        lot_size: lot.parse().unwrap(),
        fee_rate: FeeRate::TRADING,
        band_low: Ticks(1),
        band_high: Ticks(1_000_000),
        collar_ppm: 50_000,
        velocity: VelocityRule::OFF,
        phase: Phase::Open,
    })
    .unwrap()
}

impl Market {
    /// Users, instruments and a trading hold for money and each instrument per user.
    pub fn new(seed: u64) -> Self {
        let mut market = Self {
            rng: SmallRng::seed_from_u64(seed),
            admission: Fold::new(node()),
            books: Vec::new(),
            records: Vec::new(),
            time_ns: 1_700_000_000_000_000_000,
            generation: 0,
            funding_seq: 0,
            pools: 0,
            stp: StpMode::CancelOldest,
        };
        for user in 0..USERS {
            market.submit(Command::BindUser(BindUser {
                user: UserIx(user),
                id: UserId::new(&format!("user-{user}")).unwrap(),
            }));
        }
        for ix in 0..INSTRUMENTS {
            let spec = if ix == 0 {
                spec(0, "0.01", "1", 0)
            } else {
                spec(1, "0.1", "0.1", 4)
            };
            market.submit(Command::SetInstrument(SetInstrument { spec }));
        }
        for user in 0..USERS {
            market.fund(UserIx(user), AssetIx::MONEY, FUNDED, PoolKind::Trading);
            for ix in 0..INSTRUMENTS {
                market.fund(
                    UserIx(user),
                    AssetIx::units(InstrumentIx(ix)),
                    FUNDED,
                    PoolKind::Trading,
                );
            }
        }
        market
    }

    /// Default pool of a user.
    pub fn pool(user: UserIx, asset: AssetIx) -> HoldIx {
        HoldIx(user.0 * (INSTRUMENTS + 1) + asset.get())
    }

    pub fn fund(&mut self, user: UserIx, asset: AssetIx, amount: i64, kind: PoolKind) -> HoldIx {
        let hold = HoldIx(self.pools);
        self.pools += 1;
        self.funding_seq += 1;
        self.submit(Command::Fund(Fund {
            hold,
            kind,
            user,
            asset,
            amount_minor: Minor(amount),
            funding_seq: self.funding_seq,
            hold_id: Id128::from_u128(0xfeed_0000 + u128::from(hold.0)),
            key_hash: Id128::NONE,
        }));
        hold
    }

    /// Sequences, matches, folds.
    pub fn submit(&mut self, command: Command) -> &Record {
        self.time_ns += self.rng.random_range(1_000..200_000_000);
        let envelope = Envelope {
            sequence: self.admission.position().next(),
            time_ns: self.time_ns,
            command,
        };
        if let Command::SetInstrument(c) = &command
            && c.spec.ix.index() == self.books.len()
        {
            self.books.push(Book::new(c.spec, BookConfig::default()));
        }
        let mut events = Events::default();
        for book in &mut self.books {
            book.apply(&envelope, &mut events);
        }
        let mut changes = Vec::new();
        self.admission
            .apply(&envelope, &events.0, &mut changes)
            .unwrap_or_else(|error| panic!("{error}: {envelope:?} {:?}", events.0));
        self.records.push(Record {
            command: envelope,
            events: events.0,
        });
        self.records.last().unwrap()
    }

    pub fn order(
        &mut self,
        user: u32,
        ix: u32,
        side: Side,
        price: i64,
        quantity: u64,
        tif: TimeInForce,
    ) -> Option<Handle> {
        let pool = match side {
            Side::Buy => Self::pool(UserIx(user), AssetIx::MONEY),
            Side::Sell => Self::pool(UserIx(user), AssetIx::units(InstrumentIx(ix))),
        };
        self.order_from(pool, user, ix, side, price, quantity, tif)
    }

    pub fn order_from(
        &mut self,
        pool: HoldIx,
        user: u32,
        ix: u32,
        side: Side,
        price: i64,
        quantity: u64,
        tif: TimeInForce,
    ) -> Option<Handle> {
        let terms = self.admission.instrument(InstrumentIx(ix)).terms;
        let draw = reserve(
            &terms,
            side,
            Ticks(price),
            Lots(quantity),
            Done::default(),
            FeeRate::TRADING,
        )
        .unwrap();
        if draw.total() > self.admission.pool(pool).free {
            return None;
        }
        let mut slot = 0;
        let taken: Vec<u32> = self.admission.orders().map(|o| o.handle.slot).collect();
        while taken.contains(&slot) {
            slot += 1;
        }
        self.generation += 1;
        let handle = Handle {
            slot,
            generation: self.generation,
        };
        self.submit(Command::New(New {
            handle,
            instrument: InstrumentIx(ix),
            user: UserIx(user),
            session: SessionIx::NONE,
            stp_group: StpGroup::of_user(UserIx(user)),
            pool,
            fee_rate: FeeRate::TRADING,
            side,
            order_type: OrderType::Limit,
            time_in_force: tif,
            post_only: false,
            stp: self.stp,
            client_order_id: 0,
            client_seq: 0,
            expire_at_ns: 0,
            price: Ticks(price),
            quantity: Lots(quantity),
            draw,
            budget_minor: Minor::ZERO,
            key_hash: Id128::NONE,
        }));
        Some(handle)
    }

    pub fn cancel(&mut self, handle: Handle) {
        let (instrument, user) = self
            .admission
            .order(handle)
            .map_or((InstrumentIx(0), UserIx(0)), |o| (o.instrument, o.user));
        self.submit(Command::Cancel(Cancel {
            handle,
            instrument,
            user,
            session: SessionIx::NONE,
            reason: CancelReason::UserRequest,
            client_seq: 0,
            key_hash: Id128::NONE,
        }));
    }

    /// Amends to a new price and total quantity; draws the growth first, as admission does.
    pub fn amend(&mut self, handle: Handle, price: i64, filled: u64, open: u64) -> bool {
        let order = *self.admission.order(handle).unwrap();
        let terms = self.admission.instrument(order.instrument).terms;
        let target = reserve(
            &terms,
            order.side,
            Ticks(price),
            Lots(open),
            order.done,
            order.fee_rate,
        )
        .unwrap();
        let draw = order.reserve.growth_to(target);
        if draw.total() > self.admission.pool(order.pool).free {
            return false;
        }
        self.submit(Command::Amend(Amend {
            handle,
            instrument: order.instrument,
            user: order.user,
            session: SessionIx::NONE,
            client_seq: 0,
            price: Some(Ticks(price)),
            quantity: Some(Lots(filled + open)),
            draw,
            budget_minor: Minor::ZERO,
            key_hash: Id128::NONE,
        }));
        true
    }

    /// One random command. `filled` of an order is found by its entry and what is open.
    pub fn random(&mut self) {
        let open: Vec<Handle> = self.admission.orders().map(|o| o.handle).collect();
        let pick = self.rng.random_range(0..100);
        if pick < 55 || open.is_empty() {
            let user = self.rng.random_range(0..USERS);
            let ix = self.rng.random_range(0..INSTRUMENTS);
            let side = if self.rng.random() {
                Side::Buy
            } else {
                Side::Sell
            };
            let price = self.rng.random_range(90..=110);
            let quantity = self.rng.random_range(1..=60);
            let tif = match self.rng.random_range(0..10) {
                0 => TimeInForce::Ioc,
                1 => TimeInForce::Fok,
                _ => TimeInForce::Gtc,
            };
            self.order(user, ix, side, price, quantity, tif);
        } else if pick < 75 {
            let handle = open[self.rng.random_range(0..open.len())];
            self.cancel(handle);
        } else if pick < 92 {
            let handle = open[self.rng.random_range(0..open.len())];
            let total = self.total(handle);
            let order = *self.admission.order(handle).unwrap();
            let filled = total - order.open.0;
            let price = self.rng.random_range(90..=110);
            let open = self.rng.random_range(1..=80);
            self.amend(handle, price, filled, open);
        } else if pick < 95 {
            let user = UserIx(self.rng.random_range(0..USERS));
            self.submit(Command::MassCancel(MassCancel {
                scope: MassScope::User(user),
                instrument: InstrumentIx::NONE,
                side: None,
                reason: CancelReason::MassCancel,
                user,
                session: SessionIx::NONE,
                client_seq: 0,
                key_hash: Id128::NONE,
            }));
        } else {
            self.single();
        }
    }

    /// A gRPC order with a hold of its own.
    pub fn single(&mut self) -> (HoldIx, Option<Handle>) {
        let user = self.rng.random_range(0..USERS);
        let price = self.rng.random_range(90..=110);
        let quantity = self.rng.random_range(1..=60);
        let terms = self.admission.instrument(InstrumentIx(0)).terms;
        let draw = reserve(
            &terms,
            Side::Buy,
            Ticks(price),
            Lots(quantity),
            Done::default(),
            FeeRate::TRADING,
        )
        .unwrap();
        let pool = self.fund(
            UserIx(user),
            AssetIx::MONEY,
            draw.total().0,
            PoolKind::Order,
        );
        let handle = self.order_from(pool, user, 0, Side::Buy, price, quantity, TimeInForce::Gtc);
        (pool, handle)
    }

    /// Total quantity of an open order, as the book has it.
    fn total(&self, handle: Handle) -> u64 {
        let order = self.admission.order(handle).unwrap();
        let mut total = 0;
        for record in &self.records {
            if let Command::New(new) = &record.command.command
                && new.handle == handle
            {
                total = new.quantity.0;
            }
            for event in &record.events {
                match &event.event {
                    Event::Amended(e) if e.handle == handle => total = e.quantity.0,
                    Event::Reduced(e) if e.handle == handle => total -= e.quantity.0,
                    _ => {}
                }
            }
        }
        assert!(total >= order.open.0);
        total
    }
}
