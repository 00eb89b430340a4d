//! The settler: journal records in, sealed batches out. Pure: `(record, now) -> batches`.
//!
//! A batch covers whole records, `first..=through`, and follows the one before without a gap. Records that mean
//! nothing for the ledger make no batch before there are [`Limits::idle_records`]; the next one covers them
//! too. One record that is too large for a batch (a taker against thousands of makers, a mass cancel) is cut
//! into parts, each covered by itself, posted under a source of its own; only the last part moves the position.
//! Orders that are to be carved while no new record arrives are carved by a batch of the carve source.

use std::collections::HashMap;

use replica::Applied;
use types::{Handle, NodeId, Sequence, derived};

use crate::carve::{Carved, Carver};
use crate::copies::{Change, Copies, money_effects};
use crate::plan::Plan;

/// Rows that one effect adds, generously: splits for two orders, three operations, returns.
const CHANGE_WEIGHT_MAX: usize = 10;

/// Trades that one chain transaction takes (SettleTrades).
pub const CHAIN_TRADES_MAX: usize = 500;

/// Bounds of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Trades after which a batch is sealed.
    pub trades: usize,
    /// Hold steps and operations of a batch; bounded by the size of a message.
    pub weight: usize,
    /// How long a trade waits for company while nothing more is in the journal, in nanoseconds.
    pub linger_ns: u64,
    /// How long anything else waits, and how long an order is open before it is carved, in nanoseconds.
    pub wait_ns: u64,
    /// Records without effect on the ledger after which an empty batch moves its position: a start
    /// goes on from there, and the journal is kept from there.
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

/// A sealed batch: frozen, named, one ledger transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Name on chain, `<node>:<first>-<last>`, with a suffix for parts and carve batches.
    pub id: String,
    /// Where the ledger keeps its position.
    pub source: String,
    pub first: u64,
    pub through: u64,
    /// Journal records up to here are settled once this and all batches before it are posted.
    pub covers: Sequence,
    pub plan: Plan,
}

/// The state machine.
#[derive(Clone, Debug)]
pub struct Settler {
    node: NodeId,
    limits: Limits,
    copies: Copies,
    carver: Carver,
    plan: Plan,
    /// Parts of the record at the copies' position that are already full.
    parts: Vec<Plan>,
    /// Last sequence that a sealed batch covers.
    sealed: Sequence,
    /// Last record that nothing waits of; never goes back.
    covered: Sequence,
    /// Last number of the carve source.
    carve_number: u64,
    /// When the first effect of the open batch came in.
    opened_ns: Option<u64>,
    changes: Vec<Change>,
}

impl Settler {
    /// Takes over copies at what the ledger has, and the holds carved there.
    pub fn new(
        node: NodeId,
        limits: Limits,
        copies: Copies,
        carved: HashMap<Handle, Carved>,
        sealed: Sequence,
        carve_number: u64,
    ) -> Self {
        assert!(
            sealed <= copies.position(),
            "the ledger is ahead of the journal"
        );
        let carver = Carver::adopt(carved, &copies);
        Self {
            node,
            limits,
            covered: copies.position(),
            copies,
            carver,
            plan: Plan::default(),
            parts: Vec::new(),
            sealed,
            carve_number,
            opened_ns: None,
            changes: Vec::new(),
        }
    }

    pub fn copies(&self) -> &Copies {
        &self.copies
    }

    pub fn carver(&self) -> &Carver {
        &self.carver
    }

    /// Last sequence whose effects are all in sealed batches.
    pub fn covered(&self) -> Sequence {
        self.covered
    }

    /// Last sequence that a sealed batch covers.
    pub fn sealed(&self) -> Sequence {
        self.sealed
    }

    /// Whether the ledger's position is too far back, with nothing to write.
    fn is_idle_for_long(&self) -> bool {
        let idle = self.copies.position().get() - self.sealed.get();
        self.is_empty() && idle >= self.limits.idle_records
    }

    /// True when nothing waits to be sealed.
    pub fn is_empty(&self) -> bool {
        self.weight() == 0 && self.parts.is_empty()
    }

    /// Trades waiting to be sealed.
    pub fn open_trades(&self) -> usize {
        self.plan.trades.len() + self.parts.iter().map(|p| p.trades.len()).sum::<usize>()
    }

    fn weight(&self) -> usize {
        self.plan.weight() + self.carver.kept()
    }

    /// Whether a record still belongs into the open batch; if not, seal first.
    pub fn has_room(&self, applied: &Applied) -> bool {
        let effects = money_effects(applied);
        self.is_empty()
            || (self.weight() + effects * CHANGE_WEIGHT_MAX <= self.limits.weight
                && self.open_trades() + effects <= CHAIN_TRADES_MAX)
    }

    /// Applies a record and plans what it means.
    pub fn apply(&mut self, applied: &Applied, now_ns: u64) {
        assert!(
            self.parts.is_empty(),
            "a record in parts is sealed before the next one"
        );
        let was_empty = self.is_empty();
        let mut changes = std::mem::take(&mut self.changes);
        changes.clear();
        self.copies.apply(applied, &mut changes);
        for change in &changes {
            let is_full = self.weight() + CHANGE_WEIGHT_MAX > self.limits.weight
                || self.plan.trades.len() >= self.limits.trades;
            if was_empty && is_full {
                self.carver
                    .finish(&self.copies, 0, self.limits.weight, &mut self.plan);
                self.parts.push(std::mem::take(&mut self.plan));
            }
            self.carver.apply(&self.copies, change, &mut self.plan);
        }
        self.changes = changes;
        if self.is_empty() {
            self.covered = self.copies.position();
        } else {
            self.opened_ns.get_or_insert(now_ns);
        }
    }

    /// Whether the open batch is to be sealed now, see [`Settler::due_in_ns`].
    pub fn is_due(&mut self, now_ns: u64, carve_ns: Option<u64>, is_eager: bool) -> bool {
        self.due_in_ns(now_ns, carve_ns, is_eager) == Some(0)
    }

    /// Nanoseconds until the open batch is to be sealed; `None` while nothing waits.
    ///
    /// `carve_ns` is the clock by which orders age: the wall clock at the journal's tail, journal time behind
    /// it, and `None` when orders that wait to be carved are no reason to seal. Without the difference each
    /// order applied late would be old at once and a batch of its own. `is_eager`: nothing more is in the
    /// journal, trades wait for the linger time only.
    pub fn due_in_ns(&mut self, now_ns: u64, carve_ns: Option<u64>, is_eager: bool) -> Option<u64> {
        let trades = self.open_trades();
        if trades >= self.limits.trades
            || self.weight() >= self.limits.weight
            || !self.parts.is_empty()
            || self.is_idle_for_long()
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
        let young = carve_ns.and_then(|carve_ns| {
            let entered_ns = self.carver.oldest_ns(&self.copies)?;
            let at = entered_ns.saturating_add(self.limits.wait_ns);
            Some(at.saturating_sub(carve_ns))
        });
        open.into_iter().chain(young).min()
    }

    /// Seals what is there and carves what is old by the clock `carve_ns`, as far as there is room: the rest
    /// stays due and goes into the next batch. Empty when there is nothing for the ledger.
    pub fn seal(&mut self, carve_ns: u64) -> Vec<Batch> {
        let horizon_ns = carve_ns.saturating_sub(self.limits.wait_ns);
        let position = self.copies.position();
        let is_idle = self.is_idle_for_long();
        self.carver
            .finish(&self.copies, horizon_ns, self.limits.weight, &mut self.plan);
        self.opened_ns = None;
        self.covered = position;
        let parts = std::mem::take(&mut self.parts);
        let plan = std::mem::take(&mut self.plan);
        for pool in parts.iter().chain([&plan]).flat_map(|plan| &plan.pools) {
            self.carver.check(&self.copies, *pool);
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
            self.carve_number += 1;
            batches.push(Batch {
                id: derived::carve_batch_id(self.node, self.carve_number),
                source: derived::carve_source(self.node),
                first: self.carve_number,
                through: self.carve_number,
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
