//! Executes `SetTradingHold`.

use std::sync::Arc;

use rpc::Context;
use types::{Id128, InstrumentIx, Minor, RejectReason};
use wire::{SetTradingHold, TradingHold};

use crate::funding;
use crate::market::{Asset, Market};

/// Answer to a `SetTradingHold` that is refused at once, with the limit value of the reason.
pub fn refused(wanted: &SetTradingHold, reason: RejectReason, limit: u64) -> TradingHold {
    TradingHold {
        outcome: reason.code(),
        limit,
        ..unchanged(wanted)
    }
}

/// An answer without amounts.
fn unchanged(wanted: &SetTradingHold) -> TradingHold {
    TradingHold {
        request_id: wanted.request_id,
        asset: wanted.asset,
        hold_id: Id128::NONE,
        undrawn_minor: 0,
        drawn_minor: 0,
        outcome: wire::REQUEST_DONE,
        limit: 0,
    }
}

/// Sets the undrawn amount and returns the result.
pub async fn answer(market: &Arc<Market>, user_id: &str, wanted: SetTradingHold) -> TradingHold {
    let mut answer = unchanged(&wanted);
    let asset = match wanted.asset {
        0 => Some(Asset::MONEY),
        n => market.spec(InstrumentIx(n - 1)).map(Asset::units),
    };
    let Some(asset) = asset else {
        answer.outcome = RejectReason::UnknownInstrument.code();
        return answer;
    };
    if wanted.undrawn_minor < 0 {
        answer.outcome = RejectReason::Malformed.code();
        return answer;
    }
    let mut context = Context::new("market");
    context.user_id = user_id.to_owned();
    let target = Minor(wanted.undrawn_minor);
    let minor = |value: types::Decimal| value.to_minor(asset.decimals()).unwrap_or(i64::MAX);
    match funding::open_or_set(market, &context, user_id, &asset, target).await {
        Ok(view) => {
            answer.hold_id = view.hold_id;
            answer.undrawn_minor = minor(view.undrawn);
            answer.drawn_minor = minor(view.drawn);
        }
        Err(status) => {
            tracing::info!(user_id, %status, "trading hold refused");
            answer.outcome = hold_refusal(&status).code();
        }
    }
    answer
}

fn hold_refusal(status: &tonic::Status) -> RejectReason {
    match rpc::status::reason(status).as_deref() {
        Some("INSUFFICIENT_BALANCE") => RejectReason::InsufficientBalance,
        Some("HOLD_IN_USE") => RejectReason::HoldInUse,
        Some("LIMIT_EXCEEDED") => RejectReason::LimitExceeded,
        Some("HOLD_NOT_FOUND" | "SUB_ACCOUNT_NOT_FOUND") => RejectReason::UnknownHold,
        Some("INVALID_ARGUMENT") => RejectReason::Malformed,
        Some("INSTRUMENT_MATURED") => RejectReason::InstrumentMatured,
        _ => RejectReason::NotReady,
    }
}
