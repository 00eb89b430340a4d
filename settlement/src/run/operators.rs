//! What operators read of settlement, and what they may do: end the pauses of waiting steps, bust a
//! trade that stops the queue before the ledger or the chain, and close the case of a bust trade.
//!
//! A trade is bust by an operator only if the ledger, or the chain service, has refused its batch
//! repeatedly and does not have it. The worker that owns the batch checks this once more before the
//! trade leaves the batch, so a trade is never both bust and posted for good or on chain.
//!
//! Each act has an audit record in its transaction (D34).

use std::sync::Arc;

use events::audit::{RecordFilter, RecordRow};
use events::calls::CallKey;
use replica::Replica;
use rpc::{Caller, Context};
use service_clients::caused_by;
use service_kit::audit::Act;
use types::{Id128, Sequence, derived};

use super::failure::{self, WaitingStep};
use super::{SharedState, now_us};
use crate::progress::Stats;
use crate::repo::{BreakFilter, BreakRow, Case, Closed, RequestedBust, StoreError, Stored};
use crate::request::SOURCE;
use crate::saga::State;

/// Maximum waiting steps per answer.
const WAITING_MAX: usize = 100;

/// State of settlement for operators.
#[derive(Clone, Debug)]
pub struct Status {
    /// Last durable record of the journal.
    pub journal: Sequence,
    pub stats: Stats,
    pub oldest_batch_at_us: Option<i64>,
    pub breaks_open: usize,
    pub oldest_break_at_us: Option<i64>,
    pub cases_open: u64,
    pub waiting: Vec<WaitingStep>,
}

/// A batch that is not final.
#[derive(Clone, Debug)]
pub struct OpenBatch {
    /// Position in the list.
    pub number: i64,
    pub batch_id: String,
    pub state: State,
    pub attempt: u32,
    /// Trades that are neither final nor bust.
    pub trades: Vec<Id128>,
    pub sealed_at_us: i64,
    pub changed_at_us: i64,
}

/// The caller of an act and its request.
#[derive(Clone, Copy)]
pub struct By<'a> {
    pub caller: &'a Caller,
    pub context: &'a Context,
    /// Fingerprint of the request's content.
    pub digest: i64,
}

impl<'a> By<'a> {
    fn act(&self, action: &'a str, object_id: &'a str) -> Act<'a> {
        rpc::audit::act(self.caller, self.context, action, object_id)
    }

    fn actor(&self) -> &'a str {
        &self.caller.subject
    }
}

/// Object of a retry of all steps in audit records.
const ALL_STEPS: &str = "settlement";
/// RetrySettlement, as the scope of its idempotency keys.
const RETRY: &str = "RetrySettlement";

/// Why a trade is not bust.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BustRefusal {
    /// It is not in the batch that is next to be posted or to be submitted to the chain.
    NotWaiting,
    /// Its batch has not been refused repeatedly.
    NotStuck,
    /// The chain service has its batch, and may have sent it.
    Submitted,
    /// The chain service does not tell whether it has its batch.
    Away,
}

/// The calls of operators.
#[derive(Clone)]
pub struct Operators {
    state: Arc<SharedState>,
    replica: Replica,
}

impl Operators {
    pub(super) fn new(state: Arc<SharedState>, replica: Replica) -> Self {
        Self { state, replica }
    }

    /// # Errors
    /// The store cannot be read, as for all calls.
    pub async fn status(&self) -> Result<Status, StoreError> {
        let state = &self.state;
        let breaks = state.repo.breaks().await?;
        Ok(Status {
            journal: self.replica.durable(),
            stats: state.tracker.stats(state.failures.stuck()),
            oldest_batch_at_us: state.repo.oldest_open_at().await?,
            breaks_open: breaks.len(),
            oldest_break_at_us: breaks.first().map(|oldest| oldest.found_at_us),
            cases_open: state.repo.open_cases().await?,
            waiting: state.failures.waiting(WAITING_MAX),
        })
    }

    /// Batches with a number below `before`, newest first.
    ///
    /// # Errors
    /// As [`Self::status`].
    pub async fn batches(&self, before: i64, limit: i64) -> Result<Vec<OpenBatch>, StoreError> {
        let rows = self.state.repo.list_open_batches(before, limit).await?;
        let rows = rows.into_iter();
        let batch = |(row, sealed_at_us, changed_at_us): (Stored, i64, i64)| {
            let trades = row.trade_ids();
            let saga = &row.saga;
            // Bust trades include the withdrawn ones.
            let ended = match saga.bust.is_empty() {
                true => &saga.withdrawn,
                false => &saga.bust,
            };
            let open = saga.undecided().chain(ended);
            let id = |index: &u32| trades.get(*index as usize).copied();
            OpenBatch {
                number: row.number,
                trades: open.filter_map(id).collect(),
                batch_id: row.batch_id,
                state: row.saga.state,
                attempt: row.saga.attempt,
                sealed_at_us,
                changed_at_us,
            }
        };
        Ok(rows.map(batch).collect())
    }

    /// Differences, newest first, strictly after the bound.
    ///
    /// # Errors
    /// As [`Self::status`].
    pub async fn breaks(
        &self,
        filter: &BreakFilter<'_>,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<BreakRow>, StoreError> {
        self.state.repo.list_breaks(filter, bound, limit).await
    }

    /// Cases of bust trades, newest first, strictly after the bound.
    ///
    /// # Errors
    /// As [`Self::status`].
    pub async fn cases(
        &self,
        is_open: Option<bool>,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<Case>, StoreError> {
        self.state.repo.list_cases(is_open, bound, limit).await
    }

    /// Closes the case of a trade. Returns it, and whether an earlier call had closed it; `None`:
    /// the trade has no case.
    ///
    /// # Errors
    /// As [`Self::status`]; also, the store cannot be written.
    pub async fn close_case(
        &self,
        trade_id: Id128,
        by: By<'_>,
        note: &str,
    ) -> Result<Option<(Case, bool)>, StoreError> {
        let closed = Closed {
            at_us: now_us(),
            by: by.actor().to_owned(),
            note: note.to_owned(),
            digest: by.digest,
        };
        let id = trade_id.to_string();
        let act = Act {
            before: "OPEN",
            after: "CLOSED",
            reason: note,
            ..by.act("case.closed", &id)
        };
        let found = self.state.repo.close_case(trade_id, &closed, act).await?;
        if let Some((_, true)) = &found {
            let actor = by.actor();
            tracing::info!(%trade_id, actor, note, "case of a bust trade closed");
        }
        Ok(found.map(|(case, is_closed_now)| (case, !is_closed_now)))
    }

    /// Ends the pauses of the waiting steps of `id`, which may be a trade of the step's batch, or
    /// compares open differences at once if it is the hold of one. An empty id: all steps and the
    /// differences. Returns the steps, with the digest of the earlier call for a repeat, which ends
    /// the pauses again and has no record. `None`: no step and no open difference has this id.
    ///
    /// # Errors
    /// As [`Self::status`]; also, the store cannot be written.
    pub async fn retry(
        &self,
        id: &str,
        by: By<'_>,
    ) -> Result<Option<(Vec<WaitingStep>, Option<i64>)>, StoreError> {
        let state = &self.state;
        let key = CallKey {
            call: RETRY,
            subject: by.actor().to_owned(),
            key: by.context.idempotency_key.clone(),
        };
        let mut earlier = state.repo.earlier_call(&key).await?;
        let is_difference = id.is_empty() || {
            let breaks = state.repo.breaks().await?;
            breaks.iter().any(|open| open.hold_id == id)
        };
        let is_known = is_difference || state.failures.is_waiting(id);
        let of_trade = match is_known {
            true => None,
            false => self.step_of_trade(id).await?,
        };
        if earlier.is_none() && !is_known && of_trade.is_none() {
            return Ok(None);
        }
        let step_id = of_trade.as_deref().unwrap_or(id);
        let mut waiting = state.failures.waiting(usize::MAX);
        waiting.retain(|step| step_id.is_empty() || step.id == step_id);
        waiting.truncate(WAITING_MAX);
        if earlier.is_none() {
            let object_id = match id {
                "" => ALL_STEPS,
                id => id,
            };
            let act = Act {
                after: "RETRIED",
                ..by.act("settlement.retried", object_id)
            };
            let recorded = state.repo.record_call(&key, by.digest, now_us(), act);
            earlier = recorded.await?;
        }
        state.failures.retry(step_id);
        if is_difference {
            state.compare.notify_one();
        }
        Ok(Some((waiting, earlier)))
    }

    /// Id of a waiting step whose batch has this trade in the current or a later attempt.
    async fn step_of_trade(&self, id: &str) -> Result<Option<String>, StoreError> {
        let Some(trade_id) = Id128::parse(id) else {
            return Ok(None);
        };
        for step in self.state.failures.waiting(WAITING_MAX) {
            // A later attempt on chain has the batch's id with a suffix (`derived::attempt_id`).
            let batch_id = step.id.split('/').next().unwrap_or_default();
            let row = self.state.repo.batch(batch_id).await?;
            if row.is_some_and(|row| has_trade(&row, row.saga.undecided(), trade_id)) {
                return Ok(Some(step.id));
            }
        }
        Ok(None)
    }

    /// Audit records with a sequence below `before`, newest first.
    ///
    /// # Errors
    /// As [`Self::status`].
    pub async fn audit_records(
        &self,
        filter: RecordFilter<'_>,
        before: i64,
        limit: i64,
    ) -> Result<Vec<RecordRow>, StoreError> {
        self.state.repo.audit_records(filter, before, limit).await
    }

    /// Stores the request to bust a trade, which the worker of its batch executes. Returns the
    /// batch; with the digest of the earlier call for a repeat.
    ///
    /// # Errors
    /// As [`Self::status`]; also, the store cannot be written.
    pub async fn bust(
        &self,
        trade_id: Id128,
        by: By<'_>,
        reason: &str,
    ) -> Result<Result<(String, Option<i64>), BustRefusal>, StoreError> {
        let state = &self.state;
        if let Some((batch_id, digest)) = state.repo.requested_bust(trade_id).await? {
            return Ok(Ok((batch_id, Some(digest))));
        }
        let Some(row) = self.waiting_batch(trade_id).await? else {
            return Ok(Err(BustRefusal::NotWaiting));
        };
        if let Some(refusal) = self.why_not_bust(&row).await {
            return Ok(Err(refusal));
        }
        let attempt = derived::attempt_id(&row.batch_id, row.saga.attempt);
        let request = RequestedBust {
            trade_id,
            batch_id: row.batch_id,
            actor: by.actor().to_owned(),
            reason: reason.to_owned(),
            digest: by.digest,
        };
        let (id, after) = (
            trade_id.to_string(),
            format!("BUST, batch {}", request.batch_id),
        );
        let act = Act {
            before: row.saga.state.as_str(),
            after: &after,
            reason,
            ..by.act("trade.bust", &id)
        };
        state.repo.request_bust(&request, now_us(), act).await?;
        tracing::warn!(
            %trade_id,
            batch = request.batch_id,
            actor = request.actor,
            reason,
            "an operator busts a trade before its batch is posted or submitted"
        );
        state.requested().insert(trade_id, reason.to_owned());
        state.failures.retry(&attempt);
        Ok(Ok((request.batch_id, None)))
    }

    /// The batch that is next to be posted, or to be submitted, if the current attempt has this
    /// trade.
    async fn waiting_batch(&self, trade_id: Id128) -> Result<Option<Stored>, StoreError> {
        for state in [State::Sealed, State::Posted] {
            let row = self.state.repo.first_in(state).await?;
            if let Some(row) = row.filter(|row| has_trade(row, row.saga.open.iter(), trade_id)) {
                return Ok(Some(row));
            }
        }
        Ok(None)
    }

    /// Why no trade may leave this batch, which is sealed or posted.
    async fn why_not_bust(&self, row: &Stored) -> Option<BustRefusal> {
        let state = &self.state;
        let attempt = derived::attempt_id(&row.batch_id, row.saga.attempt);
        let is_sealed = row.saga.state == State::Sealed;
        let part = if is_sealed {
            failure::LEDGER
        } else {
            failure::CHAIN
        };
        if !state.failures.is_stuck(part, &attempt) {
            return Some(BustRefusal::NotStuck);
        }
        if is_sealed {
            return None;
        }
        let context = caused_by(&format!("{SOURCE}:{attempt}"));
        match state.cfa.trade_batch(&context, &attempt, 0).await {
            Ok(_) => Some(BustRefusal::Submitted),
            Err(error) if error.is_not_found() => None,
            Err(error) => {
                tracing::warn!(%error, batch = attempt, "cannot ask for the batch of a bust trade");
                Some(BustRefusal::Away)
            }
        }
    }
}

/// Whether a trade is one of these of the batch.
fn has_trade<'a>(
    row: &Stored,
    mut indices: impl Iterator<Item = &'a u32>,
    trade_id: Id128,
) -> bool {
    let trades = row.trade_ids();
    indices.any(|index| trades.get(*index as usize) == Some(&trade_id))
}
