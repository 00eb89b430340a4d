//! Current failures by part and by waiting batch or step. The health shows all of them; the
//! statistics show those that need an operator.
//!
//! Several batches are in flight: the progress of one must not hide that another is stuck. So a
//! part is healthy only if none of its batches and steps waits.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

/// Health part: posting to the ledger.
pub const LEDGER: &str = "settlement-ledger";
/// Health part: submission to the chain, finality, and the ledger calls after it.
pub const CHAIN: &str = "settlement-chain";
/// Health part: following the replica and journalling commands. Also the follower's name.
pub const JOURNAL: &str = "settlement-journal";
/// Health part: settlement's store.
pub const STORE: &str = "settlement-store";
/// Health part: open differences between journal and ledger.
pub const BREAKS: &str = "settlement-breaks";

#[derive(Debug, Default)]
struct Failure {
    reason: String,
    /// Waiting does not help: an operator is needed.
    is_stuck: bool,
    /// Ends the pause of the step.
    retry: Arc<Notify>,
}

/// A step that is repeated until it succeeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingStep {
    /// Health part.
    pub part: &'static str,
    /// Batch, hold or user whose step waits.
    pub id: String,
    pub reason: String,
    /// An operator is needed.
    pub is_stuck: bool,
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
        self.note_step(part, id, reason, is_stuck);
    }

    /// Like [`Self::note`], for a step that is repeated after a pause. The result ends the pause
    /// once [`Self::retry`] names the step. It keeps a retry that comes before the pause.
    pub fn note_step(
        &self,
        part: &'static str,
        id: &str,
        reason: &str,
        is_stuck: bool,
    ) -> Arc<Notify> {
        let mut open = self.open();
        let failure = open.entry((part, id.to_owned())).or_default();
        reason.clone_into(&mut failure.reason);
        failure.is_stuck = is_stuck;
        let retry = failure.retry.clone();
        self.update_health(part, &open);
        retry
    }

    /// Ends the pauses of the steps of `id`; empty: of all.
    pub fn retry(&self, id: &str) {
        for ((_, waiting), failure) in self.open().iter() {
            if id.is_empty() || waiting == id {
                failure.retry.notify_one();
            }
        }
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

    /// The first waiting steps, those that need an operator first.
    pub fn waiting(&self, max: usize) -> Vec<WaitingStep> {
        let open = self.open();
        let mut steps: Vec<_> = open.iter().collect();
        steps.sort_by_key(|(_, failure)| !failure.is_stuck);
        let steps = steps.into_iter().take(max);
        let step = |((part, id), failure): (&(&'static str, String), &Failure)| WaitingStep {
            part,
            id: id.clone(),
            reason: failure.reason.clone(),
            is_stuck: failure.is_stuck,
        };
        steps.map(step).collect()
    }

    /// True if a step of `id` waits in any part.
    pub fn is_waiting(&self, id: &str) -> bool {
        self.open().keys().any(|(_, waiting)| waiting == id)
    }

    /// True if the step of `id` needs an operator.
    pub fn is_stuck(&self, part: &'static str, id: &str) -> bool {
        let open = self.open();
        let failure = open.get(&(part, id.to_owned()));
        failure.is_some_and(|failure| failure.is_stuck)
    }

    /// Shows the open differences in the health; `None`: there are none.
    pub fn show_breaks(&self, reason: Option<&str>) {
        self.health.set_finding(BREAKS, reason);
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
        let waiting = failures.waiting(2);
        let ids: Vec<_> = waiting.iter().map(|step| step.id.as_str()).collect();
        assert_eq!(ids, ["1:6-9", "1:1-5"], "those that need an operator first");
        assert!(failures.is_stuck(CHAIN, "1:6-9") && !failures.is_stuck(CHAIN, "1:1-5"));
        assert!(failures.is_waiting("1:10-12") && !failures.is_waiting("1:13-14"));
        failures.clear(CHAIN, "1:6-9");
        assert_eq!(health.failing()[CHAIN], "1:1-5: away");
        assert_eq!(failures.stuck(), "");
        failures.clear(CHAIN, "1:1-5");
        failures.clear(LEDGER, "1:10-12");
        assert!(health.failing().is_empty());
    }
}
