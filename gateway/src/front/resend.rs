//! Selects and encodes session messages older than the in-memory window. [`crate::resend_source`]
//! scans the journal for them and states the cost.

use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use replica::SessionPosition;
use types::SessionIx;
use wire::{DisconnectCode, ServerMessage, encode};

use super::session::LoginRef;
use crate::market::Market;
use crate::resend_source::{ResendError, ResendSource};

/// Number of messages after which a scan stops, at the end of the record.
const PIECE_MESSAGES: usize = 16_384;

/// Messages of a session after number `after`.
///
/// Stops after the record with message `through`, after the record that completes
/// [`PIECE_MESSAGES`] messages, or once `login` has ended. The other messages of that record are
/// included, so the result may exceed both.
///
/// # Errors
/// The code to end the session with. A retransmission converts it to a reject reason.
pub async fn messages(
    market: &Arc<Market>,
    session: SessionIx,
    after: u64,
    through: u64,
    login: LoginRef,
) -> Result<Vec<Bytes>, DisconnectCode> {
    let scan = async {
        let accepts = move |position: &dyn Fn(SessionIx) -> SessionPosition| {
            position(session).last_number <= after
        };
        let source = ResendSource::newest_before(market, accepts).await?;
        source
            .scan(market, Vec::new(), move |found, to, number, message| {
                if to == session && number > after {
                    found.push(encoded(&message, number));
                }
                let is_last = to == session && number >= through;
                match is_last || found.len() >= PIECE_MESSAGES || login.has_ended() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            })
            .await
    };
    match scan.await {
        // Durable messages are in the journal unless it was truncated.
        Ok(found) if found.is_empty() => Err(DisconnectCode::MessagesRemoved),
        Ok(found) => Ok(found),
        Err(error) if error.is_truncated() => Err(DisconnectCode::MessagesRemoved),
        Err(ResendError::Aborted) => Err(DisconnectCode::Shutdown),
        Err(error) => {
            tracing::error!(%error, "cannot scan the journal: messages not resent");
            Err(DisconnectCode::Internal)
        }
    }
}

/// The message that answered a request; `None` if the journal does not contain it, was truncated
/// past it, or cannot be scanned. Stops at the answer to a later request, or once `login` has
/// ended.
pub async fn answer(
    market: &Arc<Market>,
    session: SessionIx,
    client_seq: u64,
    login: LoginRef,
) -> Option<Bytes> {
    let scan = async {
        let accepts = move |position: &dyn Fn(SessionIx) -> SessionPosition| {
            position(session).client_seq < client_seq
        };
        let source = ResendSource::newest_before_or_oldest(market, accepts).await?;
        if source.client_seq(session) >= client_seq {
            return Ok(None);
        }
        source
            .scan(market, None, move |found, to, number, message| {
                let answered = if to == session { message.answers() } else { 0 };
                if answered == client_seq {
                    *found = Some(encoded(&message, number));
                }
                // A session's answers are in the order of its requests.
                match answered >= client_seq || login.has_ended() {
                    true => ControlFlow::Break(()),
                    false => ControlFlow::Continue(()),
                }
            })
            .await
    };
    let mut scanned: Result<_, ResendError> = scan.await;
    if let Err(error) = &scanned
        && !error.is_truncated()
    {
        tracing::error!(%error, "cannot scan the journal: answer not resent");
        scanned = Ok(None);
    }
    scanned.unwrap_or_default()
}

/// Encodes a numbered message for channel 0.
fn encoded(message: &ServerMessage, number: u64) -> Bytes {
    let mut bytes = BytesMut::with_capacity(wire::NUMBERED_LEN_MAX);
    encode(message, 0, number, &mut bytes);
    bytes.freeze()
}
