//! Sub-accounts and open holds as they stand in the file, remembered from one group to the next.
//!
//! Why: they are what groups read most, and this connection is the one that writes them. Invariant:
//! a row in here is the row of the file. What a group changes is taken out before it is written and
//! comes back when it is committed; a change by any other connection is seen by SQLite's own count
//! of them, and everything is forgotten. Memory: some 300 bytes a sub-account, at most
//! [`SUB_ACCOUNTS_MAX`], and some 700 a hold, at most [`HOLDS_MAX`].

use std::collections::HashMap;

use foldhash::fast::RandomState;
use rusqlite::Connection;

use crate::{
    Error,
    book::Book,
    model::{Hold, Id, SubAccount},
};

const SUB_ACCOUNTS_MAX: usize = 65_536;
const HOLDS_MAX: usize = 32_768;

#[derive(Default)]
pub struct Known {
    /// SQLite's count of changes by others.
    version: i64,
    subaccounts: HashMap<Id, SubAccount, RandomState>,
    /// Active ones: those that have ended are seldom asked for.
    holds: HashMap<Id, Hold, RandomState>,
}

/// Rows as a group leaves them.
#[derive(Default)]
pub struct Changed {
    subaccounts: Vec<SubAccount>,
    holds: Vec<Hold>,
}

impl Known {
    /// Forgets everything where somebody else has written. Within a write transaction nobody does.
    pub fn check(&mut self, db: &Connection) -> Result<(), Error> {
        let version = db
            .prepare_cached("PRAGMA data_version")?
            .query_row([], |row| row.get(0))?;
        if version != self.version {
            self.forget();
            self.version = version;
        }
        Ok(())
    }

    fn forget(&mut self) {
        self.subaccounts.clear();
        self.holds.clear();
    }

    pub fn subaccount(&self, id: &Id) -> Option<&SubAccount> {
        self.subaccounts.get(id)
    }

    pub fn hold(&self, id: &Id) -> Option<&Hold> {
        self.holds.get(id)
    }

    pub fn keep_subaccount(&mut self, row: SubAccount) {
        if self.subaccounts.len() >= SUB_ACCOUNTS_MAX {
            self.subaccounts.clear();
        }
        self.subaccounts
            .insert(row.terms.subaccount_id.clone(), row);
    }

    fn keep_hold(&mut self, row: Hold) {
        if self.holds.len() >= HOLDS_MAX {
            self.holds.clear();
        }
        self.holds.insert(row.terms.hold_id.clone(), row);
    }

    /// Remembers what a group has committed.
    pub fn keep(&mut self, changed: Changed) {
        for row in changed.subaccounts {
            self.keep_subaccount(row);
        }
        for row in changed.holds {
            self.keep_hold(row);
        }
    }

    /// Forgets what is about to be written and gives it as it will be, to be kept once it is committed.
    pub fn take_changed(&mut self, book: &Book) -> Changed {
        // Rows carry the decimals of their instrument.
        if book.scales.changes().next().is_some() {
            self.forget();
            return Changed::default();
        }
        for change in book.subaccounts.changes() {
            self.subaccounts.remove(change.key);
        }
        for change in book.holds.changes() {
            self.holds.remove(change.key);
        }
        let subaccounts = (book.subaccounts.changes()).filter_map(|change| change.after);
        let holds = (book.holds.changes()).filter_map(|change| change.after);
        Changed {
            subaccounts: subaccounts.cloned().collect(),
            holds: holds.filter(|hold| hold.is_active()).cloned().collect(),
        }
    }
}
