//! A small market for settlement's tests: real admission and books, a replica, and a naive model of
//! the ledger that refuses everything uncovered.
#![allow(dead_code)]

pub mod journalled;
pub mod ledger;
pub mod services;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use admission::{
    Admission, AdmissionConfig, AmendRequest, CancelRequest, MassCancelRequest, NewRequest,
    OrderRef, Request,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use replica::{Applied, Names, Order, State};
use sequencer::Core;
use settlement::trading_state::TradingState;
use types::command::*;
use types::*;

pub const NODE: u8 = 1;
pub const USERS: u32 = 6;
pub const INSTRUMENTS: u32 = 2;
/// Amount per trading hold: kopecks of money, minor units of an instrument.
pub const FUNDED: i64 = 50_000_000;

/// A journal record and its effects.
#[derive(Clone, Debug)]
pub struct Record {
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
    pub applied: Applied,
}

pub struct Market {
    pub rng: SmallRng,
    /// Produces the events.
    core: Core,
    /// Applies the records.
    pub state: State,
    pub records: Vec<Record>,
    pub time_ns: u64,
    /// Maximum nanoseconds between two records.
    pub step_ns: u64,
    funding_seq: u64,
    holds: u32,
    /// Self-trade prevention mode.
    pub stp: StpMode,
}

/// Panics if `work` takes longer than [`testkit::PATIENCE`].
pub async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(testkit::PATIENCE, work)
        .await
        .unwrap_or_else(|_| panic!("not in time: {what}"))
}

/// Environment variable with the folder for the test `child` of a binary.
pub const CHILD_FOLDER: &str = "SETTLEMENT_TEST_FOLDER";

/// Runs this binary's test `child` on a folder until it is killed at a failpoint.
pub fn killed_at(place: &str, folder: &Path) {
    let mut child = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(CHILD_FOLDER, folder)
        .env("PLATFORM_CRASH_AT", place)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    // The child's own timeouts are shorter.
    let deadline = Instant::now() + 3 * testkit::PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{place} was not reached in time");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    // A failed test has an exit code, an aborted process has none.
    assert_eq!(status.code(), None, "{place} was not reached");
}

pub fn node() -> NodeId {
    NodeId::new(NODE).unwrap()
}

/// Small tables, because each test has several instances.
pub fn bounds() -> AdmissionConfig {
    AdmissionConfig {
        orders_max: 4_096,
        ..AdmissionConfig::default()
    }
}

pub fn spec(ix: u32, tick: &str, lot: &str, decimals: u8) -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        ix: InstrumentIx(ix),
        decimals,
        tick_size: tick.parse().unwrap(),
        lot_size: lot.parse().unwrap(),
        band_high: Ticks(1_000_000),
        ..InstrumentParams::new(InstrumentId::new(&format!("BOND-{ix}")).unwrap())
    })
    .unwrap()
}

/// The state after `records`, from the first record of a journal.
pub fn replayed(records: &[Record]) -> State {
    let mut state = State::new(node(), bounds());
    for record in records {
        let (command, events) = (record.command, record.events.clone());
        let applied = state.apply(&sequencer::Record { command, events });
        assert_eq!(applied.as_ref(), Ok(&record.applied));
    }
    state
}

impl Market {
    /// Creates users, instruments, and a trading hold per user for money and each instrument.
    pub fn new(seed: u64) -> Self {
        let mut market = Self {
            rng: SmallRng::seed_from_u64(seed),
            core: Core::new(bounds()),
            state: State::new(node(), bounds()),
            records: Vec::new(),
            time_ns: 1_700_000_000_000_000_000,
            step_ns: 200_000_000,
            funding_seq: 0,
            holds: 0,
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
            market.fund(UserIx(user), AssetIx::MONEY, FUNDED, HoldKind::Trading);
            for ix in 0..INSTRUMENTS {
                market.fund(
                    UserIx(user),
                    AssetIx::units(InstrumentIx(ix)),
                    FUNDED,
                    HoldKind::Trading,
                );
            }
        }
        market
    }

    pub fn admission(&self) -> &Admission {
        self.state.core().admission()
    }

    pub fn names(&self) -> &Arc<Names> {
        self.state.names()
    }

    /// Settlement's trading state at the journal's end.
    pub fn trading_state(&self) -> TradingState {
        TradingState::of(&self.state, self.names().clone())
    }

    /// Settlement's trading state before the first record.
    pub fn initial_state(&self) -> TradingState {
        TradingState::of(&State::new(node(), bounds()), self.names().clone())
    }

    pub fn position(&self) -> Sequence {
        self.state.sequence()
    }

    pub fn trades(&self) -> u64 {
        self.core.trades()
    }

    pub fn order_of(&self, handle: Handle) -> Order {
        self.state.order(handle).unwrap()
    }

    /// The trading hold of a user for an asset.
    pub fn trading_hold(user: UserIx, asset: AssetIx) -> HoldIx {
        HoldIx(user.0 * (INSTRUMENTS + 1) + asset.get())
    }

    pub fn fund(&mut self, user: UserIx, asset: AssetIx, amount: i64, kind: HoldKind) -> HoldIx {
        let hold = HoldIx(self.holds);
        self.holds += 1;
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

    /// Sequences, matches and applies a command.
    pub fn submit(&mut self, command: Command) -> &Record {
        self.time_ns += self.rng.random_range(1_000..self.step_ns);
        let command = Envelope {
            sequence: self.position().next(),
            time_ns: self.time_ns,
            received_ns: self.time_ns,
            command,
        };
        let events = self.core.apply(&command).to_vec();
        let record = sequencer::Record { command, events };
        let applied = self.state.apply(&record).unwrap();
        self.records.push(Record {
            command,
            events: record.events,
            applied,
        });
        self.records.last().unwrap()
    }

    /// Submits the command that admission makes of a request; `None` if admission refuses.
    fn admit(&mut self, request: &Request) -> Option<Command> {
        let command = self.admission().admit(request, self.time_ns).ok()?;
        self.submit(command);
        Some(command)
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
        let request = self.new_order(None, user, ix, side, price, quantity, tif);
        self.enter(&request)
    }

    /// Opens a session of the user and enters an order on it under a client order id.
    pub fn order_of_session(&mut self, session: u32, id: u64, user: u32, side: Side) -> TradeParty {
        let session = SessionIx(session);
        self.submit(Command::OpenSession(OpenSession {
            session,
            user: UserIx(user),
            stp_group: StpGroup::of_user(UserIx(user)),
            cancel_on_disconnect: false,
            key: Id128::from_u128(1 + u128::from(session.0)),
        }));
        let mut request = self.new_order(None, user, 0, side, 100, 5, TimeInForce::Gtc);
        if let Request::New(new) = &mut request {
            (new.session, new.client_seq, new.client_order_id) = (session, 1, id);
        }
        TradeParty {
            session,
            handle: self.enter(&request).expect("is covered"),
            client_order_id: id,
        }
    }

    fn enter(&mut self, request: &Request) -> Option<Handle> {
        match self.admit(request)? {
            Command::New(new) => Some(new.handle),
            other => panic!("{other:?}"),
        }
    }

    fn new_order(
        &self,
        trading_hold: Option<HoldIx>,
        user: u32,
        ix: u32,
        side: Side,
        price: i64,
        quantity: u64,
        tif: TimeInForce,
    ) -> Request {
        Request::New(NewRequest {
            instrument: InstrumentIx(ix),
            user: UserIx(user),
            session: SessionIx::NONE,
            client_seq: 0,
            client_order_id: 0,
            stp_group: None,
            stp: self.stp,
            side,
            order_type: OrderType::Limit,
            time_in_force: tif,
            post_only: false,
            expire_at_ns: 0,
            price: Some(Ticks(price)),
            quantity: Lots(quantity),
            hold: trading_hold,
            limit_checked: true,
            key_hash: Id128::NONE,
        })
    }

    pub fn cancel(&mut self, handle: Handle) {
        let order = self.order_of(handle);
        self.admit(&Request::Cancel(CancelRequest {
            order: OrderRef::Handle(handle),
            user: order.user,
            session: SessionIx::NONE,
            client_seq: 0,
            reason: CancelReason::UserRequest,
            key_hash: Id128::NONE,
        }))
        .unwrap();
    }

    /// Amends to a new price and open quantity; false if the growth is not covered.
    pub fn amend(&mut self, handle: Handle, price: i64, open: u64) -> bool {
        let order = self.order_of(handle);
        let request = Request::Amend(AmendRequest {
            order: OrderRef::Handle(handle),
            user: order.user,
            session: SessionIx::NONE,
            client_seq: 0,
            price: Some(Ticks(price)),
            quantity: Some(order.filled + Lots(open)),
            new_client_order_id: 0,
            limit_checked: true,
            key_hash: Id128::NONE,
        });
        self.admit(&request).is_some()
    }

    /// Submits one random command.
    pub fn random(&mut self) {
        let open: Vec<Handle> = self.state.orders().map(|o| o.handle).collect();
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
            let price = self.rng.random_range(90..=110);
            let open = self.rng.random_range(1..=80);
            self.amend(handle, price, open);
        } else if pick < 95 {
            let user = UserIx(self.rng.random_range(0..USERS));
            self.admit(&Request::MassCancel(MassCancelRequest {
                scope: MassScope::User(user),
                instrument: InstrumentIx::NONE,
                side: None,
                reason: CancelReason::MassCancel,
                user,
                session: SessionIx::NONE,
                client_seq: 0,
                key_hash: Id128::NONE,
            }))
            .unwrap();
        } else {
            self.order_with_own_hold();
        }
    }

    /// A gRPC order with a hold of its own, funded with the amount it draws.
    pub fn order_with_own_hold(&mut self) -> Option<Handle> {
        let user = self.rng.random_range(0..USERS);
        let price = self.rng.random_range(90..=110);
        let quantity = self.rng.random_range(1..=60);
        let order = |market: &Self, trading_hold| {
            market.new_order(
                trading_hold,
                user,
                0,
                Side::Buy,
                price,
                quantity,
                TimeInForce::Gtc,
            )
        };
        let sized = self.admission().admit(&order(self, None), self.time_ns);
        let Ok(Command::New(sized)) = sized else {
            return None;
        };
        let amount = sized.draw.total().0;
        let trading_hold = self.fund(UserIx(user), AssetIx::MONEY, amount, HoldKind::Order);
        self.enter(&order(self, Some(trading_hold)))
    }
}
