//! Row cache: sub-accounts, active holds, operations that await the chain and those that ended
//! lately, kept from one group to the next.
//!
//! Groups read these rows most often, and only the writer's connection changes them. Invariant: a
//! cached row equals the stored row. Rows that a group changes are evicted before the write and
//! inserted after the commit. A write by another connection changes SQLite's `data_version` and
//! clears the cache. Memory: some 300 bytes per sub-account, at most [`SUB_ACCOUNTS_MAX`], some 700
//! bytes per hold, at most [`HOLDS_MAX`], some 1,200 bytes per operation with one posting, 500 per
//! further posting, at most [`OPERATIONS_MAX`] with [`POSTINGS_MAX`] each, and some 700 bytes per
//! ended operation, at most [`ENDED_MAX`].

use std::collections::HashMap;

use foldhash::fast::RandomState;
use rusqlite::Connection;

use crate::{
    Error,
    book::Book,
    model::{Hold, Id, Link, Operation, Posting, SubAccount},
};

const SUB_ACCOUNTS_MAX: usize = 65_536;
const HOLDS_MAX: usize = 32_768;
/// A trade in flight has three operations. With half as many, half of the reads in `settle` missed.
const OPERATIONS_MAX: usize = 32_768;
/// Postings of a cached operation at most: bounds the memory.
const POSTINGS_MAX: usize = 4;
/// The event of a trade's end comes some milliseconds after settlement's call.
const ENDED_MAX: usize = 8_192;

#[derive(Default)]
pub struct RowCache {
    /// Last `PRAGMA data_version`, which other connections' commits change.
    version: i64,
    subaccounts: HashMap<Id, SubAccount, RandomState>,
    /// Active holds only, because ended ones are rarely read.
    holds: HashMap<Id, Hold, RandomState>,
    /// Operations that await the chain only: their next step reads them.
    operations: HashMap<Id, Stored, RandomState>,
    /// Operations that awaited the chain, by their idempotency key: an event reports their end once
    /// more.
    ended: HashMap<Id, Operation, RandomState>,
}

/// An operation with its postings.
pub struct Stored {
    pub operation: Operation,
    pub postings: Vec<Posting>,
}

/// Changed rows of a group, to be cached after its commit.
#[derive(Default)]
pub struct Changed {
    subaccounts: Vec<SubAccount>,
    holds: Vec<Hold>,
    operations: Vec<Stored>,
    ended: Vec<Operation>,
}

impl RowCache {
    /// Clears the cache if another connection has written. Called inside the write transaction,
    /// which excludes other writers.
    pub fn check(&mut self, db: &Connection) -> Result<(), Error> {
        let version = db
            .prepare_cached("PRAGMA data_version")?
            .query_row([], |row| row.get(0))?;
        if version != self.version {
            self.clear();
            self.version = version;
        }
        Ok(())
    }

    fn clear(&mut self) {
        self.subaccounts.clear();
        self.holds.clear();
        self.operations.clear();
        self.ended.clear();
    }

    pub fn subaccount(&self, id: &Id) -> Option<&SubAccount> {
        self.subaccounts.get(id)
    }

    pub fn hold(&self, id: &Id) -> Option<&Hold> {
        self.holds.get(id)
    }

    pub fn operation(&self, id: &Id) -> Option<&Stored> {
        self.operations.get(id)
    }

    /// The ended operation of this user, key and scope.
    pub fn ended(&self, user_id: &Id, key: &Id, scope: i32) -> Option<&Operation> {
        let found = self.ended.get(key)?;
        let is_same = found.terms.user_id == *user_id && found.terms.scope.code() == scope;
        is_same.then_some(found)
    }

    pub fn insert_subaccount(&mut self, row: SubAccount) {
        if self.subaccounts.len() >= SUB_ACCOUNTS_MAX {
            self.subaccounts.clear();
        }
        self.subaccounts
            .insert(row.terms.subaccount_id.clone(), row);
    }

    fn insert_hold(&mut self, row: Hold) {
        if self.holds.len() >= HOLDS_MAX {
            self.holds.clear();
        }
        self.holds.insert(row.terms.hold_id.clone(), row);
    }

    fn insert_operation(&mut self, row: Stored) {
        if self.operations.len() >= OPERATIONS_MAX {
            self.operations.clear();
        }
        let id = row.operation.terms.operation_id.clone();
        self.operations.insert(id, row);
    }

    fn insert_ended(&mut self, row: Operation) {
        if self.ended.len() >= ENDED_MAX {
            self.ended.clear();
        }
        self.ended.insert(row.terms.idempotency_key.clone(), row);
    }

    /// Caches the rows that a group has committed.
    pub fn insert_committed(&mut self, changed: Changed) {
        for row in changed.subaccounts {
            self.insert_subaccount(row);
        }
        for row in changed.holds {
            self.insert_hold(row);
        }
        for row in changed.operations {
            self.insert_operation(row);
        }
        for row in changed.ended {
            self.insert_ended(row);
        }
    }

    /// Removes the rows that are about to be written. Returns their new state, to be cached after
    /// the commit.
    pub fn evict_changed(&mut self, book: &Book) -> Changed {
        // Cached rows contain the decimals of their instrument, so new decimals invalidate all of
        // them.
        if book.scales.changes().next().is_some() {
            self.clear();
            return Changed::default();
        }
        for change in book.subaccounts.changes() {
            self.subaccounts.remove(change.key);
        }
        for change in book.holds.changes() {
            self.holds.remove(change.key);
        }
        for change in book.operations.changes() {
            self.operations.remove(change.key);
            if let Some(before) = change.before {
                self.ended.remove(&before.terms.idempotency_key);
            }
        }
        let subaccounts = (book.subaccounts.changes()).filter_map(|change| change.after);
        let holds = (book.holds.changes()).filter_map(|change| change.after);
        let operations = (book.operations.changes()).filter_map(|change| change.after);
        let operations = operations.filter(|operation| operation.terms.awaits_chain);
        let (open, ended): (Vec<&Operation>, Vec<&Operation>) =
            operations.partition(|operation| operation.status.is_open());
        Changed {
            subaccounts: subaccounts.cloned().collect(),
            holds: holds.filter(|hold| hold.is_active()).cloned().collect(),
            operations: open
                .into_iter()
                .filter_map(|operation| stored(book, operation))
                .collect(),
            ended: ended.into_iter().cloned().collect(),
        }
    }
}

/// The rows as a load would return them. `None`: too many to cache.
fn stored(book: &Book, operation: &Operation) -> Option<Stored> {
    let postings = book.postings.get(&operation.terms.operation_id);
    let postings = postings.map_or(&[][..], Vec::as_slice);
    if postings.len() > POSTINGS_MAX {
        return None;
    }
    let unlinked = |posting: &Posting| Posting {
        link: Link::default(),
        ..posting.clone()
    };
    Some(Stored {
        operation: operation.clone(),
        postings: postings.iter().map(unlinked).collect(),
    })
}
