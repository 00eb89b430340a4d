//! What the hot thread reads of a request before its admission, and of a command before its start.

use admission::Request;
use types::command::{MassScope, Route};
use types::{Command, TimeInForce, UserIx};

/// User of a mass cancel whose filter may leave some of the owner's orders. A mass cancel of all
/// orders is bounded by their number.
pub(super) fn filtered_mass_cancel(request: &Request) -> Option<UserIx> {
    let Request::MassCancel(r) = request else {
        return None;
    };
    let takes_all = r.instrument.is_none()
        && r.side.is_none()
        && matches!(r.scope, MassScope::User(_) | MassScope::Session(_));
    (!takes_all && !r.user.is_none()).then_some(r.user)
}

/// What the checks before admission need of a request.
pub(super) struct Outline {
    pub(super) member: UserIx,
    /// A new order or an amend.
    pub(super) is_order: bool,
    pub(super) is_fok: bool,
}

impl Outline {
    #[inline]
    pub(super) fn of(request: &Request) -> Self {
        let (member, is_order, is_fok) = match request {
            Request::New(new) => (new.user, true, new.time_in_force == TimeInForce::Fok),
            Request::Cancel(cancel) => (cancel.user, false, false),
            Request::Amend(amend) => (amend.user, true, false),
            other => (other.member(), false, false),
        };
        Self {
            member,
            is_order,
            is_fok,
        }
    }
}

/// A message that counts for the order-to-trade ratio.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Message {
    /// A new order or an amend.
    Order,
    /// A cancel or a refusal.
    Other,
}

/// What is read of an admitted command before it starts, by one match for the frequent commands.
pub(super) struct Dispatch {
    pub(super) route: Route,
    pub(super) member: UserIx,
    pub(super) message: Option<Message>,
}

impl Dispatch {
    #[inline]
    pub(super) fn of(command: &Command) -> Self {
        let (instrument, member, message) = match command {
            Command::New(c) => (c.instrument, c.user, Message::Order),
            Command::Cancel(c) => (c.instrument, c.user, Message::Other),
            Command::Amend(c) => (c.instrument, c.user, Message::Order),
            other => return Self::of_other(other),
        };
        Self {
            route: Route::Instrument(instrument),
            member,
            message: Some(message),
        }
    }

    #[cold]
    fn of_other(command: &Command) -> Self {
        Self {
            route: command.route(),
            member: command.member(),
            message: matches!(command, Command::Refused(_)).then_some(Message::Other),
        }
    }
}
