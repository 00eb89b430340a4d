//! The journal folded into what settlement must know: users, instruments, pools of blocked money, open orders and what they reserve.
//!
//! The same arithmetic as admission: `types::reserve` for what an order keeps, and a return is always before - after - spent. Invariant, per
//! pool at each sequence: `free + sum of reserves of its open orders` = money funded - money defunded - money spent on trades (`design.md` 4).
//!
//! The fold sees a command and its events together, so an event of an order that has already gone (an amend that lost the race against a fill)
//! names an unknown handle and moves nothing.

mod image;
mod step;

use types::{
    AssetIx, CFA_RUB, Done, FeeRate, Handle, HoldIx, Id128, InstrumentId, InstrumentIx,
    InstrumentSpec, Lots, Minor, NodeId, PoolKind, Reserve, Sequence, Side, Ticks, UserId, UserIx,
};

use crate::plan::{Amount, Ending};

pub use image::FoldImage;

/// The journal says something that cannot be: settlement stops in front of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("journal record {sequence} cannot be settled: {what}")]
pub struct FoldError {
    pub sequence: Sequence,
    pub what: String,
}

/// Money behind one trading hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct Pool {
    pub kind: PoolKind,
    pub user: UserIx,
    pub asset: AssetIx,
    /// The ledger hold.
    pub hold: Id128,
    /// What no order reserves.
    pub free: Minor,
    /// What open orders reserve, all of them together.
    pub reserved: Minor,
    pub orders: u32,
    pub funding_seq: u64,
    /// Nothing is behind it any more: closed by command, or a pool of size one whose order has gone. Later funding moves nothing.
    pub is_closed: bool,
}

impl Pool {
    /// What the ledger must still have in the trading hold and its children.
    pub fn total(&self) -> Minor {
        self.free + self.reserved
    }
}

/// An open order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct Order {
    pub id: Id128,
    pub handle: Handle,
    pub instrument: InstrumentIx,
    pub user: UserIx,
    pub pool: HoldIx,
    pub side: Side,
    pub price: Ticks,
    pub open: Lots,
    pub done: Done,
    pub fee_rate: FeeRate,
    pub reserve: Reserve,
    pub entered_ns: u64,
}

/// What an event did to an order's money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moved {
    /// The order after the event.
    pub order: Order,
    /// What it reserved just before.
    pub before: Reserve,
    /// What left the reserve for the trade.
    pub spent: Reserve,
    /// Set when the order has ended.
    pub ended: Option<Ending>,
}

impl Moved {
    /// Why what is not needed any more goes back.
    pub fn ending(&self) -> Ending {
        self.ended.unwrap_or(Ending::Less)
    }
}

/// A match with both orders' money.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Traded {
    pub trade: Id128,
    pub sequence: Sequence,
    pub trade_number: u64,
    pub executed_ns: u64,
    pub instrument: InstrumentIx,
    pub units: Minor,
    pub value: Minor,
    pub fee: Minor,
    pub buy: Moved,
    pub sell: Moved,
}

/// What a record meant for money, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Entered(Order),
    Moved(Moved),
    Traded(Traded),
    /// The one order of a pool of size one has ended: what is left of the hold becomes available.
    Emptied {
        pool: HoldIx,
        order: Id128,
        ending: Ending,
    },
}

/// The fold.
#[derive(Clone, Debug)]
pub struct Fold {
    node: NodeId,
    position: Sequence,
    users: Vec<UserId>,
    instruments: Vec<InstrumentSpec>,
    pools: Vec<Pool>,
    orders: Vec<Option<Order>>,
    trades: u64,
    money: InstrumentId,
}

impl Fold {
    pub fn new(node: NodeId) -> Self {
        Self {
            node,
            position: Sequence::ZERO,
            users: Vec::new(),
            instruments: Vec::new(),
            pools: Vec::new(),
            orders: Vec::new(),
            trades: 0,
            money: InstrumentId::new(CFA_RUB).expect("the name is within the alphabet"),
        }
    }

    /// Sequence of the last record folded.
    pub fn position(&self) -> Sequence {
        self.position
    }

    /// Trades folded so far.
    pub fn trades(&self) -> u64 {
        self.trades
    }

    pub fn pools(&self) -> impl Iterator<Item = (HoldIx, &Pool)> {
        (0u32..).map(HoldIx).zip(&self.pools)
    }

    pub fn pool(&self, ix: HoldIx) -> &Pool {
        &self.pools[ix.index()]
    }

    pub fn orders(&self) -> impl Iterator<Item = &Order> {
        self.orders.iter().flatten()
    }

    pub fn order(&self, handle: Handle) -> Option<&Order> {
        self.orders
            .get(handle.slot as usize)?
            .as_ref()
            .filter(|order| order.handle == handle)
    }

    pub fn user(&self, ix: UserIx) -> UserId {
        self.users[ix.index()]
    }

    /// How many users there are.
    pub fn users(&self) -> usize {
        self.users.len()
    }

    pub fn instrument(&self, ix: InstrumentIx) -> &InstrumentSpec {
        &self.instruments[ix.index()]
    }

    /// Decimals of money and of every instrument.
    pub fn scales(&self) -> impl Iterator<Item = (InstrumentId, u8)> + '_ {
        let money = (self.money, types::instrument::MONEY_DECIMALS);
        std::iter::once(money).chain(self.instruments.iter().map(|spec| (spec.id, spec.decimals)))
    }

    /// An amount of a pool's asset.
    pub fn amount(&self, asset: AssetIx, minor: Minor) -> Amount {
        match asset.instrument() {
            None => Amount {
                instrument: self.money,
                decimals: types::instrument::MONEY_DECIMALS,
                minor,
            },
            Some(ix) => Amount {
                instrument: self.instrument(ix).id,
                decimals: self.instrument(ix).decimals,
                minor,
            },
        }
    }

    fn pool_mut(&mut self, ix: HoldIx) -> Result<&mut Pool, String> {
        self.pools
            .get_mut(ix.index())
            .ok_or_else(|| format!("pool {ix} is unknown"))
    }
}
