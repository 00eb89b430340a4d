//! What is wrong right now: by part, and by the batch or step that it keeps waiting. Shown as health and, where
//! somebody has to look, in the statistics.
//!
//! Several batches are under way at a time: one that gets on must not hide that another is stuck, so a part
//! works again only when nothing of it waits.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

/// Part of the health: posting to the ledger.
pub const LEDGER: &str = "settlement-ledger";
/// Bringing batches to the chain and to their end.
pub const CHAIN: &str = "settlement-chain";
/// Following the replica and journalling what settlement says; the follower has this name too.
pub const JOURNAL: &str = "settlement-journal";
/// Settlement's own store.
pub const STORE: &str = "settlement-store";

#[derive(Clone, Debug, PartialEq, Eq)]
struct Trouble {
    reason: String,
    /// Time does not cure it.
    is_stuck: bool,
}

/// Open troubles.
pub struct Troubles {
    health: rpc::Health,
    open: Mutex<BTreeMap<(&'static str, String), Trouble>>,
}

impl Troubles {
    pub fn new() -> Self {
        Self {
            health: rpc::Health::new("settlement"),
            open: Mutex::default(),
        }
    }

    pub fn health(&self) -> rpc::Health {
        self.health.clone()
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<(&'static str, String), Trouble>> {
        self.open.lock().expect("no code panics while it notes")
    }

    /// `id` waits because of `reason`; `is_stuck`: until somebody has looked.
    pub fn note(&self, part: &'static str, id: &str, reason: &str, is_stuck: bool) {
        let mut open = self.open();
        let trouble = Trouble {
            reason: reason.to_owned(),
            is_stuck,
        };
        open.insert((part, id.to_owned()), trouble);
        self.show(part, &open);
    }

    /// `id` goes on.
    pub fn clear(&self, part: &'static str, id: &str) {
        let mut open = self.open();
        if open.remove(&(part, id.to_owned())).is_some() {
            self.show(part, &open);
        }
    }

    /// Forgets what the workers of a run waited for, but for what `stays`.
    pub fn begin_again(&self, stays: &str) {
        let mut open = self.open();
        open.retain(|(_, id), _| id == stays);
        for part in [LEDGER, CHAIN, JOURNAL, STORE] {
            self.show(part, &open);
        }
    }

    fn show(&self, part: &'static str, open: &BTreeMap<(&'static str, String), Trouble>) {
        let mut of_part = open.iter().filter(|((of, _), _)| *of == part);
        let worst = of_part
            .clone()
            .find(|(_, trouble)| trouble.is_stuck)
            .or_else(|| of_part.next());
        match worst {
            Some(((_, id), trouble)) => self
                .health
                .set_failing(part, format!("{id}: {}", trouble.reason)),
            None => self.health.set_ok(part),
        }
    }

    /// Everything that somebody has to look at, as one text; empty while there is nothing.
    pub fn stuck(&self) -> String {
        let open = self.open();
        let stuck = open.iter().filter(|(_, trouble)| trouble.is_stuck);
        let texts = stuck.map(|((part, id), trouble)| format!("{part}: {id}: {}", trouble.reason));
        texts.collect::<Vec<_>>().join("; ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_fails_as_long_as_anything_of_it_waits_and_names_what_is_stuck_first() {
        let troubles = Troubles::new();
        troubles.note(CHAIN, "1:1-5", "away", false);
        troubles.note(CHAIN, "1:6-9", "refused", true);
        troubles.note(LEDGER, "1:10-12", "away", false);
        let health = troubles.health();
        assert_eq!(health.failing()[CHAIN], "1:6-9: refused");
        assert_eq!(troubles.stuck(), "settlement-chain: 1:6-9: refused");
        troubles.clear(CHAIN, "1:6-9");
        assert_eq!(health.failing()[CHAIN], "1:1-5: away");
        assert_eq!(troubles.stuck(), "");
        troubles.clear(CHAIN, "1:1-5");
        troubles.clear(LEDGER, "1:10-12");
        assert!(health.failing().is_empty());
    }
}
