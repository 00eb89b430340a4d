//! Scheduling of comparisons between journal and ledger, and the rule for a break. Pure.
//!
//! A comparison costs a ledger read, so touched trading holds are compared only every
//! `check_batches` batches. A differing hold is compared repeatedly until it agrees, also when it
//! is a break. A surplus in the ledger is normal during funding: the ledger is written first.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use types::{HoldIx, Id128};

use super::SettlementConfig;
use crate::split::{Break, BreakName};

/// Maximum comparisons per round.
const ROUND_MAX: usize = 32;
/// Interval between comparisons of differing subjects.
const RECHECK_MS: u64 = 1_000;

/// Subject of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Subject {
    /// A trading hold with its children.
    TradingHold(HoldIx),
    /// One hold of an order.
    Part(Id128),
}

/// Result of a comparison.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No difference, or one that is reported already or not old enough.
    NoBreak,
    /// The difference has lasted: a break.
    Break(Break),
    /// A break has cleared: both sides agree.
    Resolved,
}

/// The trading holds to compare, and the differences found.
#[derive(Debug)]
pub struct Checks {
    every: u64,
    short_ns: u64,
    surplus_ns: u64,
    touched: BTreeSet<HoldIx>,
    suspects: BTreeMap<Subject, Suspect>,
    last_ns: u64,
}

/// State of a differing subject.
#[derive(Clone, Copy, Debug, Default)]
struct Suspect {
    /// Time of the first difference; 0 = not compared yet.
    since_ns: u64,
    compared_ns: u64,
    /// Reported as a break.
    is_reported: bool,
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

    /// Adds the trading holds of a batch; returns true if a comparison is due.
    pub fn add_touched(&mut self, trading_holds: HashSet<HoldIx>, batches: u64) -> bool {
        self.touched.extend(trading_holds);
        batches.is_multiple_of(self.every)
    }

    /// Removes and returns one round of touched trading holds.
    pub fn take_round(&mut self) -> Vec<HoldIx> {
        let round: Vec<_> = self.touched.iter().take(ROUND_MAX).copied().collect();
        self.touched
            .retain(|trading_hold| !round.contains(trading_hold));
        round
    }

    /// Schedules a comparison of a trading hold.
    pub fn suspect(&mut self, trading_hold: HoldIx) {
        self.suspects
            .entry(Subject::TradingHold(trading_hold))
            .or_default();
    }

    /// Keeps comparing a subject that is already a break.
    pub fn follow(&mut self, subject: Subject) {
        self.suspects.entry(subject).or_default().is_reported = true;
    }

    /// Makes the next comparison of differing subjects due at once.
    pub fn make_due(&mut self) {
        self.last_ns = 0;
    }

    pub fn is_due(&self, now_ns: u64) -> bool {
        self.due_in_ms(now_ns) == Some(0)
    }

    pub fn due_in_ms(&self, now_ns: u64) -> Option<u64> {
        let at = self.last_ns + RECHECK_MS * 1_000_000;
        (!self.suspects.is_empty()).then(|| at.saturating_sub(now_ns).div_ceil(1_000_000))
    }

    /// Subjects to compare now: `trading_holds`, and the differing ones compared least recently.
    pub fn to_check(&self, trading_holds: Vec<HoldIx>) -> BTreeSet<Subject> {
        let mut suspects: Vec<_> = self.suspects.iter().collect();
        suspects.sort_by_key(|(_, suspect)| suspect.compared_ns);
        let suspects = suspects.into_iter().map(|(subject, _)| *subject);
        let trading_holds = trading_holds.into_iter().map(Subject::TradingHold);
        suspects.take(ROUND_MAX).chain(trading_holds).collect()
    }

    /// Evaluates one comparison.
    pub fn judge(&mut self, subject: Subject, difference: Option<Break>, now_ns: u64) -> Verdict {
        self.last_ns = now_ns;
        let Some(found) = difference else {
            let was_reported = self
                .suspects
                .remove(&subject)
                .is_some_and(|s| s.is_reported);
            return if was_reported {
                Verdict::Resolved
            } else {
                Verdict::NoBreak
            };
        };
        let suspect = self.suspects.entry(subject).or_default();
        suspect.compared_ns = now_ns;
        if suspect.since_ns == 0 {
            suspect.since_ns = now_ns;
        }
        let tolerance_ns = match found.name {
            BreakName::HoldSurplus => self.surplus_ns,
            BreakName::HoldShort | BreakName::OrderHoldDiffers => self.short_ns,
        };
        if suspect.is_reported || now_ns - suspect.since_ns < tolerance_ns {
            return Verdict::NoBreak;
        }
        suspect.is_reported = true;
        Verdict::Break(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::{Minor, Sequence, UserIx};

    fn difference(name: BreakName) -> Option<Break> {
        Some(Break {
            name,
            at: Sequence(9),
            trading_hold: HoldIx(1),
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
        let trading_hold = Subject::TradingHold(HoldIx(1));
        let at = |ms: u64| 1_000_000_000 + ms * 1_000_000;
        let mut judge = |name: Option<BreakName>, ms| {
            let verdict = checks.judge(trading_hold, name.and_then(difference), at(ms));
            (verdict, checks.to_check(Vec::new()).len())
        };
        let (short, surplus) = (Some(BreakName::HoldShort), Some(BreakName::HoldSurplus));
        assert_eq!(judge(short, 0), (Verdict::NoBreak, 1));
        assert_eq!(judge(surplus, config.short_ms), (Verdict::NoBreak, 1));
        let (verdict, _) = judge(short, config.short_ms);
        assert!(matches!(verdict, Verdict::Break(found) if found.name == BreakName::HoldShort));
        // A break is reported once and compared until both sides agree.
        assert_eq!(judge(short, 9_000), (Verdict::NoBreak, 1));
        assert_eq!(judge(None, 9_001), (Verdict::Resolved, 0));
        assert_eq!(judge(None, 9_002), (Verdict::NoBreak, 0));
    }

    #[test]
    fn differences_are_compared_every_second_in_turn() {
        let mut checks = Checks::new(&SettlementConfig::default());
        assert_eq!(checks.due_in_ms(1), None);
        for trading_hold in 0..40 {
            checks.follow(Subject::TradingHold(HoldIx(trading_hold)));
        }
        let (second, mut seen) = (1_000_000_000, BTreeSet::new());
        for round in 1..=2 {
            let now_ns = round * second;
            assert!(checks.is_due(now_ns));
            for subject in checks.to_check(Vec::new()) {
                checks.judge(subject, difference(BreakName::HoldShort), now_ns);
                seen.insert(subject);
            }
            assert!(!checks.is_due(now_ns + second / 2));
        }
        assert_eq!(seen.len(), 40);
    }
}
