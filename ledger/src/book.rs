//! The working set of one group of commands: the rows loaded for it, what the fold made of them, and a way back.
//!
//! Each command of a group is all or nothing on its own: [`Book::mark`] before it, [`Book::rollback`] when it is refused. What is left at the
//! end is written in one transaction. Cost: one clone of the small state of a row per change, for the way back.

use std::{borrow::Borrow, hash::Hash};

use foldhash::fast::RandomState;

use crate::{
    facts::Fact,
    fold::StoredAnswer,
    limit::VelocityLimit,
    model::{
        Account, Call, Hold, Id, Operation, OperationType, Parked, Posting, Scope, SourcePosition,
        SubAccount, User,
    },
};

/// Keys come from callers: seeded anew in every process, cheaper than the standard one on short texts.
type HashMap<K, V> = std::collections::HashMap<K, V, RandomState>;
type HashSet<K> = std::collections::HashSet<K, RandomState>;

/// Rows by key, with an undo log.
#[derive(Debug)]
pub struct Table<K, V> {
    rows: HashMap<K, V>,
    undo: Vec<(K, Option<V>)>,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Table {
            rows: HashMap::default(),
            undo: Vec::new(),
        }
    }
}

/// One row that differs from what was loaded.
#[derive(Debug)]
pub struct Change<'a, K, V> {
    pub key: &'a K,
    /// `None`: the row is new.
    pub before: Option<&'a V>,
    /// `None`: the row goes.
    pub after: Option<&'a V>,
}

impl<K: Hash + Eq + Clone, V: Clone> Table<K, V> {
    /// A row as it stands in the database.
    pub fn load(&mut self, key: K, row: V) {
        debug_assert!(
            self.undo.is_empty(),
            "rows are loaded before anything changes"
        );
        self.rows.insert(key, row);
    }

    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.rows.get(key)
    }

    pub fn put(&mut self, key: K, row: V) {
        let before = self.rows.insert(key.clone(), row);
        self.undo.push((key, before));
    }

    pub fn remove(&mut self, key: &K) {
        if let Some(before) = self.rows.remove(key) {
            self.undo.push((key.clone(), Some(before)));
        }
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.rows.values()
    }

    pub fn keys(&self) -> impl Iterator<Item = &K> {
        self.rows.keys()
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    fn mark(&self) -> usize {
        self.undo.len()
    }

    fn rollback(&mut self, mark: usize) {
        while self.undo.len() > mark {
            match self.undo.pop() {
                Some((key, Some(before))) => self.rows.insert(key, before),
                Some((key, None)) => self.rows.remove(&key),
                None => break,
            };
        }
    }

    /// Makes room for so many new rows.
    fn reserve(&mut self, rows: usize) {
        self.rows.reserve(rows);
        self.undo.reserve(rows);
    }

    /// Every row that changed, once, in the order of first change.
    pub fn changes(&self) -> Vec<Change<'_, K, V>> {
        let mut seen = HashSet::with_capacity_and_hasher(self.undo.len(), RandomState::default());
        self.undo
            .iter()
            .filter(|(key, _)| seen.insert(key))
            .map(|(key, before)| Change {
                key,
                before: before.as_ref(),
                after: self.rows.get(key),
            })
            .collect()
    }
}

/// (scope, user, key) of an operation.
pub type OperationKey = (Scope, Id, Id);
/// (call, user, key) of a stored answer.
pub type AnswerKey = (Call, Id, Id);
/// Second guard of T12: a payment or payout id acts once per type.
pub type ReferenceKey = (OperationType, Id);

/// The working set. See the module's front door.
#[derive(Debug, Default)]
pub struct Book {
    pub now_us: i64,
    /// Decimals of each instrument.
    pub scales: Table<Id, u8>,
    pub users: Table<Id, User>,
    pub accounts: Table<Id, Account>,
    pub subaccounts: Table<Id, SubAccount>,
    pub holds: Table<Id, Hold>,
    pub operations: Table<Id, Operation>,
    pub by_key: Table<OperationKey, Id>,
    pub by_reference: Table<ReferenceKey, Id>,
    pub by_tx: HashMap<Id, Vec<Id>>,
    pub postings: Table<Id, Vec<Posting>>,
    pub answers: Table<AnswerKey, StoredAnswer>,
    pub sources: Table<Id, SourcePosition>,
    pub parked: Table<Id, Parked>,
    /// Limits of the instruments and users at hand.
    pub limits: Table<Id, VelocityLimit>,
    /// Minor units in the window of a limit, per sub-account.
    pub used: Table<(Id, Id), i128>,
    /// New events, each with the index of the command that caused it.
    pub facts: Vec<(usize, Fact)>,
    /// Index of the command being folded.
    pub command: usize,
    /// Holds whose expiry the present command found: it answers `Hold has expired`, later ones `Hold is not active`.
    pub expired_now: Vec<Id>,
}

/// A point to go back to.
#[derive(Clone, Copy, Debug)]
pub struct Mark([usize; 15]);

macro_rules! each_table {
    ($book:ident, $do:ident) => {
        $do!(
            $book,
            users,
            accounts,
            subaccounts,
            holds,
            operations,
            by_key,
            by_reference,
            postings,
            answers,
            sources,
            parked,
            scales,
            limits,
            used
        )
    };
}

impl Book {
    pub fn mark(&self) -> Mark {
        macro_rules! marks {
            ($book:ident, $($table:ident),+) => { [$($book.$table.mark(),)+ $book.facts.len()] };
        }
        Mark(each_table!(self, marks))
    }

    /// Undoes everything since the mark.
    pub fn rollback(&mut self, mark: Mark) {
        let mut marks = mark.0.into_iter();
        macro_rules! back {
            ($book:ident, $($table:ident),+) => { $($book.$table.rollback(marks.next().expect("a mark per table"));)+ };
        }
        each_table!(self, back);
        self.facts
            .truncate(marks.next().expect("a mark for the facts"));
    }

    /// Makes room for what so many operations may write.
    pub fn reserve(&mut self, operations: usize) {
        self.operations.reserve(operations);
        self.by_key.reserve(operations);
        self.postings.reserve(operations);
        self.subaccounts.undo.reserve(2 * operations);
        self.facts.reserve(4 * operations);
    }

    /// True when there is nothing to write.
    pub fn is_clean(&self) -> bool {
        self.mark().0.iter().all(|len| *len == 0)
    }

    pub fn tell(&mut self, fact: Fact) {
        self.facts.push((self.command, fact));
    }

    /// The operation that a key of this scope made.
    pub fn operation_by_key(&self, scope: Scope, user_id: &Id, key: &Id) -> Option<&Operation> {
        let id = self.by_key.get(&(scope, user_id.clone(), key.clone()))?;
        self.operations.get(id)
    }

    /// What a limit has counted of a sub-account; one without rows has no postings.
    pub fn used(&self, limit_id: &Id, subaccount_id: &Id) -> i128 {
        let key = (limit_id.clone(), subaccount_id.clone());
        self.used.get(&key).copied().unwrap_or(0)
    }

    pub fn postings_of(&self, operation_id: &str) -> &[Posting] {
        self.postings.get(operation_id).map_or(&[], Vec::as_slice)
    }
}
