//! Refusals of the trading path as RPC errors (D23): exact texts, reasons and metadata.

use std::collections::HashMap;

use admission::{Reject, RejectDetails};
use sequencer::SubmitError;
use tonic::{Code, Status};
use types::instrument::MONEY_DECIMALS;
use types::{Decimal, RejectReason};

/// Delay before a retry that an error suggests, in milliseconds.
const RETRY_MS: u64 = 200;

pub fn order_not_found() -> Status {
    rpc::status::not_found("ORDER_NOT_FOUND", "Order not found")
}

pub fn trade_not_found() -> Status {
    rpc::status::not_found("TRADE_NOT_FOUND", "Trade not found")
}

pub fn instrument_not_found() -> Status {
    rpc::status::not_found("INSTRUMENT_NOT_FOUND", "Instrument not found")
}

pub fn hold_not_found() -> Status {
    rpc::status::not_found("HOLD_NOT_FOUND", "Hold not found")
}

pub fn order_not_open() -> Status {
    rpc::status::failed_precondition("ORDER_NOT_OPEN", "Order is not open")
}

pub fn hold_in_use() -> Status {
    rpc::status::failed_precondition("HOLD_IN_USE", "Hold is in use")
}

/// The sweeper has released the key's hold: the call may no longer act.
pub fn request_expired() -> Status {
    rpc::status::failed_precondition(
        "REQUEST_EXPIRED",
        "The request was given up; send it again under a new idempotency key",
    )
}

/// Figures of `Insufficient balance`, in units of the asset.
#[derive(Clone, Copy, Debug, Default)]
pub struct Shortfall {
    pub required: Decimal,
    pub balance: Decimal,
    pub held: Decimal,
    pub unsettled: Decimal,
    pub available: Decimal,
    pub undrawn: Decimal,
    pub drawn: Decimal,
}

/// `Insufficient balance` with its breakdown (T05, `design.md` 4).
pub fn insufficient_balance(short: &Shortfall) -> Status {
    let facts = [
        ("required", short.required),
        ("balance", short.balance),
        ("held", short.held),
        ("unsettled", short.unsettled),
        ("available", short.available),
        ("undrawn", short.undrawn),
        ("drawn", short.drawn),
    ];
    let metadata: HashMap<String, String> = facts
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value.to_string()))
        .collect();
    rpc::status::with_metadata(
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
        metadata,
    )
}

/// An operational failure of the gateway or of a store: logged here, opaque to the caller.
pub fn internal(error: impl std::error::Error) -> Status {
    rpc::status::internal(&error)
}

/// Refuses an empty id; an unknown one is NOT_FOUND.
pub fn check_given(field: &str, id: &str) -> Result<(), Status> {
    match id.is_empty() {
        true => Err(rpc::status::invalid_argument(field, "is required")),
        false => Ok(()),
    }
}

/// A request that is not in the journal.
pub fn submit_error(error: &SubmitError) -> Status {
    match error {
        SubmitError::Busy => rpc::status::resource_exhausted("BUSY", "Market is busy", RETRY_MS),
        SubmitError::Stopping | SubmitError::JournalFailed => {
            rpc::status::unavailable("Market", 5 * RETRY_MS)
        }
        SubmitError::Refused(reject) => refused(reject),
    }
}

/// The replica lacks this many of the assigned records: its state would be older than what callers
/// were told.
pub fn replica_behind(records: u64) -> Status {
    let lag = HashMap::from([("lagRecords".to_owned(), records.to_string())]);
    let text = "Market state is behind the journal, retry later";
    rpc::status::with_metadata(Code::Unavailable, "REPLICA_BEHIND", text, lag)
}

/// Identity has not answered another call's question for the user's limit.
pub fn limit_not_read() -> Status {
    rpc::status::unavailable("Limit of the user", RETRY_MS)
}

/// New orders are refused: a follower of the journal lags or has ended, or a disk is nearly full.
fn behind(reason: RejectReason) -> Status {
    let text = match reason {
        RejectReason::SettlementBacklog => "Settlement is too far behind",
        RejectReason::DiskLow => "A disk of the platform is nearly full",
        RejectReason::ReplicaEnded => {
            let text = "Market takes no orders until its next start";
            let facts = HashMap::new();
            return rpc::status::with_metadata(Code::Unavailable, reason.as_str(), text, facts);
        }
        _ => "Market is too far behind its journal",
    };
    rpc::status::resource_exhausted(reason.as_str(), text, 5 * RETRY_MS)
}

/// New orders are refused until the clock is back or confirmed. A retry delay is unknown.
fn clock_unconfirmed() -> Status {
    let reason = RejectReason::ClockUnconfirmed.as_str();
    let text = "Market takes no orders until its clock is confirmed";
    rpc::status::with_metadata(Code::Unavailable, reason, text, HashMap::new())
}

/// ConfirmClock while the clock agrees with the machine's.
pub fn clock_not_suspect() -> Status {
    let text = "The clock is not suspect: there is nothing to confirm";
    rpc::status::failed_precondition("CLOCK_NOT_SUSPECT", text)
}

/// ConfirmClock with another offset than the clock has.
pub fn clock_offset(offset_s: i64) -> Status {
    let text = format!("The machine's clock is off by {offset_s} s: confirm that figure");
    rpc::status::failed_precondition("CLOCK_OFFSET", text)
}

/// The store did not write in time what the answer needs. A repeat is safe.
pub fn store_busy() -> Status {
    rpc::status::unavailable("Market store", 5 * RETRY_MS)
}

/// The history lacks `lag` durable records.
pub fn history_behind(lag: u64) -> Status {
    let facts = HashMap::from([("lagRecords".to_owned(), lag.to_string())]);
    let text = "History is behind the journal, retry later";
    rpc::status::with_metadata(Code::Unavailable, "HISTORY_BEHIND", text, facts)
}

/// The user is at the limit of open orders; waiting alone changes nothing.
fn order_limit(reject: &Reject) -> Status {
    let text = match reject.reason {
        RejectReason::UserOrderLimit => "Too many open orders of the user",
        _ => "Too many open orders of the user on the instrument",
    };
    let mut facts = HashMap::new();
    if let RejectDetails::MaxCount(limit) = reject.details {
        facts.insert("limit".to_owned(), limit.to_string());
    }
    rpc::status::with_metadata(Code::ResourceExhausted, reject.reason.as_str(), text, facts)
}

/// The order is too large. The value limit is in roubles.
fn size_limit(reject: &Reject) -> Status {
    let most = match reject.details {
        RejectDetails::Max(most) => most,
        _ => 0,
    };
    let (text, limit) = match reject.reason {
        RejectReason::OrderSizeLimit => ("Order has too many lots", most.to_string()),
        _ => {
            let value = i64::try_from(most).unwrap_or(i64::MAX);
            let roubles = Decimal::from_minor(value, MONEY_DECIMALS);
            ("Order value is too high", roubles.to_string())
        }
    };
    let facts = HashMap::from([("limit".to_owned(), limit)]);
    rpc::status::with_metadata(
        Code::FailedPrecondition,
        reject.reason.as_str(),
        text,
        facts,
    )
}

/// The member has used up a quota that refills with time.
fn used_up(reject: &Reject) -> Status {
    let text = match reject.reason {
        RejectReason::JournalQuota => "The user's share of the journal is used up",
        _ => "Too many order messages for the user's trades",
    };
    let retry_ms = reject.limit().div_ceil(1_000);
    rpc::status::resource_exhausted(reject.reason.as_str(), text, retry_ms)
}

/// `Insufficient balance` with figures in money; callers that know the asset build their own.
fn short_of(details: RejectDetails) -> Status {
    let mut short = Shortfall::default();
    if let RejectDetails::Balance { undrawn, main, fee } = details {
        short.undrawn = Decimal::from_minor(undrawn.0, MONEY_DECIMALS);
        short.required = Decimal::from_minor((main + fee).0, MONEY_DECIMALS);
    }
    insufficient_balance(&short)
}

/// A refusal of admission.
pub fn refused(reject: &Reject) -> Status {
    let failed = |text: &str| rpc::status::failed_precondition(reject.reason.as_str(), text);
    let bad = |field: &str, text: &str| rpc::status::invalid_argument(field, text);
    match reject.reason {
        RejectReason::InstrumentHalted
        | RejectReason::InstrumentClosed
        | RejectReason::InstrumentMatured
        | RejectReason::InstrumentPreOpen => failed("Instrument is not traded now"),
        RejectReason::UnknownInstrument => instrument_not_found(),
        RejectReason::PriceBand => failed("Price is outside the band"),
        RejectReason::PostOnly => failed("Order would trade at once"),
        RejectReason::PriceTick => bad("order.price", "must be a positive multiple of the tick"),
        RejectReason::QuantityLot => {
            bad("order.quantity", "must be a positive multiple of the lot")
        }
        RejectReason::InsufficientBalance => short_of(reject.details),
        RejectReason::NoTradingHold => failed("No trading hold"),
        RejectReason::UnknownOrder => order_not_found(),
        RejectReason::OrderNotOpen => order_not_open(),
        RejectReason::NotOwner => {
            rpc::status::permission_denied("FOREIGN_USER", "Caller may act only on its own user id")
        }
        RejectReason::Throttle => {
            rpc::status::resource_exhausted("THROTTLE", "Too many requests", RETRY_MS)
        }
        RejectReason::JournalQuota | RejectReason::OrderToTrade => used_up(reject),
        RejectReason::Busy => rpc::status::resource_exhausted("BUSY", "Market is busy", RETRY_MS),
        RejectReason::SettlementBacklog
        | RejectReason::SessionsBacklog
        | RejectReason::CheckpointBacklog
        | RejectReason::DiskLow
        | RejectReason::ReplicaEnded => behind(reject.reason),
        RejectReason::ClockUnconfirmed => clock_unconfirmed(),
        RejectReason::DuplicateClientOrderId => rpc::status::already_exists(
            "DUPLICATE_CLIENT_ORDER_ID",
            "Client order id is in use by an open order",
        ),
        RejectReason::AlreadySeen | RejectReason::DuplicateRequest => {
            rpc::status::already_exists("DUPLICATE_REQUEST", "Request was answered before")
        }
        RejectReason::UserBlocked => failed("User is blocked"),
        RejectReason::KillSwitch => failed("Kill switch is engaged"),
        RejectReason::LimitExceeded => failed("Limit exceeded"),
        RejectReason::SessionLimit => failed("User has the maximum number of sessions"),
        RejectReason::KycRequired => {
            rpc::status::failed_precondition("KYC_LEVEL_TOO_LOW", "KYC level too low for trading")
        }
        RejectReason::InvalidCombination => bad(
            "order.time_in_force",
            "does not go together with the order type, post_only or expires_at",
        ),
        RejectReason::Expired => bad("order.expires_at", "must lie in the future"),
        RejectReason::InvalidAmend => {
            bad("quantity", "must leave something open and change something")
        }
        RejectReason::TooManyOrders => {
            rpc::status::resource_exhausted("TOO_MANY_ORDERS", "Too many open orders", 5 * RETRY_MS)
        }
        RejectReason::UserOrderLimit | RejectReason::InstrumentOrderLimit => order_limit(reject),
        RejectReason::OrderSizeLimit | RejectReason::OrderValueLimit => size_limit(reject),
        RejectReason::AmountOverflow => bad("order.quantity", "times the price is too large"),
        RejectReason::UnknownHold => hold_not_found(),
        RejectReason::HoldInUse => hold_in_use(),
        RejectReason::UnknownSession
        | RejectReason::UnknownUser
        | RejectReason::NotReady
        | RejectReason::Malformed => rpc::status::internal(&std::io::Error::other(format!(
            "admission refused the gateway's own request: {reject}"
        ))),
    }
}
