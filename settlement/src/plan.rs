//! Ledger and chain contents of a batch, in settlement's types. `request` makes requests of them.
//!
//! A plan is one database transaction: hold steps and operations in journal order. No prefix of
//! that order overdraws a hold, because returns to a trading hold precede the next split out of it.

pub use types::Amount;
use types::command::Bust;
use types::{HoldIx, HoldPart, Id128, InstrumentId, OperationType, Sequence, UserId};

/// Reason of a return to the trading hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReturnReason {
    /// The open order needs less: price improvement, fee surplus, amend.
    LessNeeded,
    Filled,
    Cancelled(types::CancelReason),
    Rejected(types::RejectReason),
}

impl ReturnReason {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::LessNeeded => "LESS_NEEDED",
            Self::Filled => "FILLED",
            Self::Cancelled(reason) => reason.as_str(),
            Self::Rejected(reason) => reason.as_str(),
        }
    }
}

/// One change of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HoldMovement {
    /// Splits an order's hold out of its trading hold.
    Split {
        parent: Id128,
        hold: Id128,
        amount: Amount,
        order: Id128,
        part: HoldPart,
    },
    /// Grows an order's hold out of its parent.
    Grow { hold: Id128, amount: Amount },
    /// Returns part of an order's hold to its parent.
    Return {
        hold: Id128,
        amount: Amount,
        order: Id128,
        reason: ReturnReason,
    },
    /// Ends the hold of a single order: the rest becomes available.
    Release {
        hold: Id128,
        order: Id128,
        reason: ReturnReason,
    },
}

/// A movement and its position among the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Executed before the operation with this index.
    pub before_operation: u32,
    pub movement: HoldMovement,
}

/// Kind of a trade's operation (T01, T05).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    TradeBuy,
    TradeSell,
    Fee,
}

impl Kind {
    pub const ALL: [Self; 3] = [Self::TradeBuy, Self::TradeSell, Self::Fee];

    pub fn operation_id(self, trade: Id128) -> Id128 {
        let kind = match self {
            Self::TradeBuy => OperationType::TradeBuy,
            Self::TradeSell => OperationType::TradeSell,
            Self::Fee => OperationType::Fee,
        };
        types::child_uuid(trade, kind.as_str())
    }

    /// Idempotency key of the trade's operation of this kind.
    pub fn key(self, trade: Id128) -> String {
        match self {
            Self::TradeBuy => trade.to_string(),
            Self::TradeSell => format!("{trade}:sell"),
            Self::Fee => format!("{trade}:fee"),
        }
    }
}

/// The holds that pay for a trade: both main holds and the buyer's fee hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TradeHolds {
    pub buyer_main: Id128,
    /// `None` if no fee is charged.
    pub buyer_fee: Option<Id128>,
    pub seller_main: Id128,
}

/// One trade to settle. Its operations are a function of these fields alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TradeLeg {
    pub trade: Id128,
    pub sequence: Sequence,
    /// Dense per instrument, from 1.
    pub trade_number: u64,
    pub executed_ns: u64,
    pub instrument: InstrumentId,
    pub buyer: UserId,
    pub seller: UserId,
    /// Units delivered.
    pub units: Amount,
    /// CFA-RUB paid to the seller.
    pub value: Amount,
    /// CFA-RUB charged to the buyer on top.
    pub fee: Amount,
    pub holds: TradeHolds,
    /// The command to journal if the chain refuses the trade.
    pub bust: Bust,
}

impl TradeLeg {
    /// Ids of the trade's ledger operations.
    pub fn operations(&self) -> impl Iterator<Item = Id128> + '_ {
        Kind::ALL
            .into_iter()
            .filter(|kind| self.has_operation(*kind))
            .map(|kind| kind.operation_id(self.trade))
    }

    /// Whether the trade has an operation of this kind. A fee of 0.00 has none (`design.md` 4).
    pub fn has_operation(&self, kind: Kind) -> bool {
        kind != Kind::Fee || self.holds.buyer_fee.is_some()
    }
}

/// One operation of a plan: its kind and its trade.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    pub kind: Kind,
    /// Index into [`Plan::trades`].
    pub trade: u32,
}

/// Contents of one ledger transaction.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub steps: Vec<Step>,
    pub operations: Vec<Operation>,
    pub trades: Vec<TradeLeg>,
    /// Trading holds that the plan touches; may repeat.
    pub trading_holds: Vec<HoldIx>,
}

impl Plan {
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty() && self.operations.is_empty()
    }

    /// Size in rows: hold steps and operations.
    pub fn weight(&self) -> usize {
        self.steps.len() + self.operations.len()
    }

    /// Adds a movement after the operations so far.
    pub fn push(&mut self, trading_hold: HoldIx, movement: HoldMovement) {
        let before_operation = u32::try_from(self.operations.len()).expect("a batch is bounded");
        self.trading_holds.push(trading_hold);
        self.steps.push(Step {
            before_operation,
            movement,
        });
    }

    /// Adds a trade with its operations.
    pub fn add_trade(&mut self, leg: TradeLeg) {
        let trade = u32::try_from(self.trades.len()).expect("a batch is bounded");
        for kind in Kind::ALL {
            if leg.has_operation(kind) {
                self.operations.push(Operation { kind, trade });
            }
        }
        self.trades.push(leg);
    }
}
