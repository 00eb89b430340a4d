//! `CfaRegistryService` and its HTTP reads: only conversion and access control.

pub mod consumers;
mod convert;
mod http;
pub mod publish;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use events::audit::{RecordFilter, RecordRow};
use pb::cfa_registry_service_server::{CfaRegistryService, CfaRegistryServiceServer};
use proto::cfa::v1 as pb;
use proto::checks::{ID_BYTES_MAX, id_problem};
use proto::convert as wire;
use rpc::Role;
use rpc::context::answered;
use rpc::page::{self, Key};
use rpc::status;
use tonic::{Request, Response, Status};
use types::{Decimal, OperationStatus, OperationType};

use crate::error::{Error, Refusal};
use crate::model::{
    CFA_RUB, EnforcementAct, ExtractFormat, ExtractRecipient, Instrument, InstrumentType,
    IssueRedemption, Offer, OfferSide, Operation, RedemptionReason,
};
use crate::placement::Placement;
use crate::repo::OperationFilter;
use crate::service::compare::OWNER;
use crate::service::{
    IssueInvestment, NewExtract, NewForcedTransfer, NewFreeze, NewOffer, NewRedemption,
    NewSignature, NewTransfer, OperationResult, RedeemInvestment, RequestMeta, Service, call_wait,
};
use convert::to_status;

/// Largest page of anchors, each of which is a read of the node.
const ANCHORS_MAX: i32 = 50;
/// Largest page of balances on the chain, each of which is a read of the node.
const CHAIN_BALANCES_MAX: i32 = 250;
/// Longest wait of GetTradeBatch, in milliseconds.
const BATCH_WAIT_MS_MAX: u32 = 5_000;
/// Longest wait of StartRedemption for the issue's open operations.
const OPERATIONS_WAIT: Duration = Duration::from_secs(5);
/// Limit of transaction hashes per list request.
const TX_HASHES_MAX: usize = 100;

/// An amount read from the chain; `None`: beyond the numbers of the contract.
fn wide(units: Option<i128>, decimals: u8) -> Option<proto::common::v1::Decimal> {
    let amount = units.and_then(|units| Decimal::new(units, decimals).ok());
    amount.map(wire::to_decimal)
}

type Answer<T> = Result<Response<T>, Status>;

#[derive(Clone)]
struct Api {
    service: Arc<Service>,
}

pub fn service(service: Arc<Service>, health: rpc::Health) -> rpc::Service {
    let api = Api { service };
    let http = http::router(api.clone());
    let routes = tonic::service::Routes::new(rpc::grpc_server!(CfaRegistryServiceServer::new(api)));
    rpc::Service {
        name: "cfa",
        routes,
        http,
        health,
    }
}

/// The metadata of a write, from its caller and context.
fn write_context(
    caller: &rpc::Caller,
    context: Option<proto::common::v1::RequestContext>,
) -> Result<RequestMeta, Status> {
    let context = rpc::context::write(context)?;
    Ok(RequestMeta {
        idempotency_key: context.idempotency_key,
        correlation_id: context.correlation_id,
        actor: caller.subject.clone(),
        digest: 0,
    })
}

/// Like [`write_context`], with a digest of the request without its context. For calls whose
/// answers are stored under their key (D50).
fn context_with_digest(
    caller: &rpc::Caller,
    context: Option<proto::common::v1::RequestContext>,
    content: &impl prost::Message,
) -> Result<RequestMeta, Status> {
    Ok(RequestMeta {
        digest: rpc::context::digest(content),
        ..write_context(caller, context)?
    })
}

/// An operation as this caller may read it. Of a trade only staff get the other party's user id and
/// the key, which is settlement's (`design.md` 2).
fn operation_for(caller: &rpc::Caller, operation: &Operation) -> pb::CfaOperation {
    let mut message = convert::operation(operation);
    if message.trade_id.is_empty() || caller.acts_for_any_user() {
        return message;
    }
    message.idempotency_key.clear();
    for user_id in [
        &mut message.user_id,
        &mut message.from_user_id,
        &mut message.to_user_id,
    ] {
        if caller.require_user(user_id).is_err() {
            user_id.clear();
        }
    }
    message
}

fn operation_of(result: &OperationResult) -> Option<pb::CfaOperation> {
    Some(convert::operation(&result.operation))
}

fn reason(code: i32, default: RedemptionReason) -> Result<RedemptionReason, Status> {
    match code {
        0 => Ok(default),
        code => RedemptionReason::from_code(code)
            .filter(|reason| *reason != RedemptionReason::Coupon)
            .ok_or_else(|| status::invalid_argument("reason", "must be MATURITY or BUYBACK")),
    }
}

/// Number and issue of the last coupon of a page, or the largest ones before the first page.
fn coupon_bound(key: &str) -> (i64, &str) {
    let last = key.split_once(':');
    let last = last.and_then(|(number, id)| Some((number.parse().ok()?, id)));
    last.unwrap_or((i64::MAX, key))
}

impl Api {
    async fn operation(
        &self,
        caller: &rpc::Caller,
        operation_id: &str,
    ) -> Result<pb::CfaOperation, Status> {
        let operation = self
            .service
            .repo
            .operation(operation_id)
            .await
            .map_err(to_status)?;
        let operation = operation.ok_or_else(|| to_status(Refusal::OperationNotFound.into()))?;
        // An operation of other users is reported as not found.
        let may_see = caller.acts_for_any_user()
            || caller
                .user_id
                .as_deref()
                .is_some_and(|user_id| operation.concerns(user_id));
        if !may_see {
            return Err(to_status(Refusal::OperationNotFound.into()));
        }
        Ok(operation_for(caller, &operation))
    }

    async fn operations(
        &self,
        caller: &rpc::Caller,
        request: pb::ListOperationsRequest,
    ) -> Result<pb::ListOperationsResponse, Status> {
        let mut user_id = request.user_id;
        if !caller.acts_for_any_user() {
            if user_id.is_empty() {
                user_id = caller.user_id.clone().unwrap_or_default();
            }
            caller.require_user(&user_id)?;
        }
        if request.onchain_tx_hashes.len() > TX_HASHES_MAX {
            return Err(status::invalid_argument(
                "onchain_tx_hashes",
                format!("must contain at most {TX_HASHES_MAX} hashes"),
            ));
        }
        let filter = OperationFilter {
            user_id,
            kind: (request.r#type != 0).then_some(request.r#type),
            status: (request.status != 0).then_some(request.status),
            external_ref: request.external_ref,
            tx_hashes: request.onchain_tx_hashes,
            exclude_trades: request.without_trades,
        };
        let hash = page::filter_hash(&[
            &filter.user_id,
            &filter.kind.unwrap_or_default().to_string(),
            &filter.status.unwrap_or_default().to_string(),
            &filter.external_ref,
            &filter.tx_hashes.join(" "),
            &filter.exclude_trades.to_string(),
        ]);
        // Over HTTP an unknown kind or status gives an empty page (D45). Over RPC it is refused
        // (D48).
        let known = filter
            .kind
            .is_none_or(|kind| OperationType::from_code(kind).is_some())
            && filter
                .status
                .is_none_or(|status| OperationStatus::from_code(status).is_some());
        let page = page::parse(request.pagination, hash)?;
        let mut rows = if known {
            self.service
                .repo
                .list_operations(&filter, page.bound(), page.rows_limit())
                .await
                .map_err(to_status)?
        } else {
            Vec::new()
        };
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.operation_id.clone(),
        });
        Ok(pb::ListOperationsResponse {
            operations: rows.iter().map(|row| operation_for(caller, row)).collect(),
            pagination: Some(pagination),
        })
    }

    async fn instruments(
        &self,
        request: pb::ListInstrumentsRequest,
    ) -> Result<pb::ListInstrumentsResponse, Status> {
        let status = (request.status != 0).then_some(request.status);
        let page = page::parse(
            request.pagination,
            page::filter_hash(&[&request.status.to_string()]),
        )?;
        let mut rows = self
            .service
            .repo
            .instruments(status, page.bound(), page.rows_limit())
            .await
            .map_err(to_status)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.registered_at_us,
            id: row.instrument_id.clone(),
        });
        let ids: Vec<_> = rows.iter().map(|row| row.instrument_id.as_str()).collect();
        let placed = self.service.repo.placements(&ids).await;
        let placed = placed.map_err(to_status)?.into_iter();
        let placed: HashMap<String, Placement> = placed
            .map(|placement| (placement.instrument_id.clone(), placement))
            .collect();
        let message =
            |row: &Instrument| convert::instrument(row, placed.get(row.instrument_id.as_str()));
        Ok(pb::ListInstrumentsResponse {
            instruments: rows.iter().map(message).collect(),
            pagination: Some(pagination),
        })
    }

    /// An instrument with its placement.
    async fn instrument_message(&self, instrument: &Instrument) -> Result<pb::Instrument, Status> {
        let placed = self.service.repo.placement(&instrument.instrument_id).await;
        let placed = placed.map_err(to_status)?;
        Ok(convert::instrument(instrument, placed.as_ref()))
    }

    async fn chain_balances(
        &self,
        request: pb::ListChainBalancesRequest,
    ) -> Result<pb::ListChainBalancesResponse, Status> {
        let found = self.service.require_instrument(&request.instrument_id);
        let instrument = found.await.map_err(to_status)?;
        let mut pagination = request.pagination.unwrap_or_default();
        pagination.page_size = match pagination.page_size {
            0 => CHAIN_BALANCES_MAX,
            size => size.min(CHAIN_BALANCES_MAX),
        };
        let hash = page::filter_hash(&[&request.instrument_id, &instrument.contract_address]);
        let page = page::parse(Some(pagination), hash)?;
        let rows = self
            .service
            .chain_balances(&instrument, page.bound(), page.rows_limit());
        let mut rows = rows.await.map_err(to_status)?;
        let pagination = page.finish(&mut rows, |(holder, _)| Key {
            created_us: holder.since_us,
            id: holder.address.clone(),
        });
        let decimals = instrument.decimals;
        let balances = rows.into_iter().map(|(holder, units)| pb::ChainBalance {
            on_chain: wide(i128::try_from(units).ok(), decimals),
            in_registry: Some(wire::to_decimal_minor(holder.units_minor, decimals)),
            user_id: holder.user_id,
            address: holder.address,
        });
        Ok(pb::ListChainBalancesResponse {
            balances: balances.collect(),
            pagination: Some(pagination),
        })
    }

    async fn chain_breaks(
        &self,
        request: pb::ListChainBreaksRequest,
    ) -> Result<pb::ListChainBreaksResponse, Status> {
        if let Some(problem) = id_problem(&request.instrument_id, ID_BYTES_MAX) {
            return Err(status::invalid_argument("instrument_id", problem));
        }
        let hash = page::filter_hash(&[&request.instrument_id, &request.open_only.to_string()]);
        let page = page::parse(request.pagination, hash)?;
        let is_open = request.open_only.then_some(true);
        let rows = self.service.repo.list_breaks(
            &request.instrument_id,
            is_open,
            page.bound(),
            page.rows_limit(),
        );
        let mut rows = rows.await.map_err(to_status)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.found_at_us,
            id: format!("{}/{}", row.instrument_id, row.address),
        });
        let now_us = self.service.now_us();
        let mut breaks = Vec::with_capacity(rows.len());
        for row in rows {
            let instrument = self.service.repo.instrument(&row.instrument_id).await;
            let decimals = instrument.map_err(to_status)?.map_or(0, |of| of.decimals);
            let age_us = row.cleared_at_us.unwrap_or(now_us) - row.found_at_us;
            breaks.push(pb::ChainBreak {
                on_chain: wide(Some(row.chain_units), decimals),
                in_ledger: wide(Some(row.ledger_units), decimals),
                owner: OWNER.to_owned(),
                found_at: Some(wire::to_timestamp_us(row.found_at_us)),
                cleared_at: row.cleared_at_us.map(wire::to_timestamp_us),
                age_seconds: age_us.max(0).unsigned_abs() / 1_000_000,
                instrument_id: row.instrument_id,
                address: row.address,
                user_id: row.user_id,
            });
        }
        Ok(pb::ListChainBreaksResponse {
            breaks,
            pagination: Some(pagination),
        })
    }

    async fn accept_break(
        &self,
        context: &RequestMeta,
        message: &pb::AcceptChainBreakRequest,
    ) -> Result<(pb::AcceptChainBreakResponse, bool), Status> {
        let found = self.service.require_instrument(&message.instrument_id);
        let decimals = found.await.map_err(to_status)?.decimals;
        let malformed = |text: String| status::invalid_argument("difference", text);
        let difference = wire::decimal(message.difference.as_ref());
        let difference = difference.map_err(|error| malformed(error.to_string()))?;
        let difference = difference.rescale(decimals);
        let difference = difference.map_err(|error| malformed(error.to_string()))?;
        let difference = difference.mantissa();
        let (id, address) = (&message.instrument_id, &message.address);
        let accepted =
            (self.service).accept_break(context, id, address, difference, &message.reason);
        let (instrument, replayed) = accepted.await.map_err(to_status)?;
        let answer = pb::AcceptChainBreakResponse {
            instrument: Some(self.instrument_message(&instrument).await?),
        };
        Ok((answer, replayed))
    }

    async fn holders(
        &self,
        caller: &rpc::Caller,
        request: pb::ListHoldersRequest,
    ) -> Result<pb::ListHoldersResponse, Status> {
        let instrument = self
            .service
            .require_instrument(&request.instrument_id)
            .await
            .map_err(to_status)?;
        caller.require_user(&instrument.issuer_id)?;
        let as_of_us = request.as_of.as_ref().map(wire::timestamp_us);
        if as_of_us.is_some_and(|at_us| at_us > self.service.now_us()) {
            let problem = "must not be in the future";
            return Err(status::invalid_argument("as_of", problem));
        }
        // The order is that of one token: a page after a move to another would leave out holders.
        let hash = page::filter_hash(&[
            &request.instrument_id,
            &as_of_us.unwrap_or_default().to_string(),
            &instrument.contract_address,
        ]);
        let page = page::parse(request.pagination, hash)?;
        let (mut rows, supply) = self
            .service
            .holders(&instrument, as_of_us, page.bound(), page.rows_limit())
            .await
            .map_err(to_status)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.holder.since_us,
            id: row.holder.address.clone(),
        });
        let holders = rows
            .into_iter()
            .map(|row| pb::HolderBalance {
                balance: Some(wire::to_decimal_minor(
                    row.holder.units_minor,
                    instrument.decimals,
                )),
                locked: row.locked.map(wire::to_decimal),
                share_percent: Some(wire::to_decimal(crate::plan::share_percent(
                    row.holder.units_minor,
                    supply,
                ))),
                as_of_block: row.holder.as_of_block,
                updated_at: Some(wire::to_timestamp_us(row.holder.updated_at_us)),
                user_id: row.holder.user_id,
                address: row.holder.address,
            })
            .collect();
        Ok(pb::ListHoldersResponse {
            holders,
            pagination: Some(pagination),
        })
    }

    /// A redemption with a page of its payments; a holder sees only the own payments.
    async fn redemption(
        &self,
        caller: &rpc::Caller,
        redemption: &IssueRedemption,
        pagination: Option<proto::common::v1::PaginationRequest>,
    ) -> Result<(pb::IssueRedemption, proto::common::v1::PaginationResponse), Status> {
        let found = self.service.require_instrument(&redemption.instrument_id);
        let instrument = found.await.map_err(to_status)?;
        let holder = match caller.require_user(&instrument.issuer_id) {
            Ok(()) => None,
            Err(_) => Some(caller.user_id.as_deref().unwrap_or_default()),
        };
        let id = redemption.redemption_id.as_str();
        let hash = page::filter_hash(&[id, holder.unwrap_or_default()]);
        let page = page::parse(pagination, hash)?;
        // Payments have no time: their key is the position, which starts at 0.
        let after = page.after.as_ref().map_or(-1, |key| key.created_us);
        let (repo, limit) = (&self.service.repo, page.rows_limit());
        let listed = match holder {
            None => repo.redemption_lines(id, after, limit).await,
            // Lines of addresses that are of no user have no user id.
            Some("") => Ok(Vec::new()),
            Some(user_id) => repo.redemption_lines_of(id, user_id, after, limit).await,
        };
        let mut lines = listed.map_err(to_status)?;
        let pagination = page.finish(&mut lines, |(position, _)| Key {
            created_us: *position,
            id: String::new(),
        });
        let payments = lines
            .iter()
            .map(|(_, line)| convert::redemption_payment(line, instrument.decimals))
            .collect();
        Ok((convert::redemption(redemption, payments), pagination))
    }

    /// Fails unless the caller acts for the issuer of the instrument, whose id is returned.
    async fn require_issuer(
        &self,
        caller: &rpc::Caller,
        instrument_id: &str,
    ) -> Result<String, Status> {
        let instrument = self
            .service
            .require_instrument(instrument_id)
            .await
            .map_err(to_status)?;
        caller.require_user(&instrument.issuer_id)?;
        Ok(instrument.issuer_id)
    }

    /// Stores an offer of the caller. Returns it with the decimals of its units, and whether the
    /// call is a repeat.
    async fn make_offer(
        &self,
        context: &RequestMeta,
        new: NewOffer,
    ) -> Result<(Offer, u8, bool), Status> {
        if new.payment_minor == 0 {
            return Err(status::invalid_argument("payment", "is required"));
        }
        let made = self.service.make_offer(context, new).await;
        let (offer, replayed) = made.map_err(to_status)?;
        let decimals = self.decimals_of(&offer).await?;
        Ok((offer, decimals, replayed))
    }

    /// Cancels an offer of the caller's user. Returns the same as `make_offer`.
    async fn end_offer(
        &self,
        caller: &rpc::Caller,
        context: &RequestMeta,
        side: OfferSide,
        id: &str,
    ) -> Result<(Offer, u8, bool), Status> {
        let found = self.service.require_offer(side, id).await;
        caller.require_user(&found.map_err(to_status)?.user_id)?;
        let cancelled = self.service.cancel_offer(context, side, id).await;
        let (offer, replayed) = cancelled.map_err(to_status)?;
        let decimals = self.decimals_of(&offer).await?;
        Ok((offer, decimals, replayed))
    }

    /// A page of the offers of a user, or of an issue for its issuer, each with the decimals of its
    /// units. `user_field` is the request's field of the user.
    async fn offers(
        &self,
        caller: &rpc::Caller,
        side: OfferSide,
        (user_field, user_id): (&'static str, &str),
        instrument_id: &str,
        pagination: Option<proto::common::v1::PaginationRequest>,
    ) -> Result<(Vec<(Offer, u8)>, proto::common::v1::PaginationResponse), Status> {
        let repo = &self.service.repo;
        if !user_id.is_empty() {
            caller.require_user(user_id)?;
        } else if instrument_id.is_empty() {
            let problem = "is required without an instrument_id";
            return Err(status::invalid_argument(user_field, problem));
        } else if let Some(of) = repo.instrument(instrument_id).await.map_err(to_status)? {
            caller.require_user(&of.issuer_id)?;
        }
        let hash = page::filter_hash(&[user_id, instrument_id]);
        let page = page::parse(pagination, hash)?;
        let rows = repo.offers(
            side,
            user_id,
            instrument_id,
            page.bound(),
            page.rows_limit(),
        );
        let mut rows = rows.await.map_err(to_status)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.offer_id.clone(),
        });
        let mut offers = Vec::with_capacity(rows.len());
        let mut decimals: HashMap<String, u8> = HashMap::new();
        for row in rows {
            if let Entry::Vacant(unread) = decimals.entry(row.instrument_id.clone()) {
                unread.insert(self.decimals_of(&row).await?);
            }
            let of_units = decimals[&row.instrument_id];
            offers.push((row, of_units));
        }
        Ok((offers, pagination))
    }

    async fn decimals_of(&self, offer: &Offer) -> Result<u8, Status> {
        self.instrument_decimals(&offer.instrument_id).await
    }

    async fn instrument_decimals(&self, instrument_id: &str) -> Result<u8, Status> {
        let instrument = self.service.require_instrument(instrument_id).await;
        Ok(instrument.map_err(to_status)?.decimals)
    }

    async fn act(&self, act: &EnforcementAct) -> Result<pb::EnforcementAct, Status> {
        let decimals = self.instrument_decimals(&act.instrument_id).await?;
        Ok(convert::enforcement_act(act, decimals))
    }
}

#[tonic::async_trait]
impl CfaRegistryService for Api {
    async fn register_instrument(
        &self,
        request: Request<pb::RegisterInstrumentRequest>,
    ) -> Answer<pb::RegisterInstrumentResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = write_context(&caller, message.context.take())?;
        caller.require_user(&message.issuer_id)?;
        if !message.smart_contract_address.is_empty() {
            caller.require_approval("dfa.cfa.v1.CfaRegistryService/RegisterInstrument")?;
        }
        let new = convert::new_instrument(message).map_err(to_status)?;
        let (instrument, replayed) = self
            .service
            .register_instrument(&context, new)
            .await
            .map_err(to_status)?;
        let answer = pb::RegisterInstrumentResponse {
            instrument_id: instrument.instrument_id.clone(),
            instrument: Some(self.instrument_message(&instrument).await?),
        };
        Ok(answered(answer, replayed))
    }

    async fn get_instrument(
        &self,
        request: Request<pb::GetInstrumentRequest>,
    ) -> Answer<pb::GetInstrumentResponse> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let instrument = self
            .service
            .require_instrument(&message.instrument_id)
            .await
            .map_err(to_status)?;
        Ok(Response::new(pb::GetInstrumentResponse {
            instrument: Some(self.instrument_message(&instrument).await?),
        }))
    }

    async fn list_instruments(
        &self,
        request: Request<pb::ListInstrumentsRequest>,
    ) -> Answer<pb::ListInstrumentsResponse> {
        let mut message = request.into_inner();
        rpc::context::record_read_context(message.context.take());
        Ok(Response::new(self.instruments(message).await?))
    }

    async fn sign_issue_decision(
        &self,
        request: Request<pb::SignIssueDecisionRequest>,
    ) -> Answer<pb::SignIssueDecisionResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        self.require_issuer(&caller, &message.instrument_id).await?;
        let new = NewSignature {
            instrument_id: message.instrument_id,
            document_hash: message.document_hash,
            signature: message.signature.to_vec(),
            document_uri: message.document_uri,
        };
        let signed = self.service.sign_decision(&context, new).await;
        let (instrument, decision, replayed) = signed.map_err(to_status)?;
        let answer = pb::SignIssueDecisionResponse {
            decision: Some(convert::issue_decision(&instrument, decision)),
        };
        Ok(answered(answer, replayed))
    }

    async fn activate_instrument(
        &self,
        request: Request<pb::ActivateInstrumentRequest>,
    ) -> Answer<pb::ActivateInstrumentResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        let (instrument_id, hash) = (&message.instrument_id, &message.document_hash);
        let activated = self
            .service
            .activate_instrument(&context, instrument_id, hash);
        let (instrument, replayed) = activated.await.map_err(to_status)?;
        let answer = pb::ActivateInstrumentResponse {
            instrument: Some(self.instrument_message(&instrument).await?),
        };
        Ok(answered(answer, replayed))
    }

    async fn get_issue_decision(
        &self,
        request: Request<pb::GetIssueDecisionRequest>,
    ) -> Answer<pb::GetIssueDecisionResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let found = self.service.decision(&message.instrument_id).await;
        let (instrument, mut decision) = found.map_err(to_status)?;
        if !caller.acts_for_any_user() {
            decision.activated_by.clear();
        }
        Ok(Response::new(pb::GetIssueDecisionResponse {
            decision: Some(convert::issue_decision(&instrument, decision)),
        }))
    }

    async fn update_instrument(
        &self,
        request: Request<pb::UpdateInstrumentRequest>,
    ) -> Answer<pb::UpdateInstrumentResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        let instrument_id = message.instrument_id.clone();
        self.require_issuer(&caller, &instrument_id).await?;
        let mut change = convert::instrument_change(message).map_err(to_status)?;
        change.may_end_halt = caller.is_service();
        let (instrument, replayed) = self
            .service
            .update_instrument(&context, &instrument_id, change)
            .await
            .map_err(to_status)?;
        let answer = pb::UpdateInstrumentResponse {
            instrument: Some(self.instrument_message(&instrument).await?),
        };
        Ok(answered(answer, replayed))
    }

    async fn issue_cfa_rub(
        &self,
        request: Request<pb::IssueCfaRubRequest>,
    ) -> Answer<pb::IssueCfaRubResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let user_id = convert::user_id("user_id", message.user_id).map_err(to_status)?;
        let amount = convert::roubles("amount", message.amount.as_ref()).map_err(to_status)?;
        let payment_id = convert::id("payment_id", message.payment_id).map_err(to_status)?;
        let result = self
            .service
            .issue_rub(&context, &user_id, amount, &payment_id, None)
            .await
            .map_err(to_status)?;
        Ok(answered(
            pb::IssueCfaRubResponse {
                operation: operation_of(&result),
            },
            result.replayed,
        ))
    }

    async fn redeem_cfa_rub(
        &self,
        request: Request<pb::RedeemCfaRubRequest>,
    ) -> Answer<pb::RedeemCfaRubResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let user_id = convert::user_id("user_id", message.user_id).map_err(to_status)?;
        caller.require_user(&user_id)?;
        let amount = convert::roubles("amount", message.amount.as_ref()).map_err(to_status)?;
        let payout_id = convert::payout_id("payout_id", message.payout_id).map_err(to_status)?;
        let result = self
            .service
            .redeem_rub(&context, &user_id, amount, &payout_id)
            .await
            .map_err(to_status)?;
        Ok(answered(
            pb::RedeemCfaRubResponse {
                operation: operation_of(&result),
            },
            result.replayed,
        ))
    }

    async fn subscribe(
        &self,
        request: Request<pb::SubscribeRequest>,
    ) -> Answer<pb::SubscribeResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        // An investor offers only own money.
        caller.require_user(&message.investor_id)?;
        let (instrument_id, units) = (&message.instrument_id, message.amount.as_ref());
        let payment = message.payment.as_ref();
        let new = NewOffer {
            side: OfferSide::Buy,
            amount: convert::amount_of("amount", instrument_id, units).map_err(to_status)?,
            payment_minor: convert::payment("payment", payment).map_err(to_status)?,
            expires_at_us: message.expires_at.as_ref().map(wire::timestamp_us),
            instrument_id: message.instrument_id,
            user_id: message.investor_id,
        };
        let (offer, decimals, replayed) = self.make_offer(&context, new).await?;
        let subscription = Some(convert::subscription(&offer, decimals));
        Ok(answered(pb::SubscribeResponse { subscription }, replayed))
    }

    async fn cancel_subscription(
        &self,
        request: Request<pb::CancelSubscriptionRequest>,
    ) -> Answer<pb::CancelSubscriptionResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let (side, id) = (OfferSide::Buy, &message.subscription_id);
        let cancelled = self.end_offer(&caller, &context, side, id).await;
        let (offer, decimals, replayed) = cancelled?;
        let subscription = Some(convert::subscription(&offer, decimals));
        let answer = pb::CancelSubscriptionResponse { subscription };
        Ok(answered(answer, replayed))
    }

    async fn close_placement(
        &self,
        request: Request<pb::ClosePlacementRequest>,
    ) -> Answer<pb::ClosePlacementResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let instrument_id = message.instrument_id.as_str();
        self.require_issuer(&caller, instrument_id).await?;
        let closed = self.service.close_placement(&context, instrument_id).await;
        let (placement, replayed) = closed.map_err(to_status)?;
        let instrument = self.service.require_instrument(instrument_id).await;
        let decimals = instrument.map_err(to_status)?.decimals;
        let placement = Some(convert::placement(&placement, decimals));
        Ok(answered(pb::ClosePlacementResponse { placement }, replayed))
    }

    async fn list_subscriptions(
        &self,
        request: Request<pb::ListSubscriptionsRequest>,
    ) -> Answer<pb::ListSubscriptionsResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let user = ("investor_id", message.investor_id.as_str());
        let (side, instrument_id) = (OfferSide::Buy, &message.instrument_id);
        let listed = self.offers(&caller, side, user, instrument_id, message.pagination);
        let (rows, pagination) = listed.await?;
        let rows = rows.iter();
        Ok(Response::new(pb::ListSubscriptionsResponse {
            subscriptions: rows.map(|(of, d)| convert::subscription(of, *d)).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn offer_units(
        &self,
        request: Request<pb::OfferUnitsRequest>,
    ) -> Answer<pb::OfferUnitsResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        // A holder offers only own units.
        caller.require_user(&message.holder_id)?;
        let (instrument_id, units) = (&message.instrument_id, message.amount.as_ref());
        let payment = message.payment.as_ref();
        let new = NewOffer {
            side: OfferSide::Sell,
            amount: convert::amount_of("amount", instrument_id, units).map_err(to_status)?,
            payment_minor: convert::payment("payment", payment).map_err(to_status)?,
            expires_at_us: message.expires_at.as_ref().map(wire::timestamp_us),
            instrument_id: message.instrument_id,
            user_id: message.holder_id,
        };
        let (offer, decimals, replayed) = self.make_offer(&context, new).await?;
        let offer = Some(convert::offer(&offer, decimals));
        Ok(answered(pb::OfferUnitsResponse { offer }, replayed))
    }

    async fn cancel_offer(
        &self,
        request: Request<pb::CancelOfferRequest>,
    ) -> Answer<pb::CancelOfferResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let (side, id) = (OfferSide::Sell, &message.offer_id);
        let cancelled = self.end_offer(&caller, &context, side, id).await;
        let (offer, decimals, replayed) = cancelled?;
        let offer = Some(convert::offer(&offer, decimals));
        Ok(answered(pb::CancelOfferResponse { offer }, replayed))
    }

    async fn list_offers(
        &self,
        request: Request<pb::ListOffersRequest>,
    ) -> Answer<pb::ListOffersResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let user = ("holder_id", message.holder_id.as_str());
        let (side, instrument_id) = (OfferSide::Sell, &message.instrument_id);
        let listed = self.offers(&caller, side, user, instrument_id, message.pagination);
        let (rows, pagination) = listed.await?;
        Ok(Response::new(pb::ListOffersResponse {
            offers: rows.iter().map(|(of, d)| convert::offer(of, *d)).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn issue_investment_cfa(
        &self,
        request: Request<pb::IssueInvestmentCfaRequest>,
    ) -> Answer<pb::IssueInvestmentCfaResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let issuer_id = self.require_issuer(&caller, &message.instrument_id).await?;
        let new = IssueInvestment {
            investor_id: convert::user_id("investor_id", message.investor_id).map_err(to_status)?,
            amount: convert::amount_of("amount", &message.instrument_id, message.amount.as_ref())
                .map_err(to_status)?,
            payment_minor: convert::payment("payment", message.payment.as_ref())
                .map_err(to_status)?,
            instrument_id: message.instrument_id,
            bookbuilding_id: message.bookbuilding_id,
        };
        // Without a payment this is a mint by hand.
        if new.payment_minor == 0 && caller.require_self(&issuer_id).is_err() {
            caller.require_approval("dfa.cfa.v1.CfaRegistryService/IssueInvestmentCfa")?;
        }
        let result = self
            .service
            .issue_investment(&context, new)
            .await
            .map_err(to_status)?;
        Ok(answered(
            pb::IssueInvestmentCfaResponse {
                operation: operation_of(&result),
            },
            result.replayed,
        ))
    }

    async fn redeem_investment_cfa(
        &self,
        request: Request<pb::RedeemInvestmentCfaRequest>,
    ) -> Answer<pb::RedeemInvestmentCfaResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let issuer_id = self.require_issuer(&caller, &message.instrument_id).await?;
        let new = RedeemInvestment {
            holder_id: convert::user_id("holder_id", message.holder_id).map_err(to_status)?,
            amount: convert::amount_of("amount", &message.instrument_id, message.amount.as_ref())
                .map_err(to_status)?,
            reason: reason(message.reason, RedemptionReason::Buyback)?,
            redemption_id: convert::redemption_reference("redemption_id", message.redemption_id)
                .map_err(to_status)?,
            instrument_id: message.instrument_id,
        };
        // A buyback spends the issuer's money; a matured issue is paid by its terms.
        let is_buyback = new.reason == RedemptionReason::Buyback;
        if is_buyback && caller.require_self(&issuer_id).is_err() {
            caller.require_approval("dfa.cfa.v1.CfaRegistryService/RedeemInvestmentCfa")?;
        }
        let result = self
            .service
            .redeem_investment(&context, new)
            .await
            .map_err(to_status)?;
        Ok(answered(
            pb::RedeemInvestmentCfaResponse {
                operation: operation_of(&result),
            },
            result.replayed,
        ))
    }

    async fn start_redemption(
        &self,
        request: Request<pb::StartRedemptionRequest>,
    ) -> Answer<pb::StartRedemptionResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        self.require_issuer(&caller, &message.instrument_id).await?;
        let reason = reason(message.reason, RedemptionReason::Maturity)?;
        let new = NewRedemption {
            record_date_us: message.record_date.as_ref().map(wire::timestamp_us),
            reason,
            may_be_early: caller.is_service(),
            instrument_id: message.instrument_id,
            wait: OPERATIONS_WAIT.min(call_wait()),
        };
        let started = self.service.start_redemption(&context, new).await;
        // Issues have no call terms, so an early redemption takes two persons (`design.md` 10).
        let is_early = matches!(started, Err(Error::Refused(Refusal::NotMatured)));
        if is_early && caller.require(&[Role::Operator]).is_ok() {
            caller.require_approval("dfa.cfa.v1.CfaRegistryService/StartRedemption")?;
        }
        // Trading has stopped for good: the approved call is repeated until no operation is open.
        let is_waiting = matches!(started, Err(Error::Refused(Refusal::OperationsOpen)));
        if is_waiting && caller.approval.is_some() {
            return Err(to_status(Error::Unavailable(
                "Redemption with open operations",
            )));
        }
        let (redemption, replayed) = started.map_err(to_status)?;
        let (redemption, pagination) = self.redemption(&caller, &redemption, None).await?;
        let answer = pb::StartRedemptionResponse {
            redemption: Some(redemption),
            pagination: Some(pagination),
        };
        Ok(answered(answer, replayed))
    }

    async fn get_redemption(
        &self,
        request: Request<pb::GetRedemptionRequest>,
    ) -> Answer<pb::GetRedemptionResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let found = if message.redemption_id.is_empty() {
            self.service
                .repo
                .redemption_of_instrument(&message.instrument_id)
                .await
        } else {
            let id = &message.redemption_id;
            self.service.repo.redemption_head(id).await
        };
        let redemption = found
            .map_err(to_status)?
            .ok_or_else(|| to_status(Refusal::RedemptionNotFound.into()))?;
        let read = self.redemption(&caller, &redemption, message.pagination);
        let (redemption, pagination) = read.await?;
        Ok(Response::new(pb::GetRedemptionResponse {
            redemption: Some(redemption),
            pagination: Some(pagination),
        }))
    }

    async fn list_coupons(
        &self,
        request: Request<pb::ListCouponsRequest>,
    ) -> Answer<pb::ListCouponsResponse> {
        let mut message = request.into_inner();
        rpc::context::record_read_context(message.context.take());
        let hash = page::filter_hash(&[&message.instrument_id]);
        let page = page::parse(message.pagination, hash)?;
        let (before_us, key) = page.bound();
        let limit = page.rows_limit();
        let repo = &self.service.repo;
        let listed = match message.instrument_id.as_str() {
            "" => {
                let (number, instrument_id) = coupon_bound(key);
                let bound = (before_us, instrument_id, number);
                repo.coupons(bound, limit).await
            }
            id => repo.coupons_of(id, coupon_bound(key).0, limit).await,
        };
        let mut rows = listed.map_err(to_status)?;
        let pagination = page.finish(&mut rows, |coupon| Key {
            created_us: coupon.pays_at_us,
            id: format!("{}:{}", coupon.number, coupon.instrument_id),
        });
        Ok(Response::new(pb::ListCouponsResponse {
            coupons: rows.iter().map(convert::coupon).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn restart_coupon(
        &self,
        request: Request<pb::RestartCouponRequest>,
    ) -> Answer<pb::RestartCouponResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        self.require_issuer(&caller, &message.instrument_id).await?;
        let (coupon, replayed) = self
            .service
            .restart_coupon(&context, &message.instrument_id, message.number)
            .await
            .map_err(to_status)?;
        let answer = pb::RestartCouponResponse {
            coupon: Some(convert::coupon(&coupon)),
        };
        Ok(answered(answer, replayed))
    }

    async fn transfer_cfa(
        &self,
        request: Request<pb::TransferCfaRequest>,
    ) -> Answer<pb::TransferCfaResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        if message.trade_id.is_empty() {
            caller.require_self(&message.from_user_id)?;
        } else {
            caller.require(&[Role::Service])?;
        }
        let payment = message.payment.unwrap_or_default();
        let new = NewTransfer {
            from_user_id: convert::user_id("from_user_id", message.from_user_id)
                .map_err(to_status)?,
            to_user_id: convert::user_id("to_user_id", message.to_user_id).map_err(to_status)?,
            amount: convert::amount_of("amount", &message.instrument_id, message.amount.as_ref())
                .map_err(to_status)?,
            payment_minor: convert::money_leg("payment.amount", payment.amount.as_ref())
                .map_err(to_status)?,
            fee_minor: convert::money_leg("payment.fee", payment.fee.as_ref())
                .map_err(to_status)?,
            instrument_id: message.instrument_id,
            trade_id: message.trade_id,
        };
        let result = self
            .service
            .transfer(&context, new)
            .await
            .map_err(to_status)?;
        Ok(answered(
            pb::TransferCfaResponse {
                operation: operation_of(&result),
            },
            result.replayed,
        ))
    }

    async fn settle_trades(
        &self,
        request: Request<pb::SettleTradesRequest>,
    ) -> Answer<pb::SettleTradesResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let batch_id = convert::id("batch_id", message.batch_id).map_err(to_status)?;
        let legs: Vec<_> = message
            .trades
            .into_iter()
            .map(convert::trade_leg)
            .collect::<Result<_, Error>>()
            .map_err(to_status)?;
        let settled = self.service.settle_trades(&context, &batch_id, &legs);
        let (batch, replayed) = settled.await.map_err(to_status)?;
        let batch = Some(convert::batch(batch));
        Ok(answered(pb::SettleTradesResponse { batch }, replayed))
    }

    async fn get_trade_batch(
        &self,
        request: Request<pb::GetTradeBatchRequest>,
    ) -> Answer<pb::GetTradeBatchResponse> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let wait = message.wait_ms.min(BATCH_WAIT_MS_MAX);
        let wait = Duration::from_millis(u64::from(wait)).min(call_wait());
        let batch = self
            .service
            .trade_batch(&message.batch_id, wait)
            .await
            .map_err(to_status)?;
        Ok(Response::new(pb::GetTradeBatchResponse {
            batch: Some(convert::batch(batch)),
        }))
    }

    async fn list_holders(
        &self,
        request: Request<pb::ListHoldersRequest>,
    ) -> Answer<pb::ListHoldersResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        rpc::context::record_read_context(message.context.take());
        Ok(Response::new(self.holders(&caller, message).await?))
    }

    async fn list_chain_balances(
        &self,
        request: Request<pb::ListChainBalancesRequest>,
    ) -> Answer<pb::ListChainBalancesResponse> {
        let mut message = request.into_inner();
        rpc::context::record_read_context(message.context.take());
        Ok(Response::new(self.chain_balances(message).await?))
    }

    async fn list_chain_breaks(
        &self,
        request: Request<pb::ListChainBreaksRequest>,
    ) -> Answer<pb::ListChainBreaksResponse> {
        let mut message = request.into_inner();
        rpc::context::record_read_context(message.context.take());
        Ok(Response::new(self.chain_breaks(message).await?))
    }

    async fn list_anchors(
        &self,
        request: Request<pb::ListAnchorsRequest>,
    ) -> Answer<pb::ListAnchorsResponse> {
        let mut message = request.into_inner();
        rpc::context::record_read_context(message.context.take());
        let mut pagination = message.pagination.unwrap_or_default();
        pagination.page_size = match pagination.page_size {
            0 => ANCHORS_MAX,
            size => size.min(ANCHORS_MAX),
        };
        let page = page::parse(Some(pagination), page::filter_hash(&[]))?;
        let (before, _) = page.bound();
        let rows = self.service.anchors(before, page.rows_limit()).await;
        let mut rows = rows.map_err(to_status)?;
        let pagination = page.finish(&mut rows, |(anchor, _)| Key {
            created_us: anchor.number,
            id: String::new(),
        });
        let anchors = rows.into_iter().map(|(anchor, on_chain)| pb::Anchor {
            number: anchor.number.unsigned_abs(),
            block: anchor.block.unsigned_abs(),
            record: anchor.record.unsigned_abs(),
            at: Some(wire::to_timestamp_us(anchor.at_us)),
            tx_hash: anchor.tx_hash,
            data: hex::encode(anchor.data),
            on_chain: hex::encode(on_chain),
        });
        Ok(Response::new(pb::ListAnchorsResponse {
            anchors: anchors.collect(),
            pagination: Some(pagination),
        }))
    }

    async fn accept_chain_break(
        &self,
        request: Request<pb::AcceptChainBreakRequest>,
    ) -> Answer<pb::AcceptChainBreakResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        let (answer, replayed) = self.accept_break(&context, &message).await?;
        Ok(answered(answer, replayed))
    }

    async fn lift_quarantine(
        &self,
        request: Request<pb::LiftQuarantineRequest>,
    ) -> Answer<pb::LiftQuarantineResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        let lifted =
            self.service
                .lift_quarantine(&context, &message.instrument_id, &message.reason);
        let (instrument, replayed) = lifted.await.map_err(to_status)?;
        let answer = pb::LiftQuarantineResponse {
            instrument: Some(self.instrument_message(&instrument).await?),
        };
        Ok(answered(answer, replayed))
    }

    async fn move_holders(
        &self,
        request: Request<pb::MoveHoldersRequest>,
    ) -> Answer<pb::MoveHoldersResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        let (id, reason) = (&message.instrument_id, &message.reason);
        let moved = self.service.move_holders(&context, id, reason).await;
        let (of, replayed) = moved.map_err(to_status)?;
        let is_stopped = self.service.is_stopped(&of);
        let answer = pb::MoveHoldersResponse {
            holder_move: Some(convert::holder_move(of, is_stopped)),
        };
        Ok(answered(answer, replayed))
    }

    async fn get_holder_move(
        &self,
        request: Request<pb::GetHolderMoveRequest>,
    ) -> Answer<pb::GetHolderMoveResponse> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let found = self.service.holder_move(&message.instrument_id).await;
        let of = found.map_err(to_status)?;
        let is_stopped = self.service.is_stopped(&of);
        Ok(Response::new(pb::GetHolderMoveResponse {
            holder_move: Some(convert::holder_move(of, is_stopped)),
        }))
    }

    async fn replay_chain_transfers(
        &self,
        request: Request<pb::ReplayChainTransfersRequest>,
    ) -> Answer<pb::ReplayChainTransfersResponse> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let replayed = self
            .service
            .replay_transfers(message.from_block)
            .await
            .map_err(to_status)?;
        Ok(Response::new(
            convert::chain_transfers(replayed).map_err(to_status)?,
        ))
    }

    async fn check_integrity(
        &self,
        request: Request<pb::CheckIntegrityRequest>,
    ) -> Answer<pb::CheckIntegrityResponse> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let algorithm = convert::hash_algorithm(message.algorithm).map_err(to_status)?;
        let integrity = self
            .service
            .check_integrity(message.block_number, &message.block_hash, algorithm)
            .await
            .map_err(to_status)?;
        Ok(Response::new(pb::CheckIntegrityResponse {
            valid: integrity.valid,
            computed_hash: integrity.computed_hash,
        }))
    }

    async fn get_supply(
        &self,
        request: Request<pb::GetSupplyRequest>,
    ) -> Answer<pb::GetSupplyResponse> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let instrument_id = if message.instrument_id.is_empty() {
            CFA_RUB.to_owned()
        } else {
            message.instrument_id
        };
        let (supply, block_number) = self
            .service
            .supply(&instrument_id)
            .await
            .map_err(to_status)?;
        Ok(Response::new(pb::GetSupplyResponse {
            instrument_id,
            total_supply: Some(wire::to_decimal(supply)),
            block_number,
        }))
    }

    async fn get_operation(
        &self,
        request: Request<pb::GetOperationRequest>,
    ) -> Answer<pb::GetOperationResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        Ok(Response::new(pb::GetOperationResponse {
            operation: Some(self.operation(&caller, &message.operation_id).await?),
        }))
    }

    async fn list_operations(
        &self,
        request: Request<pb::ListOperationsRequest>,
    ) -> Answer<pb::ListOperationsResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        rpc::context::record_read_context(message.context.take());
        Ok(Response::new(self.operations(&caller, message).await?))
    }

    async fn finalize_issuance(
        &self,
        request: Request<pb::FinalizeIssuanceRequest>,
    ) -> Answer<pb::FinalizeIssuanceResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        write_context(&caller, message.context)?;
        let finalized = self.service.finalize_issuance(&message.tx_hash).await;
        let finalized = finalized.map_err(to_status)?;
        let operation = Some(convert::operation(&finalized.operation));
        let answer = pb::FinalizeIssuanceResponse { operation };
        Ok(answered(answer, finalized.replayed))
    }

    async fn finalize_redemption(
        &self,
        request: Request<pb::FinalizeRedemptionRequest>,
    ) -> Answer<pb::FinalizeRedemptionResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        write_context(&caller, message.context)?;
        let finalized = self.service.finalize_redemption(&message.payout_id).await;
        let finalized = finalized.map_err(to_status)?;
        let operation = Some(convert::operation(&finalized.operation));
        let answer = pb::FinalizeRedemptionResponse { operation };
        Ok(answered(answer, finalized.replayed))
    }

    async fn list_suspended_deposits(
        &self,
        request: Request<pb::ListSuspendedDepositsRequest>,
    ) -> Answer<pb::ListSuspendedDepositsResponse> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let page = page::parse(
            message.pagination,
            page::filter_hash(&[&message.include_resolved.to_string()]),
        )?;
        let mut rows = self
            .service
            .repo
            .list_suspended(message.include_resolved, page.bound(), page.rows_limit())
            .await
            .map_err(to_status)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.payment_id.clone(),
        });
        Ok(Response::new(pb::ListSuspendedDepositsResponse {
            deposits: rows.iter().map(convert::deposit).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn resolve_suspended_deposit(
        &self,
        request: Request<pb::ResolveSuspendedDepositRequest>,
    ) -> Answer<pb::ResolveSuspendedDepositResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        let resolved = self
            .service
            .resolve_deposit(&context, &message.payment_id, message.refund)
            .await
            .map_err(to_status)?;
        let answer = pb::ResolveSuspendedDepositResponse {
            operation: operation_of(&resolved),
        };
        Ok(answered(answer, resolved.replayed))
    }

    async fn freeze_units(
        &self,
        request: Request<pb::FreezeUnitsRequest>,
    ) -> Answer<pb::FreezeUnitsResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let id = &message.instrument_id;
        let amount = match &message.amount {
            Some(_) => Some(convert::amount_of("amount", id, message.amount.as_ref())),
            None => None,
        };
        let new = NewFreeze {
            amount: amount.transpose().map_err(to_status)?,
            holder_id: convert::user_id("holder_id", message.holder_id).map_err(to_status)?,
            basis: convert::basis(message.basis).map_err(to_status)?,
            document: convert::document("document", message.document).map_err(to_status)?,
            instrument_id: message.instrument_id,
        };
        let frozen = self.service.freeze_units(&context, new).await;
        let (act, replayed) = frozen.map_err(to_status)?;
        let act = Some(self.act(&act).await?);
        Ok(answered(pb::FreezeUnitsResponse { act }, replayed))
    }

    async fn lift_freeze(
        &self,
        request: Request<pb::LiftFreezeRequest>,
    ) -> Answer<pb::LiftFreezeResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        let document = convert::document("document", message.document).map_err(to_status)?;
        let lifted = self
            .service
            .lift_freeze(&context, &message.act_id, &document);
        let (act, replayed) = lifted.await.map_err(to_status)?;
        let act = Some(self.act(&act).await?);
        Ok(answered(pb::LiftFreezeResponse { act }, replayed))
    }

    async fn force_transfer(
        &self,
        request: Request<pb::ForceTransferRequest>,
    ) -> Answer<pb::ForceTransferResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let (id, amount) = (&message.instrument_id, message.amount.as_ref());
        let new = NewForcedTransfer {
            amount: convert::amount_of("amount", id, amount).map_err(to_status)?,
            from_user_id: convert::user_id("from_user_id", message.from_user_id)
                .map_err(to_status)?,
            to_user_id: convert::user_id("to_user_id", message.to_user_id).map_err(to_status)?,
            basis: convert::basis(message.basis).map_err(to_status)?,
            document: convert::document("document", message.document).map_err(to_status)?,
            freeze_id: message.freeze_id,
            instrument_id: message.instrument_id,
        };
        let transferred = self.service.force_transfer(&context, new).await;
        let transferred = transferred.map_err(to_status)?;
        let operation = operation_of(&transferred);
        let answer = pb::ForceTransferResponse { operation };
        Ok(answered(answer, transferred.replayed))
    }

    async fn list_enforcement_acts(
        &self,
        request: Request<pb::ListEnforcementActsRequest>,
    ) -> Answer<pb::ListEnforcementActsResponse> {
        let message = request.into_inner();
        rpc::context::record_read_context(message.context);
        let holder_id = message.holder_id.as_str();
        let page = page::parse(message.pagination, page::filter_hash(&[holder_id]))?;
        let rows = self
            .service
            .repo
            .acts(holder_id, page.bound(), page.rows_limit());
        let mut rows = rows.await.map_err(to_status)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.act_id.clone(),
        });
        let mut acts = Vec::with_capacity(rows.len());
        let mut decimals: HashMap<String, u8> = HashMap::new();
        for row in rows {
            if let Entry::Vacant(unread) = decimals.entry(row.instrument_id.clone()) {
                unread.insert(self.instrument_decimals(&row.instrument_id).await?);
            }
            let of_units = decimals[&row.instrument_id];
            acts.push(convert::enforcement_act(&row, of_units));
        }
        Ok(Response::new(pb::ListEnforcementActsResponse {
            acts,
            pagination: Some(pagination),
        }))
    }

    async fn list_audit_records(
        &self,
        request: Request<pb::ListAuditRecordsRequest>,
    ) -> Answer<pb::ListAuditRecordsResponse> {
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
        let repo = &self.service.repo;
        let rows = repo.audit_records(filter, before, page.rows_limit()).await;
        let mut rows = rows.map_err(to_status)?;
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

    async fn issue_extract(
        &self,
        request: Request<pb::IssueExtractRequest>,
    ) -> Answer<pb::IssueExtractResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        // A holder gets only own extracts, and none for others.
        caller.require_user(&message.holder_id)?;
        let recipient = match message.recipient {
            0 => ExtractRecipient::Holder,
            code => ExtractRecipient::from_code(code)
                .ok_or_else(|| status::invalid_argument("recipient", "is not known"))?,
        };
        if recipient != ExtractRecipient::Holder && !caller.acts_for_any_user() {
            let problem = "must be HOLDER: staff issues extracts for others";
            return Err(status::invalid_argument("recipient", problem));
        }
        let format = match message.format {
            0 => ExtractFormat::Csv,
            code => ExtractFormat::from_code(code)
                .ok_or_else(|| status::invalid_argument("format", "must be CSV, TEXT or PDF"))?,
        };
        let document = match message.document.is_empty() {
            true => String::new(),
            false => convert::document("document", message.document).map_err(to_status)?,
        };
        let new = NewExtract {
            holder_id: convert::user_id("holder_id", message.holder_id).map_err(to_status)?,
            as_of_us: message.as_of.as_ref().map(wire::timestamp_us),
            format,
            recipient,
            document,
            instrument_id: message.instrument_id,
        };
        let issued = self.service.issue_extract(&context, new).await;
        let (extract, replayed) = issued.map_err(to_status)?;
        let extract = Some(convert::extract(extract));
        Ok(answered(pb::IssueExtractResponse { extract }, replayed))
    }

    async fn set_redemption_block(
        &self,
        request: Request<pb::SetRedemptionBlockRequest>,
    ) -> Answer<pb::SetRedemptionBlockResponse> {
        let caller = rpc::caller(&request)?.clone();
        let mut message = request.into_inner();
        let context = message.context.take();
        let context = context_with_digest(&caller, context, &message)?;
        // An operator may block a redemption. Compliance clears it by an approval (R089, D32).
        if !message.blocked {
            caller.require(&[Role::Compliance, Role::Service])?;
            caller.require_approval("dfa.cfa.v1.CfaRegistryService/SetRedemptionBlock")?;
        }
        let blocked = self
            .service
            .set_redemption_block(
                &context,
                &message.operation_id,
                message.blocked,
                &message.reason,
            )
            .await
            .map_err(to_status)?;
        let answer = pb::SetRedemptionBlockResponse {
            operation: operation_of(&blocked),
        };
        Ok(answered(answer, blocked.replayed))
    }

    async fn refund_redemption(
        &self,
        request: Request<pb::RefundRedemptionRequest>,
    ) -> Answer<pb::RefundRedemptionResponse> {
        let caller = rpc::caller(&request)?.clone();
        let message = request.into_inner();
        let context = write_context(&caller, message.context)?;
        let refunded =
            self.service
                .refund_redemption(&context, &message.operation_id, &message.reason);
        let refunded = refunded.await.map_err(to_status)?;
        let answer = pb::RefundRedemptionResponse {
            operation: operation_of(&refunded),
        };
        Ok(answered(answer, refunded.replayed))
    }
}

const _: () = assert!(
    InstrumentType::MoneyClaim.code() == proto::common::v1::InstrumentType::MoneyClaim as i32
);
