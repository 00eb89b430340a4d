//! Sends the rows of a file and reads the reports. Requests are sent in file order over one
//! connection, without waiting for answers; each session stays within its throttle. At the end each
//! session cancels its open orders, so the book is empty for the next run.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use client::{Connection, LoginOptions, Report, Reports, Trust};
use hdrhistogram::Histogram;
use types::command::RequestKind;
use types::{RejectReason, Side, TimeInForce};
use wire::{Amend, BOTH_SIDES, Cancel, ClientMessage, MassCancel, NewOrder, ServerMessage};

use super::lobster::{Kind, Row};
use super::members::{Member, channel_of};

/// First client id of takers' orders; the ids of the file are lower.
const TAKER_IDS: u64 = 1 << 48;
/// Silence after which no further fills are expected.
const LAST_FILLS: Duration = Duration::from_millis(500);
/// Requests sent that the listener has not noted yet; with more the sender waits.
const SENT_MAX: usize = 65_536;
/// Used share of the throttle in percent. Not all of it: the clocks of client and platform differ.
const THROTTLE_USED_PERCENT: u32 = 90;

/// Totals of the reports.
pub struct Tally {
    pub orders: u64,
    pub requests: u64,
    pub skipped_unknown: u64,
    pub trades: u64,
    pub quantity: u64,
    pub rejects: BTreeMap<&'static str, u64>,
    /// Rejects other than those of a cancel or amend of an ended order.
    pub rejects_unexpected: u64,
    pub executions_of_known_orders: u64,
    pub same_maker: u64,
    /// Latency from send to the durable acknowledgement, in nanoseconds.
    pub acknowledged: Histogram<u64>,
    /// Latency from send to *accepted*, in nanoseconds.
    pub accepted: Histogram<u64>,
    /// Journal time of each trade, in trade order.
    pub executed_ns: BTreeMap<u64, u64>,
    pub elapsed: Duration,
}

/// Arrival times of the answers to a request whose send is not noted yet.
#[derive(Default)]
struct Early {
    accepted: Option<Instant>,
    answered: Option<Instant>,
}

struct Listener {
    tally: Tally,
    /// (channel, client sequence) to send time and whether it is an order.
    waiting: HashMap<(u16, u64), (Instant, bool)>,
    /// By (channel, client sequence): answers that arrived before the note of their request.
    early: HashMap<(u16, u64), Early>,
    sent_rx: tokio::sync::mpsc::Receiver<(u16, u64, Instant, bool)>,
    /// Engine id to client id.
    orders: HashMap<u64, u64>,
    /// Taker's client id to the engine id of its first maker.
    first_maker: HashMap<u64, u64>,
}

/// Sends the rows; returns once every request has its numbered answer.
pub async fn play(
    gateway: SocketAddr,
    instrument: &str,
    members: &[Member],
    rows: &[Row],
    speed: Option<f64>,
    progress: impl Fn(u64) + Send,
) -> anyhow::Result<Tally> {
    let (connection, reports) = Connection::connect(gateway, Trust::Loopback)
        .await
        .context("connect")?;
    let mut per_s = u32::MAX;
    for (channel, member) in members.iter().enumerate() {
        let token = format!("sandbox.trader.{}", member.user);
        let info = connection
            .login(u16::try_from(channel)?, LoginOptions::new(&token, "replay"))
            .await
            .with_context(|| format!("login of member {channel}"))?;
        // 0 = no limit.
        if info.throttle_per_s > 0 {
            per_s = per_s.min(info.throttle_per_s);
        }
    }
    let ix = connection
        .instruments()
        .iter()
        .find(|definition| definition.id.as_str() == instrument)
        .map(|definition| definition.instrument)
        .context("the gateway does not know the instrument")?;

    let (sent_tx, sent_rx) = tokio::sync::mpsc::channel(SENT_MAX);
    let listener = Listener::new(sent_rx);
    let listening = tokio::spawn(listener.listen(reports));
    let started = Instant::now();
    let plan = Sender {
        connection: &connection,
        instrument: ix,
        per_s,
        sent_tx,
    };
    let sent = plan.send(rows, speed, progress).await?;
    plan.cancel_all(members.len()).await?;
    drop(plan);
    let mut listener = match tokio::time::timeout(Duration::from_secs(60), listening).await {
        Ok(joined) => joined.context("listener")??,
        Err(_) => bail!("reports are still missing one minute after the last row"),
    };
    listener.compare(rows);
    let mut tally = listener.tally;
    tally.elapsed = started.elapsed();
    tally.orders = sent.orders;
    tally.requests = sent.requests;
    tally.skipped_unknown = sent.skipped_unknown;
    Ok(tally)
}

struct Sender<'a> {
    connection: &'a Connection,
    instrument: u32,
    per_s: u32,
    sent_tx: tokio::sync::mpsc::Sender<(u16, u64, Instant, bool)>,
}

#[derive(Default)]
struct Sent {
    orders: u64,
    requests: u64,
    skipped_unknown: u64,
}

impl Sender<'_> {
    /// Cancels all open orders of each session. The report's requests do not count mass cancels.
    async fn cancel_all(&self, sessions: usize) -> anyhow::Result<()> {
        for channel in 0..sessions {
            let channel = u16::try_from(channel)?;
            let sent_at = Instant::now();
            let all = MassCancel {
                scope: 0,
                instrument: self.instrument,
                side: BOTH_SIDES,
            };
            let client_seq = self.connection.send(channel, all).await?;
            self.sent_tx
                .send((channel, client_seq, sent_at, false))
                .await
                .context("the listener has ended early")?;
        }
        Ok(())
    }

    async fn send(
        &self,
        rows: &[Row],
        speed: Option<f64>,
        progress: impl Fn(u64),
    ) -> anyhow::Result<Sent> {
        let mut sent = Sent::default();
        // Total quantity of each order, including amends.
        let mut totals: HashMap<u64, u64> = HashMap::new();
        let spacing = Duration::from_secs_f64(
            100.0 / f64::from(self.per_s.max(1)) / f64::from(THROTTLE_USED_PERCENT),
        );
        let mut next_slot: HashMap<u16, Instant> = HashMap::new();
        let start = Instant::now();
        for (at, row) in rows.iter().enumerate() {
            progress(at as u64);
            let Some(message) = self.message(row, at, &mut totals, &mut sent) else {
                continue;
            };
            let channel = channel_of(row);
            let mut due = next_slot.get(&channel).copied().unwrap_or(start);
            if let Some(speed) = speed {
                let offset = (row.time_ns - rows[0].time_ns) as f64 / speed;
                due = due.max(start + Duration::from_nanos(offset as u64));
            }
            let now = Instant::now();
            if due > now {
                tokio::time::sleep_until(due.into()).await;
            }
            let sent_at = Instant::now();
            next_slot.insert(channel, due.max(sent_at - spacing) + spacing);
            let is_order = matches!(message, ClientMessage::NewOrder(_));
            let client_seq = self
                .connection
                .send(channel, message)
                .await
                .with_context(|| format!("row {}", at + 1))?;
            sent.requests += 1;
            sent.orders += u64::from(is_order);
            self.sent_tx
                .send((channel, client_seq, sent_at, is_order))
                .await
                .context("the listener has ended early")?;
        }
        Ok(sent)
    }

    /// The request of a row; `None` if the row has none.
    fn message(
        &self,
        row: &Row,
        at: usize,
        totals: &mut HashMap<u64, u64>,
        sent: &mut Sent,
    ) -> Option<ClientMessage> {
        match row.kind {
            Kind::New => {
                totals.insert(row.order_id, row.size);
                Some(
                    self.order(row.order_id, row.is_buy, TimeInForce::Gtc, row)
                        .into(),
                )
            }
            Kind::Execute => {
                let id = TAKER_IDS + at as u64;
                Some(self.order(id, !row.is_buy, TimeInForce::Ioc, row).into())
            }
            Kind::Reduce | Kind::Delete => {
                let Some(total) = totals.get_mut(&row.order_id) else {
                    sent.skipped_unknown += 1;
                    return None;
                };
                if row.kind == Kind::Delete || *total <= row.size {
                    return Some(
                        Cancel {
                            client_order_id: row.order_id,
                            engine_order_id: 0,
                        }
                        .into(),
                    );
                }
                *total -= row.size;
                Some(
                    Amend {
                        client_order_id: row.order_id,
                        engine_order_id: 0,
                        price_ticks: 0,
                        quantity_lots: *total,
                        new_client_order_id: 0,
                    }
                    .into(),
                )
            }
            Kind::ExecuteHidden | Kind::Other => None,
        }
    }

    fn order(&self, id: u64, is_buy: bool, time_in_force: TimeInForce, row: &Row) -> NewOrder {
        let side = if is_buy { Side::Buy } else { Side::Sell };
        let price_ticks = row.price_x10000 / 100;
        NewOrder {
            time_in_force,
            ..NewOrder::limit(id, self.instrument, side, price_ticks, row.size)
        }
    }
}

impl Listener {
    fn new(sent_rx: tokio::sync::mpsc::Receiver<(u16, u64, Instant, bool)>) -> Self {
        let histogram = || Histogram::new_with_bounds(1, 600_000_000_000, 3).expect("fixed bounds");
        Self {
            tally: Tally {
                orders: 0,
                requests: 0,
                skipped_unknown: 0,
                trades: 0,
                quantity: 0,
                rejects: BTreeMap::new(),
                rejects_unexpected: 0,
                executions_of_known_orders: 0,
                same_maker: 0,
                acknowledged: histogram(),
                accepted: histogram(),
                executed_ns: BTreeMap::new(),
                elapsed: Duration::ZERO,
            },
            waiting: HashMap::new(),
            early: HashMap::new(),
            sent_rx,
            orders: HashMap::new(),
            first_maker: HashMap::new(),
        }
    }

    /// Reads reports until the sender is done and every request is answered.
    async fn listen(mut self, mut reports: Reports) -> anyhow::Result<Self> {
        let mut is_sending = true;
        while is_sending || !self.waiting.is_empty() {
            tokio::select! {
                biased;
                sent = self.sent_rx.recv(), if is_sending => match sent {
                    Some((channel, client_seq, at, is_order)) => {
                        self.sent((channel, client_seq), at, is_order);
                    }
                    None => is_sending = false,
                },
                report = reports.recv() => {
                    self.report(&report.context("the connection was lost")??)?;
                }
            }
        }
        // The last fills follow their acknowledgements. Settlement is not waited for here.
        let mut end = tokio::time::Instant::now() + LAST_FILLS;
        while let Ok(Some(report)) = tokio::time::timeout_at(end, reports.recv()).await {
            let report = report?;
            self.report(&report)?;
            if !matches!(report.message, ServerMessage::SettlementProgress(_)) {
                end = tokio::time::Instant::now() + LAST_FILLS;
            }
        }
        Ok(self)
    }

    fn report(&mut self, report: &Report) -> anyhow::Result<()> {
        match &report.message {
            ServerMessage::Accepted(accepted) => {
                let key = (report.channel, accepted.client_seq);
                match self.waiting.get(&key) {
                    Some((at, true)) => {
                        record(&mut self.tally.accepted, report.received_at, *at);
                    }
                    Some(_) => {}
                    None => self.early.entry(key).or_default().accepted = Some(report.received_at),
                }
            }
            ServerMessage::OrderAck(ack) => {
                self.orders.insert(ack.engine_order_id, ack.client_order_id);
                self.answered(report, ack.client_seq);
            }
            ServerMessage::Amended(amended) => self.answered(report, amended.client_seq),
            ServerMessage::Cancelled(cancelled) if cancelled.client_seq != 0 => {
                self.answered(report, cancelled.client_seq);
            }
            // The report after the last slice answers no request.
            ServerMessage::MassCancelled(done) if done.client_seq != 0 => {
                self.answered(report, done.client_seq);
            }
            ServerMessage::Rejected(rejected) => {
                let reason = rejected.reason.as_str();
                *self.tally.rejects.entry(reason).or_default() += 1;
                let is_late =
                    matches!(
                        rejected.reason,
                        RejectReason::UnknownOrder | RejectReason::OrderNotOpen
                    ) && matches!(rejected.request, RequestKind::Cancel | RequestKind::Amend);
                if !is_late {
                    self.tally.rejects_unexpected += 1;
                }
                self.answered(report, rejected.client_seq);
            }
            ServerMessage::Fill(fill) if fill.aggressor == 1 => {
                self.tally.trades += 1;
                self.tally.quantity += fill.quantity_lots;
                self.tally
                    .executed_ns
                    .insert(fill.trade_number, fill.time_ns);
                if fill.client_order_id >= TAKER_IDS {
                    self.first_maker
                        .entry(fill.client_order_id)
                        .or_insert(fill.counter_order_id);
                }
            }
            ServerMessage::Disconnect(disconnect) => {
                bail!(
                    "the gateway ended the session: {}",
                    disconnect.text.as_str()
                );
            }
            _ => {}
        }
        Ok(())
    }

    fn answered(&mut self, report: &Report, client_seq: u64) {
        let key = (report.channel, client_seq);
        match self.waiting.remove(&key) {
            Some((at, true)) => record(&mut self.tally.acknowledged, report.received_at, at),
            Some(_) => {}
            None => self.early.entry(key).or_default().answered = Some(report.received_at),
        }
    }

    /// Notes a sent request. Its answer may have arrived before.
    fn sent(&mut self, key: (u16, u64), at: Instant, is_order: bool) {
        let early = self.early.remove(&key).unwrap_or_default();
        if let Some(accepted_at) = early.accepted.filter(|_| is_order) {
            record(&mut self.tally.accepted, accepted_at, at);
        }
        match early.answered {
            Some(answered_at) if is_order => {
                record(&mut self.tally.acknowledged, answered_at, at);
            }
            Some(_) => {}
            None => {
                self.waiting.insert(key, (at, is_order));
            }
        }
    }

    /// Compares each execution's first maker with the order that the exchange executed.
    fn compare(&mut self, rows: &[Row]) {
        let mut seen = HashSet::new();
        for (at, row) in rows.iter().enumerate() {
            match row.kind {
                Kind::New => {
                    seen.insert(row.order_id);
                }
                Kind::Execute if seen.contains(&row.order_id) => {
                    self.tally.executions_of_known_orders += 1;
                    let maker = self.first_maker.get(&(TAKER_IDS + at as u64));
                    if maker.and_then(|engine_id| self.orders.get(engine_id)) == Some(&row.order_id)
                    {
                        self.tally.same_maker += 1;
                    }
                }
                _ => {}
            }
        }
    }
}

fn record(histogram: &mut Histogram<u64>, received_at: Instant, sent_at: Instant) {
    let latency = received_at.saturating_duration_since(sent_at);
    let nanos = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
    histogram.saturating_record(nanos.max(1));
}
