//! What the trading path says at once, before anything is durable: hints for requests it has taken, refusals for those it has not.
//!
//! What was journalled, refusals included, comes later as a numbered message from the streams; nothing of it is said here but the hint.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use admission::Reject;
use bytes::Bytes;
use sequencer::{NotTaken, Outcome};
use tokio::sync::mpsc;
use types::command::RequestKind;
use types::{Command, RejectReason, Sequence, SessionIx};
use wire::{Accepted, Rejected};

use super::connection::Channels;
use super::outbound::Outbound;
use crate::market::{Market, now_ns};
use crate::past::{Past, PastError};
use crate::streams::{self, Again};

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

/// Requests of a connection, sent again, whose answers are being looked for in the journal at the same time.
const RESENDS_MAX: usize = 1_024;
/// Messages that such a request counts as in its session's throttle, beyond itself.
const RESEND_COST: u32 = 100;

/// A request whose answer only the journal has.
struct Wanted {
    session: SessionIx,
    channel: u16,
    client_seq: u64,
}

/// Requests, by session and client sequence, with the channel that asks.
type Open = HashMap<(SessionIx, u64), u16>;

/// Passes answers on until the connection is gone.
pub async fn pass_on(
    market: Arc<Market>,
    outbound: Arc<Outbound>,
    channels: Channels,
    mut answers: mpsc::UnboundedReceiver<(u64, Outcome)>,
) {
    let (older, wanted) = mpsc::channel(RESENDS_MAX);
    let resending = resend(market.clone(), outbound.clone(), wanted);
    let passing = async {
        while let Some((tag, outcome)) = answers.recv().await {
            let (channel, client_seq) = untag(tag);
            match outcome {
                Ok(record) => {
                    if let Some(hint) = hint(&record.command.command, record.command.sequence) {
                        outbound.send(channel, &hint.into());
                    }
                }
                Err(NotTaken::Refused(reject)) if reject.reason == RejectReason::AlreadySeen => {
                    let Some(session) = channels.session(channel) else {
                        continue;
                    };
                    if market.streams.send_again(session, client_seq) == Again::Older {
                        channels.charge(channel, RESEND_COST);
                        let one = Wanted {
                            session,
                            channel,
                            client_seq,
                        };
                        if older.try_send(one).is_err() {
                            refuse(&outbound, channel, client_seq, &NotTaken::Refused(reject));
                        }
                    }
                }
                Err(error) => refuse(&outbound, channel, client_seq, &error),
            }
        }
    };
    tokio::join!(passing, resending);
}

/// Looks for answers that have left the windows: one reading of the journal at a time for all that wait, ended when the last one is found.
async fn resend(market: Arc<Market>, outbound: Arc<Outbound>, mut wanted: mpsc::Receiver<Wanted>) {
    while let Some(first) = wanted.recv().await {
        let mut open = Open::new();
        let mut next = Some(first);
        while let Some(one) = next {
            open.insert((one.session, one.client_seq), one.channel);
            next = wanted.try_recv().ok();
        }
        let mut looked = look_for(&market, open.clone()).await;
        if looked.as_ref().is_err_and(PastError::is_removed) {
            // The journal's beginning went away meanwhile: once more from where it begins now.
            looked = look_for(&market, open.clone()).await;
        }
        let (found, lost) = looked.unwrap_or_else(|error| {
            if !error.is_removed() {
                tracing::error!(%error, "the journal cannot be read for a resend");
            }
            (Vec::new(), open)
        });
        for (channel, bytes) in found {
            outbound.push(channel, &bytes);
        }
        for ((_, client_seq), channel) in lost {
            let ids = (RequestKind::Other, 0, 0);
            let answer = rejected(client_seq, ids, RejectReason::AlreadySeen);
            outbound.send(channel, &answer.into());
        }
    }
}

/// The answers to these requests, each for its channel, and the requests whose answers have left the journal.
async fn look_for(
    market: &Arc<Market>,
    open: Open,
) -> Result<(Vec<(u16, Bytes)>, Open), PastError> {
    let wanted: Vec<_> = open.keys().copied().collect();
    let past = Past::before_or_oldest(market, move |told| {
        let mut wanted = wanted.iter();
        wanted.all(|(session, client_seq)| told(*session).1 < *client_seq)
    });
    let past = past.await?;
    // What was answered before the oldest place there is: nobody reads on for it.
    let is_lost =
        |&(session, client_seq): &(SessionIx, u64)| past.client_seq(session) >= client_seq;
    let (mut lost, open): (Open, Open) = open.into_iter().partition(|(one, _)| is_lost(one));
    if open.is_empty() {
        return Ok((Vec::new(), lost));
    }
    let scanning = past.scan(
        market,
        (Vec::new(), open),
        |(found, open): &mut (Vec<_>, Open), session, number, message| {
            if let Some(channel) = open.remove(&(session, message.answers())) {
                found.push((channel, streams::encoded(&message, number)));
            }
            match open.is_empty() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        },
    );
    let (_, (found, left)) = scanning.await?;
    lost.extend(left);
    Ok((found, lost))
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
