//! The readable history: orders and trades in SQLite and the market's events, both derived from
//! what the replica tells of the journal.
//!
//! One transaction a batch of records holds the rows, the events and the position, so a crash
//! leaves no half and a lost file is rebuilt by reading the journal again, as long as all of it is
//! kept. A reader that must see its own write waits for the position ([`Projection::wait`]).

pub mod published;
pub mod repo;
pub mod rows;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use events::Sqlite;
use replica::{Applied, Cause, Effect, Follower, Names, Order, Trade};
use rpc::Health;
use sequencer::Durable;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use types::{Id128, NodeId, OrderStatus, PoolKind, Sequence};

use crate::Error;
use crate::market::now_us;
use published::Publisher;
use rows::{AnswerRow, OrderRow, TradeRow};

/// Records in one transaction.
const BATCH_RECORDS_MAX: usize = 512;
/// Name in the health read.
pub const PART: &str = "history";
/// Pauses between two tries while the store is away.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(2);

/// The history as its readers see it.
#[derive(Clone)]
pub struct Projection {
    pub db: Sqlite,
    position: Arc<watch::Sender<Sequence>>,
    durable: Durable,
}

impl Projection {
    /// `durable` is told how far it has come.
    pub async fn open(db: Sqlite, durable: Durable) -> Result<Self, Error> {
        let position = Sequence(repo::position(&db).await?);
        durable.set(position);
        Ok(Self {
            db,
            durable,
            position: Arc::new(watch::Sender::new(position)),
        })
    }

    /// Last record in the tables.
    pub fn position(&self) -> Sequence {
        *self.position.borrow()
    }

    /// Returns when the tables hold everything up to `sequence`.
    pub async fn wait(&self, sequence: Sequence) {
        let mut position = self.position.subscribe();
        position
            .wait_for(|position| *position >= sequence)
            .await
            .expect("the sender lives in self");
    }

    /// Follows until shutdown. `follower` begins behind the stored position.
    pub async fn run(
        self,
        node: NodeId,
        mut follower: Follower,
        health: Health,
        shutdown: CancellationToken,
    ) -> Result<(), Error> {
        let names = follower.names().clone();
        loop {
            let first = tokio::select! {
                batch = follower.next() => batch?,
                () = shutdown.cancelled() => return Ok(()),
            };
            let mut retry = Retry::new(&health, &shutdown);
            let mut batch = Batch::new(node, &names);
            let mut through = self.gather(&mut batch, &first, &mut retry).await?;
            while batch.records < BATCH_RECORDS_MAX
                && let Some(more) = follower.try_next()
            {
                through = self.gather(&mut batch, &more, &mut retry).await?;
            }
            while let Err(error) = self.write(&batch, through).await {
                retry.wait(error).await?;
            }
            batch.count();
        }
    }

    /// Adds what the records mean to the batch; gives the last of them.
    async fn gather(
        &self,
        batch: &mut Batch<'_>,
        records: &replica::Batch,
        retry: &mut Retry<'_>,
    ) -> Result<Sequence, Error> {
        batch.records += records.len();
        for applied in records.iter() {
            let cause = &applied.cause;
            if applied.effects.is_empty() && cause.key_hash.is_none() {
                continue;
            }
            let known = match cause.key_hash {
                Id128::NONE => None,
                key_hash => loop {
                    match repo::correlation(&self.db, key_hash).await {
                        Ok(known) => break known,
                        Err(error) => retry.wait(error).await?,
                    }
                },
            };
            let correlation_id =
                known.unwrap_or_else(|| format!("{}:{}", batch.node.get(), cause.sequence));
            batch.take(applied, &correlation_id);
        }
        Ok(records.last())
    }

    async fn write(&self, batch: &Batch<'_>, through: Sequence) -> Result<(), Error> {
        let mut tx = self.db.write().await?;
        repo::save_orders_in_tx(&mut tx, &batch.orders).await?;
        repo::save_trades_in_tx(&mut tx, &batch.trades).await?;
        for (key_hash, answer) in &batch.answers {
            repo::save_answer_in_tx(&mut tx, *key_hash, answer).await?;
        }
        events::outbox::append_in_tx(&mut tx, &batch.events).await?;
        repo::set_position_in_tx(&mut tx, through.0).await?;
        tx.commit().await?;
        self.durable.set(through);
        self.position.send_replace(through);
        Ok(())
    }
}

/// The pauses of one batch while the store is away, on a full disk for example. The health read says so meanwhile.
struct Retry<'a> {
    health: &'a Health,
    shutdown: &'a CancellationToken,
    /// The next pause.
    pause: Duration,
}

impl<'a> Retry<'a> {
    fn new(health: &'a Health, shutdown: &'a CancellationToken) -> Self {
        Self {
            health,
            shutdown,
            pause: RETRY_FIRST,
        }
    }

    /// Pauses before the same is tried again.
    ///
    /// # Errors
    /// The error itself, where waiting cannot help or shutdown is near.
    async fn wait(&mut self, error: Error) -> Result<(), Error> {
        if !error.is_away() {
            return Err(error);
        }
        tracing::warn!(%error, "the history is not written, tried again");
        self.health.set_failing(PART, error.to_string());
        tokio::select! {
            () = tokio::time::sleep(self.pause) => {}
            () = self.shutdown.cancelled() => return Err(error),
        }
        self.pause = (self.pause * 2).min(RETRY_MAX);
        Ok(())
    }
}

impl Drop for Retry<'_> {
    fn drop(&mut self) {
        if self.pause > RETRY_FIRST {
            self.health.set_ok(PART);
        }
    }
}

/// What a transaction will write: each order once, as the last record leaves it.
struct Batch<'a> {
    node: NodeId,
    names: &'a Names,
    records: usize,
    orders: Vec<OrderRow>,
    place: HashMap<String, usize>,
    trades: Vec<TradeRow>,
    answers: Vec<(Id128, AnswerRow)>,
    placed: Vec<(String, types::Side)>,
    events: Vec<events::Event>,
}

impl<'a> Batch<'a> {
    fn new(node: NodeId, names: &'a Names) -> Self {
        Self {
            node,
            names,
            records: 0,
            orders: Vec::new(),
            place: HashMap::new(),
            trades: Vec::new(),
            answers: Vec::new(),
            placed: Vec::new(),
            events: Vec::new(),
        }
    }

    fn order(&mut self, row: OrderRow) {
        match self.place.get(&row.order_id) {
            Some(at) => self.orders[*at] = row,
            None => {
                self.place.insert(row.order_id.clone(), self.orders.len());
                self.orders.push(row);
            }
        }
    }

    /// Metrics of specification 1.6, once what they count is written.
    fn count(&self) {
        for (instrument_id, side) in &self.placed {
            metrics::counter!(
                "orders_placed_total",
                "instrument_id" => instrument_id.clone(),
                "side" => side.as_str()
            )
            .increment(1);
        }
        let now_us = now_us();
        for trade in &self.trades {
            metrics::counter!("trades_executed_total", "instrument_id" => trade.instrument_id.clone())
                .increment(1);
            let taken_us = now_us.saturating_sub(trade.executed_at_us).max(0);
            metrics::histogram!("trade_execution_duration_seconds").record(taken_us as f64 / 1e6);
        }
    }

    fn take(&mut self, applied: &Applied, correlation_id: &str) {
        let (names, cause) = (self.names, &applied.cause);
        let mut publisher = Publisher::new(self.node, names, *cause, correlation_id);
        let mut answer = AnswerRow {
            sequence: cause.sequence.0,
            order_id: String::new(),
            cancelled: 0,
        };
        for told in &applied.effects {
            self.events.extend(publisher.event(&told.effect));
            match &told.effect {
                Effect::Accepted(order) => {
                    let spec = names.instrument(order.instrument);
                    self.placed.push((spec.id.to_string(), order.side));
                    if cause.sequence == order.sequence {
                        answer.order_id = order.id.to_string();
                    }
                    self.order(order_row(names, cause, order, ""));
                }
                Effect::Rested(order) => self.order(order_row(names, cause, order, "")),
                Effect::Refused(order, _, reason) => {
                    answer.order_id = order.id.to_string();
                    self.order(order_row(names, cause, order, reason.as_str()));
                }
                Effect::Traded(trade) => {
                    for order in [&trade.maker, &trade.taker] {
                        self.order(order_row(names, cause, order, ""));
                    }
                    self.trades.push(trade_row(names, cause, trade));
                }
                Effect::Amended { order, .. } | Effect::Reduced { order, .. } => {
                    if answer.order_id.is_empty() {
                        answer.order_id = order.id.to_string();
                    }
                    self.order(order_row(names, cause, order, ""));
                }
                Effect::Cancelled { order, reason, .. } => {
                    if answer.order_id.is_empty() {
                        answer.order_id = order.id.to_string();
                    }
                    self.order(order_row(names, cause, order, reason.as_str()));
                }
                Effect::MassCancelled { count, .. } => {
                    answer.order_id.clear();
                    answer.cancelled += count;
                }
                Effect::RequestRefused { .. }
                | Effect::User(..)
                | Effect::Instrument(_)
                | Effect::Session(_)
                | Effect::Hold(_)
                | Effect::Entered(_)
                | Effect::Settled { .. }
                | Effect::Bust(_) => {}
            }
        }
        if !cause.key_hash.is_none() {
            self.answers.push((cause.key_hash, answer));
        }
    }
}

fn micros(time_ns: u64) -> i64 {
    i64::try_from(time_ns / 1_000).expect("nanoseconds of 64 bits fit as microseconds")
}

fn order_row(names: &Names, cause: &Cause, order: &Order, cancel_reason: &str) -> OrderRow {
    let spec = &names.instrument(order.instrument);
    let own_hold = names.hold(order.pool).kind == PoolKind::Order;
    OrderRow {
        order_id: order.id.to_string(),
        user_id: names.user(order.user).to_string(),
        instrument_id: spec.id.to_string(),
        side: order.side,
        order_type: order.order_type,
        time_in_force: order.time_in_force,
        post_only: order.post_only,
        stp: order.stp,
        expires_at_us: micros(order.expire_at_ns),
        price: published::price(spec, order),
        quantity: spec.quantity(order.quantity),
        filled: spec.quantity(order.filled),
        value_minor: order.done.value_minor.0,
        status: match order.status {
            OrderStatus::Open if !order.filled.is_zero() => OrderStatus::PartiallyFilled,
            status => status,
        },
        cancel_reason: cancel_reason.to_owned(),
        client_order_id: order.client_order_id.to_string(),
        engine_order_id: order.handle.engine_id(),
        own_hold,
        sequence: order.sequence.0,
        created_at_us: micros(order.created_ns),
        updated_at_us: micros(cause.time_ns),
    }
}

fn trade_row(names: &Names, cause: &Cause, trade: &Trade) -> TradeRow {
    let spec = names.instrument(trade.instrument);
    TradeRow {
        trade_id: trade.id.to_string(),
        buy_order_id: trade.buy().id.to_string(),
        sell_order_id: trade.sell().id.to_string(),
        buyer_id: names.user(trade.buy().user).to_string(),
        seller_id: names.user(trade.sell().user).to_string(),
        instrument_id: spec.id.to_string(),
        price: spec.price(trade.price),
        quantity: spec.quantity(trade.quantity),
        fee_minor: trade.fee_minor.0,
        trade_number: trade.number,
        aggressor_side: trade.taker.side,
        executed_at_us: micros(cause.time_ns),
        sequence: cause.sequence.0,
    }
}
