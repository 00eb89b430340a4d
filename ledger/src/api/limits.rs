//! RPCs to set, remove and list velocity limits, for staff.

use proto::{
    convert::{self as proto_convert, to_decimal_minor, to_timestamp_us},
    ledger::v1 as wire,
};
use rpc::{
    Caller,
    page::{self, Key},
};
use tonic::{Response, Status};

use super::{Api, Writer, convert, reads, refused, respond};
use crate::{
    fold::{Answer as CommandAnswer, CommandKind, LimitTerms, Replay},
    limit::{OperationTypes, Side, VelocityLimit},
    model::{AccountType, OperationType},
    refusal::Refusal,
};

type Answer<T> = Result<Response<T>, Status>;

impl Api {
    pub(super) async fn set_velocity_limit(
        &self,
        caller: &Caller,
        mut message: wire::SetVelocityLimitRequest,
    ) -> Answer<wire::SetVelocityLimitResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let kind = CommandKind::SetLimit {
            limit: terms(message.limit).map_err(refused)?,
            reason: convert::text("reason", message.reason).map_err(refused)?,
            may_raise: caller.is_service(),
        };
        let (limit, replay) = self.change_limit(writer, kind).await?;
        Ok(respond(
            wire::SetVelocityLimitResponse { limit: Some(limit) },
            replay,
        ))
    }

    pub(super) async fn remove_velocity_limit(
        &self,
        caller: &Caller,
        mut message: wire::RemoveVelocityLimitRequest,
    ) -> Answer<wire::RemoveVelocityLimitResponse> {
        let context = rpc::context::write(message.context.take())?;
        let writer = Writer::of(caller, context, rpc::context::digest(&message));
        let kind = CommandKind::RemoveLimit {
            limit_id: convert::id("limit_id", message.limit_id).map_err(refused)?,
            reason: convert::text("reason", message.reason).map_err(refused)?,
        };
        let (limit, replay) = self.change_limit(writer, kind).await?;
        Ok(respond(
            wire::RemoveVelocityLimitResponse { limit: Some(limit) },
            replay,
        ))
    }

    async fn change_limit(
        &self,
        writer: Writer,
        kind: CommandKind,
    ) -> Result<(wire::VelocityLimit, Replay), Status> {
        let result = self
            .commit(writer, kind)
            .await?
            .map_err(|refusal| convert::status(&refusal, false))?;
        match result.answer {
            CommandAnswer::Limit(limit) => Ok((to_limit(&limit), result.replay)),
            _ => Err(super::writes::answer_mismatch()),
        }
    }

    pub(super) async fn list_velocity_limits(
        &self,
        _: &Caller,
        message: wire::ListVelocityLimitsRequest,
    ) -> Answer<wire::ListVelocityLimitsResponse> {
        rpc::context::record_read_context(message.context);
        reads::check_id_filter("user_id", &message.user_id)?;
        reads::check_id_filter("instrument_id", &message.instrument_id)?;
        let hash = page::filter_hash(&[&message.user_id, &message.instrument_id]);
        let page = page::parse(message.pagination, hash)?;
        let mut rows = self
            .store
            .limits(
                &message.user_id,
                &message.instrument_id,
                reads::page_bound(&page),
            )
            .await
            .map_err(reads::failed)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.limit_id.to_string(),
        });
        Ok(Response::new(wire::ListVelocityLimitsResponse {
            limits: rows.iter().map(to_limit).collect(),
            pagination: Some(pagination),
        }))
    }
}

fn terms(limit: Option<wire::VelocityLimit>) -> Result<LimitTerms, Refusal> {
    let limit = limit.ok_or_else(|| Refusal::invalid("limit", "is required"))?;
    let kinds = limit
        .operation_types
        .iter()
        .enumerate()
        .map(|(index, code)| {
            OperationType::from_code(*code).ok_or_else(|| {
                let field = format!("limit.operation_types[{index}]");
                Refusal::invalid(field, format!("has no operation type {code}"))
            })
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(LimitTerms {
        limit_id: convert::id("limit.limit_id", limit.limit_id)?,
        user_id: convert::text("limit.user_id", limit.user_id)?.into(),
        account_kind: match limit.account_type {
            0 => None,
            code => Some(AccountType::from_code(code).ok_or_else(|| {
                Refusal::invalid(
                    "limit.account_type",
                    "must be MAIN, INVEST, BLOCKED or unset",
                )
            })?),
        },
        instrument_id: convert::id("limit.instrument_id", limit.instrument_id)?,
        side: Side::from_code(limit.side)
            .ok_or_else(|| Refusal::invalid("limit.side", "must be DEBIT or CREDIT"))?,
        window_s: i64::from(limit.window_seconds),
        amount: proto_convert::decimal(limit.amount.as_ref())
            .map_err(|error| Refusal::invalid("limit.amount", error.to_string()))?,
        kinds: OperationTypes::of(kinds),
    })
}

fn to_limit(limit: &VelocityLimit) -> wire::VelocityLimit {
    wire::VelocityLimit {
        limit_id: limit.limit_id.to_string(),
        user_id: limit.user_id.to_string(),
        account_type: limit.account_kind.map_or(0, AccountType::code),
        instrument_id: limit.instrument_id.to_string(),
        side: limit.side.code(),
        window_seconds: u32::try_from(limit.window_s).unwrap_or(u32::MAX),
        amount: Some(to_decimal_minor(limit.amount.0, limit.decimals)),
        operation_types: limit.kinds.iter().map(OperationType::code).collect(),
        created_at: Some(to_timestamp_us(limit.created_at_us)),
        updated_at: Some(to_timestamp_us(limit.updated_at_us)),
    }
}
