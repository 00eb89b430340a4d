//! Sub-accounts as they stand in the file, remembered from one group to the next.
//!
//! Why: they are what groups read most, and this connection is the one that writes them. Invariant: a row in here is the row of the file. What a group
//! changes is taken out before it is written and comes back when it is committed; a change by any other connection is seen by SQLite's
//! own count of them, and everything is forgotten. Memory: some 300 bytes a row, at most [`ROWS_MAX`].

use std::collections::HashMap;

use foldhash::fast::RandomState;
use rusqlite::Connection;

use crate::{
    Error,
    book::{Book, Change},
    model::{Id, SubAccount},
};

const ROWS_MAX: usize = 65_536;

#[derive(Default)]
pub struct Known {
    /// SQLite's count of changes by others.
    version: i64,
    rows: HashMap<Id, SubAccount, RandomState>,
}

impl Known {
    /// Forgets everything where somebody else has written. Within a write transaction nobody does.
    pub fn check(&mut self, db: &Connection) -> Result<(), Error> {
        let version = db
            .prepare_cached("PRAGMA data_version")?
            .query_row([], |row| row.get(0))?;
        if version != self.version {
            self.rows.clear();
            self.version = version;
        }
        Ok(())
    }

    pub fn get(&self, id: &Id) -> Option<&SubAccount> {
        self.rows.get(id)
    }

    pub fn keep(&mut self, row: SubAccount) {
        if self.rows.len() >= ROWS_MAX {
            self.rows.clear();
        }
        self.rows.insert(row.terms.subaccount_id.clone(), row);
    }

    /// Forgets what is about to be written and gives it as it will be, to be kept once it is committed.
    pub fn take_changed(
        &mut self,
        book: &Book,
        changes: &[Change<Id, SubAccount>],
    ) -> Vec<SubAccount> {
        // Rows carry the decimals of their instrument.
        if book.scales.changes().next().is_some() {
            self.rows.clear();
            return Vec::new();
        }
        for change in changes {
            self.rows.remove(change.key);
        }
        let after = changes.iter().filter_map(|change| change.after);
        after.cloned().collect()
    }
}
