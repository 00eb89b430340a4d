//! Compares samples of live messages with the journal: the bytes in a session's window with the
//! bytes built from the replica's report of the same record. If they differ, a client would be
//! resent another message than it was sent. A difference is logged as an error, is counted, and
//! fails the health part [`PART`] until the next start.
//!
//! Cost: one message per [`PAUSE`], and its look-up by the front. Each sample follows the replica
//! for one batch only, so that the comparison never lags and never reads a file.

use std::sync::Arc;
use std::time::Duration;

use admission::Report;
use bytes::{Bytes, BytesMut};
use rpc::Health;
use sequencer::Stamp;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use types::SessionIx;

use super::desk::FrontMessage;
use super::report::message;
use super::window::Compared;
use crate::Error;
use crate::market::Market;

/// Part of the health that fails after a difference.
pub const PART: &str = "session-messages";
/// Time between two samples.
const PAUSE: Duration = Duration::from_millis(20);
/// Step from sample to sample within a batch. Prime, so that all positions are sampled over time.
const STEP: usize = 7_919;

/// A message that the front is to compare.
pub struct Sample {
    pub session: SessionIx,
    pub number: u64,
    pub rebuilt: Bytes,
    pub answer: oneshot::Sender<Compared>,
}

/// Compares samples until shutdown.
///
/// # Errors
/// The replica has ended.
pub async fn run(
    market: Arc<Market>,
    health: Health,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let mut place = 0_usize;
    loop {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            compared = sample(&market, &health, place) => compared?,
        }
        place = place.wrapping_add(STEP);
        tokio::select! {
            () = shutdown.cancelled() => return Ok(()),
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}

/// Compares one message of the next batch that has messages.
async fn sample(market: &Market, health: &Health, place: usize) -> Result<(), Error> {
    let replica = &market.replica;
    let mut follower = replica.follow_detached(PART, replica.position());
    let (stamp, report) = loop {
        if let Some(found) = pick(&follower.next().await?, place) {
            break found;
        }
    };
    drop(follower);
    let mut rebuilt = BytesMut::with_capacity(wire::NUMBERED_LEN_MAX);
    let message = message(market.node, &stamp, &report);
    wire::encode(&message, 0, report.number, &mut rebuilt);
    let (answer, compared) = oneshot::channel();
    let sample = Sample {
        session: report.session,
        number: report.number,
        rebuilt: rebuilt.freeze(),
        answer,
    };
    market.front.send(FrontMessage::Compare(sample)).await;
    // A stopping front does not answer.
    if let Ok(compared) = compared.await {
        record_outcome(health, &stamp, &report, compared);
    }
    Ok(())
}

/// The report of a batch at `place`, modulo the number of reports; `None` if there are none.
fn pick(batch: &replica::Batch, place: usize) -> Option<(Stamp, Report)> {
    let count: usize = batch.iter().map(|applied| applied.reports.len()).sum();
    let mut place = place.checked_rem(count)?;
    for applied in batch.iter() {
        let Some(report) = applied.reports.get(place) else {
            place -= applied.reports.len();
            continue;
        };
        let cause = &applied.cause;
        let stamp = Stamp {
            sequence: cause.sequence,
            time_ns: cause.time_ns,
            received_ns: cause.received_ns,
        };
        return Some((stamp, *report));
    }
    None
}

fn record_outcome(health: &Health, stamp: &Stamp, report: &Report, compared: Compared) {
    let outcome = match compared {
        Compared::Equal => "equal",
        Compared::NotKept => "not_kept",
        Compared::Differs => "differs",
    };
    metrics::counter!("trading_messages_compared_total", "outcome" => outcome).increment(1);
    if compared == Compared::Differs {
        let (session, number) = (report.session.0, report.number);
        tracing::error!(
            session,
            number,
            sequence = stamp.sequence.0,
            severity = "critical",
            "sent session message differs from the journal"
        );
        let reason = format!("message {number} of session {session} differs from the journal's");
        health.set_failing(PART, reason);
    }
}

#[cfg(test)]
mod tests {
    use admission::ReportBody;
    use replica::{Applied, Batch};
    use types::command::{Cause, RequestKind};
    use types::{Handle, Id128, InstrumentIx, Sequence, Ticks};

    use super::*;

    fn report(number: u64) -> Report {
        Report {
            session: SessionIx(3),
            instrument: InstrumentIx::NONE,
            number,
            client_seq: 0,
            client_order_id: 0,
            handle: Handle::NONE,
            body: ReportBody::MassCancelled {
                count: 1,
                remaining: 0,
            },
        }
    }

    fn applied(sequence: u64, numbers: std::ops::Range<u64>) -> Applied {
        let cause = Cause {
            sequence: Sequence(sequence),
            time_ns: sequence,
            received_ns: sequence,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
            new_client_order_id: 0,
            amended_price: Ticks::ZERO,
            request: RequestKind::Other,
        };
        Applied {
            cause,
            effects: Vec::new(),
            reports: numbers.map(report).collect(),
        }
    }

    #[test]
    fn every_message_of_a_batch_may_be_the_sample() {
        let batch = Batch::new(vec![
            applied(1, 1..1),
            applied(2, 1..3),
            applied(3, 3..3),
            applied(4, 3..6),
        ]);
        let picked = |place| {
            let (stamp, report) = pick(&batch, place).expect("the batch has messages");
            (stamp.sequence.0, report.number)
        };
        let all: Vec<_> = (0..6).map(picked).collect();
        assert_eq!(all, [(2, 1), (2, 2), (4, 3), (4, 4), (4, 5), (2, 1)]);
        assert!(pick(&Batch::new(vec![applied(1, 1..1)]), 5).is_none());
    }

    #[test]
    fn a_difference_fails_the_health_and_nothing_else_does() {
        let health = Health::new("market");
        let stamp = Stamp {
            sequence: Sequence(9),
            time_ns: 0,
            received_ns: 0,
        };
        for compared in [Compared::Equal, Compared::NotKept] {
            record_outcome(&health, &stamp, &report(17), compared);
            assert!(health.failing().is_empty());
        }
        record_outcome(&health, &stamp, &report(17), Compared::Differs);
        record_outcome(&health, &stamp, &report(18), Compared::Equal);
        let failing = health.failing();
        let reason = failing.get(PART).expect("the failure stays");
        assert!(
            reason.contains("message 17 of session 3 differs"),
            "{reason}"
        );
    }
}
