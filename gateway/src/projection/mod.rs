//! The readable history: orders and trades in SQLite and the market's events, both derived from the journal at the commit position.
//!
//! One transaction a batch of records holds the rows, the events and the position, so a crash leaves no half and a lost file is rebuilt by reading the
//! journal again, as long as all of it is kept. A reader that must see its own write waits for the position ([`Projection::wait`]).

pub mod published;
pub mod repo;
pub mod rows;

use std::sync::Arc;
use std::time::Duration;

use events::Sqlite;
use rpc::Health;
use sequencer::{Reader, Record};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use types::{Id128, OrderStatus, PoolKind, Sequence};

use crate::Error;
use crate::fold::{Cause, Fact, Fold, Order, Trade};
use crate::follower::Follower;
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
}

impl Projection {
    pub async fn open(db: Sqlite) -> Result<Self, Error> {
        let position = Sequence(repo::position(&db).await?);
        Ok(Self {
            db,
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

    /// Follows the journal until shutdown. `fold` is not past the stored position, and `reader` begins behind it: the state behind the rows is folded from
    /// there, rows at or before the stored position are not written again.
    pub async fn run(
        self,
        mut fold: Fold,
        reader: Reader,
        health: Health,
        shutdown: CancellationToken,
    ) -> Result<(), Error> {
        let mut reader = Follower::new(reader, health.clone(), PART);
        let written = self.position();
        let mut facts = Vec::new();
        while fold.sequence() < written {
            let record = tokio::select! {
                record = reader.next() => record?,
                () = shutdown.cancelled() => return Ok(()),
            };
            facts.clear();
            fold.apply(&record.command, &record.events, &mut facts);
        }
        loop {
            let first = tokio::select! {
                record = reader.next() => record?,
                () = shutdown.cancelled() => return Ok(()),
            };
            let mut records = vec![first];
            while records.len() < BATCH_RECORDS_MAX {
                match reader.try_next()? {
                    Some(record) => records.push(record),
                    None => break,
                }
            }
            let mut retry = Retry::new(&health, &shutdown);
            let batch = self.gather(&mut fold, &records, &mut retry).await?;
            // The fold has the records already: only the transaction is repeated.
            while let Err(error) = self.write(&batch, fold.sequence()).await {
                retry.wait(error).await?;
            }
            batch.count();
        }
    }

    /// Folds the records into what their transaction writes.
    async fn gather(
        &self,
        fold: &mut Fold,
        records: &[Record],
        retry: &mut Retry<'_>,
    ) -> Result<Batch, Error> {
        let mut batch = Batch::default();
        for record in records {
            batch.facts.clear();
            let cause = fold.apply(&record.command, &record.events, &mut batch.facts);
            if batch.facts.is_empty() && cause.key_hash.is_none() {
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
                known.unwrap_or_else(|| format!("{}:{}", fold.node().get(), cause.sequence));
            batch.take(fold, &cause, &correlation_id);
        }
        Ok(batch)
    }

    async fn write(&self, batch: &Batch, through: Sequence) -> Result<(), Error> {
        let mut tx = self.db.write().await?;
        repo::save_orders_in_tx(&mut tx, &batch.orders).await?;
        repo::save_trades_in_tx(&mut tx, &batch.trades).await?;
        for (key_hash, answer) in &batch.answers {
            repo::save_answer_in_tx(&mut tx, *key_hash, answer).await?;
        }
        events::outbox::append_in_tx(&mut tx, &batch.events).await?;
        repo::set_position_in_tx(&mut tx, through.0).await?;
        tx.commit().await?;
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
#[derive(Default)]
struct Batch {
    facts: Vec<Fact>,
    orders: Vec<OrderRow>,
    place: std::collections::HashMap<String, usize>,
    trades: Vec<TradeRow>,
    answers: Vec<(Id128, AnswerRow)>,
    placed: Vec<(String, types::Side)>,
    events: Vec<events::Event>,
}

impl Batch {
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

    fn take(&mut self, fold: &Fold, cause: &Cause, correlation_id: &str) {
        let mut publisher = Publisher::new(fold.node(), *cause, correlation_id);
        let mut answer = AnswerRow {
            sequence: cause.sequence.0,
            order_id: String::new(),
            cancelled: 0,
        };
        let facts = std::mem::take(&mut self.facts);
        for fact in &facts {
            self.events.extend(publisher.event(fold, fact));
            match fact {
                Fact::Entered(order) => {
                    let spec = fold.instrument(order.instrument);
                    self.placed.push((spec.id.to_string(), order.side));
                    if cause.sequence == order.sequence {
                        answer.order_id = order.id.to_string();
                    }
                    self.order(order_row(fold, cause, order, ""));
                }
                Fact::Rested(order) => self.order(order_row(fold, cause, order, "")),
                Fact::Refused(order, reason) => {
                    answer.order_id = order.id.to_string();
                    self.order(order_row(fold, cause, order, reason.as_str()));
                }
                Fact::Traded(trade) => {
                    for order in [&trade.maker, &trade.taker] {
                        self.order(order_row(fold, cause, order, ""));
                    }
                    self.trades.push(trade_row(fold, cause, trade));
                }
                Fact::Amended { order, .. } | Fact::Reduced { order, .. } => {
                    if answer.order_id.is_empty() {
                        answer.order_id = order.id.to_string();
                    }
                    self.order(order_row(fold, cause, order, ""));
                }
                Fact::Cancelled { order, reason, .. } => {
                    if answer.order_id.is_empty() {
                        answer.order_id = order.id.to_string();
                    }
                    self.order(order_row(fold, cause, order, reason.as_str()));
                }
                Fact::MassCancelled { count, .. } => {
                    answer.order_id.clear();
                    answer.cancelled += count;
                }
                Fact::RequestRefused { .. }
                | Fact::User(..)
                | Fact::Instrument(_)
                | Fact::Session(_)
                | Fact::Pool(_)
                | Fact::PoolIdle(_) => {}
            }
        }
        if !cause.key_hash.is_none() {
            self.answers.push((cause.key_hash, answer));
        }
        self.facts = facts;
    }
}

fn micros(time_ns: u64) -> i64 {
    i64::try_from(time_ns / 1_000).expect("nanoseconds of 64 bits fit as microseconds")
}

fn order_row(fold: &Fold, cause: &Cause, order: &Order, cancel_reason: &str) -> OrderRow {
    let spec = fold.instrument(order.instrument);
    let own_hold = fold
        .pool(order.pool)
        .is_some_and(|pool| pool.kind == PoolKind::Order);
    OrderRow {
        order_id: order.id.to_string(),
        user_id: fold.user(order.user).to_string(),
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

fn trade_row(fold: &Fold, cause: &Cause, trade: &Trade) -> TradeRow {
    let spec = fold.instrument(trade.instrument);
    TradeRow {
        trade_id: trade.id.to_string(),
        buy_order_id: trade.buy().id.to_string(),
        sell_order_id: trade.sell().id.to_string(),
        buyer_id: fold.user(trade.buy().user).to_string(),
        seller_id: fold.user(trade.sell().user).to_string(),
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
