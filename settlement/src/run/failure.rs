//! Current failures by part and by waiting batch or step. The health shows all of them; the
//! statistics show those that need an operator.
//!
//! Several batches are in flight: the progress of one must not hide that another is stuck. So a
//! part is healthy only if none of its batches and steps waits.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// Health part: posting to the ledger.
pub const LEDGER: &str = "settlement-ledger";
/// Health part: submission to the chain, finality, and the ledger calls after it.
pub const CHAIN: &str = "settlement-chain";
/// Health part: following the replica and journalling commands. Also the follower's name.
pub const JOURNAL: &str = "settlement-journal";
/// Health part: settlement's store.
pub const STORE: &str = "settlement-store";

#[derive(Clone, Debug, PartialEq, Eq)]
struct Failure {
    reason: String,
    /// Waiting does not help: an operator is needed.
    is_stuck: bool,
}

/// Current failures.
pub struct CurrentFailures {
    health: rpc::Health,
    open: Mutex<BTreeMap<(&'static str, String), Failure>>,
}

impl CurrentFailures {
    pub fn new() -> Self {
        Self {
            health: rpc::Health::new("settlement"),
            open: Mutex::default(),
        }
    }

    pub fn health(&self) -> rpc::Health {
        self.health.clone()
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<(&'static str, String), Failure>> {
        self.open
            .lock()
            .expect("no code panics while it holds the lock")
    }

    /// Records that `id` waits because of `reason`. `is_stuck`: an operator is needed.
    pub fn note(&self, part: &'static str, id: &str, reason: &str, is_stuck: bool) {
        let mut open = self.open();
        let failure = Failure {
            reason: reason.to_owned(),
            is_stuck,
        };
        open.insert((part, id.to_owned()), failure);
        self.update_health(part, &open);
    }

    /// Removes the failure of `id`.
    pub fn clear(&self, part: &'static str, id: &str) {
        let mut open = self.open();
        if open.remove(&(part, id.to_owned())).is_some() {
            self.update_health(part, &open);
        }
    }

    /// Removes the failures of an ended run, except those with id `kept`.
    pub fn reset(&self, kept: &str) {
        let mut open = self.open();
        open.retain(|(_, id), _| id == kept);
        for part in [LEDGER, CHAIN, JOURNAL, STORE] {
            self.update_health(part, &open);
        }
    }

    fn update_health(&self, part: &'static str, open: &BTreeMap<(&'static str, String), Failure>) {
        let mut of_part = open.iter().filter(|((of, _), _)| *of == part);
        let worst = of_part
            .clone()
            .find(|(_, failure)| failure.is_stuck)
            .or_else(|| of_part.next());
        match worst {
            Some(((_, id), failure)) => self
                .health
                .set_failing(part, format!("{id}: {}", failure.reason)),
            None => self.health.set_ok(part),
        }
    }

    /// Failures that need an operator, as one text; empty if there are none.
    pub fn stuck(&self) -> String {
        let open = self.open();
        let stuck = open.iter().filter(|(_, failure)| failure.is_stuck);
        let texts = stuck.map(|((part, id), failure)| format!("{part}: {id}: {}", failure.reason));
        texts.collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_fails_while_anything_waits_and_reports_stuck_ids_first() {
        let failures = CurrentFailures::new();
        failures.note(CHAIN, "1:1-5", "away", false);
        failures.note(CHAIN, "1:6-9", "refused", true);
        failures.note(LEDGER, "1:10-12", "away", false);
        let health = failures.health();
        assert_eq!(health.failing()[CHAIN], "1:6-9: refused");
        assert_eq!(failures.stuck(), "settlement-chain: 1:6-9: refused");
        failures.clear(CHAIN, "1:6-9");
        assert_eq!(health.failing()[CHAIN], "1:1-5: away");
        assert_eq!(failures.stuck(), "");
        failures.clear(CHAIN, "1:1-5");
        failures.clear(LEDGER, "1:10-12");
        assert!(health.failing().is_empty());
    }
}
