//! One session on a connection: what is known of it, and its requests as the trading path takes them.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use admission::{AmendRequest, CancelRequest, MassCancelRequest, NewRequest, OrderRef, Request};
use types::command::{MassScope, RequestKind};
use types::{
    CancelReason, Handle, Id128, InstrumentIx, Lots, SessionIx, Side, StpGroup, StpMode, Ticks,
    UserIx,
};
use wire::{BOTH_SIDES, ClientMessage, ORDER_POST_ONLY};

use crate::budget::Budget;
use crate::throttle::Throttle;

/// A session that is logged in on a channel.
pub struct Channel {
    pub session: SessionIx,
    /// Names this login of the session to the streams.
    pub claim: u64,
    pub user: UserIx,
    pub user_id: String,
    pub key: Id128,
    pub stp_group: StpGroup,
    pub cancel_on_disconnect: bool,
    pub throttle: Throttle,
    pub budget: Arc<Budget>,
    /// A `SetTradingHold` is being answered: one at a time.
    pub hold_pending: Arc<AtomicBool>,
}

/// What a channel is.
pub enum State {
    /// Its login is on the way.
    LoggingIn,
    Live(Box<Channel>),
}

/// Why a message of a logged-in session is no request.
#[derive(Debug, PartialEq, Eq)]
pub struct BadField;

/// Which kind of request a message is, with the ids that its refusal names.
pub fn names(message: &ClientMessage) -> Option<(RequestKind, u64, u64)> {
    match message {
        ClientMessage::NewOrder(m) => Some((RequestKind::New, m.client_order_id, 0)),
        ClientMessage::Cancel(m) => {
            Some((RequestKind::Cancel, m.client_order_id, m.engine_order_id))
        }
        ClientMessage::Amend(m) => Some((RequestKind::Amend, m.client_order_id, m.engine_order_id)),
        ClientMessage::MassCancel(_) => Some((RequestKind::MassCancel, 0, 0)),
        ClientMessage::Login(_)
        | ClientMessage::Logout(_)
        | ClientMessage::Heartbeat(_)
        | ClientMessage::SetTradingHold(_) => None,
    }
}

impl Channel {
    /// A message that acts, as the trading path takes it.
    pub fn request(&self, client_seq: u64, message: &ClientMessage) -> Result<Request, BadField> {
        match message {
            ClientMessage::NewOrder(m) => self.new_order(client_seq, m).map(Request::New),
            ClientMessage::Cancel(m) => Ok(Request::Cancel(CancelRequest {
                order: order_ref(m.engine_order_id, m.client_order_id),
                user: self.user,
                session: self.session,
                client_seq,
                reason: CancelReason::UserRequest,
                key_hash: Id128::NONE,
            })),
            ClientMessage::Amend(m) => Ok(Request::Amend(AmendRequest {
                order: order_ref(m.engine_order_id, m.client_order_id),
                user: self.user,
                session: self.session,
                client_seq,
                price: (m.price_ticks != 0).then_some(Ticks(m.price_ticks)),
                quantity: (m.quantity_lots != 0).then_some(Lots(m.quantity_lots)),
                limit_checked: false,
                key_hash: Id128::NONE,
            })),
            ClientMessage::MassCancel(m) => self.mass_cancel(client_seq, m),
            ClientMessage::Login(_)
            | ClientMessage::Logout(_)
            | ClientMessage::Heartbeat(_)
            | ClientMessage::SetTradingHold(_) => Err(BadField),
        }
    }

    fn new_order(&self, client_seq: u64, m: &wire::NewOrder) -> Result<NewRequest, BadField> {
        // Self-trades are allowed by the platform's own setting only, never by a client.
        if m.stp == StpMode::None || m.flags & !ORDER_POST_ONLY != 0 || m.client_order_id == 0 {
            return Err(BadField);
        }
        Ok(NewRequest {
            instrument: InstrumentIx(m.instrument),
            user: self.user,
            session: self.session,
            client_seq,
            client_order_id: m.client_order_id,
            stp_group: None,
            stp: m.stp,
            side: m.side,
            order_type: m.order_type,
            time_in_force: m.time_in_force,
            post_only: m.flags & ORDER_POST_ONLY != 0,
            expire_at_ns: m.expire_at_ns,
            price: (m.price_ticks != 0).then_some(Ticks(m.price_ticks)),
            quantity: Lots(m.quantity_lots),
            pool: None,
            limit_checked: false,
            key_hash: Id128::NONE,
        })
    }

    fn mass_cancel(&self, client_seq: u64, m: &wire::MassCancel) -> Result<Request, BadField> {
        let scope = match m.scope {
            0 => MassScope::Session(self.session),
            1 => MassScope::User(self.user),
            2 => MassScope::Group(self.stp_group),
            _ => return Err(BadField),
        };
        let side = match m.side {
            BOTH_SIDES => None,
            code => Some(Side::from_code(code).ok_or(BadField)?),
        };
        Ok(Request::MassCancel(MassCancelRequest {
            scope,
            // `wire::ALL_INSTRUMENTS` is the index that names none in particular.
            instrument: InstrumentIx(m.instrument),
            side,
            reason: CancelReason::MassCancel,
            user: self.user,
            session: self.session,
            client_seq,
            key_hash: Id128::NONE,
        }))
    }
}

const _: () = assert!(wire::ALL_INSTRUMENTS == InstrumentIx::NONE.0);

fn order_ref(engine_order_id: u64, client_order_id: u64) -> OrderRef {
    match engine_order_id {
        0 => OrderRef::Client(client_order_id),
        id => OrderRef::Handle(Handle::from_engine_id(id)),
    }
}
