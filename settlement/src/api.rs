//! `SettlementService`: status, batches and differences for operators, retry and bust.

use events::audit::{RecordFilter, RecordRow};
use proto::checks::{ID_BYTES_MAX, id_problem};
use proto::convert::{to_decimal, to_decimal_minor, to_timestamp_us};
use proto::settlement::v1 as pb;
use proto::settlement::v1::settlement_service_server::{
    SettlementService, SettlementServiceServer,
};
use rpc::page::{self, Key};
use rpc::status;
use service_kit::clock::now_us;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use types::Id128;

use crate::repo::{BreakFilter, BreakRow, Case, StoreError};
use crate::run::{BustRefusal, By, OpenBatch, Operators, WaitingStep};
use crate::saga::State;

/// Largest page of batches: each has up to 500 trades.
const BATCHES_MAX: i32 = 20;
/// Longest reason of a bust, which becomes part of the reason of the reversals, and longest note of
/// a case.
const REASON_BYTES_MAX: usize = 512;
/// Role that resolves a difference and closes a case.
const OWNER: &str = "operator";

struct Api {
    operators: Operators,
}

/// The service. It has no HTTP reads.
pub fn service(operators: Operators) -> rpc::Service {
    let api = Api { operators };
    rpc::Service {
        name: "settlement",
        routes: Routes::new(rpc::grpc_server!(SettlementServiceServer::new(api))),
        http: Default::default(),
        health: rpc::Health::new("settlement"),
    }
}

fn failed(error: StoreError) -> Status {
    match error {
        StoreError::Events(_) | StoreError::Sql(_) => {
            tracing::warn!(%error, "settlement's store cannot be used");
            status::unavailable("Settlement", 1_000)
        }
        damaged => status::internal(&damaged),
    }
}

#[tonic::async_trait]
impl SettlementService for Api {
    async fn get_settlement_status(
        &self,
        request: Request<pb::GetSettlementStatusRequest>,
    ) -> Result<Response<pb::GetSettlementStatusResponse>, Status> {
        rpc::context::record_read_context(request.into_inner().context);
        let found = self.operators.status().await.map_err(failed)?;
        let stats = found.stats;
        let lag = stats.settlement_lag_ms;
        Ok(Response::new(pb::GetSettlementStatusResponse {
            journal_sequence: found.journal.0,
            folded_sequence: stats.progress.folded.0,
            settled_sequence: stats.progress.settled.0,
            finalized_sequence: stats.progress.finalized.0,
            lag_records: found.journal.0.saturating_sub(stats.progress.folded.0),
            trades_pending: stats.trades_pending,
            trades_settled: stats.trades_settled,
            trades_bust: stats.trades_failed,
            batches_pending: stats.batches_pending,
            oldest_batch_at: found.oldest_batch_at_us.map(to_timestamp_us),
            lag_ms_p50: lag.p50,
            lag_ms_p99: lag.p99,
            lag_ms_max: lag.max,
            breaks_open: found.breaks_open as u64,
            oldest_break_at: found.oldest_break_at_us.map(to_timestamp_us),
            waiting: found.waiting.into_iter().map(waiting_step).collect(),
            cases_open: found.cases_open,
        }))
    }

    async fn list_cases(
        &self,
        request: Request<pb::ListCasesRequest>,
    ) -> Result<Response<pb::ListCasesResponse>, Status> {
        let request = request.into_inner();
        let is_open = match request.state() {
            pb::CaseState::Unspecified => None,
            pb::CaseState::Open => Some(true),
            pb::CaseState::Closed => Some(false),
        };
        let hash = page::filter_hash(&[&request.state.to_string()]);
        rpc::context::record_read_context(request.context);
        let page = page::parse(request.pagination, hash)?;
        let found = self
            .operators
            .cases(is_open, page.bound(), page.rows_limit());
        let mut found = found.await.map_err(failed)?;
        let pagination = page.finish(&mut found, |case| Key {
            created_us: case.opened_at_us,
            id: case.trade.trade_id.to_string(),
        });
        Ok(Response::new(pb::ListCasesResponse {
            cases: found.into_iter().map(case).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn close_case(
        &self,
        request: Request<pb::CloseCaseRequest>,
    ) -> Result<Response<pb::CloseCaseResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut request = request.into_inner();
        let context = rpc::context::write(request.context.take())?;
        let digest = rpc::context::digest(&request);
        let trade_id = trade_id(&request.trade_id)?;
        check_text("note", &request.note)?;
        let by = By {
            caller: &caller,
            context: &context,
            digest,
        };
        let closed = self.operators.close_case(trade_id, by, &request.note);
        let Some((found, is_repeat)) = closed.await.map_err(failed)? else {
            let text = "Trade has no case";
            return Err(status::not_found("CASE_NOT_FOUND", text));
        };
        let stored = found.closed.as_ref().map(|closed| closed.digest);
        if stored != Some(digest) {
            rpc::context::note_difference("CloseCase", &context.idempotency_key);
        }
        let answer = pb::CloseCaseResponse {
            case: Some(case(found)),
        };
        Ok(rpc::context::answered(answer, is_repeat))
    }

    async fn list_batches(
        &self,
        request: Request<pb::ListBatchesRequest>,
    ) -> Result<Response<pb::ListBatchesResponse>, Status> {
        let request = request.into_inner();
        rpc::context::record_read_context(request.context);
        let mut pagination = request.pagination.unwrap_or_default();
        pagination.page_size = match pagination.page_size {
            0 => BATCHES_MAX,
            size => size.min(BATCHES_MAX),
        };
        let page = page::parse(Some(pagination), page::filter_hash(&[]))?;
        let (before, _) = page.bound();
        let batches = self.operators.batches(before, page.rows_limit());
        let mut batches = batches.await.map_err(failed)?;
        let pagination = page.finish(&mut batches, |batch| Key {
            created_us: batch.number,
            id: batch.batch_id.clone(),
        });
        Ok(Response::new(pb::ListBatchesResponse {
            batches: batches.into_iter().map(batch).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn list_breaks(
        &self,
        request: Request<pb::ListBreaksRequest>,
    ) -> Result<Response<pb::ListBreaksResponse>, Status> {
        let request = request.into_inner();
        let is_open = match request.state() {
            pb::BreakState::Unspecified => None,
            pb::BreakState::Open => Some(true),
            pb::BreakState::Cleared => Some(false),
        };
        let hash = page::filter_hash(&[
            &request.instrument_id,
            &request.state.to_string(),
            &request.age_seconds_min.to_string(),
        ]);
        rpc::context::record_read_context(request.context);
        if let Some(problem) = id_problem(&request.instrument_id, ID_BYTES_MAX) {
            return Err(status::invalid_argument("instrument_id", problem));
        }
        let page = page::parse(request.pagination, hash)?;
        let now_us = now_us();
        let filter = BreakFilter {
            instrument_id: &request.instrument_id,
            is_open,
            found_until_us: now_us - i64::from(request.age_seconds_min) * 1_000_000,
        };
        let found = self
            .operators
            .breaks(&filter, page.bound(), page.rows_limit());
        let mut found = found.await.map_err(failed)?;
        let pagination = page.finish(&mut found, |row| Key {
            created_us: row.found_at_us,
            id: row.hold_id.clone(),
        });
        let breaks = found.into_iter().map(|row| difference(row, now_us));
        Ok(Response::new(pb::ListBreaksResponse {
            breaks: breaks.collect(),
            pagination: Some(pagination),
        }))
    }

    async fn retry_settlement(
        &self,
        request: Request<pb::RetrySettlementRequest>,
    ) -> Result<Response<pb::RetrySettlementResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut request = request.into_inner();
        let context = rpc::context::write(request.context.take())?;
        let digest = rpc::context::digest(&request);
        if let Some(problem) = id_problem(&request.id, ID_BYTES_MAX) {
            return Err(status::invalid_argument("id", problem));
        }
        let by = By {
            caller: &caller,
            context: &context,
            digest,
        };
        let waiting = self.operators.retry(&request.id, by).await;
        let Some((waiting, earlier)) = waiting.map_err(failed)? else {
            return Err(status::not_found(
                "STEP_NOT_FOUND",
                "No waiting step, open difference or trade of a waiting batch has this id",
            ));
        };
        tracing::info!(
            actor = caller.subject,
            id = request.id,
            "settlement retries"
        );
        if earlier.is_some_and(|earlier| earlier != digest) {
            rpc::context::note_difference("RetrySettlement", &context.idempotency_key);
        }
        let answer = pb::RetrySettlementResponse {
            waiting: waiting.into_iter().map(waiting_step).collect(),
        };
        Ok(rpc::context::answered(answer, earlier.is_some()))
    }

    async fn list_audit_records(
        &self,
        request: Request<pb::ListAuditRecordsRequest>,
    ) -> Result<Response<pb::ListAuditRecordsResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let page = page::parse(
            ask.pagination,
            page::filter_hash(&[&ask.actor, &ask.object_id]),
        )?;
        let (before, _) = page.bound();
        let filter = RecordFilter {
            actor: &ask.actor,
            object_id: &ask.object_id,
        };
        let rows = self
            .operators
            .audit_records(filter, before, page.rows_limit());
        let mut rows = rows.await.map_err(failed)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.sequence,
            id: String::new(),
        });
        let listed =
            |row: &RecordRow| rpc::audit::listed(&row.record(), &row.previous_hash, &row.hash);
        Ok(Response::new(pb::ListAuditRecordsResponse {
            records: rows.iter().map(listed).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn bust_trade(
        &self,
        request: Request<pb::BustTradeRequest>,
    ) -> Result<Response<pb::BustTradeResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut request = request.into_inner();
        let context = rpc::context::write(request.context.take())?;
        let digest = rpc::context::digest(&request);
        let trade_id = trade_id(&request.trade_id)?;
        check_text("reason", &request.reason)?;
        let by = By {
            caller: &caller,
            context: &context,
            digest,
        };
        let done = self.operators.bust(trade_id, by, &request.reason);
        let (batch_id, earlier) = done.await.map_err(failed)?.map_err(refused)?;
        if earlier.is_some_and(|earlier| earlier != digest) {
            rpc::context::note_difference("BustTrade", &context.idempotency_key);
        }
        let answer = pb::BustTradeResponse { batch_id };
        Ok(rpc::context::answered(answer, earlier.is_some()))
    }
}

fn trade_id(text: &str) -> Result<Id128, Status> {
    Id128::parse(text).ok_or_else(|| status::invalid_argument("trade_id", "must be a trade's id"))
}

fn check_text(field: &'static str, text: &str) -> Result<(), Status> {
    if text.trim().is_empty() || text.len() > REASON_BYTES_MAX {
        let problem = format!("must have 1 to {REASON_BYTES_MAX} bytes");
        return Err(status::invalid_argument(field, problem));
    }
    Ok(())
}

fn case(of: Case) -> pb::Case {
    let state = match of.closed {
        None => pb::CaseState::Open,
        Some(_) => pb::CaseState::Closed,
    };
    let (closed_at_us, closed_by, note) = match of.closed {
        None => (None, String::new(), String::new()),
        Some(closed) => (Some(closed.at_us), closed.by, closed.note),
    };
    pb::Case {
        trade_id: of.trade.trade_id.to_string(),
        batch_id: of.batch_id,
        instrument_id: of.trade.instrument_id,
        buyer_id: of.trade.buyer_id,
        seller_id: of.trade.seller_id,
        quantity: Some(to_decimal(of.trade.quantity)),
        payment: Some(to_decimal(of.trade.payment)),
        fee: Some(to_decimal(of.trade.fee)),
        reason: of.trade.reason,
        state: state.into(),
        owner: OWNER.to_owned(),
        opened_at: Some(to_timestamp_us(of.opened_at_us)),
        closed_at: closed_at_us.map(to_timestamp_us),
        closed_by,
        note,
    }
}

fn refused(refusal: BustRefusal) -> Status {
    let text = match refusal {
        BustRefusal::NotWaiting => "Trade is not in the batch that waits for ledger or chain",
        BustRefusal::NotStuck => "Batch of the trade is not stuck",
        BustRefusal::Submitted => "Batch of the trade is with the chain service",
        BustRefusal::Away => return status::unavailable("Chain service", 1_000),
    };
    status::failed_precondition("TRADE_NOT_STUCK", text)
}

fn waiting_step(step: WaitingStep) -> pb::WaitingStep {
    pb::WaitingStep {
        part: step.part.to_owned(),
        id: step.id,
        reason: step.reason,
        is_stuck: step.is_stuck,
    }
}

fn batch(batch: OpenBatch) -> pb::SettlementBatch {
    let state = match batch.state {
        State::Sealed => pb::BatchState::Sealed,
        State::Posted => pb::BatchState::Posted,
        State::Submitted => pb::BatchState::Submitted,
        State::Included => pb::BatchState::Included,
        State::Final => pb::BatchState::Final,
    };
    pb::SettlementBatch {
        batch_id: batch.batch_id,
        state: state.into(),
        attempt: batch.attempt,
        trade_ids: batch.trades.iter().map(ToString::to_string).collect(),
        sealed_at: Some(to_timestamp_us(batch.sealed_at_us)),
        changed_at: Some(to_timestamp_us(batch.changed_at_us)),
    }
}

fn difference(row: BreakRow, now_us: i64) -> pb::Break {
    let state = match row.cleared_at_us {
        None => pb::BreakState::Open,
        Some(_) => pb::BreakState::Cleared,
    };
    let age_us = row.cleared_at_us.unwrap_or(now_us) - row.found_at_us;
    // The decimals of a difference that an older release found are unknown.
    let amount = |minor: i64| {
        let is_known = !row.instrument_id.is_empty();
        is_known.then(|| to_decimal_minor(minor, row.decimals))
    };
    pb::Break {
        expected: amount(row.expected),
        found: amount(row.found),
        name: row.name,
        hold_id: row.hold_id,
        user_id: row.user_id,
        instrument_id: row.instrument_id,
        sequence: row.sequence,
        state: state.into(),
        owner: OWNER.to_owned(),
        found_at: Some(to_timestamp_us(row.found_at_us)),
        cleared_at: row.cleared_at_us.map(to_timestamp_us),
        age_seconds: (age_us.max(0) / 1_000_000).cast_unsigned(),
    }
}
