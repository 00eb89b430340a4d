//! The working set of one group of commands: loaded rows, changes by the fold, and an undo log.
//!
//! Each command of a group is atomic on its own. The caller takes a [`Book::savepoint`] before the
//! command and calls [`Book::rollback`] if the command is refused. The store writes the remaining
//! changes in one transaction. Cost: a copy of the row's small mutable state per change.

use std::{borrow::Borrow, collections::BTreeSet, hash::Hash};

use foldhash::fast::RandomState;
use indexmap::IndexMap;

use crate::{
    effects::Effect,
    fold::StoredAnswer,
    limit::VelocityLimit,
    model::{
        Account, Call, Hold, Id, Operation, OperationType, PendingReceipt, Posting, Scope,
        SourcePosition, SubAccount, User,
    },
};

/// Seeded per process, because callers choose the keys. Faster than the standard hasher on short
/// texts.
type HashMap<K, V> = std::collections::HashMap<K, V, RandomState>;

/// Rows by key, with an undo log. A key keeps its index for the life of the table, so rollback and
/// the list of changes need no lookups.
#[derive(Debug)]
pub struct Table<K, V> {
    rows: IndexMap<K, Slot<V>, RandomState>,
    /// Number of rows present.
    present: usize,
    undo: Vec<Undo<V>>,
}

#[derive(Debug)]
struct Slot<V> {
    /// `None`: the row does not exist or was removed.
    row: Option<V>,
    /// The row has a change since loading that was not rolled back.
    is_changed: bool,
}

#[derive(Debug)]
struct Undo<V> {
    index: usize,
    before: Option<V>,
    /// This is the first change of the row since loading.
    is_first: bool,
}

impl<K, V> Default for Table<K, V> {
    fn default() -> Self {
        Table {
            rows: IndexMap::default(),
            present: 0,
            undo: Vec::new(),
        }
    }
}

/// A row that differs from what was loaded.
#[derive(Debug)]
pub struct Change<'a, K, V> {
    pub key: &'a K,
    /// `None`: the row is new.
    pub before: Option<&'a V>,
    /// `None`: the row is deleted.
    pub after: Option<&'a V>,
}

impl<K: Hash + Eq, V> Table<K, V> {
    /// Loads a row from the database.
    pub fn load(&mut self, key: K, row: V) {
        assert!(
            self.undo.is_empty(),
            "rows must be loaded before the first change"
        );
        let loaded = Slot {
            row: Some(row),
            is_changed: false,
        };
        let before = self.rows.insert(key, loaded);
        self.present += usize::from(before.is_none());
    }

    pub fn get<Q: Hash + Eq + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.rows.get(key)?.row.as_ref()
    }

    pub fn put(&mut self, key: K, row: V) {
        let entry = self.rows.entry(key);
        let index = entry.index();
        let slot = entry.or_insert(Slot {
            row: None,
            is_changed: false,
        });
        let before = slot.row.replace(row);
        self.present += usize::from(before.is_none());
        self.undo.push(Undo {
            index,
            before,
            is_first: !slot.is_changed,
        });
        slot.is_changed = true;
    }

    pub fn remove(&mut self, key: &K) {
        if let Some((index, _, slot)) = self.rows.get_full_mut(key)
            && let Some(before) = slot.row.take()
        {
            self.present -= 1;
            self.undo.push(Undo {
                index,
                before: Some(before),
                is_first: !slot.is_changed,
            });
            slot.is_changed = true;
        }
    }

    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.rows.values().filter_map(|slot| slot.row.as_ref())
    }

    /// Keys of the rows present.
    pub fn keys(&self) -> impl Iterator<Item = &K> {
        let present = self.rows.iter().filter(|(_, slot)| slot.row.is_some());
        present.map(|(key, _)| key)
    }

    pub fn is_empty(&self) -> bool {
        self.present == 0
    }

    fn undo_len(&self) -> usize {
        self.undo.len()
    }

    fn rollback(&mut self, mark: usize) {
        for undo in self.undo.drain(mark..).rev() {
            let slot = &mut self.rows[undo.index];
            self.present -= usize::from(slot.row.is_some());
            self.present += usize::from(undo.before.is_some());
            slot.row = undo.before;
            slot.is_changed = !undo.is_first;
        }
    }

    /// Reserves space for N rows.
    pub fn reserve(&mut self, rows: usize) {
        self.rows.reserve(rows);
    }

    fn reserve_changes(&mut self, changes: usize) {
        self.undo.reserve(changes);
    }

    /// Rows inserted after a mark, in order of insertion, in their current state.
    fn inserted_since(&self, mark: usize) -> impl Iterator<Item = (&K, &V)> {
        let inserted = self.undo[mark..].iter();
        let inserted = inserted.filter(|undo| undo.is_first && undo.before.is_none());
        inserted.filter_map(|undo| {
            let (key, slot) = self.rows.get_index(undo.index)?;
            Some((key, slot.row.as_ref()?))
        })
    }

    /// Indexes of the rows that were inserted before a mark and changed after it.
    fn modified_since(&self, mark: usize) -> BTreeSet<usize> {
        let (earlier, later) = self.undo.split_at(mark);
        let modified = later.iter().filter(|undo| !undo.is_first);
        let mut modified: BTreeSet<usize> = modified.map(|undo| undo.index).collect();
        for undo in later.iter().filter(|undo| undo.is_first) {
            modified.remove(&undo.index);
        }
        if !modified.is_empty() {
            let loaded = earlier.iter().filter(|undo| undo.before.is_some());
            for undo in loaded.filter(|undo| undo.is_first) {
                modified.remove(&undo.index);
            }
        }
        modified
    }

    /// Every changed row once, in the order of first change.
    pub fn changes(&self) -> impl Iterator<Item = Change<'_, K, V>> {
        let firsts = self.undo.iter().filter(|undo| undo.is_first);
        firsts.filter_map(|undo| {
            let (key, slot) = self.rows.get_index(undo.index)?;
            Some(Change {
                key,
                before: undo.before.as_ref(),
                after: slot.row.as_ref(),
            })
        })
    }
}

/// (scope, user, key) of an operation.
pub type OperationKey = (Scope, Id, Id);
/// (call, user, key) of a stored answer.
pub type AnswerKey = (Call, Id, Id);
/// (type, external reference): second guard of T12, unique per operation type.
pub type ReferenceKey = (OperationType, Id);

/// The working set of a group.
#[derive(Debug, Default)]
pub struct Book {
    pub now_us: i64,
    /// Number of the next posting, in stores that number postings.
    pub next_posting: i64,
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
    pub pending_receipts: Table<Id, PendingReceipt>,
    /// Limits of the loaded instruments and users.
    pub limits: Table<Id, VelocityLimit>,
    /// Usage of a limit in its window in minor units, by (limit, sub-account).
    pub used: Table<(Id, Id), i128>,
    /// Effects of the fold, each with the index of its command.
    pub effects: Vec<(usize, Effect)>,
    /// Index of the command being folded.
    pub command_index: usize,
    /// Holds that the current command found expired. The current command is refused with `Hold has
    /// expired`, later ones with `Hold is not active`.
    pub expired_now: Vec<Id>,
    flush: EarlyFlush,
}

/// New operations with their postings, which the store writes while the fold continues.
#[derive(Debug)]
pub struct FlushedRows {
    pub operations: Vec<Operation>,
    pub postings: Vec<Posting>,
}

/// State of the early flush.
#[derive(Debug, Default)]
struct EarlyFlush {
    /// Number of flushed operations.
    count: usize,
    /// Lengths of the undo logs of operations and postings at the last flush.
    operations_mark: usize,
    postings_mark: usize,
    /// Indexes of operations that changed after their flush and before the last flush.
    changed: BTreeSet<usize>,
    /// Flushed rows were rolled back.
    rolled_back_past_flush: bool,
}

/// A point to roll back to.
#[derive(Clone, Copy, Debug)]
pub struct Savepoint {
    /// Undo length per table, then the number of effects.
    lengths: [usize; 15],
    next_posting: i64,
}

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
            pending_receipts,
            scales,
            limits,
            used
        )
    };
}

impl Book {
    /// An empty working set.
    pub fn at(now_us: i64) -> Self {
        Book {
            now_us,
            ..Book::default()
        }
    }

    pub fn savepoint(&self) -> Savepoint {
        macro_rules! marks {
            ($book:ident, $($table:ident),+) => { [$($book.$table.undo_len(),)+ $book.effects.len()] };
        }
        Savepoint {
            lengths: each_table!(self, marks),
            next_posting: self.next_posting,
        }
    }

    /// Undoes all changes after the savepoint.
    pub fn rollback(&mut self, savepoint: Savepoint) {
        let flushed = (self.flush.operations_mark, self.flush.postings_mark);
        let mut marks = savepoint.lengths.into_iter();
        macro_rules! back {
            ($book:ident, $($table:ident),+) => { $($book.$table.rollback(marks.next().expect("a mark per table"));)+ };
        }
        each_table!(self, back);
        self.effects
            .truncate(marks.next().expect("a mark for the effects"));
        self.next_posting = savepoint.next_posting;
        if self.operations.undo_len() < flushed.0 || self.postings.undo_len() < flushed.1 {
            self.flush = EarlyFlush {
                rolled_back_past_flush: true,
                ..EarlyFlush::default()
            };
        }
    }

    /// Reserves space for the rows that N operations may write.
    pub fn reserve(&mut self, operations: usize) {
        macro_rules! room {
            ($($table:ident),+) => { $(
                self.$table.reserve(operations);
                self.$table.reserve_changes(operations);
            )+ };
        }
        room!(operations, by_key, postings);
        self.subaccounts.reserve_changes(2 * operations);
        self.effects.reserve(4 * operations);
    }

    /// Flushes the operations created since the last flush, once the undo log of operations grew by
    /// `changes`. `None`: it grew by less, no operation is new, or flushed rows were rolled back.
    pub fn drain_ready(&mut self, changes: usize) -> Option<FlushedRows> {
        if self.flush.rolled_back_past_flush
            || self.operations.undo_len() < self.flush.operations_mark + changes
        {
            return None;
        }
        let (operations, postings) = self.unflushed();
        let rows = FlushedRows {
            operations: operations.into_iter().cloned().collect(),
            postings: postings.into_iter().cloned().collect(),
        };
        let changed = self.operations.modified_since(self.flush.operations_mark);
        self.flush.changed.extend(changed);
        self.flush.count += rows.operations.len();
        self.flush.operations_mark = self.operations.undo_len();
        self.flush.postings_mark = self.postings.undo_len();
        (!rows.operations.is_empty()).then_some(rows)
    }

    /// Number of flushed operations.
    pub fn flushed_count(&self) -> usize {
        self.flush.count
    }

    /// True if flushed rows were rolled back. The store must discard them. Afterwards nothing is
    /// flushed or counted as flushed.
    pub fn rolled_back_past_flush(&self) -> bool {
        self.flush.rolled_back_past_flush
    }

    /// New operations and postings that are not flushed yet.
    pub fn unflushed(&self) -> (Vec<&Operation>, Vec<&Posting>) {
        let operations = self.operations.inserted_since(self.flush.operations_mark);
        let postings = self.postings.inserted_since(self.flush.postings_mark);
        (
            operations.map(|(_, row)| row).collect(),
            postings.flat_map(|(_, rows)| rows).collect(),
        )
    }

    /// Operations that changed after they were flushed.
    pub fn flushed_and_modified(&self) -> Vec<&Operation> {
        let mut changed = self.operations.modified_since(self.flush.operations_mark);
        changed.extend(&self.flush.changed);
        let rows = changed.into_iter();
        rows.filter_map(|index| self.operations.rows[index].row.as_ref())
            .collect()
    }

    /// True if there is nothing to write.
    pub fn is_clean(&self) -> bool {
        self.savepoint().lengths.iter().all(|len| *len == 0)
    }

    pub fn push_effect(&mut self, effect: Effect) {
        self.effects.push((self.command_index, effect));
    }

    /// The operation created under a key in this scope.
    pub fn operation_by_key(&self, scope: Scope, user_id: &Id, key: &Id) -> Option<&Operation> {
        let id = self.by_key.get(&(scope, user_id.clone(), key.clone()))?;
        self.operations.get(id)
    }

    /// Usage of a limit by a sub-account in minor units; 0 without a row.
    pub fn used(&self, limit_id: &Id, subaccount_id: &Id) -> i128 {
        let key = (limit_id.clone(), subaccount_id.clone());
        self.used.get(&key).copied().unwrap_or(0)
    }

    pub fn postings_of(&self, operation_id: &str) -> &[Posting] {
        self.postings.get(operation_id).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use rand::{Rng, SeedableRng, rngs::StdRng};

    use super::*;
    use crate::model::{OperationStatus, OperationTerms};

    /// Model of a table: current rows, loaded rows, changed keys in order of first change.
    #[derive(Clone, Default)]
    struct Model {
        rows: BTreeMap<u8, u32>,
        loaded: BTreeMap<u8, u32>,
        changed: Vec<u8>,
    }

    impl Model {
        fn set(&mut self, key: u8, row: Option<u32>) {
            if !self.changed.contains(&key) {
                self.changed.push(key);
            }
            match row {
                Some(row) => self.rows.insert(key, row),
                None => self.rows.remove(&key),
            };
        }
    }

    fn assert_same(table: &Table<u8, u32>, model: &Model) {
        for key in 0..=u8::MAX {
            assert_eq!(table.get(&key), model.rows.get(&key));
        }
        assert_eq!(table.is_empty(), model.rows.is_empty());
        assert_eq!(table.values().count(), model.rows.len());
        assert!(table.keys().all(|key| model.rows.contains_key(key)));
        let changes = table.changes();
        let changes =
            changes.map(|change| (*change.key, change.before.copied(), change.after.copied()));
        let expected = model.changed.iter().map(|key| {
            let (before, after) = (model.loaded.get(key), model.rows.get(key));
            (*key, before.copied(), after.copied())
        });
        assert!(changes.eq(expected));
    }

    #[test]
    fn flushed_rows_are_written_once_and_their_changes_after_them() {
        let operation = |id: &str, status| Operation {
            terms: Arc::new(OperationTerms {
                operation_id: id.into(),
                scope: Scope::Create,
                kind: OperationType::Payment,
                user_id: "u1".into(),
                idempotency_key: id.into(),
                external_ref: None,
                awaits_chain: false,
                reverses: None,
                digest: 0,
                created_at_us: 0,
            }),
            status,
            tx_hash: None,
            rejection_code: None,
            rejection_message: None,
            finalized_at_us: None,
            reversed_by: None,
        };
        let put = |book: &mut Book, id: &str, status| {
            book.operations.put(id.into(), operation(id, status));
        };
        let ids = |operations: &[&Operation]| -> Vec<String> {
            let ids = operations
                .iter()
                .map(|row| row.terms.operation_id.to_string());
            ids.collect()
        };
        let mut book = Book::at(0);
        book.operations
            .load("old".into(), operation("old", OperationStatus::Settled));
        let empty = book.savepoint();
        put(&mut book, "a", OperationStatus::Settled);
        put(&mut book, "old", OperationStatus::Finalized);
        assert!(book.drain_ready(3).is_none());
        put(&mut book, "b", OperationStatus::Settled);
        let rows = book.drain_ready(3).unwrap();
        assert_eq!(ids(&rows.operations.iter().collect::<Vec<_>>()), ["a", "b"]);
        assert!(book.drain_ready(1).is_none());

        put(&mut book, "c", OperationStatus::Settled);
        let savepoint = book.savepoint();
        put(&mut book, "b", OperationStatus::Finalized);
        put(&mut book, "b", OperationStatus::Failed);
        put(&mut book, "c", OperationStatus::Finalized);
        put(&mut book, "old", OperationStatus::Failed);
        assert_eq!(book.flushed_count(), 2);
        assert_eq!(ids(&book.unflushed().0), ["c"]);
        assert_eq!(ids(&book.flushed_and_modified()), ["b"]);
        assert_eq!(
            book.flushed_and_modified()[0].status,
            OperationStatus::Failed
        );
        book.rollback(savepoint);
        assert!(book.flushed_and_modified().is_empty() && !book.rolled_back_past_flush());

        // A second flush, then changes of flushed rows only.
        put(&mut book, "a", OperationStatus::Finalized);
        let rows = book.drain_ready(2).unwrap();
        assert_eq!(ids(&rows.operations.iter().collect::<Vec<_>>()), ["c"]);
        assert_eq!(ids(&book.flushed_and_modified()), ["a"]);
        put(&mut book, "c", OperationStatus::Failed);
        put(&mut book, "old", OperationStatus::Failed);
        assert!(book.drain_ready(2).is_none());
        assert_eq!(ids(&book.flushed_and_modified()), ["a", "c"]);
        assert_eq!((book.flushed_count(), book.unflushed().0.len()), (3, 0));

        book.rollback(empty);
        assert!(book.rolled_back_past_flush() && book.flushed_and_modified().is_empty());
        put(&mut book, "d", OperationStatus::Settled);
        assert!(book.drain_ready(1).is_none());
        assert_eq!(
            (book.flushed_count(), ids(&book.unflushed().0)),
            (0, vec!["d".to_owned()])
        );
    }

    #[test]
    fn table_matches_a_model_of_rows_changes_and_rollback() {
        for seed in 0..300 {
            let mut random = StdRng::seed_from_u64(seed);
            let (mut table, mut model) = (Table::default(), Model::default());
            for key in 0..random.random_range(0..6) {
                table.load(key, 0);
                model.rows.insert(key, 0);
            }
            model.loaded = model.rows.clone();
            let mut marks = vec![(table.undo_len(), model.clone())];
            for row in 1..60 {
                let key = random.random_range(0..8);
                match random.random_range(0..8) {
                    0 => marks.push((table.undo_len(), model.clone())),
                    1 => {
                        let (mark, then) = marks[random.random_range(0..marks.len())].clone();
                        marks.retain(|(earlier, _)| *earlier <= mark);
                        table.rollback(mark);
                        model = then;
                    }
                    2 | 3 => {
                        table.remove(&key);
                        if model.rows.contains_key(&key) {
                            model.set(key, None);
                        }
                    }
                    _ => {
                        table.put(key, row);
                        model.set(key, Some(row));
                    }
                }
                assert_same(&table, &model);
            }
        }
    }
}
