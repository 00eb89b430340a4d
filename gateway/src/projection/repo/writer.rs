//! Writes a batch of records: one prepared statement per row, run on the caller's thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use events::DirectTx;
use replica::{Names, Trade};
use types::{Decimal, InstrumentIx, OrderStatus, RejectReason, Sequence, Side, UserIx, derived};

use super::trade_key;
use crate::Error;
use crate::projection::batch::{Answer, NewTrade, OrderChange, Rows, limit_price};
use crate::projection::micros;

pub const INSERT_ORDER: &str = "INSERT INTO orders (sequence, user, instrument, side, order_type, time_in_force, \
     post_only, stp, expires_at_us, price, quantity, filled, value_minor, status, cancel_reason, client_order_id, \
     engine_order_id, created_ns, updated_at_us) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19)";
pub const UPDATE_ORDER: &str = "UPDATE orders SET price = ?2, quantity = ?3, filled = ?4, value_minor = ?5, \
     status = ?6, cancel_reason = ?7, updated_at_us = ?8, client_order_id = ?9 WHERE sequence = ?1";
pub const INSERT_TRADE: &str = "INSERT INTO trades (id, buy_order, sell_order, buyer, seller, instrument, price, \
     quantity, fee_minor, number, aggressor_side, executed_ns) \
     VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)";
pub const SET_POSITION: &str = "UPDATE projection SET sequence = ?1 WHERE id = 1";
const INSERT_ANSWER: &str = "INSERT INTO answers (key_hash, sequence, order_sequence, cancelled, refusal) \
     VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (key_hash) DO UPDATE \
     SET cancelled = answers.cancelled + excluded.cancelled";
const USER: &str = "INSERT INTO users (user_id) VALUES (?1) \
     ON CONFLICT (user_id) DO UPDATE SET user_id = excluded.user_id RETURNING user";
const INSTRUMENT: &str = "INSERT INTO instruments (instrument_id, tick_mantissa, tick_scale, lot_mantissa, lot_scale) \
     VALUES (?1, ?2, ?3, ?4, ?5) ON CONFLICT (instrument_id) DO UPDATE \
     SET tick_mantissa = coalesce(tick_mantissa, excluded.tick_mantissa), \
     tick_scale = coalesce(tick_scale, excluded.tick_scale) \
     RETURNING instrument, tick_mantissa, tick_scale, lot_mantissa, lot_scale";

/// Binds the values in order and runs the statement.
macro_rules! run {
    ($statement:expr; $($value:expr),+ $(,)?) => {{
        let statement = &mut *$statement;
        let mut at = 0;
        $(
            at += 1;
            statement.raw_bind_parameter(at, $value).map_err(events::Error::from)?;
        )+
        statement.raw_execute().map_err(events::Error::from)?
    }};
}

/// A prepared statement of the transaction.
macro_rules! prepared {
    ($tx:expr, $sql:expr) => {
        $tx.prepare_cached($sql).map_err(events::Error::from)?
    };
}

/// An instrument's row number, and the stored units per tick and per lot. Both are 1 unless the
/// instrument's first rows were converted from an earlier schema.
#[derive(Clone, Copy)]
struct Units {
    instrument: i64,
    per_tick: i64,
    per_lot: i64,
}

/// Orders and trades of a batch, for the metrics.
#[derive(Default)]
pub struct BatchCounts {
    /// Orders that a book accepted.
    pub orders: BTreeMap<(InstrumentIx, Side), u64>,
    /// Times of the trades, in microseconds.
    pub trades: BTreeMap<InstrumentIx, Vec<i64>>,
}

/// Writes batches. Caches the row numbers of users and instruments.
pub struct Writer {
    names: Arc<Names>,
    /// Row numbers, by user index; 0 = not looked up yet.
    users: Vec<i64>,
    instruments: Vec<Option<Units>>,
}

impl Writer {
    pub fn new(names: Arc<Names>) -> Self {
        Self {
            names,
            users: Vec::new(),
            instruments: Vec::new(),
        }
    }

    /// Writes the rows and the position in the caller's transaction.
    ///
    /// # Errors
    /// The store fails. The caller must not commit the transaction, and must call
    /// [`Self::clear_cache`].
    pub fn write(
        &mut self,
        tx: &DirectTx,
        rows: &Rows<'_>,
        through: Sequence,
    ) -> Result<BatchCounts, Error> {
        let mut counts = BatchCounts::default();
        self.orders(tx, &rows.orders, &mut counts)?;
        self.trades(tx, &rows.trades, &mut counts)?;
        for answer in &rows.answers {
            insert_answer(tx, answer)?;
        }
        run!(prepared!(tx, SET_POSITION); signed(through.get()));
        Ok(counts)
    }

    /// Empties the cache: its rows may not have been committed.
    pub fn clear_cache(&mut self) {
        self.users.clear();
        self.instruments.clear();
    }

    fn orders(
        &mut self,
        tx: &DirectTx,
        changes: &[OrderChange<'_>],
        counts: &mut BatchCounts,
    ) -> Result<(), Error> {
        let mut insert = prepared!(tx, INSERT_ORDER);
        let mut update = prepared!(tx, UPDATE_ORDER);
        for change in changes {
            let order = change.order;
            let units = self.units(tx, order.instrument)?;
            let price = limit_price(order.terms.order_type, order.price);
            let price = price.map(|ticks| units.price(ticks.0)).transpose()?;
            let (quantity, filled) = (
                units.quantity(order.quantity.0)?,
                units.quantity(order.filled.0)?,
            );
            let status = change.status();
            let updated_us = micros(change.updated_ns);
            if !change.is_new {
                let changed = run!(update; signed(change.sequence.get()), price, quantity, filled,
                    order.fill_totals.value_minor.0, status.code(), change.reason, updated_us,
                    order.client_order_id.cast_signed());
                if changed != 1 {
                    let reason = format!("order {} has no row", change.sequence);
                    return Err(Error::Stored(reason));
                }
                continue;
            }
            run!(insert;
                signed(change.sequence.get()),
                self.user(tx, order.user)?,
                units.instrument,
                order.side.code(),
                order.terms.order_type.code(),
                order.terms.time_in_force.code(),
                order.terms.post_only,
                order.terms.stp.code(),
                micros(order.terms.expire_at_ns),
                price,
                quantity,
                filled,
                order.fill_totals.value_minor.0,
                status.code(),
                change.reason,
                order.client_order_id.cast_signed(),
                order.handle.engine_id().cast_signed(),
                signed(order.created_ns),
                updated_us,
            );
            if status != OrderStatus::Rejected {
                *counts
                    .orders
                    .entry((order.instrument, order.side))
                    .or_default() += 1;
            }
        }
        Ok(())
    }

    fn trades(
        &mut self,
        tx: &DirectTx,
        trades: &[NewTrade<'_>],
        counts: &mut BatchCounts,
    ) -> Result<(), Error> {
        let mut insert = prepared!(tx, INSERT_TRADE);
        for NewTrade {
            sequence,
            executed_ns,
            trade,
        } in trades
        {
            let units = self.units(tx, trade.instrument)?;
            let (buy, sell) = (trade.buy(), trade.sell());
            run!(insert;
                trade_key(*sequence, index(trade)),
                signed(buy.sequence.get()),
                signed(sell.sequence.get()),
                self.user(tx, buy.user)?,
                self.user(tx, sell.user)?,
                units.instrument,
                units.price(trade.price.0)?,
                units.quantity(trade.quantity.0)?,
                trade.fee_minor.0,
                signed(trade.number),
                trade.taker.side.code(),
                signed(*executed_ns),
            );
            let times = counts.trades.entry(trade.instrument).or_default();
            times.push(micros(*executed_ns));
        }
        Ok(())
    }

    fn user(&mut self, tx: &DirectTx, user: UserIx) -> Result<i64, Error> {
        match self.users.get(user.index()) {
            Some(known) if *known != 0 => return Ok(*known),
            Some(_) => {}
            None => self.users.resize(user.index() + 1, 0),
        }
        let id = self.names.user(user);
        let number = prepared!(tx, USER).query_row([id.as_str()], |row| row.get(0));
        let number = number.map_err(events::Error::from)?;
        self.users[user.index()] = number;
        Ok(number)
    }

    fn units(&mut self, tx: &DirectTx, instrument: InstrumentIx) -> Result<Units, Error> {
        match self.instruments.get(instrument.index()) {
            Some(Some(known)) => return Ok(*known),
            Some(None) => {}
            None => self.instruments.resize(instrument.index() + 1, None),
        }
        let spec = self.names.instrument(instrument);
        let (tick, lot) = (spec.tick_size(), spec.lot_size());
        let mantissa = |step: Decimal| i64::try_from(step.mantissa()).expect("64 bits in the spec");
        let values = (
            spec.id.as_str(),
            mantissa(tick),
            tick.scale(),
            mantissa(lot),
            lot.scale(),
        );
        let stored = prepared!(tx, INSTRUMENT).query_row(values, |row| {
            let (tick, lot): ((i64, u8), (i64, u8)) =
                ((row.get(1)?, row.get(2)?), (row.get(3)?, row.get(4)?));
            Ok((row.get(0)?, tick, lot))
        });
        let (number, tick_unit, lot_unit) = stored.map_err(events::Error::from)?;
        let per = |step: Decimal, (mantissa, scale): (i64, u8)| {
            let unit = Decimal::from_minor(mantissa, scale);
            let steps = step
                .steps_of(unit)
                .ok()
                .and_then(|steps| i64::try_from(steps).ok());
            steps
                .ok_or_else(|| Error::Stored(format!("{}: step is no multiple of {unit}", spec.id)))
        };
        let units = Units {
            instrument: number,
            per_tick: per(tick, tick_unit)?,
            per_lot: per(lot, lot_unit)?,
        };
        self.instruments[instrument.index()] = Some(units);
        Ok(units)
    }
}

impl Units {
    fn price(self, ticks: i64) -> Result<i64, Error> {
        let units = ticks.checked_mul(self.per_tick);
        units.ok_or_else(|| Error::Stored(format!("price of {ticks} ticks overflows")))
    }

    fn quantity(self, lots: u64) -> Result<i64, Error> {
        let units = i64::try_from(lots)
            .ok()
            .and_then(|lots| lots.checked_mul(self.per_lot));
        units.ok_or_else(|| Error::Stored(format!("quantity of {lots} lots overflows")))
    }
}

/// Index of a trade among its command's events, decoded from the public id.
pub(super) fn index(trade: &Trade) -> u32 {
    derived::trade_index(trade.id).expect("a trade id has an index")
}

pub(super) fn signed(number: u64) -> i64 {
    i64::try_from(number).expect("sequences and times have 63 bits")
}

/// Stores the first answer under a key. Later slices of a mass cancel only add to `cancelled`.
pub(super) fn insert_answer(tx: &DirectTx, answer: &Answer) -> Result<(), Error> {
    run!(prepared!(tx, INSERT_ANSWER);
        answer.key_hash.as_u128().to_be_bytes().as_slice(),
        signed(answer.sequence.get()),
        signed(answer.order.get()),
        answer.cancelled,
        answer.refusal.map(RejectReason::code),
    );
    Ok(())
}
