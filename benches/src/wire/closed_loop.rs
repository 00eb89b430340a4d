//! Latency with one request in flight: each request follows the durable answer to the previous one.

use std::time::{Duration, Instant};

use anyhow::Context;
use client::spinning::Connection;
use hdrhistogram::Histogram;
use types::Side;
use wire::{Cancel, ClientMessage, NewOrder, ServerMessage};

use crate::hop::histogram;

/// Price of the orders. It is low enough that no order trades and the hold always suffices.
const PRICE_TICKS: i64 = 100;
/// Maximum wait for an answer.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(30);

/// Times from sending a request to its reports, in nanoseconds.
pub struct Latencies {
    pub accepted: Histogram<u64>,
    pub durable: Histogram<u64>,
}

/// Sends `count` requests on channel 0: new orders and their cancels in turn. Sends a tenth more
/// before, which is not measured.
///
/// # Errors
/// The connection is lost, an answer is missing, or a request is rejected.
pub fn run(
    connection: &mut Connection,
    instrument: u32,
    count: usize,
) -> anyhow::Result<Latencies> {
    let mut latencies = Latencies {
        accepted: histogram(),
        durable: histogram(),
    };
    let warm_up = count / 10;
    for number in 1..=(count + warm_up) as u64 {
        let answer = answer_to(connection, &request(instrument, number));
        let (accepted, durable) = answer.with_context(|| format!("request {number}"))?;
        if number > warm_up as u64 {
            let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
            latencies.accepted.saturating_record(nanos(accepted));
            latencies.durable.saturating_record(nanos(durable));
        }
    }
    Ok(latencies)
}

/// A new order for an odd number, its cancel for the next even number.
fn request(instrument: u32, number: u64) -> ClientMessage {
    let client_order_id = number.div_ceil(2);
    match number % 2 {
        1 => NewOrder::limit(client_order_id, instrument, Side::Buy, PRICE_TICKS, 1).into(),
        _ => Cancel {
            client_order_id,
            engine_order_id: 0,
        }
        .into(),
    }
}

/// Sends a request; returns the times to *accepted* and *durable*.
fn answer_to(
    connection: &mut Connection,
    request: &ClientMessage,
) -> anyhow::Result<(Duration, Duration)> {
    let sent = Instant::now();
    let number = connection.send(0, request)?;
    let number = number.context("the send buffer is full")?;
    connection.flush();
    let mut answer = Answer::default();
    loop {
        connection.poll()?;
        while let Some(report) = connection.recv() {
            answer.on_report(number, &report.message, sent.elapsed())?;
        }
        if let Some(times) = answer.times() {
            return Ok(times);
        }
        anyhow::ensure!(sent.elapsed() < ANSWER_WAIT_MAX, "no answer");
    }
}

/// Times to the reports on a request.
#[derive(Default)]
struct Answer {
    accepted: Option<Duration>,
    durable: Option<Duration>,
}

impl Answer {
    /// Notes a report that was read `elapsed` after sending the request of client sequence
    /// `request`.
    fn on_report(
        &mut self,
        request: u64,
        message: &ServerMessage,
        elapsed: Duration,
    ) -> anyhow::Result<()> {
        match message {
            ServerMessage::Accepted(m) if m.client_seq == request => {
                self.accepted = Some(elapsed);
            }
            ServerMessage::Rejected(m) => anyhow::bail!("rejected: {}", m.reason),
            other if other.answers() == request => {
                // Without this check the missing time would lower the percentiles.
                anyhow::ensure!(self.accepted.is_some(), "durable without `Accepted` before");
                self.durable = Some(elapsed);
            }
            _ => {}
        }
        Ok(())
    }

    /// Both times, once both reports were read.
    fn times(&self) -> Option<(Duration, Duration)> {
        Some((self.accepted?, self.durable?))
    }
}

#[cfg(test)]
mod tests {
    use types::{CancelReason, RejectReason};
    use wire::{Accepted, Cancelled, Rejected};

    use super::*;

    const REQUEST: u64 = 4;

    fn accepted(client_seq: u64) -> ServerMessage {
        Accepted {
            client_seq,
            client_order_id: 2,
            engine_order_id: 3,
            node_sequence: 5,
        }
        .into()
    }

    fn durable() -> ServerMessage {
        Cancelled {
            client_seq: REQUEST,
            client_order_id: 2,
            engine_order_id: 3,
            instrument: 0,
            reason: CancelReason::UserRequest,
            quantity_lots: 1,
            node_sequence: 5,
            time_ns: 6,
            received_ns: 6,
        }
        .into()
    }

    #[test]
    fn both_reports_give_both_times() {
        let mut answer = Answer::default();
        let mut at = |message, us| {
            let elapsed = Duration::from_micros(us);
            answer.on_report(REQUEST, &message, elapsed).expect("noted");
            answer.times()
        };
        assert_eq!(at(accepted(REQUEST), 10), None);
        let times = [10, 70].map(Duration::from_micros);
        assert_eq!(at(durable(), 70), Some((times[0], times[1])));
    }

    #[test]
    fn an_answer_without_accepted_is_an_error() {
        let mut answer = Answer::default();
        let mut at = |message: ServerMessage| answer.on_report(REQUEST, &message, Duration::ZERO);
        at(accepted(REQUEST - 1)).expect("a report on another request");
        let error = at(durable()).expect_err("no `Accepted`").to_string();
        assert!(error.contains("without `Accepted`"), "{error}");
    }

    #[test]
    fn a_rejected_request_is_an_error() {
        let refused = Rejected {
            client_seq: REQUEST,
            client_order_id: 2,
            engine_order_id: 0,
            request: types::command::RequestKind::New,
            reason: RejectReason::Throttle,
            limit: 0,
            node_sequence: 0,
            time_ns: 0,
            received_ns: 0,
        };
        let mut answer = Answer::default();
        let error = answer.on_report(REQUEST, &refused.into(), Duration::ZERO);
        let error = error.expect_err("rejected").to_string();
        assert!(error.contains("rejected"), "{error}");
    }
}
