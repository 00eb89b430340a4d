//! The honest member. It sends one order or cancel at a time, each after the durable report of the
//! previous one.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use client::{Connection, LoginOptions, Reports, Trust};
use hdrhistogram::Histogram;
use types::Side;
use wire::{Cancel, ClientMessage, ServerMessage};

use super::stalls::{Span, Watch, total, without};
use crate::member::{instrument_of, limit};

/// Minimum time between two requests, so that the member stays far below its throttle.
const PACE: Duration = Duration::from_millis(1);
/// Longest wait for an answer; beyond it the member counts as not served.
const ANSWER_MAX: Duration = Duration::from_secs(20);
/// Shorter times between two reports are not kept.
const GAP_MIN: Duration = Duration::from_millis(10);

/// Measurements of the honest member.
pub struct Figures {
    /// Latency from a request to its durable report, in microseconds.
    pub durable_us: Histogram<u64>,
    /// Longest time between two reports; zero below 10 ms.
    pub gap: Duration,
    /// The same without the machine's stalls.
    pub own_gap: Duration,
    /// Time of the run in which the machine did not run a core.
    pub stalled: Duration,
    /// Violations.
    pub violations: Vec<String>,
}

/// A logged-in member.
pub struct Honest {
    connection: Connection,
    reports: Reports,
    runtime: tokio::runtime::Runtime,
    instrument: u32,
}

impl Honest {
    /// Connects and logs in.
    ///
    /// # Panics
    /// If either fails.
    pub fn login(server: SocketAddr, token: &str, instrument: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let (connection, reports) = runtime.block_on(async {
            let connected = Connection::connect(server, Trust::Loopback).await;
            let (connection, reports) = connected.expect("the honest member connects");
            let mut options = LoginOptions::new(token, "honest");
            options.from_now = true;
            let login = connection.login(0, options).await;
            login.expect("the honest member logs in");
            (connection, reports)
        });
        Self {
            instrument: instrument_of(&connection, instrument),
            connection,
            reports,
            runtime,
        }
    }

    /// Trades for `duration`. The orders rest one tick below the market maker's lowest level.
    pub fn trade(mut self, duration: Duration) -> Figures {
        let mut figures = Figures {
            durable_us: Histogram::new_with_bounds(1, 60_000_000, 3).expect("a minute"),
            gap: Duration::ZERO,
            own_gap: Duration::ZERO,
            stalled: Duration::ZERO,
            violations: Vec::new(),
        };
        let watch = Watch::begin();
        let mut gaps = Vec::new();
        let (connection, reports) = (&self.connection, &mut self.reports);
        let instrument = self.instrument;
        self.runtime.block_on(async {
            let begun = Instant::now();
            let mut last_report = begun;
            for number in 1u64.. {
                if begun.elapsed() >= duration && number % 2 == 1 {
                    return;
                }
                let sent = Instant::now();
                let request = request(number, instrument);
                let outcome = match connection.send(0, request).await {
                    Ok(seq) => answer(reports, seq, &mut last_report, &mut gaps).await,
                    Err(error) => Err(error.to_string()),
                };
                if let Err(why) = outcome {
                    figures
                        .violations
                        .push(format!("request {number} of the honest member: {why}"));
                    return;
                }
                let took = u64::try_from(sent.elapsed().as_micros()).unwrap_or(u64::MAX);
                figures.durable_us.saturating_record(took);
                tokio::time::sleep_until((sent + PACE).into()).await;
            }
        });
        let stalls = watch.finish();
        figures.stalled = total(&stalls);
        for gap in gaps {
            figures.gap = figures.gap.max(gap.1 - gap.0);
            figures.own_gap = figures.own_gap.max(without(gap, &stalls));
        }
        figures
    }
}

/// The order of an odd `number`, the cancel of that order for the next one.
fn request(number: u64, instrument: u32) -> ClientMessage {
    let client_order_id = number.div_ceil(2);
    match number % 2 {
        1 => limit(client_order_id, instrument, Side::Buy, 100, 1).into(),
        _ => Cancel {
            client_order_id,
            engine_order_id: 0,
        }
        .into(),
    }
}

/// Waits for the durable answer to a request.
async fn answer(
    reports: &mut Reports,
    client_seq: u64,
    last_report: &mut Instant,
    gaps: &mut Vec<Span>,
) -> Result<(), String> {
    loop {
        let report = match tokio::time::timeout(ANSWER_MAX, reports.recv()).await {
            Err(_) => return Err(format!("no answer within {ANSWER_MAX:?}")),
            Ok(Some(Ok(report))) => report,
            Ok(Some(Err(error))) => return Err(error.to_string()),
            Ok(None) => return Err("the connection was closed".to_owned()),
        };
        let now = Instant::now();
        if now - *last_report >= GAP_MIN {
            gaps.push((*last_report, now));
        }
        *last_report = now;
        match report.message {
            ServerMessage::Accepted(_) => {}
            ServerMessage::Rejected(m) if m.client_seq == client_seq => {
                return Err(m.reason.as_str().to_owned());
            }
            other if other.answers() == client_seq => return Ok(()),
            _ => {}
        }
    }
}
