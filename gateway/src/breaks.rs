//! Users whose money differs between journal and ledger: they may not trade until it agrees (`design.md` 4). Settlement compares and says who.
//!
//! A user is blocked in the journal for one of two reasons, each told by somebody else: identity's word, and a difference. He goes on when neither holds.
//! Doing a thing twice changes nothing, so nothing is kept here: settlement repeats itself until it is told that it is done.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use admission::Request;
use rpc::Context;
use settlement::Suspension;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::consumers::{ask_or_known, bound, stop_trading};
use crate::market::Market;

/// How long to wait before what did not work is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// Does what settlement says until shutdown.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let mut told = market.settlement.suspensions();
    let mut done = BTreeMap::new();
    loop {
        let wanted = told.borrow_and_update().clone();
        done.retain(|user_id, _| wanted.contains_key(user_id));
        let mut is_late = false;
        for (user_id, suspension) in wanted {
            if done.get(&user_id) == Some(&suspension) {
                continue;
            }
            let acted = match suspension {
                Suspension::Differs => stop(&market, &user_id).await,
                Suspension::Agrees => let_go_on(&market, &user_id).await,
            };
            match acted {
                Ok(()) => {
                    done.insert(user_id, suspension);
                }
                Err(status) => {
                    tracing::warn!(%status, user_id, ?suspension, "will be tried again");
                    is_late = true;
                }
            }
        }
        tokio::select! {
            changed = told.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(RETRY), if is_late => {}
            () = shutdown.cancelled() => return,
        }
    }
}

async fn stop(market: &Market, user_id: &str) -> Result<(), Status> {
    if let Some(user) = bound(market, user_id) {
        stop_trading(market, user).await?;
        tracing::error!(
            user_id,
            severity = "critical",
            "user blocked, orders cancelled: journal and ledger differ"
        );
    }
    Ok(())
}

/// Lifts the block, unless identity has one of its own.
async fn let_go_on(market: &Market, user_id: &str) -> Result<(), Status> {
    if let Some(user) = bound(market, user_id) {
        market.identity.forget(user_id);
        let context = Context::new("market");
        if !market.identity.profile(&context, user_id).await?.is_blocked {
            ask_or_known(market, Request::UnblockUser(user)).await?;
        }
        tracing::info!(user_id, "journal and ledger agree again");
    }
    market
        .settlement
        .lifted(user_id)
        .await
        .map_err(|error| rpc::status::internal(&error))
}
