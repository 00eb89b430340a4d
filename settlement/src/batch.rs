//! The settler: journal records in, sealed batches out. Pure: `(record, now) -> batches`.
//!
//! A batch covers whole records, `first..=through`, and starts where the previous one ended.
//! Records without ledger effect produce a batch only every [`Limits::idle_records`]; otherwise the
//! next batch covers them. A record that exceeds a batch (a taker against thousands of makers, a
//! mass cancel) is cut into parts. No part overdraws a hold. All parts but the last are posted
//! under a source of the record; the last one moves the position. Holds that are split while no new
//! record arrives go into a batch of the split source.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use replica::Applied;
use types::{Handle, NodeId, Sequence, derived};

use crate::plan::Plan;
use crate::split::{HoldSplitter, SplitHolds};
use crate::trading_state::{Change, TradingState, money_effects};

/// Maximum rows per effect: splits and returns of two orders, three operations, releases.
const CHANGE_WEIGHT_MAX: usize = 10;

/// Maximum trades of one chain transaction (SettleTrades).
pub const CHAIN_TRADES_MAX: usize = 500;

/// Limits of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of trades at which a batch is sealed.
    pub trades: usize,
    /// Maximum hold steps and operations per batch. Bounds the size of the request.
    pub weight: usize,
    /// Longest wait of a trade for more trades at the journal's tail, in nanoseconds.
    pub linger_ns: u64,
    /// Longest wait of other effects, and order age at which holds are split, in nanoseconds.
    pub wait_ns: u64,
    /// Records without ledger effect after which an empty batch moves the ledger's position. A
    /// restart begins there, and the journal is retained from there.
    pub idle_records: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            trades: 250,
            weight: 1_500,
            linger_ns: 5_000_000,
            wait_ns: 1_000_000_000,
            idle_records: 16_384,
        }
    }
}

/// Number of trades at which a batch is sealed, from the configured maximum down to what the gas of
/// a block is enough for: halved by a batch that fails as a whole, raised by one by a transaction
/// of at least this size.
///
/// It decides only the size of later batches, so a restart may begin at the maximum again.
#[derive(Debug)]
pub struct ChainSize {
    max: usize,
    trades: AtomicUsize,
}

impl ChainSize {
    pub fn new(max: usize) -> Self {
        Self {
            max,
            trades: AtomicUsize::new(max),
        }
    }

    pub fn get(&self) -> usize {
        self.trades.load(Ordering::Relaxed)
    }

    /// A batch of `trades` failed as a whole. The failure of a single trade may be its own.
    pub fn failed(&self, trades: usize) {
        if trades > 1 {
            self.trades.fetch_min(trades.div_ceil(2), Ordering::Relaxed);
        }
    }

    /// A transaction of `trades` has executed. It raises nothing if another change comes first.
    pub fn executed(&self, trades: usize) {
        let now = self.get();
        if trades >= now && now < self.max {
            let (order, next) = (Ordering::Relaxed, now + 1);
            let _ = self.trades.compare_exchange(now, next, order, order);
        }
    }
}

/// A sealed batch: the immutable contents of one ledger transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Id on chain: `<node>:<first>-<last>`, with a suffix for parts and split batches.
    pub id: String,
    /// Ledger source whose position the batch moves.
    pub source: String,
    pub first: u64,
    pub through: u64,
    /// Records up to here are settled once this and all earlier batches are posted.
    pub covers: Sequence,
    pub plan: Plan,
}

/// Builds batches from records.
#[derive(Clone, Debug)]
pub struct Settler {
    node: NodeId,
    limits: Limits,
    trading_state: TradingState,
    splitter: HoldSplitter,
    plan: Plan,
    /// Full parts of the record at the trading state's position.
    parts: Vec<Plan>,
    sealed: Sequence,
    /// Last record whose effects are all sealed; never decreases.
    covered: Sequence,
    /// Last batch number of the split source.
    split_number: u64,
    /// Arrival time of the open batch's first effect.
    opened_ns: Option<u64>,
    changes: Vec<Change>,
}

impl Settler {
    /// Starts from the trading state at the ledger's position and the order holds in the ledger.
    pub fn new(
        node: NodeId,
        limits: Limits,
        trading_state: TradingState,
        split_holds: HashMap<Handle, SplitHolds>,
        sealed: Sequence,
        split_number: u64,
    ) -> Self {
        assert!(
            sealed <= trading_state.position(),
            "the ledger is ahead of the journal"
        );
        let splitter = HoldSplitter::from_ledger(split_holds, &trading_state);
        Self {
            node,
            limits,
            covered: trading_state.position(),
            trading_state,
            splitter,
            plan: Plan::default(),
            parts: Vec::new(),
            sealed,
            split_number,
            opened_ns: None,
            changes: Vec::new(),
        }
    }

    pub fn trading_state(&self) -> &TradingState {
        &self.trading_state
    }

    pub fn splitter(&self) -> &HoldSplitter {
        &self.splitter
    }

    /// Sets the number of trades at which a batch is sealed.
    pub fn limit_trades(&mut self, trades: usize) {
        self.limits.trades = trades;
    }

    /// Last sequence with all effects in sealed batches.
    pub fn covered(&self) -> Sequence {
        self.covered
    }

    /// Last sequence that a sealed batch covers.
    pub fn sealed(&self) -> Sequence {
        self.sealed
    }

    /// Whether an empty batch is due to move the ledger's position.
    fn is_idle_limit_reached(&self) -> bool {
        let idle = self.trading_state.position().get() - self.sealed.get();
        self.is_empty() && idle >= self.limits.idle_records
    }

    /// Whether nothing waits to be sealed.
    pub fn is_empty(&self) -> bool {
        self.weight() == 0 && self.parts.is_empty()
    }

    pub fn open_trades(&self) -> usize {
        self.plan.trades.len() + self.parts.iter().map(|p| p.trades.len()).sum::<usize>()
    }

    fn weight(&self) -> usize {
        self.plan.weight() + self.splitter.deferred()
    }

    /// Whether a record fits into the open batch. If not, seal first.
    pub fn has_room(&self, applied: &Applied) -> bool {
        let effects = money_effects(applied);
        self.is_empty()
            || (self.weight() + effects * CHANGE_WEIGHT_MAX <= self.limits.weight
                && self.open_trades() + effects <= CHAIN_TRADES_MAX)
    }

    /// Applies a record and adds its effects to the plan.
    pub fn apply(&mut self, applied: &Applied, now_ns: u64) {
        assert!(
            self.parts.is_empty(),
            "a record in parts is sealed before the next one"
        );
        let was_empty = self.is_empty();
        let mut changes = std::mem::take(&mut self.changes);
        changes.clear();
        self.trading_state.apply(applied, &mut changes);
        for change in &changes {
            let is_full = self.weight() + CHANGE_WEIGHT_MAX > self.limits.weight
                || self.plan.trades.len() >= self.limits.trades;
            if was_empty && is_full {
                self.splitter
                    .finish(&self.trading_state, 0, self.limits.weight, &mut self.plan);
                self.parts.push(std::mem::take(&mut self.plan));
            }
            self.splitter
                .apply(&self.trading_state, change, &mut self.plan);
        }
        self.changes = changes;
        if self.is_empty() {
            self.covered = self.trading_state.position();
        } else {
            self.opened_ns.get_or_insert(now_ns);
        }
    }

    /// Whether to seal the open batch now, see [`Settler::due_in_ns`].
    pub fn is_due(&mut self, now_ns: u64, age_clock_ns: Option<u64>, is_eager: bool) -> bool {
        self.due_in_ns(now_ns, age_clock_ns, is_eager) == Some(0)
    }

    /// Nanoseconds until the open batch must be sealed; `None` if there is nothing to seal.
    ///
    /// `age_clock_ns` is the clock for order ages: wall clock at the journal's tail, journal time
    /// during catch-up. `None`: unsplit orders do not make a batch due. With wall time during
    /// catch-up each order would be old on arrival and seal its own batch. `is_eager`: the journal
    /// has no more records, so trades wait for the linger time only.
    pub fn due_in_ns(
        &mut self,
        now_ns: u64,
        age_clock_ns: Option<u64>,
        is_eager: bool,
    ) -> Option<u64> {
        let trades = self.open_trades();
        if trades >= self.limits.trades
            || self.weight() >= self.limits.weight
            || !self.parts.is_empty()
            || self.is_idle_limit_reached()
        {
            return Some(0);
        }
        let wait_ns = if trades > 0 && is_eager {
            self.limits.linger_ns
        } else {
            self.limits.wait_ns
        };
        let open = self
            .opened_ns
            .map(|at| at.saturating_add(wait_ns).saturating_sub(now_ns));
        let pending = age_clock_ns.and_then(|age_clock_ns| {
            let entered_ns = self.splitter.oldest_ns(&self.trading_state)?;
            let at = entered_ns.saturating_add(self.limits.wait_ns);
            Some(at.saturating_sub(age_clock_ns))
        });
        open.into_iter().chain(pending).min()
    }

    /// Seals the open batch, after splitting the holds of orders that are older than the wait time.
    ///
    /// Orders that do not fit stay due for the next batch. Returns no batch if there is nothing for
    /// the ledger.
    pub fn seal(&mut self, age_clock_ns: u64) -> Vec<Batch> {
        let horizon_ns = age_clock_ns.saturating_sub(self.limits.wait_ns);
        let position = self.trading_state.position();
        let is_idle = self.is_idle_limit_reached();
        self.splitter.finish(
            &self.trading_state,
            horizon_ns,
            self.limits.weight,
            &mut self.plan,
        );
        self.opened_ns = None;
        self.covered = position;
        let parts = std::mem::take(&mut self.parts);
        let plan = std::mem::take(&mut self.plan);
        for trading_hold in parts
            .iter()
            .chain([&plan])
            .flat_map(|plan| &plan.trading_holds)
        {
            self.splitter.check(&self.trading_state, *trading_hold);
        }
        let mut batches = Vec::with_capacity(parts.len() + 1);
        for (number, part) in (1u64..).zip(parts) {
            batches.push(Batch {
                id: derived::part_batch_id(self.node, position, number),
                source: derived::parts_source(self.node, position),
                first: number,
                through: number,
                covers: Sequence(position.0 - 1),
                plan: part,
            });
        }
        if plan.is_empty() && batches.is_empty() && !is_idle {
            return batches;
        }
        if position == self.sealed {
            self.split_number += 1;
            batches.push(Batch {
                id: derived::split_batch_id(self.node, self.split_number),
                source: derived::split_source(self.node),
                first: self.split_number,
                through: self.split_number,
                covers: position,
                plan,
            });
            return batches;
        }
        let first = self.sealed.next().0;
        batches.push(Batch {
            id: derived::batch_id(self.node, first, position.0),
            source: derived::settlement_source(self.node),
            first,
            through: position.0,
            covers: position,
            plan,
        });
        self.sealed = position;
        batches
    }
}
