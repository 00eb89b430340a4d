//! Rebuilds messages that have left the windows from the journal. See [`crate::resend_source`] for
//! the cost.

use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use types::SessionIx;
use wire::{DisconnectCode, ServerMessage, encode};

use crate::market::Market;
use crate::resend_source::{ResendError, ResendSource};

/// Maximum messages per read.
const PIECE_MESSAGES: usize = 16_384;

/// The messages of a session after `after` through `through`, at most [`PIECE_MESSAGES`]. The
/// error is the code to end the session with.
pub async fn messages(
    market: &Arc<Market>,
    session: SessionIx,
    after: u64,
    through: u64,
) -> Result<Vec<Bytes>, DisconnectCode> {
    let reading = async {
        let source =
            ResendSource::newest_before(market, move |last| last(session).0 <= after).await?;
        source
            .scan(market, Vec::new(), move |found, to, number, message| {
                if to == session && number > after {
                    found.push(encoded(&message, number));
                }
                let is_last = to == session && number >= through;
                match found.len() < PIECE_MESSAGES && !is_last {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            })
            .await
    };
    match reading.await {
        // Durable messages are in the journal unless it was truncated.
        Ok(found) if found.is_empty() => Err(DisconnectCode::MessagesRemoved),
        Ok(found) => Ok(found),
        Err(error) if error.is_removed() => Err(DisconnectCode::MessagesRemoved),
        Err(ResendError::Aborted) => Err(DisconnectCode::Shutdown),
        Err(error) => {
            tracing::error!(%error, "cannot read the journal: session not resumed");
            Err(DisconnectCode::Internal)
        }
    }
}

/// The message that answered a request; `None` when the journal no longer has it or cannot be read.
pub async fn answer(market: &Arc<Market>, session: SessionIx, client_seq: u64) -> Option<Bytes> {
    let reading = async {
        let is_before = move |last: &dyn Fn(SessionIx) -> (u64, u64)| last(session).1 < client_seq;
        let source = ResendSource::newest_before_or_oldest(market, is_before).await?;
        if source.client_seq(session) >= client_seq {
            return Ok(None);
        }
        source
            .scan(market, None, move |found, to, number, message| {
                if to == session && message.answers() == client_seq {
                    *found = Some(encoded(&message, number));
                    return ControlFlow::Break(());
                }
                ControlFlow::Continue(())
            })
            .await
    };
    let mut read: Result<_, ResendError> = reading.await;
    if let Err(error) = &read
        && !error.is_removed()
    {
        tracing::error!(%error, "cannot read the journal: answer not resent");
        read = Ok(None);
    }
    read.unwrap_or_default()
}

/// Encodes a numbered message for channel 0.
fn encoded(message: &ServerMessage, number: u64) -> Bytes {
    let mut bytes = BytesMut::with_capacity(wire::NUMBERED_LEN_MAX);
    encode(message, 0, number, &mut bytes);
    bytes.freeze()
}
