//! Journal records of trades, made by admission and order book as on the hot thread.
//!
//! Members with an even number rest orders on both sides, those with an odd number take them, so
//! both parties of a trade differ and positions stay balanced. A maker has 1 to 10 lots, a taker 1
//! to 5. Times are those of the wall clock.

use admission::{AdmissionConfig, FundRequest, NewRequest, Request};
use sequencer::{Core, Record};
use types::{
    AssetIx, Command, Envelope, Event, HoldKind, Id128, InstrumentIx, Lots, Minor, Side, Ticks,
    TimeInForce, UserId, UserIx,
};

use crate::load::Random;

/// The traded instrument: whole units, ticks of one kopeck.
pub const INSTRUMENT: &str = "SETTLE";
/// Kopecks in each member's trading hold.
pub const MONEY: i64 = 10_000_000_000_000;
/// Units in each member's trading hold.
pub const UNITS: i64 = 1_000_000_000;

/// Prices of resting bids and offers: 999.90 and 1000.10.
const BID: Ticks = Ticks(99_990);
const OFFER: Ticks = Ticks(100_010);
const MAKER_LOTS: u64 = 10;
const TAKER_LOTS: u64 = 5;
/// Resting lots per side below which a maker enters an order. A taker is always filled.
const RESTING_LOTS: u64 = 20;

const _: () = assert!(TAKER_LOTS <= RESTING_LOTS);

/// Limits of all cores of the benchmark: the book has a few dozen orders.
pub fn limits() -> AdmissionConfig {
    AdmissionConfig {
        orders_max: 65_536,
        ..AdmissionConfig::default()
    }
}

/// User id of a member.
pub fn member(number: u32) -> String {
    format!("member-{number}")
}

/// Ledger hold of a member's money or units.
pub fn hold_id(number: u32, is_money: bool) -> Id128 {
    Id128::from_u128((0xbe9c_u128 << 64) | u128::from(number * 2 + u32::from(is_money)))
}

/// Makes the records.
pub struct Flow {
    core: Core,
    users: Vec<UserIx>,
    random: Random,
    /// Resting lots: bids, offers.
    resting: [u64; 2],
    trades: u64,
    time_ns: u64,
}

impl Flow {
    /// Also returns the records of instrument, users and trading holds. `members` is even.
    pub fn new(members: u32, seed: u64) -> (Self, Vec<Record>) {
        assert!(
            members >= 2 && members.is_multiple_of(2),
            "pairs of members"
        );
        let mut flow = Self {
            core: Core::new(limits()),
            users: Vec::new(),
            random: Random::new(seed),
            resting: [0, 0],
            trades: 0,
            time_ns: 0,
        };
        let instrument = crate::instrument(InstrumentIx::NONE, INSTRUMENT);
        let mut setup = vec![flow.execute(&Request::SetInstrument(instrument))];
        for number in 0..members {
            let id = UserId::new(&member(number)).expect("an id");
            let bound = flow.execute(&Request::BindUser(id));
            let Command::BindUser(bind) = &bound.command.command else {
                unreachable!("a BindUser request is journalled as BindUser")
            };
            let user = bind.user;
            flow.users.push(user);
            setup.push(bound);
            let units = AssetIx::units(InstrumentIx(0));
            for (asset, amount) in [(AssetIx::MONEY, MONEY), (units, UNITS)] {
                setup.push(flow.execute(&Request::Fund(FundRequest {
                    hold_id: hold_id(number, asset.is_money()),
                    kind: HoldKind::Trading,
                    user,
                    asset,
                    amount_minor: Minor(amount),
                    funding_seq: 1,
                    key_hash: Id128::NONE,
                })));
            }
        }
        (flow, setup)
    }

    /// Trades of all records so far.
    pub fn trades(&self) -> u64 {
        self.trades
    }

    /// Records until there are `trades` more trades, or up to four beyond.
    pub fn take(&mut self, trades: u64) -> Vec<Record> {
        let end = self.trades + trades;
        let mut records = Vec::new();
        while self.trades < end {
            records.push(self.record());
        }
        records
    }

    fn record(&mut self) -> Record {
        let is_buyer = self.random.below(2) == 0;
        // A buyer takes offers.
        let opposite = usize::from(is_buyer);
        if self.resting[opposite] < RESTING_LOTS {
            let lots = 1 + self.random.below(MAKER_LOTS);
            self.resting[opposite] += lots;
            let user = self.member_of(0);
            return self.order(user, !is_buyer, lots, TimeInForce::Gtc);
        }
        let lots = 1 + self.random.below(TAKER_LOTS);
        self.resting[opposite] -= lots;
        let user = self.member_of(1);
        self.order(user, is_buyer, lots, TimeInForce::Ioc)
    }

    /// A random maker (`parity` 0) or taker (1).
    fn member_of(&mut self, parity: usize) -> UserIx {
        let pairs = self.users.len() as u64 / 2;
        self.users[2 * self.random.below(pairs) as usize + parity]
    }

    fn order(&mut self, user: UserIx, is_buy: bool, lots: u64, tif: TimeInForce) -> Record {
        // A maker's price is that of its own side, a taker's that of the other one.
        let is_maker = tif == TimeInForce::Gtc;
        let price = if is_buy == is_maker { BID } else { OFFER };
        let side = if is_buy { Side::Buy } else { Side::Sell };
        let record = self.execute(&Request::New(NewRequest {
            time_in_force: tif,
            limit_checked: true,
            ..NewRequest::limit(InstrumentIx(0), user, side, price, Lots(lots))
        }));
        let events = record.events.iter();
        let trades = events.filter(|event| matches!(event.event, Event::Trade(_)));
        self.trades += trades.count() as u64;
        record
    }

    fn execute(&mut self, request: &Request) -> Record {
        // Two records of one nanosecond would have ids of one time.
        self.time_ns = service_kit::clock::now_ns().max(self.time_ns + 1);
        let admitted = self.core.admission().admit(request, self.time_ns);
        let command = Envelope {
            sequence: self.core.sequence().next(),
            time_ns: self.time_ns,
            received_ns: self.time_ns,
            command: admitted.unwrap_or_else(|reject| panic!("{request:?}: {reject:?}")),
        };
        let events = self.core.apply(&command).to_vec();
        Record { command, events }
    }
}
