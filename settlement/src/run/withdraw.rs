//! Posting to the ledger, and the trades that leave a batch because the ledger refuses them.
//!
//! A batch is one ledger transaction and moves the ledger's position, so one refused trade stops
//! all later ones. An operator may bust a trade of a batch that the ledger has refused repeatedly:
//! the batch is posted without it. What both members were to give for the trade becomes available
//! in the same transaction, as after the reversal of a posted trade.
//!
//! A refusal of a hold step remains one: the hold has less than the journal drew from it, which is
//! a difference to be repaired.

use std::sync::atomic::{AtomicBool, Ordering};

use rpc::Context;
use service_clients::CallError;
use service_clients::ledger::SealedBatch;

use super::poster::Poster;
use super::retry::{retry_call, retry_store};
use super::{Halt, failure, now_us};
use crate::failpoint;
use crate::repo::Stored;
use crate::request::SOURCE;
use crate::saga::StepResult;

/// Result of an attempt to post.
enum Posting {
    /// In the ledger. True: it was there already.
    Posted(bool),
    /// Operators want these trades bust.
    Withdraw(Vec<u32>),
}

impl Poster {
    /// Posts a batch until the ledger accepts it, without the trades that operators bust meanwhile.
    /// Returns true if the ledger had it already.
    pub(super) async fn post_or_withdraw(
        &self,
        row: &mut Stored,
        mut sealed: SealedBatch,
    ) -> Result<bool, Halt> {
        loop {
            sealed = match self.try_post(row, &sealed).await? {
                Posting::Posted(replayed) => {
                    let late = self.requested(row);
                    if !late.is_empty() {
                        tracing::warn!(
                            batch = row.batch_id,
                            trades = late.len(),
                            "the ledger accepts the batch: trades to be bust are posted"
                        );
                    }
                    return Ok(replayed);
                }
                Posting::Withdraw(trades) => withdraw(row, sealed, trades)?,
            };
            // The state and the request that matches it are one row.
            row.request = sealed.to_bytes();
            let (shared, row) = (&self.shared, &*row);
            retry_store(shared, &row.batch_id, || {
                shared.repo.advance(row, &[], &[], now_us())
            })
            .await?;
            failpoint::reach(failpoint::WITHDRAWN);
        }
    }

    /// Repeats the call until it succeeds or the batch is to be changed.
    async fn try_post(&self, row: &Stored, sealed: &SealedBatch) -> Result<Posting, Halt> {
        // The last answer was a refusal. After any other one, or before the first, an earlier call
        // of this batch may still be accepted.
        let (is_refused, context) = (AtomicBool::new(false), Context::new(SOURCE));
        let (this, is_refused, context) = (self, &is_refused, &context);
        retry_call(
            &self.shared,
            failure::LEDGER,
            &row.batch_id,
            || async move {
                if is_refused.load(Ordering::Relaxed) {
                    let requested = this.requested(row);
                    // Asked, because a refusal of the caller proves nothing about earlier calls.
                    if !requested.is_empty()
                        && !this.shared.ledger.has_sealed(context, sealed).await?
                    {
                        return Ok(Posting::Withdraw(requested));
                    }
                }
                let sent = this.shared.ledger.create_sealed_operations(sealed).await;
                let refused = matches!(sent, Err(CallError::Refused(_)));
                is_refused.store(refused, Ordering::Relaxed);
                sent.map(Posting::Posted)
            },
        )
        .await
    }

    /// Those of the batch's trades that an operator wants bust.
    fn requested(&self, row: &Stored) -> Vec<u32> {
        let requested = self.shared.requested();
        if requested.is_empty() {
            return Vec::new();
        }
        let trades = row.trade_ids();
        let is_requested = |index: &&u32| {
            let trade = trades.get(**index as usize);
            trade.is_some_and(|trade| requested.contains_key(trade))
        };
        row.saga.open.iter().filter(is_requested).copied().collect()
    }
}

/// Removes trades from a batch that the ledger does not have.
fn withdraw(
    row: &mut Stored,
    mut sealed: SealedBatch,
    trades: Vec<u32>,
) -> Result<SealedBatch, Halt> {
    let trade_ids = row.trade_ids();
    for index in &trades {
        let trade_id = trade_ids[*index as usize].to_string();
        sealed = sealed.without(&trade_id);
        tracing::warn!(
            batch = row.batch_id,
            trade_id,
            "trade leaves its batch before the ledger"
        );
    }
    let withdrawn = row.saga.handle_result(StepResult::Withdrawn { trades });
    withdrawn.map_err(|error| Halt::Saga(row.batch_id.clone(), error))?;
    Ok(sealed)
}
