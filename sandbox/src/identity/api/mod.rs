//! `IdentityService` and its HTTP reads.

mod convert;
mod records;
mod reservations;
pub mod uses;

use std::sync::Arc;

use axum::{
    Router,
    extract::{Path, State},
    routing::get,
};
use events::{Event, Sqlite, Tx};
use proto::{
    common::v1 as common,
    identity::v1::{self as pb, identity_service_server::IdentityService},
};
use rpc::{
    Caller,
    context::{Once, answered},
    json::{HttpError, Json, resource},
    page::{self, Key},
    status::{already_exists, internal, invalid_argument, not_found},
};
use service_kit::Clock;
use tonic::{Request, Response, Status};
use types::{
    BusinessDay, Decimal, LimitType, SYSTEM_USER, UserId,
    address::{eip55, onchain_address},
};
use uuid::Uuid;

use crate::api::{begin, commit};

use self::convert::{
    account_of, amount, checked_account, hash_name, kyc_level, limit_amount, limit_type, money,
    profile, profile_for,
};
use self::records::{By, Change};
use super::{
    publish::{Kind, event},
    repo::{self, User},
    rules::{self, Defaults, Limit, ReservationState, TradingBasis},
};

/// Name of this service in health and audit records.
pub const SOURCE: &str = "identity";

/// The service; clones share the store.
#[derive(Clone)]
pub struct Api(Arc<Inner>);

struct Inner {
    db: Sqlite,
    defaults: Defaults,
    basis: TradingBasis,
    clock: Clock,
    health: rpc::Health,
}

impl Api {
    pub fn new(db: Sqlite, defaults: Defaults, basis: TradingBasis, clock: Clock) -> Api {
        Api(Arc::new(Inner {
            db,
            defaults,
            basis,
            clock,
            health: rpc::Health::new(SOURCE),
        }))
    }

    pub fn health(&self) -> rpc::Health {
        self.0.health.clone()
    }

    pub fn http(&self) -> Router {
        Router::new()
            .route("/identity/users/{user_id}", get(read_user))
            .route("/identity/limits/{user_id}", get(read_limits))
            .with_state(self.clone())
    }

    pub async fn close(&self) {
        self.0.db.close().await;
    }

    async fn user(&self, user_id: &str) -> Result<User, Status> {
        let found = repo::get(self.0.db.read(), user_id)
            .await
            .map_err(sql_status)?;
        found.ok_or_else(unknown_user)
    }

    async fn limit(&self, user_id: &str, limit_type: LimitType) -> Result<Limit, Status> {
        let own = repo::limit(self.0.db.read(), user_id, limit_type)
            .await
            .map_err(sql_status)?;
        Ok(own.unwrap_or_else(|| self.0.defaults.of(limit_type)))
    }

    async fn used(&self, user_id: &str, limit_type: LimitType) -> Result<Decimal, Status> {
        let period = self.period(limit_type);
        repo::used(self.0.db.read(), user_id, period, limit_type)
            .await
            .map_err(sql_status)
    }

    /// First day of the current period of a limit.
    fn period(&self, limit_type: LimitType) -> BusinessDay {
        rules::period(limit_type, BusinessDay::of(self.0.clock.now_us()))
    }

    async fn limits(&self, user_id: &str) -> Result<pb::GetLimitsResponse, Status> {
        let standing = self.user(user_id).await?.standing();
        let mut limits = Vec::new();
        let applying = LimitType::ALL.iter();
        for limit_type in applying.filter(|limit_type| standing.has_limit(**limit_type)) {
            let limit = self.limit(user_id, *limit_type).await?;
            let used = self.used(user_id, *limit_type).await?;
            limits.push(limit_use(*limit_type, &limit, used));
        }
        Ok(pb::GetLimitsResponse {
            user_id: user_id.to_owned(),
            limits,
        })
    }

    fn event(&self, kind: Kind, user_id: &str, reason: &str, correlation_id: &str) -> Event {
        let now_us = self.0.clock.now_us();
        event(kind, user_id, reason, correlation_id, now_us)
    }

    /// Changes a user, and appends the event and the audit record. Does neither if `act` changes
    /// nothing.
    async fn change_in_tx(
        &self,
        tx: &mut Tx,
        by: By<'_>,
        user_id: &str,
        reason: &str,
        act: impl FnOnce(&mut User) -> Kind,
    ) -> Result<pb::UserProfile, Status> {
        let found = repo::get(&mut **tx, user_id).await.map_err(sql_status)?;
        let mut user = found.ok_or_else(unknown_user)?;
        let before = user.clone();
        let kind = act(&mut user);
        if user != before {
            repo::save_in_tx(tx, &user).await.map_err(sql_status)?;
            let event = self.event(kind, user_id, reason, &by.context.correlation_id);
            events::outbox::append_in_tx(tx, &[event])
                .await
                .map_err(events_status)?;
            let (before, after) = (before.audit_text(), user.audit_text());
            let change = Change {
                action: kind.action(),
                user_id,
                before: &before,
                after: &after,
                reason,
            };
            self.record(tx, by, change).await?;
            tracing::info!(user_id, change = ?kind, reason, "user changed");
        }
        Ok(profile(&user))
    }
}

#[tonic::async_trait]
impl IdentityService for Api {
    async fn get_user_profile(
        &self,
        request: Request<pb::GetUserProfileRequest>,
    ) -> Result<Response<pb::GetUserProfileResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let ask = request.into_inner();
        caller.require_user(&ask.user_id)?;
        rpc::context::record_read_context(ask.context);
        let user = self.user(&ask.user_id).await?;
        Ok(Response::new(pb::GetUserProfileResponse {
            profile: Some(profile_for(&caller, &user)),
        }))
    }

    async fn list_users(
        &self,
        request: Request<pb::ListUsersRequest>,
    ) -> Result<Response<pb::ListUsersResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let page = page::parse(ask.pagination, page::filter_hash(&[]))?;
        let (created_at_us, id) = page.bound();
        let rows = repo::list(self.0.db.read(), created_at_us, id, page.rows_limit());
        let mut rows = rows.await.map_err(sql_status)?;
        let pagination = page.finish(&mut rows, |user| Key {
            created_us: user.created_at_us,
            id: user.user_id.clone(),
        });
        Ok(Response::new(pb::ListUsersResponse {
            users: rows.iter().map(|user| profile_for(&caller, user)).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn check_limits(
        &self,
        request: Request<pb::CheckLimitsRequest>,
    ) -> Result<Response<pb::CheckLimitsResponse>, Status> {
        rpc::caller(&request)?.require_user(&request.get_ref().user_id)?;
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let limit_type = limit_type(ask.limit_type)?;
        let mut amount = amount("amount", ask.amount.as_ref())?;
        if let Some(notional) = &ask.notional {
            let notional = convert::notional(notional)?;
            if limit_type == LimitType::Trading && self.0.basis == TradingBasis::Notional {
                amount = notional;
            }
        }
        let user = self.user(&ask.user_id).await?;
        let limit = self.limit(&ask.user_id, limit_type).await?;
        let used = self.used(&ask.user_id, limit_type).await?;
        let verdict = rules::check(user.standing(), limit_type, &limit, used, amount);
        tracing::info!(user_id = ask.user_id, limit_type = %limit_type, operation_type = ask.operation_type,
            amount = %amount, allowed = verdict.allowed.is_ok(), "limit checked");
        Ok(Response::new(pb::CheckLimitsResponse {
            allowed: verdict.allowed.is_ok(),
            reason: verdict.allowed.err(),
            remaining: Some(money(verdict.remaining)),
        }))
    }

    async fn reserve_limit(
        &self,
        request: Request<pb::ReserveLimitRequest>,
    ) -> Result<Response<pb::ReserveLimitResponse>, Status> {
        self.reserve(request.into_inner()).await
    }

    async fn confirm_limit(
        &self,
        request: Request<pb::ConfirmLimitRequest>,
    ) -> Result<Response<pb::ConfirmLimitResponse>, Status> {
        let ask = request.into_inner();
        let used = ask.amount.as_ref();
        let used = used.map(|used| amount("amount", Some(used))).transpose()?;
        let confirmed = ReservationState::Confirmed;
        let ended = self.end_reservation(ask.context, ask.reservation_id, confirmed, used);
        Ok(answered(pb::ConfirmLimitResponse {}, ended.await?))
    }

    async fn cancel_limit(
        &self,
        request: Request<pb::CancelLimitRequest>,
    ) -> Result<Response<pb::CancelLimitResponse>, Status> {
        let ask = request.into_inner();
        let cancelled = ReservationState::Cancelled;
        let ended = self.end_reservation(ask.context, ask.reservation_id, cancelled, None);
        Ok(answered(pb::CancelLimitResponse {}, ended.await?))
    }

    async fn check_sanctions(
        &self,
        request: Request<pb::CheckSanctionsRequest>,
    ) -> Result<Response<pb::CheckSanctionsResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let user = self.user(&ask.user_id).await?;
        let reason = if user.sanctioned {
            rules::SANCTIONS_HIT.to_owned()
        } else {
            String::new()
        };
        Ok(Response::new(pb::CheckSanctionsResponse {
            hit: user.sanctioned,
            reason,
        }))
    }

    async fn get_limits(
        &self,
        request: Request<pb::GetLimitsRequest>,
    ) -> Result<Response<pb::GetLimitsResponse>, Status> {
        rpc::caller(&request)?.require_user(&request.get_ref().user_id)?;
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        Ok(Response::new(self.limits(&ask.user_id).await?))
    }

    async fn create_user(
        &self,
        request: Request<pb::CreateUserRequest>,
    ) -> Result<Response<pb::CreateUserResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let user = new_user(ask, &context, self.0.clock.now_us())?;
        let mut tx = self.0.db.write().await.map_err(events_status)?;
        // T12: the key repeats the call only for the same user.
        let known = if user.generated {
            repo::generated_by(&mut *tx, &user.idempotency_key).await
        } else {
            repo::get(&mut *tx, &user.user_id).await
        };
        if let Some(stored) = known.map_err(sql_status)? {
            if stored.idempotency_key != user.idempotency_key {
                return Err(already_exists("USER_EXISTS", "User already exists"));
            }
            if stored.created_with != 0 && stored.created_with != user.created_with {
                rpc::context::note_difference("CreateUser", &user.idempotency_key);
            }
            let profile = Some(profile(&stored));
            return Ok(answered(pb::CreateUserResponse { profile }, true));
        }
        if repo::is_address_taken(&mut *tx, &user.onchain_address)
            .await
            .map_err(sql_status)?
        {
            return Err(already_exists(
                "ADDRESS_TAKEN",
                "On-chain address belongs to another user",
            ));
        }
        repo::save_in_tx(&mut tx, &user).await.map_err(sql_status)?;
        let created = self.event(Kind::Created, &user.user_id, "", &context.correlation_id);
        events::outbox::append_in_tx(&mut tx, &[created])
            .await
            .map_err(events_status)?;
        let change = Change {
            action: Kind::Created.action(),
            user_id: &user.user_id,
            before: "",
            after: &user.audit_text(),
            reason: "",
        };
        self.record(&mut tx, By::of(&caller, &context), change)
            .await?;
        tx.commit().await.map_err(events_status)?;
        tracing::info!(user_id = user.user_id, "user created");
        Ok(Response::new(pb::CreateUserResponse {
            profile: Some(profile(&user)),
        }))
    }

    async fn update_user(
        &self,
        request: Request<pb::UpdateUserRequest>,
    ) -> Result<Response<pb::UpdateUserResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let once = Once::of("UpdateUser", &caller, &context, &ask);
        let kyc = kyc_level(ask.kyc_status)?;
        let bank_account = ask.bank_account.map(checked_account).transpose()?;
        let mut tx = begin!(&self.0.db, &once);
        let stored = repo::get(&mut *tx, &ask.user_id)
            .await
            .map_err(sql_status)?;
        let stored = stored.ok_or_else(unknown_user)?;
        let moves_account = !stored.bank_account.is_empty()
            && (bank_account.as_ref()).is_some_and(|account| *account != stored.bank_account);
        let clears_sanctions = stored.sanctioned && ask.sanctioned == Some(false);
        // It ends the yearly limit of the user's purchases (F35).
        let qualifies = !stored.qualified_investor && ask.qualified_investor == Some(true);
        if moves_account || clears_sanctions || qualifies {
            caller.require_approval("dfa.identity.v1.IdentityService/UpdateUser")?;
        }
        let reason = "profile changed";
        let by = By::of(&caller, &context);
        let changed = self.change_in_tx(&mut tx, by, &ask.user_id, reason, |user| {
            user.kyc_level = kyc.unwrap_or(user.kyc_level);
            if let Some(account) = bank_account {
                user.bank_account = account;
            }
            user.qualified_investor = ask.qualified_investor.unwrap_or(user.qualified_investor);
            user.sanctioned = ask.sanctioned.unwrap_or(user.sanctioned);
            Kind::Updated
        });
        let profile = Some(changed.await?);
        let answer = pb::UpdateUserResponse { profile };
        commit(tx, &once, answer).await
    }

    async fn set_limit(
        &self,
        request: Request<pb::SetLimitRequest>,
    ) -> Result<Response<pb::SetLimitResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let once = Once::of("SetLimit", &caller, &context, &ask);
        let limit_type = limit_type(ask.limit_type)?;
        let daily = ask.daily_limit.as_ref().map(limit_amount).transpose()?;
        let mut tx = begin!(&self.0.db, &once);
        let user = repo::get(&mut *tx, &ask.user_id)
            .await
            .map_err(sql_status)?;
        user.ok_or_else(unknown_user)?;
        let own = repo::limit(&mut *tx, &ask.user_id, limit_type).await;
        let known = own.map_err(sql_status)?;
        let known = known.unwrap_or_else(|| self.0.defaults.of(limit_type));
        let limit = Limit {
            // An unset amount keeps the limit and changes only the text.
            daily: daily.unwrap_or(known.daily),
            refuse_with: ask.refuse_with,
        };
        if limit.is_above(&known) {
            caller.require_approval("dfa.identity.v1.IdentityService/SetLimit")?;
        }
        repo::set_limit_in_tx(&mut tx, &ask.user_id, limit_type, &limit)
            .await
            .map_err(sql_status)?;
        let reason = format!("{limit_type} limit changed");
        let updated = self.event(
            Kind::Updated,
            &ask.user_id,
            &reason,
            &context.correlation_id,
        );
        events::outbox::append_in_tx(&mut tx, &[updated])
            .await
            .map_err(events_status)?;
        if limit != known {
            let (before, after) = (known.audit_text(limit_type), limit.audit_text(limit_type));
            let change = Change {
                action: "limit.set",
                user_id: &ask.user_id,
                before: &before,
                after: &after,
                reason: "",
            };
            self.record(&mut tx, By::of(&caller, &context), change)
                .await?;
        }
        let period = self.period(limit_type);
        let used = repo::used(&mut *tx, &ask.user_id, period, limit_type).await;
        let answer = pb::SetLimitResponse {
            limit: Some(limit_use(limit_type, &limit, used.map_err(sql_status)?)),
        };
        commit(tx, &once, answer).await
    }

    async fn block_user(
        &self,
        request: Request<pb::BlockUserRequest>,
    ) -> Result<Response<pb::BlockUserResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let once = Once::of("BlockUser", &caller, &context, &ask);
        let mut tx = begin!(&self.0.db, &once);
        let by = By::of(&caller, &context);
        let changed = self.change_in_tx(&mut tx, by, &ask.user_id, &ask.reason, |user| {
            user.blocked.get_or_insert_with(|| ask.reason.clone());
            Kind::Blocked
        });
        let profile = Some(changed.await?);
        let answer = pb::BlockUserResponse { profile };
        commit(tx, &once, answer).await
    }

    async fn unblock_user(
        &self,
        request: Request<pb::UnblockUserRequest>,
    ) -> Result<Response<pb::UnblockUserResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let once = Once::of("UnblockUser", &caller, &context, &ask);
        let mut tx = begin!(&self.0.db, &once);
        let by = By::of(&caller, &context);
        let changed = self.change_in_tx(&mut tx, by, &ask.user_id, &ask.reason, |user| {
            user.blocked = None;
            Kind::Unblocked
        });
        let profile = Some(changed.await?);
        let answer = pb::UnblockUserResponse { profile };
        commit(tx, &once, answer).await
    }

    async fn list_audit_records(
        &self,
        request: Request<pb::ListAuditRecordsRequest>,
    ) -> Result<Response<pb::ListAuditRecordsResponse>, Status> {
        self.audit_records(request.into_inner()).await
    }
}

/// The user of a valid request.
fn new_user(
    ask: pb::CreateUserRequest,
    context: &rpc::Context,
    now_us: i64,
) -> Result<User, Status> {
    let created_with = rpc::context::digest(&ask);
    let generated = ask.user_id.is_empty();
    let user_id = if generated {
        Uuid::now_v7().to_string()
    } else {
        ask.user_id
    };
    if let Err(error) = UserId::new(&user_id) {
        return Err(invalid_argument("user_id", error.to_string()));
    }
    // Not in `UserId`: stored journals may have such ids. In a path they would be another resource.
    if user_id.contains(['/', '%']) {
        return Err(invalid_argument("user_id", "must not contain `/` or `%`"));
    }
    if user_id == SYSTEM_USER {
        return Err(invalid_argument("user_id", "is reserved"));
    }
    let kyc_level = kyc_level(ask.kyc_status)?.unwrap_or(common::KycStatus::None as i32);
    let bank_account = if ask.bank_account.is_empty() {
        account_of(&user_id)
    } else {
        checked_account(ask.bank_account)?
    };
    Ok(User {
        onchain_address: eip55(&onchain_address(&user_id)),
        user_id,
        kyc_level,
        bank_account,
        blocked: None,
        qualified_investor: ask.qualified_investor,
        sanctioned: false,
        full_name_hash: hash_name(&ask.full_name),
        idempotency_key: context.idempotency_key.clone(),
        generated,
        created_with,
        created_at_us: now_us,
    })
}

fn limit_use(limit_type: LimitType, limit: &Limit, used: Decimal) -> pb::LimitUse {
    pb::LimitUse {
        limit_type: limit_type.code(),
        daily_limit: Some(money(limit.daily)),
        used_today: Some(money(used)),
    }
}

async fn read_user(
    State(api): State<Api>,
    caller: Caller,
    Path(user_id): Path<String>,
) -> Result<Json, HttpError> {
    caller.require_user(&user_id)?;
    let user = api.user(&user_id).await?;
    let shown = profile_for(&caller, &user);
    Ok(resource(&shown, "dfa.identity.v1.UserProfile"))
}

async fn read_limits(
    State(api): State<Api>,
    caller: Caller,
    Path(user_id): Path<String>,
) -> Result<Json, HttpError> {
    caller.require_user(&user_id)?;
    let limits = api.limits(&user_id).await?;
    Ok(resource(&limits, "dfa.identity.v1.GetLimitsResponse"))
}

fn unknown_user() -> Status {
    not_found("USER_NOT_FOUND", "User not found")
}

fn sql_status(error: sqlx::Error) -> Status {
    internal(&error)
}

fn events_status(error: events::Error) -> Status {
    internal(&error)
}
