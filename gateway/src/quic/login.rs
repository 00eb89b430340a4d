//! From a credential to an opened session: who is it, may he trade, with how much; is the number he has one that was sent; then the journalled
//! `OpenSession`. And the other end: the journalled `CloseSession` of a session that no connection has.
//!
//! Both happen in the session's turn, so the journal's last word about a session is always about the connection that has it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use admission::{Request, SessionRequest};
use rpc::{Context, Role};
use sequencer::NotTaken;
use tokio::sync::OwnedMutexGuard;
use tonic::{Code, Status};
use types::{Command, Id128, Minor, RejectReason, Sequence, SessionIx, StpGroup, UserIx, derived};
use wire::{DisconnectCode, LOGIN_CANCEL_ON_DISCONNECT, LOGIN_FROM_NOW, Login};

use super::channel::Channel;
use super::server::Shared;
use crate::funding;
use crate::market::{Asset, Market, now_ns};
use crate::streams::Attach;
use crate::throttle::Throttle;

/// How long to wait before a busy trading path is told of a closing again.
const BUSY_RETRY: Duration = Duration::from_millis(10);

/// A session that the journal has opened, to be attached while the turn is held.
pub struct Opened {
    pub live: Channel,
    pub attach: Attach,
    pub turn: OwnedMutexGuard<()>,
}

/// Opens a session for a channel. The error is what the client is told; the journal then holds the session as it was before.
pub async fn open(
    shared: &Arc<Shared>,
    address: IpAddr,
    channel: u16,
    login: &Login,
) -> Result<Opened, DisconnectCode> {
    let market = &shared.market;
    if shared.is_shut_out(address) {
        return Err(DisconnectCode::TooManyLogins);
    }
    let known_flags = LOGIN_CANCEL_ON_DISCONNECT | LOGIN_FROM_NOW;
    if login.flags & !known_flags != 0
        || login.session_name.as_str().is_empty()
        || (login.stp_group != 0 && !market.config.stp_groups)
        || login.stp_group >= u32::MAX >> 1
        || login.money_hold_minor < 0
    {
        return Err(DisconnectCode::BadField);
    }
    let caller = shared
        .auth
        .authenticate(login.token.as_str())
        .map_err(|_| {
            shared.login_failed(address);
            DisconnectCode::Credentials
        })?;
    caller
        .require(&[Role::Trader, Role::Investor])
        .map_err(|_| DisconnectCode::Role)?;
    let user_id = caller.user_id.ok_or(DisconnectCode::Role)?;

    let mut context = Context::new("market");
    context.user_id = user_id.clone();
    let profile =
        market
            .identity
            .profile(&context, &user_id)
            .await
            .map_err(|status| match status.code() {
                Code::NotFound => DisconnectCode::Credentials,
                _ => failed("identity", &status),
            })?;
    if !profile.is_standard {
        return Err(DisconnectCode::KycLevel);
    }
    if profile.is_blocked {
        return Err(DisconnectCode::UserBlocked);
    }
    let user = market
        .bind_user(&user_id)
        .await
        .map_err(|status| failed("binding", &status))?;
    if !shared.admit_login(user) {
        return Err(DisconnectCode::TooManySessions);
    }
    let key = derived::session_key(&user_id, login.session_name.as_str());
    // Numbers only grow: what is not ahead now will not be.
    check_place(market, user, key, login)?;
    let budget = market.budgets.of(user);
    if budget.is_stale(admission::moscow_day(now_ns())) {
        market
            .refresh_budget(&context, user, &user_id)
            .await
            .map_err(|status| failed("budget", &status))?;
    }
    if login.money_hold_minor > 0 {
        let target = Minor(login.money_hold_minor);
        funding::open_or_set(market, &context, &user_id, &Asset::MONEY, target)
            .await
            .map_err(|status| {
                tracing::info!(user_id, %status, "trading hold asked for at login refused");
                DisconnectCode::TradingHold
            })?;
    }

    let turn = market.sessions.lock(key).await;
    check_place(market, user, key, login)?;
    let cancel_on_disconnect = login.flags & LOGIN_CANCEL_ON_DISCONNECT != 0;
    let request = SessionRequest {
        key,
        user,
        stp_group: (login.stp_group != 0).then(|| StpGroup::explicit(login.stp_group)),
        cancel_on_disconnect,
    };
    let record = match market.ask(Request::OpenSession(request)).await {
        Ok(record) => record,
        // The self-trade group is another member's.
        Err(NotTaken::Refused(reject)) if reject.reason == RejectReason::NotOwner => {
            return Err(DisconnectCode::BadField);
        }
        Err(NotTaken::Refused(reject)) => {
            tracing::error!(%reject, "admission refused to open a session");
            return Err(DisconnectCode::Internal);
        }
        Err(_) => return Err(DisconnectCode::NotReady),
    };
    let Command::OpenSession(opened) = record.command.command else {
        unreachable!("an opening is journalled as one");
    };
    if let Err(status) = market.durable(record.command.sequence).await {
        return Err(failed("journal", &status)); // It takes no closing either.
    }
    // Everything before the opening is in the streams then, the last client sequence included.
    told(market, opened.session, record.command.sequence).await?;
    let heartbeat_ms = match login.heartbeat_ms {
        0 => market.config.heartbeat_ms,
        asked => asked.clamp(100, market.config.heartbeat_ms.max(100)),
    };
    let attach = Attach {
        session: opened.session,
        channel,
        last_sequence: login.last_sequence,
        from_now: login.flags & LOGIN_FROM_NOW != 0,
        throttle_per_s: market.config.throttle_per_s,
        heartbeat_ms,
        time_ns: now_ns(),
    };
    let live = Channel {
        session: opened.session,
        claim: 0,
        user,
        user_id,
        key,
        stp_group: opened.stp_group,
        cancel_on_disconnect,
        throttle: Throttle::new(market.config.throttle_per_s, now_ns()),
        budget,
        hold_pending: Arc::default(),
    };
    Ok(Opened { live, attach, turn })
}

/// Returns when the streams have the record that opened the session, which is closed where they never will.
async fn told(
    market: &Market,
    session: SessionIx,
    sequence: Sequence,
) -> Result<(), DisconnectCode> {
    let Err(status) = market.told(sequence).await else {
        return Ok(());
    };
    close_if_left(market, session).await;
    Err(failed("replica", &status))
}

/// A number that was sent, of a session that is there or may be made.
fn check_place(
    market: &Market,
    user: UserIx,
    key: Id128,
    login: &Login,
) -> Result<(), DisconnectCode> {
    let known = market.streams.session(key);
    let from_now = login.flags & LOGIN_FROM_NOW != 0;
    if !from_now && login.last_sequence > known.map_or(0, |(_, last)| last) {
        return Err(DisconnectCode::SequenceAhead);
    }
    let sessions_max = market.config.sessions_per_user_max as usize;
    if known.is_none() && market.streams.sessions_of(user).len() >= sessions_max {
        return Err(DisconnectCode::TooManySessions);
    }
    Ok(())
}

/// Tells the journal that nobody has a session any more, unless somebody has. The caller has the session's turn.
pub async fn close_if_left(market: &Market, session: SessionIx) {
    if market.streams.is_live(session) {
        return;
    }
    loop {
        match market.ask(Request::CloseSession(session)).await {
            Ok(_) | Err(NotTaken::Refused(_)) => return,
            // Its orders' grace begins with the closing.
            Err(NotTaken::Busy) => tokio::time::sleep(BUSY_RETRY).await,
            // The next start treats every session as disconnected.
            Err(error) => {
                tracing::warn!(%error, session = session.get(), "a session was not closed");
                return;
            }
        }
    }
}

/// Ends every live session of a user.
pub async fn end_user(market: &Market, user: UserIx, code: DisconnectCode) {
    for (session, key) in market.streams.sessions_of(user) {
        let _turn = market.sessions.lock(key).await;
        if market.streams.end(session, code) {
            close_if_left(market, session).await;
        }
    }
}

fn failed(what: &str, status: &Status) -> DisconnectCode {
    tracing::warn!(what, %status, "login cannot be answered now");
    DisconnectCode::NotReady
}
