//! The writes of LedgerService.

use proto::ledger::v1 as wire;
use rpc::Caller;
use tonic::{Response, Status};

use super::{Api, Writer, convert, refused, respond};
use crate::{
    fold::{Answer, Batch, CommandKind, CommandResult, Outcome, Posted, Replay, Source, Target},
    model::OperationType,
    refusal::Refusal,
};

/// Maximum number of operations and hold steps per call.
const BATCH_ITEMS_MAX: usize = 20_000;

type RpcResult<T> = Result<Response<T>, Status>;

fn scales(scales: Vec<wire::InstrumentScale>) -> Result<Vec<(crate::model::Id, u8)>, Status> {
    scales
        .into_iter()
        .enumerate()
        .map(|(index, scale)| {
            let field = format!("instrument_scales[{index}]");
            let id = convert::id(&format!("{field}.instrument_id"), scale.instrument_id)
                .map_err(refused)?;
            let decimals = u8::try_from(scale.decimals).map_err(|_| {
                rpc::status::invalid_argument(format!("{field}.decimals"), "must be at most 18")
            })?;
            Ok((id, decimals))
        })
        .collect()
}

/// True if each operation succeeds or fails alone. The default is all or nothing.
fn is_independent(mode: i32) -> Result<bool, Status> {
    match wire::BatchMode::try_from(mode) {
        Ok(wire::BatchMode::Unspecified | wire::BatchMode::AllOrNothing) => Ok(false),
        Ok(wire::BatchMode::Independent) => Ok(true),
        Err(_) => Err(rpc::status::invalid_argument(
            "mode",
            "must be ALL_OR_NOTHING or INDEPENDENT",
        )),
    }
}

/// Internal error: the answer does not match the command (a bug).
pub(super) fn answer_mismatch() -> Status {
    rpc::status::internal(&crate::Error::Invariant(
        "answer does not match the command".to_owned(),
    ))
}

fn to_postings(posted: &Posted) -> Vec<wire::Posting> {
    posted.postings.iter().map(convert::to_posting).collect()
}

fn single(result: CommandResult) -> Result<Posted, Status> {
    let Answer::Batch { outcomes } = result.answer else {
        return Err(answer_mismatch());
    };
    outcomes
        .into_iter()
        .next()
        .ok_or_else(answer_mismatch)?
        .map_err(|refused| convert::status(&refused, false))
}

/// Converts the outcome of a batch to its response.
fn to_outcomes(outcome: &Outcome) -> RpcResult<wire::CreateOperationsResponse> {
    let CommandResult { answer, replay } = outcome
        .as_ref()
        .map_err(|refused| convert::status(refused, true))?;
    let Answer::Batch { outcomes } = answer else {
        return Err(answer_mismatch());
    };
    let outcomes = outcomes
        .iter()
        .zip(0..)
        .map(|(outcome, index)| match outcome {
            Ok(posted) => wire::OperationOutcome {
                index,
                operation: Some(convert::to_operation(&posted.operation)),
                postings: to_postings(posted),
                replayed: posted.replay != Replay::No,
                ..Default::default()
            },
            Err(refused) => wire::OperationOutcome {
                index,
                error_reason: refused.refusal.reason().to_owned(),
                error_message: refused.refusal.to_string(),
                replayed: refused.replay != Replay::No,
                ..Default::default()
            },
        });
    let message = wire::CreateOperationsResponse {
        outcomes: outcomes.collect(),
        replayed: *replay != Replay::No,
    };
    Ok(respond(message, *replay))
}

impl Api {
    pub(super) async fn create_operation(
        &self,
        caller: &Caller,
        mut message: wire::CreateOperationRequest,
    ) -> RpcResult<wire::CreateOperationResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let new = convert::new_operation(
            message.operation,
            message.postings,
            &writer.context.idempotency_key,
            &writer.context.user_id,
        )
        .map_err(refused)?;
        let mut writer = writer;
        writer.key.digest = new.digest;
        let batch = Batch {
            single: true,
            operations: vec![Ok(new)],
            scales: scales(message.instrument_scales)?,
            ..Batch::default()
        };
        let result = self
            .commit(writer, CommandKind::Post(batch))
            .await?
            .map_err(|refused| convert::status(&refused, false))?;
        let replay = result.replay;
        let posted = single(result)?;
        let message = wire::CreateOperationResponse {
            operation: Some(convert::to_operation(&posted.operation)),
            postings: to_postings(&posted),
        };
        Ok(respond(message, replay))
    }

    pub(super) async fn create_operations(
        &self,
        caller: &Caller,
        mut message: wire::CreateOperationsRequest,
    ) -> RpcResult<wire::CreateOperationsResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        if message.operations.len() + message.hold_steps.len() > BATCH_ITEMS_MAX {
            return Err(rpc::status::invalid_argument(
                "operations",
                format!("must be at most {BATCH_ITEMS_MAX} together with hold_steps"),
            ));
        }
        let source = convert::optional_id("source", Some(message.source)).map_err(refused)?;
        let has_sequences = message.first_sequence != 0 || message.through_sequence != 0;
        if source.is_none() && has_sequences {
            return Err(rpc::status::invalid_argument(
                "source",
                "must be given with first_sequence and through_sequence",
            ));
        }
        let batch = Batch {
            single: false,
            independent: is_independent(message.mode)?,
            operations: message
                .operations
                .into_iter()
                .map(|new| {
                    convert::new_operation(new.operation, new.postings, "", &writer.context.user_id)
                })
                .collect(),
            steps: message.hold_steps.into_iter().map(convert::step).collect(),
            source: source.map(|name| Source {
                name,
                first_sequence: message.first_sequence,
                through_sequence: message.through_sequence,
            }),
            scales: scales(message.instrument_scales)?,
            from_event: false,
        };
        self.commit_prepared(writer, CommandKind::Post(batch), to_outcomes)
            .await?
    }

    pub(super) async fn finalize_operation(
        &self,
        caller: &Caller,
        mut message: wire::FinalizeOperationRequest,
    ) -> RpcResult<wire::FinalizeOperationResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let id = convert::id("operation_id", message.operation_id).map_err(refused)?;
        let kind = CommandKind::Finalize {
            targets: vec![Target::Id(id.clone())],
            tx_hash: convert::tx_hash("onchain_tx_hash", Some(message.onchain_tx_hash))
                .map_err(refused)?,
        };
        let result = self
            .commit(writer, kind)
            .await?
            .map_err(|refused| convert::status(&refused, false))?;
        let operation = self
            .store
            .operation(&id)
            .await
            .map_err(|error| super::failed(&error))?
            .ok_or_else(answer_mismatch)?;
        let message = wire::FinalizeOperationResponse {
            operation: Some(convert::to_operation(&operation)),
        };
        Ok(respond(message, result.replay))
    }

    pub(super) async fn finalize_operations(
        &self,
        caller: &Caller,
        mut message: wire::FinalizeOperationsRequest,
    ) -> RpcResult<wire::FinalizeOperationsResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let targets = message
            .operation_ids
            .into_iter()
            .enumerate()
            .map(|(index, id)| convert::id(&format!("operation_ids[{index}]"), id).map(Target::Id))
            .collect::<Result<Vec<_>, _>>()
            .map_err(refused)?;
        let kind = CommandKind::Finalize {
            targets,
            tx_hash: convert::tx_hash("onchain_tx_hash", Some(message.onchain_tx_hash))
                .map_err(refused)?,
        };
        let result = self
            .commit(writer, kind)
            .await?
            .map_err(|refused| convert::status(&refused, true))?;
        let Answer::Finalized { changed } = result.answer else {
            return Err(answer_mismatch());
        };
        Ok(respond(
            wire::FinalizeOperationsResponse { finalized: changed },
            result.replay,
        ))
    }

    pub(super) async fn reverse_operation(
        &self,
        caller: &Caller,
        mut message: wire::ReverseOperationRequest,
    ) -> RpcResult<wire::ReverseOperationResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let kind = CommandKind::Reverse {
            operation_id: convert::id("operation_id", message.operation_id).map_err(refused)?,
            reason: convert::text("reason", message.reason).map_err(refused)?,
        };
        let result = self
            .commit(writer, kind)
            .await?
            .map_err(|refused| convert::status(&refused, false))?;
        let replay = result.replay;
        let posted = single(result)?;
        let message = wire::ReverseOperationResponse {
            operation: Some(convert::to_operation(&posted.operation)),
            postings: to_postings(&posted),
        };
        Ok(respond(message, replay))
    }

    pub(super) async fn create_hold(
        &self,
        caller: &Caller,
        mut message: wire::CreateHoldRequest,
    ) -> RpcResult<wire::CreateHoldResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let kind = CommandKind::CreateHold(convert::new_hold(message.hold).map_err(refused)?);
        let (hold, _, replay) = self.hold(writer, kind).await?;
        Ok(respond(
            wire::CreateHoldResponse { hold: Some(hold) },
            replay,
        ))
    }

    pub(super) async fn release_hold(
        &self,
        caller: &Caller,
        mut message: wire::ReleaseHoldRequest,
    ) -> RpcResult<wire::ReleaseHoldResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let kind = CommandKind::ReleaseHold {
            hold_id: convert::id("hold_id", message.hold_id).map_err(refused)?,
            reason: convert::text("reason", message.reason).map_err(refused)?,
        };
        let (hold, _, replay) = self.hold(writer, kind).await?;
        Ok(respond(
            wire::ReleaseHoldResponse { hold: Some(hold) },
            replay,
        ))
    }

    pub(super) async fn consume_hold(
        &self,
        caller: &Caller,
        mut message: wire::ConsumeHoldRequest,
    ) -> RpcResult<wire::ConsumeHoldResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let operation_kind = match message.operation_type {
            0 => OperationType::Redemption,
            code => OperationType::from_code(code).ok_or_else(|| {
                refused(Refusal::invalid(
                    "operation_type",
                    "must be one of the operation types",
                ))
            })?,
        };
        let amount = message.amount.as_ref();
        let kind = CommandKind::ConsumeHold {
            hold_id: convert::id("hold_id", message.hold_id).map_err(refused)?,
            amount: amount
                .map(|amount| convert::amount("amount", Some(amount)))
                .transpose()
                .map_err(refused)?,
            operation_kind,
            external_ref: convert::optional_id("external_ref", message.external_ref)
                .map_err(refused)?,
        };
        let (hold, operation, replay) = self.hold(writer, kind).await?;
        let message = wire::ConsumeHoldResponse {
            hold: Some(hold),
            operation: operation.map(|posted| convert::to_operation(&posted.operation)),
        };
        Ok(respond(message, replay))
    }

    pub(super) async fn adjust_hold(
        &self,
        caller: &Caller,
        mut message: wire::AdjustHoldRequest,
    ) -> RpcResult<wire::AdjustHoldResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let kind = CommandKind::AdjustHold {
            hold_id: convert::id("hold_id", message.hold_id).map_err(refused)?,
            remaining: convert::amount_or_zero(
                "remaining_amount",
                message.remaining_amount.as_ref(),
            )
            .map_err(refused)?,
        };
        let (hold, _, replay) = self.hold(writer, kind).await?;
        Ok(respond(
            wire::AdjustHoldResponse { hold: Some(hold) },
            replay,
        ))
    }

    async fn hold(
        &self,
        writer: Writer,
        kind: CommandKind,
    ) -> Result<(wire::Hold, Option<Posted>, Replay), Status> {
        let result = self
            .commit(writer, kind)
            .await?
            .map_err(|refused| convert::status(&refused, false))?;
        match result.answer {
            Answer::Hold { hold, operation } => {
                Ok((convert::to_hold(&hold), operation, result.replay))
            }
            _ => Err(answer_mismatch()),
        }
    }

    pub(super) async fn set_sub_account_status(
        &self,
        caller: &Caller,
        mut message: wire::SetSubAccountStatusRequest,
    ) -> RpcResult<wire::SetSubAccountStatusResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let subaccount_id = convert::id("subaccount_id", message.subaccount_id).map_err(refused)?;
        let status = convert::subaccount_status(message.status).map_err(refused)?;
        // Freezing takes one person, lifting a freeze two (D32).
        if message.status == wire::SubAccountStatus::Active as i32 {
            caller.require_approval("dfa.ledger.v1.LedgerService/SetSubAccountStatus")?;
        }
        let reason = convert::text("reason", message.reason).map_err(refused)?;
        let by = caller.subject.as_str();
        tracing::info!(%subaccount_id, %status, reason, by, "sub-account status change requested");
        let kind = CommandKind::SetStatus {
            subaccount_id,
            status,
            reason,
        };
        let result = self
            .commit(writer, kind)
            .await?
            .map_err(|refused| convert::status(&refused, false))?;
        let Answer::SubAccount(subaccount) = result.answer else {
            return Err(answer_mismatch());
        };
        let message = wire::SetSubAccountStatusResponse {
            subaccount: Some(convert::to_subaccount(&subaccount)),
        };
        Ok(respond(message, result.replay))
    }
}
