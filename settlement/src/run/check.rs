//! When pools are compared with the ledger, and when a difference is a break. Pure.
//!
//! A comparison is cheap but not free, so pools touched by batches are looked at every so many batches, and those that differed again until they agree
//! or the difference has lasted. More in the ledger than the journal says is normal while funding is under way (the ledger comes first).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use types::HoldIx;

use super::SettlementConfig;
use crate::carve::{Break, BreakName};

/// Pools of one round.
const ROUND_MAX: usize = 32;
/// Time between two looks at a pool that differs.
const AGAIN_MS: u64 = 1_000;

#[derive(Debug)]
pub struct Checks {
    every: u64,
    short_ns: u64,
    surplus_ns: u64,
    touched: BTreeSet<HoldIx>,
    /// Pools that differed: since when (0 = not looked at yet), and whether it was told.
    suspects: BTreeMap<HoldIx, Suspect>,
    last_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Suspect {
    since_ns: u64,
    told: bool,
}

impl Checks {
    pub fn new(config: &SettlementConfig) -> Self {
        Self {
            every: config.check_batches.max(1),
            short_ns: config.short_ms * 1_000_000,
            surplus_ns: config.surplus_ms * 1_000_000,
            touched: BTreeSet::new(),
            suspects: BTreeMap::new(),
            last_ns: 0,
        }
    }

    /// Notes the pools of a batch; true when it is time to compare.
    pub fn take(&mut self, pools: HashSet<HoldIx>, batches: u64) -> bool {
        self.touched.extend(pools);
        batches.is_multiple_of(self.every)
    }

    /// Takes the pools of a round out of those touched.
    pub fn touched(&mut self) -> Vec<HoldIx> {
        let round: Vec<_> = self.touched.iter().take(ROUND_MAX).copied().collect();
        self.touched.retain(|pool| !round.contains(pool));
        round
    }

    /// Looks at a pool soon.
    pub fn suspect(&mut self, pool: HoldIx) {
        self.suspects.entry(pool).or_default();
    }

    fn is_waiting(&self) -> bool {
        self.suspects.values().any(|suspect| !suspect.told)
    }

    pub fn is_due(&self, now_ns: u64) -> bool {
        self.due_in_ms(now_ns) == Some(0)
    }

    pub fn due_in_ms(&self, now_ns: u64) -> Option<u64> {
        let at = self.last_ns + AGAIN_MS * 1_000_000;
        self.is_waiting()
            .then(|| at.saturating_sub(now_ns).div_ceil(1_000_000))
    }

    /// Pools to compare now: those given and the suspects.
    pub fn to_check(&self, pools: Vec<HoldIx>) -> Vec<HoldIx> {
        let mut all: BTreeSet<HoldIx> = self
            .suspects
            .iter()
            .filter(|(_, suspect)| !suspect.told)
            .map(|(pool, _)| *pool)
            .take(ROUND_MAX)
            .collect();
        all.extend(pools);
        all.into_iter().collect()
    }

    /// Judges one comparison; `Some` when the difference has lasted and is a break now.
    pub fn judge(&mut self, pool: HoldIx, difference: Option<Break>, now_ns: u64) -> Option<Break> {
        self.last_ns = now_ns;
        let Some(found) = difference else {
            self.suspects.remove(&pool);
            return None;
        };
        let suspect = self.suspects.entry(pool).or_default();
        if suspect.since_ns == 0 {
            suspect.since_ns = now_ns;
        }
        let patience_ns = match found.name {
            BreakName::HoldSurplus => self.surplus_ns,
            BreakName::HoldShort | BreakName::OrderHoldDiffers => self.short_ns,
        };
        if suspect.told || now_ns - suspect.since_ns < patience_ns {
            return None;
        }
        suspect.told = true;
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Id128, Minor, Sequence, UserIx};

    fn difference(name: BreakName) -> Option<Break> {
        Some(Break {
            name,
            at: Sequence(9),
            pool: HoldIx(1),
            user: UserIx(0),
            hold: Id128::NONE,
            expected: Minor(2),
            found: Minor(1),
        })
    }

    #[test]
    fn a_difference_is_a_break_once_and_only_when_it_lasts() {
        let config = SettlementConfig::default();
        let mut checks = Checks::new(&config);
        let pool = HoldIx(1);
        let at = |ms: u64| 1_000_000_000 + ms * 1_000_000;
        assert_eq!(checks.due_in_ms(at(0)), None);
        assert_eq!(
            checks.judge(pool, difference(BreakName::HoldShort), at(0)),
            None
        );
        assert!(!checks.is_due(at(500)) && checks.is_due(at(1_000)));
        assert_eq!(checks.to_check(Vec::new()), vec![pool]);
        assert_eq!(
            checks.judge(
                pool,
                difference(BreakName::HoldSurplus),
                at(config.short_ms)
            ),
            None
        );
        let found = checks.judge(pool, difference(BreakName::HoldShort), at(config.short_ms));
        assert_eq!(found.map(|f| f.name), Some(BreakName::HoldShort));
        assert_eq!(
            checks.judge(pool, difference(BreakName::HoldShort), at(9_000)),
            None
        );
        assert_eq!(checks.due_in_ms(at(9_000)), None);
        assert_eq!(checks.judge(pool, None, at(9_001)), None);
        assert!(checks.suspects.is_empty());
    }
}
