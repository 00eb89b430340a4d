//! LedgerService. Writes become commands for the committer; reads query the store.
//!
//! Every refusal has the exact text and reason of D23. A replayed answer has the metadata
//! `idempotent-replayed: true`. A key reused with different content gets the stored answer; the
//! reuse is logged and counted (T12).

pub mod consumers;
pub mod convert;
pub mod http;
mod limits;
mod reads;
mod records;
mod statement;
pub mod topics;
mod writes;

use std::time::Instant;

use proto::ledger::v1::{self as wire, ledger_service_server::LedgerService};
use rpc::Context;
use tonic::{Request, Response, Status};

use crate::{
    Clock, Error,
    committer::{Committer, LARGE_WEIGHT_MIN},
    fold::{Answer, Author, CallKey, Command, CommandKind, CommandResult, Outcome, Replay},
    refusal::{Refusal, Refused},
    repo::Store,
};

/// The service, shared by RPC, HTTP reads and the request topics.
pub struct Api {
    pub(crate) store: Store,
    pub(crate) committer: Committer,
    pub(crate) clock: Clock,
}

/// Caller and key of a write.
struct Writer {
    context: Context,
    key: CallKey,
    is_service: bool,
    /// Subject of the caller's credential.
    subject: String,
}

impl Writer {
    /// `digest` is the digest of the message without its context.
    fn of(caller: &rpc::Caller, context: Context, digest: i64) -> Self {
        let user_id = if context.user_id.is_empty() {
            &caller.subject
        } else {
            &context.user_id
        };
        Writer {
            key: CallKey {
                key: context.idempotency_key.as_str().into(),
                user_id: user_id.as_str().into(),
                digest,
            },
            is_service: caller.acts_by_itself(),
            subject: caller.subject.clone(),
            context,
        }
    }

    fn command(self, kind: CommandKind) -> (Command, Context) {
        // What services post is in the operations; limits and statuses are set by staff, also by
        // way of a service.
        let is_recorded = !self.is_service
            || matches!(
                kind,
                CommandKind::SetStatus { .. }
                    | CommandKind::SetLimit { .. }
                    | CommandKind::RemoveLimit { .. }
            );
        let author = is_recorded.then(|| Author {
            subject: self.subject,
            request_id: self.context.request_id.clone(),
            correlation_id: self.context.correlation_id.clone(),
        });
        let command = Command {
            kind,
            key: Some(self.key),
            is_service: self.is_service,
            author,
        };
        (command, self.context)
    }
}

impl Api {
    /// Commits a command. The outer error is operational; the inner error is the refusal.
    async fn commit(&self, writer: Writer, kind: CommandKind) -> Result<Outcome, Status> {
        self.submit(writer.command(kind)).await
    }

    async fn submit(&self, (command, context): (Command, Context)) -> Result<Outcome, Status> {
        let started = Instant::now();
        let outcome = self.committer.submit(command, context).await;
        let outcome = outcome.map_err(|error| failed(&error))?;
        record_latency(started);
        report_key_reuse(reused_keys(&outcome));
        Ok(outcome)
    }

    /// As [`Self::commit`], and converts the outcome with `prepare`: for a large command during the
    /// write.
    async fn commit_prepared<T>(
        &self,
        writer: Writer,
        kind: CommandKind,
        prepare: impl Fn(&Outcome) -> T,
    ) -> Result<T, Status> {
        let command = writer.command(kind);
        if command.0.weight() < LARGE_WEIGHT_MIN {
            return Ok(prepare(&self.submit(command).await?));
        }
        let started = Instant::now();
        let (command, context) = command;
        let early = self.committer.submit_early(command, context).await;
        let mut early = early.map_err(|error| failed(&error))?;
        let mut prepared = None;
        // A repeated fold may have another outcome; the last one counts.
        while early.folded.changed().await.is_ok() {
            let outcome = early.folded.borrow_and_update();
            prepared = outcome.as_ref().map(|it| (reused_keys(it), prepare(it)));
        }
        let durable = early.durable.await.unwrap_or(Err(Error::Closed));
        durable.map_err(|error| failed(&error))?;
        record_latency(started);
        let (reused_keys, answer) = prepared.ok_or_else(|| failed(&Error::Closed))?;
        report_key_reuse(reused_keys);
        Ok(answer)
    }
}

/// Number of keys reused with different content: the call's, or those of its operations.
fn reused_keys(outcome: &Outcome) -> usize {
    match outcome {
        Ok(CommandResult {
            replay: Replay::Different,
            ..
        })
        | Err(Refused {
            replay: Replay::Different,
            ..
        }) => 1,
        Ok(CommandResult {
            answer: Answer::Batch { outcomes },
            ..
        }) => outcomes
            .iter()
            .filter(|item| match item {
                Ok(posted) => posted.replay == Replay::Different,
                Err(refused) => refused.replay == Replay::Different,
            })
            .count(),
        _ => 0,
    }
}

fn report_key_reuse(count: usize) {
    if count > 0 {
        tracing::warn!(
            count,
            "idempotency key reused with different content, stored answer returned"
        );
        metrics::counter!("ledger_idempotency_mismatches_total").increment(count as u64);
    }
}

/// Records the latency of a durable write.
fn record_latency(started: Instant) {
    metrics::histogram!("ledger_operation_duration_seconds")
        .record(started.elapsed().as_secs_f64());
}

/// Status of a store failure (D23). The caller may retry if the store is unavailable, but not after
/// a permanent failure.
pub(crate) fn failed(error: &Error) -> Status {
    if error.is_away() {
        tracing::warn!(%error, "ledger store is unavailable");
        rpc::status::unavailable("Ledger", 1_000)
    } else {
        rpc::status::internal(error)
    }
}

fn refused(refusal: Refusal) -> Status {
    convert::status(&refusal.into(), false)
}

fn respond<T>(message: T, replay: Replay) -> Response<T> {
    rpc::context::answered(message, replay != Replay::No)
}

macro_rules! delegate {
    ($($method:ident($request:ident) -> $response:ident;)+) => {
        #[tonic::async_trait]
        impl LedgerService for Api {
            $(
                async fn $method(&self, request: Request<wire::$request>) -> Result<Response<wire::$response>, Status> {
                    let caller = rpc::caller(&request)?.clone();
                    self.$method(&caller, request.into_inner()).await
                }
            )+
        }
    };
}

delegate! {
    get_account(GetAccountRequest) -> GetAccountResponse;
    list_accounts(ListAccountsRequest) -> ListAccountsResponse;
    get_sub_account(GetSubAccountRequest) -> GetSubAccountResponse;
    list_sub_accounts(ListSubAccountsRequest) -> ListSubAccountsResponse;
    get_balance(GetBalanceRequest) -> GetBalanceResponse;
    create_operation(CreateOperationRequest) -> CreateOperationResponse;
    create_operations(CreateOperationsRequest) -> CreateOperationsResponse;
    finalize_operation(FinalizeOperationRequest) -> FinalizeOperationResponse;
    finalize_operations(FinalizeOperationsRequest) -> FinalizeOperationsResponse;
    reverse_operation(ReverseOperationRequest) -> ReverseOperationResponse;
    get_operation(GetOperationRequest) -> GetOperationResponse;
    list_operations(ListOperationsRequest) -> ListOperationsResponse;
    create_hold(CreateHoldRequest) -> CreateHoldResponse;
    release_hold(ReleaseHoldRequest) -> ReleaseHoldResponse;
    consume_hold(ConsumeHoldRequest) -> ConsumeHoldResponse;
    adjust_hold(AdjustHoldRequest) -> AdjustHoldResponse;
    get_hold(GetHoldRequest) -> GetHoldResponse;
    list_holds(ListHoldsRequest) -> ListHoldsResponse;
    get_source_position(GetSourcePositionRequest) -> GetSourcePositionResponse;
    get_trial_balance(GetTrialBalanceRequest) -> GetTrialBalanceResponse;
    set_sub_account_status(SetSubAccountStatusRequest) -> SetSubAccountStatusResponse;
    get_statement(GetStatementRequest) -> GetStatementResponse;
    set_velocity_limit(SetVelocityLimitRequest) -> SetVelocityLimitResponse;
    remove_velocity_limit(RemoveVelocityLimitRequest) -> RemoveVelocityLimitResponse;
    list_velocity_limits(ListVelocityLimitsRequest) -> ListVelocityLimitsResponse;
    list_audit_records(ListAuditRecordsRequest) -> ListAuditRecordsResponse;
    get_chain_head(GetChainHeadRequest) -> GetChainHeadResponse;
}
