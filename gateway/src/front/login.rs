//! Checks a login: credential, permission to trade, budget, and the last message number that the
//! client has. The front then journals the opening of the session.

use std::net::IpAddr;
use std::sync::Arc;

use rpc::{Context, Role};
use tonic::{Code, Status};
use types::{Id128, Minor, StpGroup, UserId, UserIx, derived};
use wire::{DisconnectCode, LOGIN_CANCEL_ON_DISCONNECT, LOGIN_FROM_NOW, Login};

use super::desk::Desk;
use crate::budget::Budget;
use crate::funding;
use crate::market::{Asset, Market};

/// A login that passed every check.
pub struct Admitted {
    pub user: UserIx,
    pub user_id: Arc<str>,
    /// Identifies the session across connections.
    pub key: Id128,
    pub stp_group: Option<StpGroup>,
    pub cancel_on_disconnect: bool,
    pub budget: Arc<Budget>,
    /// Number of the last message that the client has.
    pub last_sequence: u64,
    /// The client does not want earlier messages.
    pub from_now: bool,
    /// Longest silence on either side, in milliseconds.
    pub heartbeat_ms: u32,
}

/// Checks a login. On error the client gets the code, and the session is unchanged.
pub async fn admit(
    desk: &Desk,
    address: IpAddr,
    login: &Login,
) -> Result<Admitted, DisconnectCode> {
    let market = &desk.market;
    check_form(market, login)?;
    let (name, failures_max) = (login.session_name.as_str(), market.config.failed_logins_max);
    // The address is checked here too, since a lock-out does not close open connections.
    let is_locked_out = |name| desk.failures.is_locked_out(address, name, failures_max);
    if is_locked_out(None) || is_locked_out(Some(name)) {
        return Err(DisconnectCode::TooManyLogins);
    }
    let caller = desk.auth.authenticate(login.token.as_str()).map_err(|_| {
        desk.failures.record(address, name);
        DisconnectCode::Credentials
    })?;
    caller
        .require(&Role::TRADING)
        .map_err(|_| DisconnectCode::Role)?;
    let user_id = caller.user_id.ok_or(DisconnectCode::Role)?;
    let mut context = Context::new("market");
    context.user_id = user_id.clone();
    let user = check_user(desk, &context, &user_id).await?;
    let key = derived::session_key(&user_id, login.session_name.as_str());
    check_session(market, user, key, login).await?;
    let budget = market.budgets.of_user(user);
    if budget.is_kyc_too_low() {
        // The profile that was just checked may be newer: read the level again.
        budget.invalidate();
    }
    if budget.is_stale(market.day()) {
        let refreshed = market.refresh_budget(&context, user, &user_id).await;
        refreshed.map_err(|status| dependency_failed("budget", &status))?;
    }
    // The level may have dropped since the check of the profile. From here on events of identity
    // reach the session: the replica has the user's binding.
    if budget.is_kyc_too_low() {
        return Err(DisconnectCode::KycLevel);
    }
    if login.money_hold_minor > 0 {
        let target = Minor(login.money_hold_minor);
        funding::open_or_set(market, &context, &user_id, &Asset::MONEY, target)
            .await
            .map_err(|status| {
                tracing::info!(user_id, %status, "trading hold of a login refused");
                DisconnectCode::TradingHold
            })?;
    }
    let longest = market.config.heartbeat_ms.max(HEARTBEAT_MS_MIN);
    Ok(Admitted {
        user,
        user_id: user_id.into(),
        key,
        stp_group: (login.stp_group != 0).then(|| StpGroup::explicit(login.stp_group)),
        cancel_on_disconnect: login.flags & LOGIN_CANCEL_ON_DISCONNECT != 0,
        budget,
        last_sequence: login.last_sequence,
        from_now: login.flags & LOGIN_FROM_NOW != 0,
        heartbeat_ms: match login.heartbeat_ms {
            0 => longest,
            asked => asked.clamp(HEARTBEAT_MS_MIN, longest),
        },
    })
}

/// Shortest heartbeat interval that a client may ask for.
const HEARTBEAT_MS_MIN: u32 = 100;

fn check_form(market: &Market, login: &Login) -> Result<(), DisconnectCode> {
    let known_flags = LOGIN_CANCEL_ON_DISCONNECT | LOGIN_FROM_NOW;
    let name = login.session_name.as_str();
    let is_invalid = login.flags & !known_flags != 0
        || name.is_empty()
        || name.chars().any(char::is_control)
        || (login.stp_group != 0 && !market.config.stp_groups)
        || login.stp_group >= u32::MAX >> 1
        || login.money_hold_minor < 0;
    match is_invalid {
        true => Err(DisconnectCode::BadField),
        false => Ok(()),
    }
}

/// Checks the user's rate and profile. Returns the user's index.
async fn check_user(
    desk: &Desk,
    context: &Context,
    user_id: &str,
) -> Result<UserIx, DisconnectCode> {
    let market = &desk.market;
    let id = UserId::new(user_id).ok();
    if let Some(user) = id.and_then(|id| market.replica.names().user_ix(&id)) {
        // Before the profile, which may be a call of identity.
        check_rate(desk, user)?;
        check_profile(market, context, user_id).await?;
        return Ok(user);
    }
    check_profile(market, context, user_id).await?;
    let user = market.bind_user(user_id).await;
    let user = user.map_err(|status| dependency_failed("binding", &status))?;
    check_rate(desk, user)?;
    Ok(user)
}

fn check_rate(desk: &Desk, user: UserIx) -> Result<(), DisconnectCode> {
    match desk.admits_login(user) {
        true => Ok(()),
        false => Err(DisconnectCode::TooManySessions),
    }
}

async fn check_profile(
    market: &Market,
    context: &Context,
    user_id: &str,
) -> Result<(), DisconnectCode> {
    let profile = market.identity.profile(context, user_id).await;
    let profile = profile.map_err(|status| match status.code() {
        Code::NotFound => DisconnectCode::Credentials,
        _ => dependency_failed("identity", &status),
    })?;
    if !profile.is_standard {
        return Err(DisconnectCode::KycLevel);
    }
    match profile.is_blocked {
        true => Err(DisconnectCode::UserBlocked),
        false => Ok(()),
    }
}

/// Checks that the session has the client's last message, and that it exists or may be created.
/// Both are checked again at the opening, because sessions may be forgotten or created meanwhile.
async fn check_session(
    market: &Market,
    user: UserIx,
    key: Id128,
    login: &Login,
) -> Result<(), DisconnectCode> {
    let known = market.state(|state| {
        let admission = state.core().admission();
        let session = admission
            .session_ix(key)
            .and_then(|ix| admission.session(ix));
        let user = admission.user(user);
        let may_add = user.is_none_or(|user| user.sessions < admission.bounds(user).sessions);
        (session.map(|session| session.last_number), may_add)
    });
    let (last_number, may_add) = known
        .await
        .map_err(|status| dependency_failed("replica", &status))?;
    let from_now = login.flags & LOGIN_FROM_NOW != 0;
    if !from_now && login.last_sequence > last_number.unwrap_or(0) {
        return Err(DisconnectCode::SequenceAhead);
    }
    if last_number.is_none() && !may_add {
        return Err(DisconnectCode::TooManySessions);
    }
    Ok(())
}

fn dependency_failed(what: &str, status: &Status) -> DisconnectCode {
    tracing::warn!(what, %status, "login refused: dependency unavailable");
    DisconnectCode::NotReady
}
