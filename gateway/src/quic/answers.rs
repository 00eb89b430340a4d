//! What the trading path says at once, before anything is durable: hints for requests it has taken, refusals for those it has not.
//!
//! What was journalled, refusals included, comes later as a numbered message from the streams; nothing of it is said here but the hint.

use std::sync::Arc;

use admission::Reject;
use client::wire::{Accepted, Rejected};
use sequencer::{NotTaken, Outcome};
use tokio::sync::mpsc;
use types::command::RequestKind;
use types::{Command, RejectReason, Sequence, SessionIx};

use super::connection::Channels;
use super::outbound::Outbound;
use crate::market::{Market, now_ns};

/// Client sequences that fit a tag: 2^48 requests are enough for a century at a thousand a second.
pub const CLIENT_SEQ_MAX: u64 = (1 << 48) - 1;

/// Channel and client sequence of a request in one number.
pub fn tag(channel: u16, client_seq: u64) -> u64 {
    debug_assert!(client_seq <= CLIENT_SEQ_MAX);
    u64::from(channel) << 48 | client_seq
}

fn untag(tag: u64) -> (u16, u64) {
    ((tag >> 48) as u16, tag & CLIENT_SEQ_MAX)
}

/// Passes answers on until the connection is gone.
pub async fn pass_on(
    market: Arc<Market>,
    outbound: Arc<Outbound>,
    channels: Channels,
    mut answers: mpsc::UnboundedReceiver<(u64, Outcome)>,
) {
    while let Some((tag, outcome)) = answers.recv().await {
        let (channel, client_seq) = untag(tag);
        match outcome {
            Ok(record) => {
                if let Some(hint) = hint(&record.command.command, record.command.sequence) {
                    outbound.send(channel, &hint.into());
                }
            }
            Err(NotTaken::Refused(reject)) if reject.reason == RejectReason::AlreadySeen => {
                if let Some(session) = channels.session(channel) {
                    original_answer(&market, &outbound, session, channel, client_seq);
                }
            }
            Err(error) => refuse(&outbound, channel, client_seq, &error),
        }
    }
}

fn hint(command: &Command, sequence: Sequence) -> Option<Accepted> {
    let (client_seq, client_order_id, engine_order_id) = match command {
        Command::New(c) => (c.client_seq, c.client_order_id, c.handle.engine_id()),
        Command::Cancel(c) => (c.client_seq, 0, c.handle.engine_id()),
        Command::Amend(c) => (c.client_seq, 0, c.handle.engine_id()),
        Command::MassCancel(c) => (c.client_seq, 0, 0),
        _ => return None,
    };
    Some(Accepted {
        client_seq,
        client_order_id,
        engine_order_id,
        node_sequence: sequence.0,
    })
}

/// A request was sent twice: its original answer, under its number. Where it is not durable yet it is still to come.
fn original_answer(
    market: &Arc<Market>,
    outbound: &Arc<Outbound>,
    session: SessionIx,
    channel: u16,
    client_seq: u64,
) {
    if market.streams.send_again(session, client_seq) {
        return;
    }
    let (market, outbound) = (market.clone(), outbound.clone());
    tokio::spawn(async move {
        match crate::streams::find_answer(&market, session, client_seq).await {
            Ok(Some(bytes)) => outbound.push(channel, &bytes),
            Ok(None) => {}
            Err(error) => tracing::error!(%error, "the journal cannot be read for a resend"),
        }
    });
}

fn refuse(outbound: &Outbound, channel: u16, client_seq: u64, error: &NotTaken) {
    let reason = match error {
        NotTaken::Busy => RejectReason::Busy,
        NotTaken::Stopping | NotTaken::JournalFailed => RejectReason::NotReady,
        NotTaken::Refused(Reject { reason, .. }) => *reason,
    };
    let ids = (RequestKind::Other, 0, 0);
    outbound.send(channel, &rejected(client_seq, ids, reason).into());
}

/// An unnumbered refusal: the request was not seen.
pub fn rejected(
    client_seq: u64,
    (request, client_order_id, engine_order_id): (RequestKind, u64, u64),
    reason: RejectReason,
) -> Rejected {
    Rejected {
        client_seq,
        client_order_id,
        engine_order_id,
        request,
        reason,
        node_sequence: 0,
        time_ns: now_ns(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_keep_channel_and_sequence_apart() {
        for (channel, client_seq) in [(0, 0), (63, CLIENT_SEQ_MAX), (5, 1)] {
            assert_eq!(untag(tag(channel, client_seq)), (channel, client_seq));
        }
    }
}
