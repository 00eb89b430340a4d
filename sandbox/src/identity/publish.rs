//! Events on `platform.identity.events.v1` (D27, D28), keyed by user id.

use events::Event;
use prost::Message;
use proto::{convert::to_timestamp_us, identity::v1 as pb};
use uuid::Uuid;

const SOURCE: &str = "identity";

/// Kind of a change of a user.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Created,
    Updated,
    Blocked,
    Unblocked,
}

impl Kind {
    /// Name of the change in audit records.
    pub const fn action(self) -> &'static str {
        match self {
            Kind::Created => "user.created",
            Kind::Updated => "user.updated",
            Kind::Blocked => "user.blocked",
            Kind::Unblocked => "user.unblocked",
        }
    }
}

/// The event of a change at this time.
pub fn event(kind: Kind, user_id: &str, reason: &str, correlation_id: &str, now_us: i64) -> Event {
    let mut context = rpc::Context::new(SOURCE);
    correlation_id.clone_into(&mut context.correlation_id);
    context.occurred_at_us = now_us;
    let (context, at) = (Some(context.to_proto()), Some(to_timestamp_us(now_us)));
    let (user, reason) = (user_id.to_owned(), reason.to_owned());
    macro_rules! encoded {
        ($message:ident) => {
            (
                stringify!($message),
                pb::$message {
                    context,
                    user_id: user,
                    reason,
                    at,
                }
                .encode_to_vec(),
            )
        };
    }
    let (name, payload) = match kind {
        Kind::Created => encoded!(UserCreatedEvent),
        Kind::Updated => encoded!(UserUpdatedEvent),
        Kind::Blocked => encoded!(UserBlockedEvent),
        Kind::Unblocked => encoded!(UserUnblockedEvent),
    };
    Event {
        id: Uuid::now_v7(),
        topic: events::topics::IDENTITY.to_owned(),
        key: user_id.to_owned(),
        type_name: format!("dfa.identity.v1.{name}"),
        subject: user_id.to_owned(),
        source: SOURCE.to_owned(),
        correlation_id: correlation_id.to_owned(),
        occurred_at_us: now_us,
        payload,
    }
}
