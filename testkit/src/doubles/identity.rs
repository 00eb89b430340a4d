//! Identity double: users as the test defines them.

use proto::common::v1::{KycStatus, LimitType};
use proto::convert::{money_minor, to_money};
use proto::identity::v1::identity_service_server::IdentityService;
use proto::identity::v1::*;
use tonic::{Request, Response, Status};

use super::{ServiceDoubles, State, number, unimplemented_methods};

#[derive(Clone)]
pub struct TestUser {
    pub kyc: KycStatus,
    pub status: UserStatus,
    pub is_sanctioned: bool,
    /// Remaining daily TRADING limit, in kopecks.
    pub trading_remaining_minor: i64,
    /// Remaining yearly INVESTMENT limit, in kopecks (F35). `None`: a qualified investor.
    pub investment_remaining_minor: Option<i64>,
    /// Reason with which every CheckLimits is refused. `None`: no refusal of its own; see
    /// `State::limit_refusal`.
    pub refuse_with: Option<String>,
}

/// A reservation of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub user_id: String,
    pub limit_type: i32,
    pub amount_minor: i64,
    /// `RESERVED`, `CONFIRMED` or `CANCELLED`.
    pub state: &'static str,
    /// Number of successful confirm and cancel calls.
    pub end_calls: u32,
}

impl Default for TestUser {
    fn default() -> Self {
        Self {
            kyc: KycStatus::Standard,
            status: UserStatus::Active,
            is_sanctioned: false,
            trading_remaining_minor: 1_000_000_000_000,
            investment_remaining_minor: None,
            refuse_with: None,
        }
    }
}

impl ServiceDoubles {
    /// Changes a user; creates it with the defaults if absent.
    pub fn upsert_user(&self, user_id: &str, change: impl FnOnce(&mut TestUser)) {
        self.with(|state| change(state.users.entry(user_id.to_owned()).or_default()));
    }

    /// Returns and clears the recorded CheckLimits requests.
    pub fn take_limit_checks(&self) -> Vec<CheckLimitsRequest> {
        self.with(|state| std::mem::take(&mut state.limit_checks))
    }
}

impl State {
    fn reserve(&mut self, request: ReserveLimitRequest) -> Result<ReserveLimitResponse, Status> {
        if self.reservations_unavailable {
            return Err(Status::unavailable("limits cannot be reserved"));
        }
        let amount_minor = money_minor(request.amount.as_ref()).unwrap_or_default();
        let used: i64 = self
            .reservations
            .values()
            .filter(|stored| {
                stored.user_id == request.user_id && stored.limit_type == request.limit_type
            })
            .filter(|stored| stored.state != "CANCELLED")
            .map(|stored| stored.amount_minor)
            .sum();
        let known = self.reservations.get(&request.reservation_id);
        if known.is_some_and(|known| known.state == "CANCELLED") {
            return Ok(ReserveLimitResponse {
                allowed: false,
                reason: Some("Reservation was cancelled".to_owned()),
                remaining: None,
            });
        }
        let is_known = known.is_some();
        let limit = self.daily_limits.get(&request.limit_type);
        let allowed = is_known || limit.is_none_or(|limit| used + amount_minor <= *limit);
        if allowed && !is_known {
            let reservation = Reservation {
                user_id: request.user_id,
                limit_type: request.limit_type,
                amount_minor,
                state: "RESERVED",
                end_calls: 0,
            };
            self.reservations
                .insert(request.reservation_id, reservation);
        }
        Ok(ReserveLimitResponse {
            allowed,
            reason: (!allowed).then(|| "Daily limit exceeded".to_owned()),
            remaining: None,
        })
    }

    /// `used`: the confirmed part in kopecks.
    fn end(
        &mut self,
        reservation_id: &str,
        state: &'static str,
        used: Option<i64>,
    ) -> Result<(), Status> {
        if self.reservations_unavailable {
            return Err(Status::unavailable("reservations cannot be ended"));
        }
        let stored = self.reservations.get_mut(reservation_id);
        let stored = stored.ok_or_else(|| Status::not_found("Reservation not found"))?;
        if ![state, "RESERVED"].contains(&stored.state) {
            let ended = format!("Reservation is {}", stored.state);
            return Err(rpc::status::failed_precondition("RESERVATION_ENDED", ended));
        }
        stored.state = state;
        stored.amount_minor = used.unwrap_or(stored.amount_minor);
        stored.end_calls += 1;
        Ok(())
    }

    fn user(&self, user_id: &str) -> Option<&TestUser> {
        self.users.get(user_id).or(self.default_user.as_ref())
    }
}

#[tonic::async_trait]
impl IdentityService for ServiceDoubles {
    async fn get_user_profile(
        &self,
        request: Request<GetUserProfileRequest>,
    ) -> Result<Response<GetUserProfileResponse>, Status> {
        let user_id = request.into_inner().user_id;
        let latch = self.with(|state| state.profile_latches.get(&user_id).cloned());
        if let Some(latch) = latch {
            drop(latch.acquire().await);
        }
        self.with(|state| {
            state.trail.push(format!("profile {user_id}"));
            let user = state.user(&user_id);
            let user =
                user.ok_or_else(|| rpc::status::not_found("USER_NOT_FOUND", "User not found"))?;
            let profile = Some(UserProfile {
                bank_account: format!("account of {user_id}"),
                kyc_status: user.kyc.into(),
                status: user.status.into(),
                qualified_investor: user.investment_remaining_minor.is_none(),
                user_id,
                ..Default::default()
            });
            Ok(Response::new(GetUserProfileResponse { profile }))
        })
    }

    async fn check_limits(
        &self,
        request: Request<CheckLimitsRequest>,
    ) -> Result<Response<CheckLimitsResponse>, Status> {
        let request = request.into_inner();
        let (limit, operation) = (
            request.limit_type().as_str_name(),
            request.operation_type().as_str_name(),
        );
        let call = format!(
            "limits {} {} {} {}",
            request.user_id,
            limit.trim_start_matches("LIMIT_TYPE_"),
            number(&request.amount),
            operation.trim_start_matches("OPERATION_TYPE_"),
        );
        let (reason, latch) = self.with(|state| {
            let user = state.user(&request.user_id).cloned().unwrap_or_default();
            let reason = match user.status {
                UserStatus::Blocked => Some("User is blocked".to_owned()),
                _ => user.refuse_with.or_else(|| state.limit_refusal.clone()),
            };
            state.trail.push(call);
            state.limit_checks.push(request);
            (reason, state.limit_latch.clone())
        });
        if let Some(latch) = latch {
            // Waits until the test closes the semaphore, which has no permits.
            drop(latch.acquire().await);
        }
        Ok(Response::new(CheckLimitsResponse {
            allowed: reason.is_none(),
            reason,
            remaining: None,
        }))
    }

    async fn reserve_limit(
        &self,
        request: Request<ReserveLimitRequest>,
    ) -> Result<Response<ReserveLimitResponse>, Status> {
        let reserved = self.with(|state| state.reserve(request.into_inner()));
        reserved.map(Response::new)
    }

    async fn confirm_limit(
        &self,
        request: Request<ConfirmLimitRequest>,
    ) -> Result<Response<ConfirmLimitResponse>, Status> {
        let request = request.into_inner();
        let used = request.amount.as_ref();
        let used = used.map(|used| money_minor(Some(used)).unwrap_or_default());
        self.with(|state| state.end(&request.reservation_id, "CONFIRMED", used))?;
        Ok(Response::new(ConfirmLimitResponse {}))
    }

    async fn cancel_limit(
        &self,
        request: Request<CancelLimitRequest>,
    ) -> Result<Response<CancelLimitResponse>, Status> {
        let id = request.into_inner().reservation_id;
        self.with(|state| state.end(&id, "CANCELLED", None))?;
        Ok(Response::new(CancelLimitResponse {}))
    }

    async fn check_sanctions(
        &self,
        request: Request<CheckSanctionsRequest>,
    ) -> Result<Response<CheckSanctionsResponse>, Status> {
        let user_id = request.into_inner().user_id;
        self.with(|state| {
            state.trail.push(format!("sanctions {user_id}"));
            Ok(Response::new(CheckSanctionsResponse {
                hit: state.user(&user_id).is_some_and(|user| user.is_sanctioned),
                reason: "on the list".into(),
            }))
        })
    }

    async fn get_limits(
        &self,
        request: Request<GetLimitsRequest>,
    ) -> Result<Response<GetLimitsResponse>, Status> {
        let user_id = request.into_inner().user_id;
        self.with(|state| *state.limit_reads.entry(user_id.clone()).or_default() += 1);
        if self.with(|state| state.limits_unavailable.contains(&user_id)) {
            return Err(Status::unavailable("limits cannot be read"));
        }
        let (left, of_year) = self.with(|state| {
            let user = state.user(&user_id);
            let left = user.map_or(0, |user| user.trading_remaining_minor);
            (left, user.and_then(|user| user.investment_remaining_minor))
        });
        let mut limits = vec![LimitUse {
            limit_type: LimitType::Trading.into(),
            daily_limit: Some(to_money(left + 500)),
            used_today: Some(to_money(500)),
        }];
        limits.extend(of_year.map(|left| LimitUse {
            limit_type: LimitType::Investment.into(),
            daily_limit: Some(to_money(left + 300)),
            used_today: Some(to_money(300)),
        }));
        Ok(Response::new(GetLimitsResponse { user_id, limits }))
    }

    unimplemented_methods!(
        list_users: ListUsersRequest => ListUsersResponse,
        create_user: CreateUserRequest => CreateUserResponse,
        update_user: UpdateUserRequest => UpdateUserResponse,
        set_limit: SetLimitRequest => SetLimitResponse,
        block_user: BlockUserRequest => BlockUserResponse,
        unblock_user: UnblockUserRequest => UnblockUserResponse,
        list_audit_records: ListAuditRecordsRequest => ListAuditRecordsResponse,
    );
}
