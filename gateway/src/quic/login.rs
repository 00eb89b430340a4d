//! From a credential to an attached session: who is it, may he trade, with how much; then the journalled `OpenSession`, and the stream from the number
//! the client has.

use std::net::IpAddr;
use std::sync::Arc;

use admission::{Request, SessionRequest};
use bytes::Bytes;
use client::wire::{DisconnectCode, LOGIN_CANCEL_ON_DISCONNECT, LOGIN_FROM_NOW, Login};
use rpc::{Context, Role};
use sequencer::NotTaken;
use tonic::{Code, Status};
use types::{Command, Minor, StpGroup};

use super::channel::Channel;
use super::outbound::Outbound;
use super::server::Shared;
use crate::funding;
use crate::ids;
use crate::market::{Asset, now_ns};
use crate::streams::{self, Attach, AttachError};
use crate::throttle::Throttle;

/// Logs a session in on a channel. The error is what the client is told.
pub async fn log_in(
    shared: &Arc<Shared>,
    outbound: &Arc<Outbound>,
    address: IpAddr,
    channel: u16,
    login: &Login,
) -> Result<Channel, DisconnectCode> {
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
    if !profile.may_trade {
        return Err(DisconnectCode::KycLevel);
    }
    if profile.blocked {
        return Err(DisconnectCode::UserBlocked);
    }
    let user = market
        .bind_user(&user_id)
        .await
        .map_err(|status| failed("binding", &status))?;
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

    let key = ids::session_key(&user_id, login.session_name.as_str());
    let cancel_on_disconnect = login.flags & LOGIN_CANCEL_ON_DISCONNECT != 0;
    let request = SessionRequest {
        key,
        user,
        stp_group: (login.stp_group != 0).then(|| StpGroup::explicit(login.stp_group)),
        cancel_on_disconnect,
    };
    let record = match market.ask(Request::OpenSession(request)).await {
        Ok(record) => record,
        Err(NotTaken::Refused(reject)) => {
            tracing::error!(%reject, "admission refused to open a session");
            return Err(DisconnectCode::Internal);
        }
        Err(_) => return Err(DisconnectCode::NotReady),
    };
    let Command::OpenSession(opened) = record.command.command else {
        unreachable!("an opening is journalled as one");
    };
    // Everything before the opening is in the streams then, the last client sequence included.
    market.streams.wait(record.command.sequence).await;
    let heartbeat_ms = match login.heartbeat_ms {
        0 => market.config.heartbeat_ms,
        asked => asked.clamp(100, market.config.heartbeat_ms.max(100)),
    };
    let mut attach = Attach {
        session: opened.session,
        channel,
        last_sequence: login.last_sequence,
        from_now: login.flags & LOGIN_FROM_NOW != 0,
        throttle_per_s: market.config.throttle_per_s,
        heartbeat_ms,
        time_ns: now_ns(),
        rebuilt: Vec::new(),
    };
    loop {
        match market.streams.attach(outbound, &attach) {
            Ok(()) => break,
            Err(AttachError::Ahead) => return Err(DisconnectCode::SequenceAhead),
            Err(AttachError::OlderThanWindow { .. }) => {
                attach.rebuilt = rebuilt(shared, &attach).await?;
            }
        }
    }
    Ok(Channel {
        session: opened.session,
        user,
        user_id,
        key,
        stp_group: opened.stp_group,
        cancel_on_disconnect,
        throttle: Throttle::new(market.config.throttle_per_s, now_ns()),
        budget,
    })
}

async fn rebuilt(shared: &Shared, attach: &Attach) -> Result<Vec<Bytes>, DisconnectCode> {
    let market = &shared.market;
    let kept = streams::rebuild(market, attach.session, attach.last_sequence)
        .await
        .map_err(|error| {
            tracing::error!(%error, "the journal cannot be read for a resume");
            DisconnectCode::Internal
        })?;
    Ok(kept.into_iter().map(|kept| kept.bytes).collect())
}

fn failed(what: &str, status: &Status) -> DisconnectCode {
    tracing::warn!(what, %status, "login cannot be answered now");
    DisconnectCode::NotReady
}
