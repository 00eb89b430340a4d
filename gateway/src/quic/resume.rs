//! Brings a session that has just logged in up to now: what its client lacks is written in pieces, each only when the connection has room for it, so that any
//! gap can be closed over any line. Live messages follow once nothing is left in between.

use std::ops::ControlFlow;
use std::sync::Arc;

use bytes::Bytes;
use types::{Id128, SessionIx};
use wire::DisconnectCode;

use super::login::close_if_left;
use super::outbound::Outbound;
use crate::market::Market;
use crate::past::{Past, PastError};
use crate::streams::{self, Step};

/// Messages read from the journal for one piece.
const PIECE_MESSAGES: usize = 4_096;

/// Writes until the session follows, is taken over, or the connection ends.
pub async fn catch_up(
    market: &Arc<Market>,
    outbound: &Arc<Outbound>,
    (session, key): (SessionIx, Id128),
    claim: u64,
) {
    let mut past = None;
    loop {
        // A place in the past is as large as the node: a client that makes us wait does not keep it.
        if !outbound.has_room() {
            past = None;
        }
        if !outbound.room().await {
            return;
        }
        let after = match market.streams.advance(session, claim) {
            Step::More => continue,
            Step::Follows | Step::Gone => return,
            Step::OlderThanWindow { after } => after,
        };
        match piece(market, past.take(), session, after).await {
            Ok((place, messages)) => {
                past = Some(place);
                let streams = &market.streams;
                if !streams.hand_over(session, claim, after, &messages) {
                    return;
                }
            }
            Err(PastError::GivenUp) => return,
            Err(error) if error.is_removed() => {
                let _turn = market.sessions.lock(key).await;
                let code = DisconnectCode::MessagesRemoved;
                if market.streams.is_of(session, claim) && market.streams.end(session, code) {
                    close_if_left(market, session).await;
                }
                return;
            }
            Err(error) => {
                tracing::error!(%error, "the journal cannot be read for a resume");
                outbound.end(DisconnectCode::Internal);
                return;
            }
        }
    }
}

async fn piece(
    market: &Arc<Market>,
    past: Option<Past>,
    session: SessionIx,
    after: u64,
) -> Result<(Past, Vec<Bytes>), PastError> {
    let past = match past {
        Some(past) => past,
        None => Past::before(market, move |told| told(session).0 <= after).await?,
    };
    past.scan(market, Vec::new(), move |messages, to, number, message| {
        if to == session && number > after {
            messages.push(streams::encoded(&message, number));
        }
        match messages.len() < PIECE_MESSAGES {
            true => ControlFlow::Continue(()),
            false => ControlFlow::Break(()),
        }
    })
    .await
}
