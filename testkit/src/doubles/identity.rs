//! Identity double: users as the test defines them.

use proto::common::v1::{KycStatus, LimitType};
use proto::convert::{money_minor, to_money};
use proto::identity::v1::identity_service_server::IdentityService;
use proto::identity::v1::*;
use tonic::{Request, Response, Status};

use super::{Peers, State, number, unanswered};

#[derive(Clone)]
pub struct Person {
    pub kyc: KycStatus,
    pub status: UserStatus,
    pub is_sanctioned: bool,
    /// Rest of the daily TRADING limit, in kopecks.
    pub trading_minor: i64,
    /// Reason with which every CheckLimits is refused; `None`: allowed.
    pub refuse_with: Option<String>,
}

/// A reservation of a day limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    pub user_id: String,
    pub limit_type: i32,
    pub kopecks: i64,
    /// `RESERVED`, `CONFIRMED` or `CANCELLED`.
    pub state: &'static str,
    /// Number of confirms and cancels.
    pub ends: u32,
}

impl Default for Person {
    fn default() -> Self {
        Self {
            kyc: KycStatus::Standard,
            status: UserStatus::Active,
            is_sanctioned: false,
            trading_minor: 1_000_000_000_000,
            refuse_with: None,
        }
    }
}

impl Peers {
    pub fn change(&self, user_id: &str, change: impl FnOnce(&mut Person)) {
        self.with(|state| change(state.people.entry(user_id.to_owned()).or_default()));
    }

    /// Limit checks since the last call.
    pub fn limit_questions(&self) -> Vec<CheckLimitsRequest> {
        self.with(|state| std::mem::take(&mut state.limit_questions))
    }
}

impl State {
    fn reserve(&mut self, ask: ReserveLimitRequest) -> Result<ReserveLimitResponse, Status> {
        if self.reservations_away {
            return Err(Status::unavailable("limits cannot be reserved"));
        }
        let kopecks = money_minor(ask.amount.as_ref()).unwrap_or_default();
        let used: i64 = self
            .reservations
            .values()
            .filter(|stored| stored.user_id == ask.user_id && stored.limit_type == ask.limit_type)
            .filter(|stored| stored.state != "CANCELLED")
            .map(|stored| stored.kopecks)
            .sum();
        let is_known = self.reservations.contains_key(&ask.reservation_id);
        let limit = self.day_limits.get(&ask.limit_type);
        let allowed = is_known || limit.is_none_or(|limit| used + kopecks <= *limit);
        if allowed && !is_known {
            let reservation = Reservation {
                user_id: ask.user_id,
                limit_type: ask.limit_type,
                kopecks,
                state: "RESERVED",
                ends: 0,
            };
            self.reservations.insert(ask.reservation_id, reservation);
        }
        Ok(ReserveLimitResponse {
            allowed,
            reason: (!allowed).then(|| "Daily limit exceeded".to_owned()),
            remaining: None,
        })
    }

    fn end(&mut self, reservation_id: &str, state: &'static str) -> Result<(), Status> {
        if self.reservations_away {
            return Err(Status::unavailable("reservations cannot be ended"));
        }
        let stored = self.reservations.get_mut(reservation_id);
        let stored = stored.ok_or_else(|| Status::not_found("Reservation not found"))?;
        if ![state, "RESERVED"].contains(&stored.state) {
            let ended = format!("Reservation is {}", stored.state);
            return Err(rpc::status::failed_precondition("RESERVATION_ENDED", ended));
        }
        stored.state = state;
        stored.ends += 1;
        Ok(())
    }

    fn person(&self, user_id: &str) -> Option<&Person> {
        self.people.get(user_id).or(self.stranger.as_ref())
    }
}

#[tonic::async_trait]
impl IdentityService for Peers {
    async fn get_user_profile(
        &self,
        request: Request<GetUserProfileRequest>,
    ) -> Result<Response<GetUserProfileResponse>, Status> {
        let user_id = request.into_inner().user_id;
        self.with(|state| {
            state.trail.push(format!("profile {user_id}"));
            let person = state.person(&user_id);
            let person =
                person.ok_or_else(|| rpc::status::not_found("USER_NOT_FOUND", "User not found"))?;
            let profile = Some(UserProfile {
                bank_account: format!("account of {user_id}"),
                kyc_status: person.kyc.into(),
                status: person.status.into(),
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
        let question = format!(
            "limits {} {} {} {}",
            request.user_id,
            limit.trim_start_matches("LIMIT_TYPE_"),
            number(&request.amount),
            operation.trim_start_matches("OPERATION_TYPE_"),
        );
        let (reason, gate) = self.with(|state| {
            let person = state.person(&request.user_id).cloned().unwrap_or_default();
            let reason = match person.status {
                UserStatus::Blocked => Some("User is blocked".to_owned()),
                _ => person.refuse_with.or_else(|| state.limit_refusal.clone()),
            };
            state.trail.push(question);
            state.limit_questions.push(request);
            (reason, state.limit_gate.clone())
        });
        if let Some(gate) = gate {
            // The gate has no permits: `acquire` returns when it is closed.
            drop(gate.acquire().await);
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
        let id = request.into_inner().reservation_id;
        self.with(|state| state.end(&id, "CONFIRMED"))?;
        Ok(Response::new(ConfirmLimitResponse {}))
    }

    async fn cancel_limit(
        &self,
        request: Request<CancelLimitRequest>,
    ) -> Result<Response<CancelLimitResponse>, Status> {
        let id = request.into_inner().reservation_id;
        self.with(|state| state.end(&id, "CANCELLED"))?;
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
                hit: state
                    .person(&user_id)
                    .is_some_and(|person| person.is_sanctioned),
                reason: "on the list".into(),
            }))
        })
    }

    async fn get_limits(
        &self,
        request: Request<GetLimitsRequest>,
    ) -> Result<Response<GetLimitsResponse>, Status> {
        let user_id = request.into_inner().user_id;
        if self.with(|state| state.limits_away.contains(&user_id)) {
            return Err(Status::unavailable("limits cannot be read"));
        }
        let left = self.with(|state| {
            state
                .person(&user_id)
                .map_or(0, |person| person.trading_minor)
        });
        Ok(Response::new(GetLimitsResponse {
            user_id,
            limits: vec![LimitUse {
                limit_type: LimitType::Trading.into(),
                daily_limit: Some(to_money(left + 500)),
                used_today: Some(to_money(500)),
            }],
        }))
    }

    unanswered!(
        list_users: ListUsersRequest => ListUsersResponse,
        create_user: CreateUserRequest => CreateUserResponse,
        update_user: UpdateUserRequest => UpdateUserResponse,
        set_limit: SetLimitRequest => SetLimitResponse,
        block_user: BlockUserRequest => BlockUserResponse,
        unblock_user: UnblockUserRequest => UnblockUserResponse,
    );
}
