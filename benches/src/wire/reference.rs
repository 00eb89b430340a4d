//! A plain reference book that replays a run's journal and compares every trade.
//!
//! It supports the commands that the flow causes: limit and market orders (GTC, IOC, FOK), cancels,
//! amends, and self-trade prevention that cancels the newest order. Any other command on the
//! instrument is an error.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use anyhow::{bail, ensure};
use sequencer::Record;
use sequencer::inspect::Folder;
use types::command::{Amend, New, Route};
use types::{Command, Event, Handle, InstrumentIx, Side, StpGroup, StpMode, TimeInForce};

/// Maximum time spent waiting for the journal, without the time of the replay.
const JOURNAL_WAIT_MAX: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// An order. Open and total quantity are in lots.
#[derive(Clone, Copy, Debug)]
struct Resting {
    handle: Handle,
    group: StpGroup,
    open: u64,
    total: u64,
}

/// An incoming order.
struct Taker {
    order: Resting,
    side: Side,
    price: i64,
}

/// Maker, taker, price in ticks and quantity in lots.
type Trade = (Handle, Handle, i64, u64);

/// Verified commands and trades of one instrument in a run's journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    pub commands: u64,
    pub trades: u64,
}

/// The reference book. The key of a level is its price. Prices of buys are negated, so that the
/// best level comes first.
#[derive(Default)]
pub struct Reference {
    sides: [BTreeMap<i64, VecDeque<Resting>>; 2],
    /// Side and level key of each resting order.
    places: HashMap<Handle, (Side, i64)>,
    /// Trades of the current command.
    trades: Vec<Trade>,
}

/// Replays the records 1 to `through` in the journal of a running platform.
///
/// # Errors
/// A trade differs, the journal contains an unsupported command on the instrument, or it does not
/// reach `through` in time.
pub fn verify(
    journal: &Folder,
    instrument: InstrumentIx,
    through: u64,
) -> anyhow::Result<Verified> {
    let (mut book, mut verified, mut last) = (Reference::default(), Verified::default(), 0);
    let mut waited = Duration::ZERO;
    journal.follow(
        1..=through,
        |record| {
            last = record.command.sequence.get();
            match record.command.command.route() {
                Route::Instrument(it) if it != instrument => return Ok(()),
                Route::Admission => return Ok(()),
                _ => {}
            }
            verified.commands += 1;
            verified.trades += book.apply(&record).map_err(|error| format!("{error:#}"))?;
            Ok(())
        },
        || {
            std::thread::sleep(POLL_INTERVAL);
            waited += POLL_INTERVAL;
            waited < JOURNAL_WAIT_MAX
        },
    )?;
    ensure!(
        last == through,
        "timed out: the journal ends at {last}, before {through}"
    );
    Ok(verified)
}

fn key(side: Side, price: i64) -> i64 {
    match side {
        Side::Buy => -price,
        Side::Sell => price,
    }
}

impl Reference {
    /// Executes a command and compares its trades with those of the record. Returns their number.
    ///
    /// # Errors
    /// The trades differ, or the command is not supported.
    pub fn apply(&mut self, record: &Record) -> anyhow::Result<u64> {
        self.trades.clear();
        match &record.command.command {
            Command::New(new) => self.new_order(new)?,
            Command::Amend(amend) => self.amend(amend)?,
            Command::Cancel(cancel) => {
                self.remove(cancel.handle);
            }
            Command::SetInstrument(_) | Command::SetPhase(_) => {}
            other => bail!(
                "record {}: unexpected command {other:?}",
                record.command.sequence.get()
            ),
        }
        let journalled = record.events.iter().filter_map(|event| match &event.event {
            Event::Trade(t) => Some((t.maker, t.taker, t.price.0, t.quantity.get())),
            _ => None,
        });
        ensure!(
            journalled.clone().eq(self.trades.iter().copied()),
            "record {}: trades {:?}, expected by the reference {:?}",
            record.command.sequence.get(),
            journalled.collect::<Vec<_>>(),
            self.trades,
        );
        Ok(self.trades.len() as u64)
    }

    fn new_order(&mut self, new: &New) -> anyhow::Result<()> {
        ensure!(
            !new.post_only && new.stp == StpMode::CancelNewest && new.expire_at_ns == 0,
            "unsupported order: {new:?}"
        );
        let total = new.quantity.get();
        let taker = Taker {
            order: Resting {
                handle: new.handle,
                group: new.stp_group,
                open: total,
                total,
            },
            side: new.side,
            price: new.price.0,
        };
        match new.time_in_force {
            TimeInForce::Fok if !self.can_fill(&taker) => {}
            TimeInForce::Gtc => self.match_and_rest(taker),
            TimeInForce::Ioc | TimeInForce::Fok => {
                self.match_incoming(taker);
            }
            other => bail!("unsupported time in force {other:?}"),
        }
        Ok(())
    }

    /// Amends an order. The quantity of the command is the new total (T22). At the same price and
    /// no more quantity the order keeps priority.
    fn amend(&mut self, amend: &Amend) -> anyhow::Result<()> {
        let Some(&(side, at)) = self.places.get(&amend.handle) else {
            return Ok(());
        };
        let queue = self.sides[side.index()]
            .get_mut(&at)
            .expect("the level of the order");
        let order = queue.iter_mut().find(|order| order.handle == amend.handle);
        let order = order.expect("the order is in its level");
        let total = amend
            .quantity
            .map_or(order.total, |quantity| quantity.get());
        let price = amend.price.map_or_else(|| key(side, at), |price| price.0);
        let filled = order.total - order.open;
        if total <= filled {
            return Ok(());
        }
        if key(side, price) == at && total <= order.total {
            (order.open, order.total) = (total - filled, total);
            return Ok(());
        }
        let order = Resting {
            open: total - filled,
            total,
            ..*order
        };
        self.remove(amend.handle);
        self.match_and_rest(Taker { order, side, price });
        Ok(())
    }

    /// Removes an order from the book if it rests.
    fn remove(&mut self, handle: Handle) {
        let Some((side, at)) = self.places.remove(&handle) else {
            return;
        };
        let level = self.sides[side.index()]
            .get_mut(&at)
            .expect("the level of the order");
        level.retain(|order| order.handle != handle);
        if level.is_empty() {
            self.sides[side.index()].remove(&at);
        }
    }

    fn match_and_rest(&mut self, taker: Taker) {
        let (side, at) = (taker.side, key(taker.side, taker.price));
        if let Some(order) = self.match_incoming(taker) {
            self.places.insert(order.handle, (side, at));
            self.sides[side.index()]
                .entry(at)
                .or_default()
                .push_back(order);
        }
    }

    /// Matches an order within its price. Returns the remainder, or `None` if the order is filled
    /// or self-trade prevention has cancelled it.
    fn match_incoming(&mut self, taker: Taker) -> Option<Resting> {
        let Taker {
            mut order,
            side,
            price,
        } = taker;
        let other = side.opposite();
        while order.open > 0 {
            let Some(mut level) = self.sides[other.index()].first_entry() else {
                break;
            };
            let at = *level.key();
            if at > key(other, price) {
                break;
            }
            let maker = level.get_mut().front_mut().expect("levels are not empty");
            if maker.group == order.group {
                return None;
            }
            let quantity = maker.open.min(order.open);
            maker.open -= quantity;
            order.open -= quantity;
            self.trades
                .push((maker.handle, order.handle, key(other, at), quantity));
            if maker.open == 0 {
                self.places.remove(&maker.handle);
                level.get_mut().pop_front();
                if level.get().is_empty() {
                    level.remove();
                }
            }
        }
        (order.open > 0).then_some(order)
    }

    /// True if the order can be filled before it meets an order of its own group.
    fn can_fill(&self, taker: &Taker) -> bool {
        let other = taker.side.opposite();
        let mut missing = taker.order.open;
        let inside = self.sides[other.index()].range(..=key(other, taker.price));
        for maker in inside.flat_map(|(_, level)| level) {
            if maker.group == taker.order.group {
                return false;
            }
            if maker.open >= missing {
                return true;
            }
            missing -= maker.open;
        }
        false
    }
}
