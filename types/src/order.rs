//! Properties of an order (specification 1.3, decisions D13, D38, T19, T22).

use crate::code_enum;

code_enum! {
    /// Side of an order.
    #[derive(zerocopy::FromZeros)]
    Side {
        Buy = 0 "BUY",
        Sell = 1 "SELL",
    }
}

impl Side {
    /// The side an order of this side trades with.
    pub const fn opposite(self) -> Self {
        match self {
            Self::Buy => Self::Sell,
            Self::Sell => Self::Buy,
        }
    }

    /// 0 for buy, 1 for sell: index of two-element arrays.
    pub const fn index(self) -> usize {
        self as usize
    }
}

code_enum! {
    /// Order type. A market order has a protection price and never rests (T19).
    OrderType {
        Limit = 0 "LIMIT",
        Market = 1 "MARKET",
    }
}

code_enum! {
    /// Time in force.
    TimeInForce {
        /// Good till cancelled: the remainder rests.
        Gtc = 0 "GTC",
        /// Immediate or cancel: the remainder is cancelled (R171).
        Ioc = 1 "IOC",
        /// Fill or kill: filled completely at once, or no trade (R172).
        Fok = 2 "FOK",
        /// Good till date: does not trade from the journalled time `expire_at_ns` on. Its
        /// cancellation is due at the next full millisecond.
        Gtd = 3 "GTD",
    }
}

impl TimeInForce {
    /// True when a remainder may rest in the book.
    pub const fn rests(self) -> bool {
        match self {
            Self::Gtc | Self::Gtd => true,
            Self::Ioc | Self::Fok => false,
        }
    }
}

code_enum! {
    /// Effect when two orders of one self-trade group meet; the incoming one decides (D38).
    #[derive(zerocopy::FromZeros)]
    StpMode {
        /// The incoming order is cancelled (default, T43).
        CancelNewest = 0 "CANCEL_NEWEST",
        /// The resting order is cancelled, the incoming one continues.
        CancelOldest = 1 "CANCEL_OLDEST",
        /// Both are cancelled.
        CancelBoth = 2 "CANCEL_BOTH",
        /// Both shrink by the smaller open quantity, without a trade.
        Decrement = 3 "DECREMENT",
        /// Self-trades are allowed (only by explicit setting).
        None = 4 "NONE",
    }
}

code_enum! {
    /// State of an order (D13). Clients never see `New`: the same command leads to another state.
    OrderStatus {
        New = 0 "NEW",
        Open = 1 "OPEN",
        PartiallyFilled = 2 "PARTIALLY_FILLED",
        Filled = 3 "FILLED",
        Cancelled = 4 "CANCELLED",
        Rejected = 5 "REJECTED",
    }
}

impl OrderStatus {
    /// True when nothing more can happen to the order.
    pub const fn is_final(self) -> bool {
        matches!(self, Self::Filled | Self::Cancelled | Self::Rejected)
    }
}

code_enum! {
    /// Phase of an instrument's market.
    Phase {
        /// Resting orders may enter when they do not cross; nothing trades.
        PreOpen = 0 "PRE_OPEN",
        /// Continuous trading.
        Open = 1 "OPEN",
        /// Interrupted: cancels only.
        Halt = 2 "HALT",
        /// Outside the trading day: cancels only.
        Closed = 3 "CLOSED",
        /// The instrument has matured: every order is cancelled, none enters.
        Matured = 4 "MATURED",
    }
}

code_enum! {
    /// Cause of a phase change.
    PhaseCause {
        /// A command by an operator, the schedule or the instrument's registry.
        Command = 0 "COMMAND",
        /// A trade would have moved the price too far (F08).
        Velocity = 1 "VELOCITY",
    }
}

code_enum! {
    /// Purpose of a hold (T49).
    HoldKind {
        /// Trading hold of a (user, asset): the default of all its orders.
        Trading = 0 "TRADING",
        /// A hold for a single gRPC order.
        Order = 1 "ORDER",
    }
}
