//! RPC errors for refusals of the trading path (D23): texts, reasons and metadata.

use std::collections::HashMap;

use admission::{Reject, RejectDetails};
use sequencer::SubmitError;
use tonic::{Code, Status};
use types::instrument::MONEY_DECIMALS;
use types::{Decimal, RejectReason};

/// Suggested delay before a retry, in milliseconds.
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

/// The sweeper has closed the hold of this idempotency key. The call must not proceed.
pub fn request_expired() -> Status {
    rpc::status::failed_precondition(
        "REQUEST_EXPIRED",
        "The request has expired; send it again under a new idempotency key",
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
    let metadata = [
        ("required", short.required),
        ("balance", short.balance),
        ("held", short.held),
        ("unsettled", short.unsettled),
        ("available", short.available),
        ("undrawn", short.undrawn),
        ("drawn", short.drawn),
    ];
    let metadata: HashMap<String, String> = metadata
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

/// Refuses an empty id with INVALID_ARGUMENT.
pub fn check_not_empty(field: &str, id: &str) -> Result<(), Status> {
    match id.is_empty() {
        true => Err(rpc::status::invalid_argument(field, "is required")),
        false => Ok(()),
    }
}

/// A request that the trading path did not journal.
pub fn submit_error(error: &SubmitError) -> Status {
    match error {
        SubmitError::Busy => rpc::status::resource_exhausted("BUSY", "Market is busy", RETRY_MS),
        SubmitError::Stopping | SubmitError::JournalFailed => {
            rpc::status::unavailable("Market", 5 * RETRY_MS)
        }
        SubmitError::Refused(reject) => refused(reject),
    }
}

/// The replica lags the last assigned sequence by `records`. Its state could be older than what
/// earlier answers reported.
pub fn replica_behind(records: u64) -> Status {
    let lag = HashMap::from([("lagRecords".to_owned(), records.to_string())]);
    let text = "Market state is behind the journal, retry later";
    rpc::status::with_metadata(Code::Unavailable, "REPLICA_BEHIND", text, lag)
}

/// Another call is still reading the user's limit from identity.
pub fn limit_read_in_progress() -> Status {
    rpc::status::unavailable("Limit of the user", RETRY_MS)
}

/// New orders are refused: a follower of the journal lags or has ended, or a disk is nearly full.
fn intake_closed(reason: RejectReason) -> Status {
    let text = match reason {
        RejectReason::SettlementBacklog => "Settlement is too far behind",
        RejectReason::DiskLow => "A disk of the platform is nearly full",
        RejectReason::ReplicaEnded => {
            let text = "Market takes no orders until its next start";
            let metadata = HashMap::new();
            return rpc::status::with_metadata(Code::Unavailable, reason.as_str(), text, metadata);
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

/// ConfirmClock while the clock is not suspect.
pub fn clock_not_suspect() -> Status {
    let text = "The clock is not suspect: there is nothing to confirm";
    rpc::status::failed_precondition("CLOCK_NOT_SUSPECT", text)
}

/// ConfirmClock with an offset that is not the clock's.
pub fn clock_offset_differs(offset_s: i64) -> Status {
    let text = format!("The machine's clock is off by {offset_s} s: confirm that figure");
    rpc::status::failed_precondition("CLOCK_OFFSET", text)
}

/// The history's file did not respond within `read_wait_ms`. A repeat of the call is safe.
pub fn store_busy() -> Status {
    rpc::status::unavailable("Market store", 5 * RETRY_MS)
}

/// The history lacks `lag` durable records.
pub fn history_behind(lag: u64) -> Status {
    let metadata = HashMap::from([("lagRecords".to_owned(), lag.to_string())]);
    let text = "History is behind the journal, retry later";
    rpc::status::with_metadata(Code::Unavailable, "HISTORY_BEHIND", text, metadata)
}

/// The user is at the limit of open orders. Waiting does not help.
fn order_limit(reject: &Reject) -> Status {
    let text = match reject.reason {
        RejectReason::UserOrderLimit => "Too many open orders of the user",
        _ => "Too many open orders of the user on the instrument",
    };
    let mut metadata = HashMap::new();
    if let RejectDetails::MaxCount(limit) = reject.details {
        metadata.insert("limit".to_owned(), limit.to_string());
    }
    rpc::status::with_metadata(
        Code::ResourceExhausted,
        reject.reason.as_str(),
        text,
        metadata,
    )
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
    let metadata = HashMap::from([("limit".to_owned(), limit)]);
    rpc::status::with_metadata(
        Code::FailedPrecondition,
        reject.reason.as_str(),
        text,
        metadata,
    )
}

/// The member has exhausted a quota that refills with time.
fn quota_exhausted(reject: &Reject) -> Status {
    let text = match reject.reason {
        RejectReason::JournalQuota => "The user's share of the journal is used up",
        _ => "Too many order messages for the user's trades",
    };
    let retry_ms = reject.limit().div_ceil(1_000);
    rpc::status::resource_exhausted(reject.reason.as_str(), text, retry_ms)
}

/// `Insufficient balance` with amounts in roubles. Callers that know the asset call
/// [`insufficient_balance`].
fn insufficient_money(details: RejectDetails) -> Status {
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
        RejectReason::InsufficientBalance => insufficient_money(reject.details),
        RejectReason::NoTradingHold => failed("No trading hold"),
        RejectReason::UnknownOrder => order_not_found(),
        RejectReason::OrderNotOpen => order_not_open(),
        RejectReason::NotOwner => {
            rpc::status::permission_denied("FOREIGN_USER", "Caller may act only on its own user id")
        }
        RejectReason::Throttle => {
            rpc::status::resource_exhausted("THROTTLE", "Too many requests", RETRY_MS)
        }
        RejectReason::JournalQuota | RejectReason::OrderToTrade => quota_exhausted(reject),
        RejectReason::Busy => rpc::status::resource_exhausted("BUSY", "Market is busy", RETRY_MS),
        RejectReason::SettlementBacklog
        | RejectReason::SessionsBacklog
        | RejectReason::CheckpointBacklog
        | RejectReason::DiskLow
        | RejectReason::ReplicaEnded => intake_closed(reject.reason),
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
            "cannot be combined with the order type, post_only or expires_at",
        ),
        RejectReason::Expired => bad("order.expires_at", "must be in the future"),
        RejectReason::InvalidAmend => bad(
            "quantity",
            "must exceed the filled quantity; an amend must change a limit order",
        ),
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
