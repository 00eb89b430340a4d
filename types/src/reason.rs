//! Reasons of cancels and rejects. Names are the ones a client receives (D14, D23).

use crate::code_enum;

code_enum! {
    /// Reason why open quantity was cancelled (D14).
    CancelReason {
        UserRequest = 0 "USER_REQUEST",
        IocRemainder = 1 "IOC_REMAINDER",
        FokNotFillable = 2 "FOK_NOT_FILLABLE",
        NoLiquidity = 3 "NO_LIQUIDITY",
        SelfTrade = 4 "SELF_TRADE",
        CancelOnDisconnect = 5 "CANCEL_ON_DISCONNECT",
        MassCancel = 6 "MASS_CANCEL",
        KillSwitch = 7 "KILL_SWITCH",
        UserBlocked = 8 "USER_BLOCKED",
        InstrumentHalted = 9 "INSTRUMENT_HALTED",
        InstrumentMatured = 10 "INSTRUMENT_MATURED",
        HoldExpired = 11 "HOLD_EXPIRED",
        HoldReleased = 12 "HOLD_RELEASED",
        Expired = 13 "EXPIRED",
        Operator = 14 "OPERATOR",
        CancelAllAfter = 15 "CANCEL_ALL_AFTER",
    }
}

code_enum! {
    /// Reason why gateway, admission or book rejected a request. A business outcome, not an error.
    RejectReason {
        /// Trading on the instrument is halted.
        InstrumentHalted = 0 "INSTRUMENT_HALTED",
        /// Instrument has matured.
        InstrumentMatured = 1 "INSTRUMENT_MATURED",
        /// The order would trade before the market opens.
        InstrumentPreOpen = 2 "INSTRUMENT_PRE_OPEN",
        /// The instrument is not known on this node.
        UnknownInstrument = 3 "UNKNOWN_INSTRUMENT",
        /// Price outside the band.
        PriceBand = 4 "PRICE_BAND",
        /// A post-only order would have traded.
        PostOnly = 5 "POST_ONLY",
        /// Price is not a positive multiple of the tick, or too high.
        PriceTick = 6 "PRICE_TICK",
        /// Quantity is not a positive multiple of the lot, or too large.
        QuantityLot = 7 "QUANTITY_LOT",
        /// The hold's undrawn money does not cover the draw.
        InsufficientBalance = 8 "INSUFFICIENT_BALANCE",
        /// The user has no trading hold for the asset.
        NoTradingHold = 9 "NO_TRADING_HOLD",
        /// No order has that id.
        UnknownOrder = 10 "UNKNOWN_ORDER",
        /// The order is already filled or cancelled.
        OrderNotOpen = 11 "ORDER_NOT_OPEN",
        /// The order belongs to another user.
        NotOwner = 12 "NOT_OWNER",
        /// Session sends faster than its throttle.
        Throttle = 13 "THROTTLE",
        /// A ring or queue is full: retry.
        Busy = 14 "BUSY",
        /// Settlement lags too far: new orders wait, cancels pass.
        SettlementBacklog = 15 "SETTLEMENT_BACKLOG",
        /// The client order id names an open order of this user.
        DuplicateClientOrderId = 16 "DUPLICATE_CLIENT_ORDER_ID",
        /// Client sequence number at or below the last one seen.
        AlreadySeen = 17 "ALREADY_SEEN",
        /// Session is not open.
        UnknownSession = 18 "UNKNOWN_SESSION",
        /// User is not bound on this node.
        UnknownUser = 19 "UNKNOWN_USER",
        /// User is blocked.
        UserBlocked = 20 "USER_BLOCKED",
        /// Trading limit of the day is used up.
        LimitExceeded = 21 "LIMIT_EXCEEDED",
        /// KYC does not allow trading.
        KycRequired = 22 "KYC_REQUIRED",
        /// Order type, time in force, post-only and expiry do not fit together.
        InvalidCombination = 23 "INVALID_COMBINATION",
        /// Good-till-date is in the past.
        Expired = 24 "EXPIRED",
        /// The amend leaves nothing open or changes nothing that it may change.
        InvalidAmend = 25 "INVALID_AMEND",
        /// The table of open orders is full.
        TooManyOrders = 26 "TOO_MANY_ORDERS",
        /// The amount exceeds 64-bit minor units.
        AmountOverflow = 27 "AMOUNT_OVERFLOW",
        /// The hold is unknown on this node or closed.
        UnknownHold = 28 "UNKNOWN_HOLD",
        /// The hold still backs open orders, its money is drawn, or the user has another trading
        /// hold for the asset.
        HoldInUse = 29 "HOLD_IN_USE",
        /// The platform is stopping or recovering.
        NotReady = 30 "NOT_READY",
        /// The call was answered before under the same idempotency key, or would change nothing.
        DuplicateRequest = 31 "DUPLICATE_REQUEST",
        /// The message cannot be read or breaks the protocol.
        Malformed = 32 "MALFORMED",
        /// The kill switch is engaged, for the user or for all users (F11).
        KillSwitch = 33 "KILL_SWITCH",
        /// Session messages lag too far: new orders wait, cancels pass.
        SessionsBacklog = 34 "SESSIONS_BACKLOG",
        /// The newest checkpoint is too old: new orders wait, cancels pass.
        CheckpointBacklog = 35 "CHECKPOINT_BACKLOG",
        /// The replica has ended: no new orders until the next start, cancels pass.
        ReplicaEnded = 36 "REPLICA_ENDED",
        /// The user has the maximum number of open orders.
        UserOrderLimit = 37 "USER_ORDER_LIMIT",
        /// The user has the maximum number of open orders on the instrument.
        InstrumentOrderLimit = 38 "INSTRUMENT_ORDER_LIMIT",
        /// The trading day of the instrument is over.
        InstrumentClosed = 39 "INSTRUMENT_CLOSED",
        /// More lots than this user's limit for one order.
        OrderSizeLimit = 40 "ORDER_SIZE_LIMIT",
        /// A higher value than this user's limit for one order.
        OrderValueLimit = 41 "ORDER_VALUE_LIMIT",
        /// The machine's clock has stepped and is not confirmed: new orders wait, cancels pass.
        ClockUnconfirmed = 42 "CLOCK_UNCONFIRMED",
        /// The user's requests have used up their journal quota for this minute.
        JournalQuota = 43 "JOURNAL_QUOTA",
        /// Too many order messages per trade of this user: new orders and amends are slowed down.
        OrderToTrade = 44 "ORDER_TO_TRADE",
        /// A disk of the platform is nearly full: new orders wait, cancels pass.
        DiskLow = 45 "DISK_LOW",
        /// The user has the maximum number of sessions.
        SessionLimit = 46 "SESSION_LIMIT",
    }
}
