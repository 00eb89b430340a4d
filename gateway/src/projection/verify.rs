//! Compares the history with the journal, from which its rows follow. Read-only, in one snapshot,
//! with or without a running platform; the snapshot keeps the write-ahead log from shrinking until
//! the end.
//!
//! Replays the journal from its first record up to the position of the history. If its beginning
//! was removed, from the oldest checkpoint that it continues; rows of earlier commands are then
//! counted and not compared, except orders that were still open. Rows are compared in windows of
//! records, in the order of their keys:
//!
//! | row | compared |
//! |---|---|
//! | order | after its end; an open one after the last record |
//! | trade | after its command |
//! | answer | after its command's last slice; without its sequence if the call noted it first |
//! | user, instrument | at the end: it has an order, and the journal has it with the same units |
//!
//! A row whose key is in a window, but of no record of the window, was added. The amounts of rows
//! count in the units of their instrument; a changed unit or name changes all rows with it.
//!
//! Memory: a replica, a window of records, and answers of commands that are not complete.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use events::seal::{Altered, Change};
use replica::{Batch, Names, Order, ReplicaError, State};
use sequencer::inspect::Folder;
use tokio::runtime::Handle;
use types::{Decimal, Id128, InstrumentId, InstrumentSpec, NodeId, Sequence, UserId};

use super::BATCH_RECORDS;
use super::batch::{Answer, NewTrade, OrderChange, Rows};
use super::repo::verify::{HistorySnapshot, StoredAnswer, StoredName, StoredOrder, StoredTrade};
use super::rows::OrderRow;
use crate::start::FILE;
use crate::{Error, GatewayConfig};

/// Rows that are read by key at once.
const PAGE: usize = 1_000;
/// Rows that are named per table. The others are counted.
const NAMED_MAX: usize = 100;
const NOT_DERIVED: &str = "requests, client_order_ids, positions, listed, feed, inbox, outbox and answers without \
     a command: they do not follow from the journal";

/// Result of [`verify_history`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HistoryCheck {
    /// Rows compared.
    pub rows: u64,
    /// Empty: the compared rows are those of the journal.
    pub findings: Vec<String>,
    /// Rows that are not compared, and why.
    pub not_compared: Vec<String>,
}

/// Compares `market.db` with the journal in this folder.
///
/// # Errors
/// The store cannot be read. A journal that cannot be read is a finding.
pub async fn verify_history(config: &GatewayConfig, journal: &Path) -> Result<HistoryCheck, Error> {
    let node = NodeId::new(config.node).ok_or(Error::Node(config.node))?;
    let db = HistorySnapshot::open(&config.data_dir.join(FILE), node).await?;
    let (folder, runtime) = (Folder::new(journal), Handle::current());
    let comparing = move || compare(db, &folder, node, &runtime);
    let compared = tokio::task::spawn_blocking(comparing).await;
    // A record that breaks an invariant panics.
    compared.map_err(|panic| ReplicaError::Ended(panic.to_string()))?
}

/// Blocks.
fn compare(
    db: HistorySnapshot,
    folder: &Folder,
    node: NodeId,
    runtime: &Handle,
) -> Result<HistoryCheck, Error> {
    let found = match replica::earliest_state(folder, node) {
        Ok(Some(state)) => Ok(state),
        Ok(None) => Err("its beginning was removed, and no checkpoint replaces it".to_owned()),
        Err(error) => Err(error.to_string()),
    };
    let mut state = match found {
        Ok(state) => state,
        Err(reason) => {
            runtime.block_on(db.close())?;
            return Ok(HistoryCheck {
                findings: vec![format!("the journal cannot be replayed: {reason}")],
                ..HistoryCheck::default()
            });
        }
    };
    let mut comparison = Comparison::new(db, &state);
    if comparison.is_behind() {
        runtime.block_on(comparison.behind())?;
        return runtime.block_on(comparison.finish());
    }
    match comparison.replay(folder, &mut state, runtime)? {
        None => runtime.block_on(comparison.at_end(&state))?,
        Some(reason) => {
            let through = comparison.through;
            // A running node may remove records before they are read.
            let is_removed = folder
                .removed_through()
                .is_ok_and(|removed| removed > through);
            match is_removed {
                true => comparison.not_compared.push(format!(
                    "rows of commands after {through}: the journal was truncated meanwhile"
                )),
                false => comparison.findings.texts.push(format!(
                    "the journal cannot be replayed after command {through}: {reason}"
                )),
            }
        }
    }
    runtime.block_on(comparison.finish())
}

/// What differs, by table.
#[derive(Default)]
struct Findings {
    named: BTreeMap<&'static str, Vec<Altered>>,
    /// Number of further rows.
    unnamed: BTreeMap<&'static str, u64>,
    texts: Vec<String>,
}

impl Findings {
    fn add(&mut self, table: &'static str, key: String, change: Change) {
        let named = self.named.entry(table).or_default();
        if named.len() == NAMED_MAX {
            *self.unnamed.entry(table).or_default() += 1;
            return;
        }
        named.push(Altered {
            table: table.to_owned(),
            key,
            change,
        });
    }

    fn into_texts(self) -> Vec<String> {
        let named = self.named.into_values().flatten();
        let named = named.map(|altered| altered.to_string());
        let unnamed = self.unnamed.into_iter();
        let unnamed = unnamed.map(|(table, rows)| format!("{table}: {rows} more rows"));
        named.chain(unnamed).chain(self.texts).collect()
    }
}

/// The row that an order must have.
struct ExpectedOrder {
    key: i64,
    row: OrderRow,
    created_ns: i64,
    /// False: a checkpoint restored the order, so that the time of its last change is unknown.
    has_time: bool,
}

impl ExpectedOrder {
    fn of(change: &OrderChange<'_>, has_time: bool, names: &Names) -> Self {
        let client_order_id = match change.order.client_order_id {
            0 => String::new(),
            number => number.to_string(),
        };
        Self {
            key: change.sequence.get().cast_signed(),
            row: change.row(names, client_order_id),
            created_ns: change.order.created_ns.cast_signed(),
            has_time,
        }
    }

    fn equals(&self, stored: StoredOrder) -> bool {
        let Some(mut row) = stored.row else {
            return false;
        };
        if !self.has_time {
            row.updated_at_us = self.row.updated_at_us;
        }
        row == self.row && stored.created_ns == self.created_ns
    }
}

struct Comparison {
    db: HistorySnapshot,
    names: Arc<Names>,
    /// Last command that the journal no longer has; zero if it has all.
    removed: Sequence,
    /// Last command whose rows are compared.
    through: Sequence,
    /// Answers of commands that continue in slices, as the slices so far have left them.
    unfinished: HashMap<Id128, Answer>,
    /// Compared orders of removed commands.
    earlier_orders: u64,
    rows: u64,
    findings: Findings,
    not_compared: Vec<String>,
}

impl Comparison {
    fn new(db: HistorySnapshot, state: &State) -> Self {
        Self {
            db,
            names: state.names().clone(),
            removed: state.sequence(),
            through: state.sequence(),
            unfinished: HashMap::new(),
            earlier_orders: 0,
            rows: 0,
            findings: Findings::default(),
            not_compared: vec![NOT_DERIVED.to_owned()],
        }
    }

    /// The journal's earliest state is later than the history. Retention keeps the states that a
    /// lagging history needs, but a running node may remove them after the snapshot was taken.
    fn is_behind(&self) -> bool {
        self.db.position.unwrap_or_default() < self.removed
    }

    async fn behind(&mut self) -> Result<(), Error> {
        self.through = self.db.position.unwrap_or_default();
        self.not_compared.push(format!(
            "rows of commands through {}: the journal's earliest state is that after {}",
            self.through, self.removed
        ));
        self.later().await
    }

    /// Applies the journal up to the position of the history, and compares the rows of each window.
    /// Returns why the journal cannot be replayed, if it cannot. Blocks.
    fn replay(
        &mut self,
        folder: &Folder,
        state: &mut State,
        runtime: &Handle,
    ) -> Result<Option<String>, Error> {
        let position = self.db.position.unwrap_or_default();
        if state.sequence() >= position {
            return Ok(None);
        }
        let mut records = Vec::with_capacity(BATCH_RECORDS);
        let mut failed = None;
        let replayed = replica::replay(folder, state, position, |state, applied| {
            records.push(applied);
            if records.len() < BATCH_RECORDS {
                return Ok(());
            }
            let batch = Batch::new(std::mem::take(&mut records));
            let compared = runtime.block_on(self.window(batch, state));
            compared.map_err(|error| failed.insert(error).to_string())
        });
        if let Some(error) = failed {
            return Err(error);
        }
        if let Err(error) = replayed {
            return Ok(Some(error.to_string()));
        }
        if !records.is_empty() {
            runtime.block_on(self.window(Batch::new(records), state))?;
        }
        Ok(None)
    }

    /// Compares the rows of the next records. `state` is that after them.
    async fn window(&mut self, batch: Batch, state: &State) -> Result<(), Error> {
        let through = batch.last();
        let batches = [batch];
        let rows = Rows::of(&batches);
        self.orders(&rows.orders, through).await?;
        self.trades(&rows.trades, through).await?;
        self.answers(&rows.answers, through, state).await?;
        self.through = through;
        Ok(())
    }

    async fn orders(
        &mut self,
        changes: &[OrderChange<'_>],
        through: Sequence,
    ) -> Result<(), Error> {
        let keys = self.db.order_keys(self.through, through).await?;
        let mut added: BTreeSet<i64> = keys.into_iter().collect();
        for change in changes.iter().filter(|change| change.is_new) {
            added.remove(&change.sequence.get().cast_signed());
        }
        for key in added {
            self.findings.add("orders", key.to_string(), Change::Added);
        }
        let ended: Vec<_> = changes
            .iter()
            .filter(|change| change.order.status.is_final())
            .collect();
        for page in ended.chunks(PAGE) {
            let expected = page
                .iter()
                .map(|change| ExpectedOrder::of(change, true, &self.names));
            let expected = expected.collect();
            self.compare_orders(expected).await?;
        }
        Ok(())
    }

    async fn compare_orders(&mut self, page: Vec<ExpectedOrder>) -> Result<(), Error> {
        let keys: Vec<i64> = page.iter().map(|order| order.key).collect();
        let mut stored = self.db.orders(&keys).await?;
        for expected in page {
            let found = stored.remove(&expected.key);
            self.earlier_orders +=
                u64::from(found.is_some() && expected.row.sequence <= self.removed.get());
            let is_equal = found.map(|found| expected.equals(found));
            self.note("orders", expected.key.to_string(), is_equal);
        }
        Ok(())
    }

    async fn trades(&mut self, trades: &[NewTrade<'_>], through: Sequence) -> Result<(), Error> {
        let mut stored = self.db.trades(self.through, through).await?;
        for new in trades {
            let (key, expected) = StoredTrade::of(new, &self.names);
            let found = stored.remove(&key);
            let is_equal = found.map(|found| found == Some(expected));
            self.note("trades", key.to_string(), is_equal);
        }
        for key in stored.into_keys() {
            self.findings.add("trades", key.to_string(), Change::Added);
        }
        Ok(())
    }

    async fn answers(
        &mut self,
        answers: &[Answer],
        through: Sequence,
        state: &State,
    ) -> Result<(), Error> {
        let keys = self.db.answer_keys(self.through, through).await?;
        let mut added: BTreeSet<(i64, Vec<u8>)> = keys.into_iter().collect();
        for answer in answers {
            if let Some(first) = self.unfinished.get_mut(&answer.key_hash) {
                first.cancelled += answer.cancelled;
                continue;
            }
            let key = answer.key_hash.as_u128().to_be_bytes().to_vec();
            added.remove(&(answer.sequence.get().cast_signed(), key));
            self.unfinished.insert(answer.key_hash, *answer);
        }
        for (_, key) in added {
            self.findings
                .add("answers", hex::encode(key), Change::Added);
        }
        let admission = state.core().admission();
        let is_done = |answer: &&Answer| !admission.is_sweeping(answer.sequence);
        let done: Vec<Answer> = self.unfinished.values().filter(is_done).copied().collect();
        for answer in &done {
            self.unfinished.remove(&answer.key_hash);
        }
        self.compare_answers(done).await
    }

    async fn compare_answers(&mut self, answers: Vec<Answer>) -> Result<(), Error> {
        for page in answers.chunks(PAGE) {
            let keys: Vec<Id128> = page.iter().map(|answer| answer.key_hash).collect();
            let stored = self.db.answers(&keys).await?;
            for answer in page {
                let expected = StoredAnswer::of(answer);
                let is_equal = stored.get(&answer.key_hash).map(|found| {
                    // An earlier command with the key has the row. It was compared with that one.
                    let is_earlier = (1..expected.sequence).contains(&found.sequence);
                    // The call noted its answer before the history had the command.
                    is_earlier || *found == expected || expected.is_noted_as(found)
                });
                self.note("answers", format!("{:?}", answer.key_hash), is_equal);
            }
        }
        Ok(())
    }

    /// Notes a comparison. `None`: there is no row.
    fn note(&mut self, table: &'static str, key: String, is_equal: Option<bool>) {
        self.rows += 1;
        match is_equal {
            Some(true) => {}
            Some(false) => self.findings.add(table, key, Change::Changed),
            None => self.findings.add(table, key, Change::Deleted),
        }
    }

    /// Compares what is open after the last record, and rows that do not belong to a command.
    async fn at_end(&mut self, state: &State) -> Result<(), Error> {
        let mut open = state.orders();
        loop {
            let page: Vec<Order> = open.by_ref().take(PAGE).collect();
            if page.is_empty() {
                break;
            }
            let expected = page.iter().map(|order| {
                let updated_ns = state.open_order(order.id).and_then(|(_, at)| at);
                let change = OrderChange {
                    sequence: order.sequence,
                    is_new: false,
                    order,
                    updated_ns: updated_ns.unwrap_or_default(),
                    reason: "",
                };
                ExpectedOrder::of(&change, updated_ns.is_some(), &self.names)
            });
            let expected = expected.collect();
            self.compare_orders(expected).await?;
        }
        let unfinished = std::mem::take(&mut self.unfinished);
        self.compare_answers(unfinished.into_values().collect())
            .await?;
        self.later().await?;
        self.earlier().await?;
        self.users().await?;
        self.instruments().await
    }

    /// The position, and rows of commands after the last compared one.
    async fn later(&mut self) -> Result<(), Error> {
        let position = self.db.position;
        let through = self.through;
        let text = match position {
            Some(position) if position <= through => None,
            Some(position) => Some(format!(
                "projection: position {position}, the journal ends at {through}"
            )),
            None => Some("projection: the position is missing".to_owned()),
        };
        self.findings.texts.extend(text);
        for (table, rows) in self.db.counts_after(through).await? {
            if rows > 0 {
                let text = format!("{table}: {rows} rows of commands after {through}");
                self.findings.texts.push(text);
            }
        }
        Ok(())
    }

    /// Rows of no command, and of commands that the journal no longer has.
    async fn earlier(&mut self) -> Result<(), Error> {
        for (table, rows) in self.db.counts_through(self.removed).await? {
            let rows = match table {
                "orders" => rows.saturating_sub(self.earlier_orders),
                _ => rows,
            };
            if rows == 0 {
                continue;
            }
            let text = format!("{table}: {rows} rows of commands through {}", self.removed);
            match self.removed {
                Sequence::ZERO => self.findings.texts.push(text),
                _ => self
                    .not_compared
                    .push(format!("{text}, which the journal no longer has")),
            }
        }
        Ok(())
    }

    async fn users(&mut self) -> Result<(), Error> {
        let mut last = i64::MIN;
        loop {
            let (next, page) = self.db.users(last).await?;
            if page.is_empty() {
                return Ok(());
            }
            last = next;
            for user in page {
                let id = UserId::new(&user.id).ok();
                let is_known = id.is_some_and(|id| self.names.user_ix(&id).is_some());
                self.note_name("users", &user, is_known, true);
            }
        }
    }

    async fn instruments(&mut self) -> Result<(), Error> {
        let mut last = i64::MIN;
        loop {
            let (next, page) = self.db.instruments(last).await?;
            if page.is_empty() {
                return Ok(());
            }
            last = next;
            for row in page {
                let id = InstrumentId::new(&row.id).ok();
                let spec = id.and_then(|id| self.names.instrument_of(&id));
                let is_equal = spec.is_some_and(|spec| row.units == Some(units_of(&spec)));
                self.note_name("instruments", &row, spec.is_some(), is_equal);
            }
        }
    }

    fn note_name(&mut self, table: &'static str, row: &StoredName, is_known: bool, is_equal: bool) {
        self.rows += 1;
        if !(is_known && row.is_used) {
            self.findings.add(table, row.id.clone(), Change::Added);
        } else if !is_equal {
            self.findings.add(table, row.id.clone(), Change::Changed);
        }
    }

    async fn finish(self) -> Result<HistoryCheck, Error> {
        self.db.close().await?;
        Ok(HistoryCheck {
            rows: self.rows,
            findings: self.findings.into_texts(),
            not_compared: self.not_compared,
        })
    }
}

/// Mantissa and scale of tick and lot.
fn units_of(spec: &InstrumentSpec) -> [Option<i64>; 4] {
    let parts = |step: Decimal| {
        let mantissa = i64::try_from(step.mantissa()).ok();
        (mantissa, Some(i64::from(step.scale())))
    };
    let (tick, lot) = (parts(spec.tick_size()), parts(spec.lot_size()));
    [tick.0, tick.1, lot.0, lot.1]
}
