//! Sends an order flow of many members over one connection, in the order of the flow, as fast as
//! windows and rate allow. Without work the client sleeps, since it shares the platform's cores.

use std::time::{Duration, Instant};

use anyhow::Context;
use client::spinning::Connection;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::setpriority_process;
use rustix::thread::gettid;
use types::{CancelReason, OrderType, RejectReason, Side, TimeInForce};
use wire::{Amend, Cancel, ClientMessage, NewOrder, ServerMessage};

use crate::xflow::{self, Kind, Op, Record};

/// Lowest price of the flow on the instrument, in ticks.
const PRICE_LOW: i64 = 2_000;
const WARM_UP: Duration = Duration::from_secs(1);
/// Maximum wait for the answers in flight at the end.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(30);
/// Maximum sleep: at 250,000 requests/s, 25 become due in it.
const SLEEP_NS: i64 = 100_000;

/// Nice value of the client in the flow. On the same machine it competes with the platform for the
/// cores: with equal priority the replica waits for the client's time slices.
const NICE: i32 = 5;

/// Lowers the calling thread's priority for the flow.
///
/// # Errors
/// The system refuses.
pub fn lower_priority() -> anyhow::Result<()> {
    Ok(setpriority_process(Some(gettid()), NICE)?)
}

/// Load of the members.
pub struct Load {
    pub users: u16,
    pub sessions_per_user: u16,
    /// Requests in flight per session.
    pub window: u64,
    /// Requests offered per second; `None`: as many as the windows allow.
    pub rate: Option<u64>,
    /// Duration; the run ends earlier if the flow does.
    pub duration: Duration,
}

/// Counters after the warm-up.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    /// Requests whose command is durable: the answer is numbered and is no `Rejected`.
    pub durable: u64,
    /// Rejected requests, without those of `too_late`.
    pub refused: u64,
    /// Cancels and amends whose order had already ended.
    pub too_late: u64,
    pub trades: u64,
    /// Orders cancelled by self-trade prevention.
    pub prevented: u64,
    pub seconds: f64,
    /// Most requests that were due at the rate and not yet sent, also for a full window.
    pub overdue_max: usize,
}

impl Counts {
    /// Answered requests.
    pub fn answered(&self) -> u64 {
        self.durable + self.refused + self.too_late
    }

    /// Counts a message to one of the sessions.
    fn add(&mut self, message: &ServerMessage) {
        match message {
            ServerMessage::Rejected(m) => match m.reason {
                RejectReason::UnknownOrder | RejectReason::OrderNotOpen => self.too_late += 1,
                _ => self.refused += 1,
            },
            ServerMessage::Fill(fill) => self.trades += u64::from(fill.aggressor),
            // It answers no request.
            ServerMessage::Cancelled(m) if m.reason == CancelReason::SelfTrade => {
                self.prevented += 1;
            }
            other => self.durable += u64::from(other.answers() != 0),
        }
    }
}

/// An order of the flow.
#[derive(Clone, Copy, Default)]
struct Order {
    /// Channel of the session that sent it.
    channel: u16,
    /// In lots.
    filled: u64,
}

/// A running flow.
pub struct Flow {
    records: Vec<Record>,
    next: usize,
    /// By the flow's order id, which is also the client order id.
    orders: Vec<Order>,
    /// Requests sent, by channel.
    sent: Vec<u64>,
    /// Requests answered, by channel.
    answered: Vec<u64>,
    /// First channel of the sessions.
    first_channel: u16,
    /// Added to the flow's prices, in ticks.
    price_offset: i64,
    counts: Counts,
}

impl Flow {
    /// The sessions use the channels from `first_channel` on.
    pub fn new(flow: xflow::Flow, load: &Load, first_channel: u16) -> Self {
        let channels = usize::from(first_channel + load.users * load.sessions_per_user);
        let count = usize::try_from(flow.header.id_max).expect("order ids fit memory") + 1;
        Self {
            records: flow.records,
            next: 0,
            orders: vec![Order::default(); count],
            sent: vec![0; channels],
            answered: vec![0; channels],
            first_channel,
            price_offset: PRICE_LOW - flow.header.price_low,
            counts: Counts::default(),
        }
    }

    /// Runs the flow for the load's duration. Answers may be in flight then: see [`Self::drain`].
    ///
    /// # Errors
    /// The connection is lost, or the flow ends during the warm-up.
    pub fn run(
        &mut self,
        connection: &mut Connection,
        instrument: u32,
        load: &Load,
    ) -> anyhow::Result<Counts> {
        let begun = Instant::now();
        let (begin, end) = (begun + WARM_UP, begun + WARM_UP + load.duration);
        let mut from = None;
        loop {
            let now = Instant::now();
            if from.is_none() && now >= begin {
                self.counts = Counts::default();
                from = Some(now);
            }
            let is_over = now >= end || self.next == self.records.len();
            if is_over {
                let from = from.context("the flow ended during the warm-up")?;
                self.counts.seconds = now.duration_since(from).as_secs_f64();
                return Ok(self.counts);
            }
            let due = load
                .rate
                .map_or(usize::MAX, |rate| requests_due(now - begun, rate));
            let sent = self.next;
            self.send(connection, instrument, load, due)?;
            if load.rate.is_some() {
                let overdue = due.saturating_sub(self.next);
                self.counts.overdue_max = self.counts.overdue_max.max(overdue);
            }
            connection.poll()?;
            if !self.count_reports(connection) && self.next == sent {
                wait_for_datagram(connection);
            }
        }
    }

    /// Shares of the sent records by operation.
    pub fn sent_mix(&self) -> xflow::Mix {
        xflow::Mix::of(&self.records[..self.next])
    }

    /// Waits for the answers in flight.
    ///
    /// # Errors
    /// The connection is lost, or answers are missing.
    pub fn drain(&mut self, connection: &mut Connection) -> anyhow::Result<()> {
        let since = Instant::now();
        while self.sent != self.answered {
            anyhow::ensure!(
                since.elapsed() < ANSWER_WAIT_MAX,
                "timed out waiting for answers"
            );
            connection.poll()?;
            if !self.count_reports(connection) {
                wait_for_datagram(connection);
            }
        }
        Ok(())
    }

    /// Sends requests of the flow up to number `due` as far as the windows allow. A session with a
    /// full window delays all following requests, so the flow keeps its order.
    fn send(
        &mut self,
        connection: &mut Connection,
        instrument: u32,
        load: &Load,
        due: usize,
    ) -> anyhow::Result<()> {
        while self.next < due
            && let Some(record) = self.records.get(self.next)
        {
            let order = &mut self.orders[record.id as usize];
            if let Op::New(_) = record.op {
                let member = record.account % u32::from(load.users * load.sessions_per_user);
                order.channel = self.first_channel + u16::try_from(member).expect("below 64");
            }
            let channel = usize::from(order.channel);
            if self.sent[channel] - self.answered[channel] >= load.window {
                return Ok(());
            }
            let message = message(record, order.filled, self.price_offset, instrument);
            if connection.send(order.channel, &message)?.is_none() {
                return Ok(());
            }
            self.sent[channel] += 1;
            self.next += 1;
        }
        Ok(())
    }

    /// Counts the received reports. Returns false if there were none.
    fn count_reports(&mut self, connection: &mut Connection) -> bool {
        let mut any = false;
        let (counts, answered, orders) = (&mut self.counts, &mut self.answered, &mut self.orders);
        while let Some(report) = connection.recv() {
            any = true;
            if report.message.answers() != 0 {
                answered[usize::from(report.channel)] += 1;
            }
            if let ServerMessage::Fill(fill) = &report.message {
                orders[fill.client_order_id as usize].filled += fill.quantity_lots;
            }
            counts.add(&report.message);
        }
        any
    }
}

/// Sleeps until a datagram arrives, at most [`SLEEP_NS`].
fn wait_for_datagram(connection: &Connection) {
    let mut socket = [PollFd::new(connection, PollFlags::IN)];
    let longest = Timespec {
        tv_sec: 0,
        tv_nsec: SLEEP_NS,
    };
    // The caller polls the connection after an error too.
    let _ = poll(&mut socket, Some(&longest));
}

/// Number of requests due after `elapsed`.
fn requests_due(elapsed: Duration, rate: u64) -> usize {
    let due = elapsed.as_nanos() * u128::from(rate) / 1_000_000_000;
    usize::try_from(due).unwrap_or(usize::MAX)
}

fn message(record: &Record, filled: u64, price_offset: i64, instrument: u32) -> ClientMessage {
    let price_ticks = match record.price {
        0 => 0,
        price => price + price_offset,
    };
    match record.op {
        Op::New(kind) => {
            let (order_type, time_in_force) = match kind {
                Kind::Gtc => (OrderType::Limit, TimeInForce::Gtc),
                Kind::Ioc => (OrderType::Limit, TimeInForce::Ioc),
                Kind::Fok => (OrderType::Limit, TimeInForce::Fok),
                Kind::Market => (OrderType::Market, TimeInForce::Ioc),
            };
            let side = match record.side {
                0 => Side::Buy,
                _ => Side::Sell,
            };
            NewOrder {
                order_type,
                time_in_force,
                ..NewOrder::limit(record.id, instrument, side, price_ticks, record.quantity)
            }
            .into()
        }
        Op::Cancel => Cancel {
            client_order_id: record.id,
            engine_order_id: 0,
        }
        .into(),
        Op::Replace { .. } => Amend {
            client_order_id: record.id,
            engine_order_id: 0,
            price_ticks,
            quantity_lots: filled + record.quantity,
            new_client_order_id: 0,
        }
        .into(),
    }
}

#[cfg(test)]
mod tests {
    use types::command::RequestKind;
    use wire::{Cancelled, Rejected};

    use super::*;

    fn rejected(reason: RejectReason) -> ServerMessage {
        Rejected {
            client_seq: 4,
            client_order_id: 2,
            engine_order_id: 0,
            request: RequestKind::Cancel,
            reason,
            limit: 0,
            node_sequence: 0,
            time_ns: 0,
            received_ns: 0,
        }
        .into()
    }

    fn cancelled(client_seq: u64, reason: CancelReason) -> ServerMessage {
        Cancelled {
            client_seq,
            client_order_id: 2,
            engine_order_id: 3,
            instrument: 0,
            reason,
            quantity_lots: 1,
            node_sequence: 5,
            time_ns: 6,
            received_ns: 6,
        }
        .into()
    }

    #[test]
    fn refused_requests_are_not_durable() {
        let mut counts = Counts::default();
        counts.add(&rejected(RejectReason::UnknownOrder));
        counts.add(&rejected(RejectReason::OrderNotOpen));
        counts.add(&rejected(RejectReason::Throttle));
        assert_eq!((counts.durable, counts.too_late, counts.refused), (0, 2, 1));
        counts.add(&cancelled(4, CancelReason::UserRequest));
        counts.add(&cancelled(0, CancelReason::SelfTrade));
        assert_eq!((counts.durable, counts.prevented), (1, 1));
        assert_eq!(counts.answered(), 4);
    }
}
