//! Health of one service: its failing parts with reasons (D41, R261).
//!
//! A part is a component or dependency of the service (`store`, `chain`, `kafka`, `ledger`). A part
//! without an entry is healthy. Readers see changes at once. Repeating a state notifies no reader.
//!
//! A *finding* is a fault in data, not in a component: an open break, a quarantined token.
//! `/health` shows it as failing. The service still answers, and what must stop is stopped where
//! the finding is (`design.md` 4), so a finding makes neither `/readyz` nor the gRPC health check
//! fail: else one break would take every user's market away.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

/// Failing parts by name, with the reason.
pub type Failing = BTreeMap<String, String>;

/// Shared handle; clones refer to the same service.
#[derive(Clone)]
pub struct Health {
    name: Arc<str>,
    failing: Arc<watch::Sender<Failing>>,
    findings: Arc<watch::Sender<Failing>>,
}

impl Health {
    pub fn new(name: &str) -> Self {
        Health {
            name: name.into(),
            failing: Arc::new(watch::Sender::new(Failing::new())),
            findings: Arc::new(watch::Sender::new(Failing::new())),
        }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Marks a part as failing. `/health` shows `reason` without authentication: no secrets in it.
    pub fn set_failing(&self, part: &str, reason: impl Into<String>) {
        let reason = reason.into();
        self.failing.send_if_modified(|failing| {
            if failing.get(part) == Some(&reason) {
                return false;
            }
            tracing::warn!(service_name = &*self.name, part, reason, "part is failing");
            failing.insert(part.to_owned(), reason);
            true
        });
    }

    /// Marks a part as healthy.
    pub fn set_ok(&self, part: &str) {
        self.failing.send_if_modified(|failing| {
            let changed = failing.remove(part).is_some();
            if changed {
                tracing::info!(service_name = &*self.name, part, "part recovered");
            }
            changed
        });
    }

    /// Sets a part as failing with a reason, or as healthy.
    pub fn set(&self, part: &str, reason: Option<&str>) {
        match reason {
            Some(reason) => self.set_failing(part, reason),
            None => self.set_ok(part),
        }
    }

    /// Reports a finding, or that there is none of this kind. `/health` shows `reason` without
    /// authentication: no secrets in it.
    pub fn set_finding(&self, kind: &str, reason: Option<&str>) {
        self.findings.send_if_modified(|findings| {
            if findings.get(kind).map(String::as_str) == reason {
                return false;
            }
            match reason {
                Some(reason) => {
                    tracing::warn!(service_name = &*self.name, kind, reason, "finding");
                    findings.insert(kind.to_owned(), reason.to_owned());
                }
                None => {
                    tracing::info!(service_name = &*self.name, kind, "finding cleared");
                    findings.remove(kind);
                }
            }
            true
        });
    }

    /// Findings by kind, with the reason.
    pub fn findings(&self) -> Failing {
        self.findings.borrow().clone()
    }

    pub fn watch_findings(&self) -> watch::Receiver<Failing> {
        self.findings.subscribe()
    }

    pub fn failing(&self) -> Failing {
        self.failing.borrow().clone()
    }

    pub fn watch(&self) -> watch::Receiver<Failing> {
        self.failing.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fail_and_recover_one_by_one_and_repeats_notify_no_reader() {
        let health = Health::new("ledger");
        let mut seen = health.watch();
        seen.mark_unchanged();
        health.set_failing("kafka", "no broker");
        assert!(seen.has_changed().unwrap());
        seen.mark_unchanged();
        health.set_failing("kafka", "no broker");
        health.set_ok("store");
        assert!(!seen.has_changed().unwrap());
        assert_eq!(health.failing()["kafka"], "no broker");
        health.set_ok("kafka");
        assert!(health.failing().is_empty());
    }

    #[test]
    fn a_finding_is_no_failing_part() {
        let health = Health::new("cfa");
        let mut seen = health.watch();
        seen.mark_unchanged();
        health.set_finding("breaks", Some("BOND-1: 1"));
        assert!(!seen.has_changed().unwrap());
        assert!(health.failing().is_empty());
        assert_eq!(health.findings()["breaks"], "BOND-1: 1");
        health.set_finding("breaks", None);
        assert!(health.findings().is_empty());
    }
}
