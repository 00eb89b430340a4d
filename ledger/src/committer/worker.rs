//! The writer: loads, folds, writes and answers a group. Retries a failed group, then its commands
//! one by one.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use events::EventRef;
use service_kit::{backoff, discipline::STEP_MAX_NS};
use uuid::Uuid;

use super::job::{InboxCommand, Job, reply_to_group};
use crate::{
    Clock, Error,
    book::Book,
    effects::Effect,
    fold::{self, Answer, Command, CommandKind, CommandResult, OnProgress, Outcome},
    ids::IdGenerator,
    publish,
    repo::{Group, RetryKind, Store},
};

/// How long a group is retried. Below the deadline of a call, so that the caller gets
/// `UNAVAILABLE`.
pub const RETRY_TIME_MAX: Duration = Duration::from_secs(4);
/// Attempts of a group that conflicts with other ledgers. Jitter separates two such groups.
const CONTENTION_TRIES_MAX: u32 = 16;
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(250);

pub(super) struct Worker {
    store: Store,
    clock: Clock,
    health: rpc::Health,
    /// The last group could not reach the store.
    is_away: bool,
    /// An assertion failed. The writer is stopped.
    is_broken: Arc<AtomicBool>,
}

impl Worker {
    pub(super) fn new(store: Store, clock: Clock, health: rpc::Health) -> Self {
        Worker {
            store,
            clock,
            health,
            is_away: false,
            is_broken: Arc::default(),
        }
    }

    pub(super) fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Runs deferred work of the store after the answers of a group.
    pub(super) async fn run_deferred(&self) {
        let _guard = StopGuard(self.health.clone(), self.is_broken.clone());
        if let Err(error) = self.store.run_deferred().await {
            tracing::warn!(%error, "deferred store work failed; the next group retries it");
        }
    }

    pub(super) async fn commit(&mut self, group: Vec<Job>) {
        let _guard = StopGuard(self.health.clone(), self.is_broken.clone());
        match self.attempt(&group).await {
            Ok((outcomes, book)) => {
                self.health.set_ok("store");
                reply_to_group(group, outcomes);
                // Dropped after the answers, because freeing the rows takes time.
                drop(book);
            }
            Err(error) if group.len() > 1 && !self.is_away => {
                tracing::warn!(
                    %error,
                    commands = group.len(),
                    "group failed, retrying its commands one by one"
                );
                for job in group {
                    let one = vec![job];
                    match self.attempt(&one).await {
                        Ok((outcomes, _)) => {
                            self.health.set_ok("store");
                            reply_to_group(one, outcomes);
                        }
                        Err(error) => self.fail(one, error),
                    }
                }
            }
            Err(error) => self.fail(group, error),
        }
    }

    fn fail(&self, group: Vec<Job>, error: Error) {
        tracing::error!(%error, "ledger write failed");
        self.health.set_failing("store", "the last write failed");
        // The callers may retry a group that exhausted its retries of conflicts.
        let is_away = error.is_away() || self.store.retry_kind(&error) != RetryKind::Never;
        let text = error.to_string();
        for job in group {
            let text = text.clone();
            job.reply(Err(Error::Commit { text, is_away }));
        }
    }

    /// Folds and commits a group. Retries failures that [`Store::retry_kind`] reports as temporary.
    /// Returns the outcomes and the working set.
    async fn attempt(&mut self, group: &[Job]) -> Result<(Vec<Outcome>, Book), Error> {
        let began = Instant::now();
        let mut tries = 0;
        loop {
            let error = match self.attempt_once(group).await {
                Ok(done) => {
                    self.is_away = false;
                    return Ok(done);
                }
                Err(error) => error,
            };
            tries += 1;
            let is_over = began.elapsed() >= RETRY_TIME_MAX;
            let retry = self.store.retry_kind(&error);
            if retry != RetryKind::Lost {
                // The store answered.
                self.is_away = false;
            }
            let why = match retry {
                RetryKind::Never => return Err(error),
                RetryKind::Contention if is_over || tries >= CONTENTION_TRIES_MAX => {
                    return Err(error);
                }
                RetryKind::Contention => "contention",
                RetryKind::Lost if is_over || self.is_away => {
                    self.is_away = true;
                    return Err(error);
                }
                RetryKind::Lost => "connection",
            };
            tracing::debug!(%error, tries, "commit failed, retrying the group");
            metrics::counter!("ledger_commit_retries_total", "reason" => why).increment(1);
            let pause = backoff::doubled(FIRST_PAUSE, tries, PAUSE_MAX);
            tokio::time::sleep(pause - backoff::jitter(pause)).await;
        }
    }

    async fn attempt_once(&self, group: &[Job]) -> Result<(Vec<Outcome>, Book), Error> {
        if let [
            Job::Events {
                consumer, inbox, ..
            },
        ] = group
        {
            return self.accept_events(consumer, inbox).await;
        }
        let commands: Vec<(&Command, &rpc::Context)> = group
            .iter()
            .filter_map(|job| match job {
                Job::One {
                    command, context, ..
                } => Some((command, context)),
                Job::Events { .. } => None,
            })
            .collect();
        let mut tx = self.store.begin().await?;
        let book = self.load(&mut *tx, &commands).await?;
        let mut outcomes = Vec::new();
        let mut fold = |book: &mut Book, on_progress: OnProgress<'_>| {
            outcomes = fold_all(book, &commands, false, on_progress);
            for (job, outcome) in group.iter().zip(&mut outcomes) {
                if let Job::One { reply, .. } = job {
                    reply.send_early(outcome);
                }
            }
        };
        let contexts: Vec<&rpc::Context> = commands.iter().map(|(_, context)| *context).collect();
        let events = |book: &Book, emit: &mut dyn FnMut(EventRef<'_>)| {
            publish::emit_events(&book.effects, &contexts, book.now_us, emit)
        };
        let book = tx.fold_and_save(book, &mut fold, &events).await?;
        let has_maintenance = commands
            .iter()
            .any(|(command, _)| matches!(command.kind, CommandKind::PurgePendingReceipts { .. }));
        if !book.is_clean() || has_maintenance {
            finish(tx, &book, &commands).await?;
        }
        Ok((outcomes, book))
    }

    /// Accepts events up to the first refusal. After a refusal the events before it are folded
    /// again without it, with the same result unless another ledger committed in between.
    async fn accept_events(
        &self,
        consumer: &str,
        inbox: &[InboxCommand],
    ) -> Result<(Vec<Outcome>, Book), Error> {
        let mut accepted = inbox;
        let mut refused = None;
        loop {
            let (mut outcomes, book) = self.accept_all(consumer, accepted).await?;
            match outcomes.pop_if(|last| last.is_err()) {
                Some(first) if outcomes.is_empty() => return Ok((vec![first], book)),
                Some(first) => {
                    accepted = &accepted[..outcomes.len()];
                    refused = Some(first);
                }
                None => {
                    outcomes.extend(refused);
                    return Ok((outcomes, book));
                }
            }
        }
    }

    /// Accepts all of these events, or none if one is refused. The refusal is then the last
    /// outcome.
    async fn accept_all(
        &self,
        consumer: &str,
        inbox: &[InboxCommand],
    ) -> Result<(Vec<Outcome>, Book), Error> {
        let mut tx = self.store.begin().await?;
        let all = inbox.iter().map(|item| (&item.command, &item.context));
        let all: Vec<(&Command, &rpc::Context)> = all.collect();
        let (mut book, mut folded) = self.fold_events(&mut *tx, &all).await?;
        let are_idempotent = |commands: &[(&Command, &rpc::Context)]| {
            let mut kinds = commands.iter().map(|(command, _)| &command.kind);
            kinds.all(CommandKind::is_idempotent)
        };
        // Another source has reported the same before: no event needs an inbox entry.
        if book.is_clean() && are_idempotent(&all) && folded.iter().all(Result::is_ok) {
            return Ok((folded, book));
        }
        let event_ids: Vec<Uuid> = inbox.iter().map(|item| item.event_id).collect();
        let are_new = tx.accept(consumer, &event_ids).await?;
        let commands = all.into_iter().zip(&are_new);
        let commands = commands.filter(|(_, is_new)| **is_new);
        let commands: Vec<(&Command, &rpc::Context)> = commands.map(|(of, _)| of).collect();
        if commands.len() < inbox.len() {
            (book, folded) = self.fold_events(&mut *tx, &commands).await?;
        }
        let is_refused = folded.last().is_some_and(Result::is_err);
        let changes_nothing = book.is_clean() && are_idempotent(&commands);
        if !is_refused && !changes_nothing {
            let contexts: Vec<&rpc::Context> =
                commands.iter().map(|(_, context)| *context).collect();
            let events = |book: &Book, emit: &mut dyn FnMut(EventRef<'_>)| {
                publish::emit_events(&book.effects, &contexts, book.now_us, emit)
            };
            tx.save(&book, &events).await?;
            finish(tx, &book, &commands).await?;
        }
        let mut folded = folded.into_iter();
        let outcomes = are_new.iter().map_while(|is_new| match is_new {
            true => folded.next(),
            false => Some(Ok(CommandResult::new(Answer::Done))),
        });
        let mut outcomes: Vec<Outcome> = outcomes.collect();
        if let Some(refused) = outcomes.iter().position(Result::is_err) {
            outcomes.truncate(refused + 1);
        }
        Ok((outcomes, book))
    }

    /// Loads the rows of events' commands and folds these, up to the first refusal.
    async fn fold_events(
        &self,
        tx: &mut dyn Group,
        commands: &[(&Command, &rpc::Context)],
    ) -> Result<(Book, Vec<Outcome>), Error> {
        let mut book = self.load(tx, commands).await?;
        let folded = fold_all(&mut book, commands, true, &mut |_| {});
        Ok((book, folded))
    }

    /// Loads the rows that these commands touch.
    async fn load(
        &self,
        tx: &mut dyn Group,
        commands: &[(&Command, &rpc::Context)],
    ) -> Result<Book, Error> {
        let bare: Vec<&Command> = commands.iter().map(|(command, _)| *command).collect();
        let clock_us = self.clock.now_us();
        let mut book = tx.load(&bare, clock_us).await?;
        book.assert_read();
        if (book.now_us - clock_us) * 1_000 > STEP_MAX_NS {
            // Another ledger on this database has a clock ahead of this one. This clock decides
            // whether it is still trusted.
            self.clock.check_stored_us(book.now_us);
        }
        book.reserve(bare.iter().map(|command| command.weight()).sum());
        Ok(book)
    }
}

/// Folds commands into the working set. `ends_at_refusal`: stops after the first refusal.
fn fold_all(
    book: &mut Book,
    commands: &[(&Command, &rpc::Context)],
    ends_at_refusal: bool,
    on_progress: OnProgress<'_>,
) -> Vec<Outcome> {
    let mut generator = IdGenerator::at(book.now_us);
    let mut ids = || generator.id();
    let mut outcomes = Vec::with_capacity(commands.len());
    for (index, (command, _)) in commands.iter().enumerate() {
        let outcome = fold::fold(book, index, command, &mut ids, on_progress);
        let is_over = ends_at_refusal && outcome.is_err();
        outcomes.push(outcome);
        if is_over {
            break;
        }
        on_progress(book);
    }
    book.assert_balanced();
    outcomes
}

/// Runs the commands' maintenance in the store and commits.
async fn finish(
    mut tx: Box<dyn Group>,
    book: &Book,
    commands: &[(&Command, &rpc::Context)],
) -> Result<(), Error> {
    for (command, _) in commands {
        tx.run_maintenance(command).await?;
    }
    tx.commit().await?;
    record_metrics(book);
    Ok(())
}

/// Updates the metrics of specification 1.6. Called after the commit.
fn record_metrics(book: &Book) {
    let mut operations: BTreeMap<(&'static str, &'static str), u64> = BTreeMap::new();
    let mut postings = 0;
    for (_, effect) in &book.effects {
        match effect {
            Effect::OperationCreated { kind, status, .. } => {
                *operations
                    .entry((kind.as_str(), status.as_str()))
                    .or_default() += 1;
            }
            Effect::StatusChanged {
                operation_id, new, ..
            } => {
                if let Some(row) = book.operations.get(operation_id) {
                    let key = (row.terms.kind.as_str(), new.as_str());
                    *operations.entry(key).or_default() += 1;
                }
            }
            Effect::PostingCreated(_) => postings += 1,
            _ => {}
        }
    }
    for ((kind, status), count) in operations {
        metrics::counter!("ledger_operations_total", "type" => kind, "status" => status)
            .increment(count);
    }
    metrics::counter!("ledger_postings_total").increment(postings);
    let mut opened = 0_i32;
    for change in book.holds.changes() {
        let was = change.before.is_some_and(|hold| hold.is_active());
        let is = change.after.is_some_and(|hold| hold.is_active());
        opened += i32::from(is) - i32::from(was);
    }
    metrics::gauge!("ledger_holds_total").increment(f64::from(opened));
}

impl CommandKind {
    /// True if a second execution changes nothing, so the event needs no inbox entry.
    fn is_idempotent(&self) -> bool {
        matches!(
            self,
            CommandKind::Confirm { .. } | CommandKind::Receipt { .. }
        )
    }
}

/// Stops the writer and reports it to health when dropped by a panic, that is after a failed
/// assertion.
struct StopGuard(rpc::Health, Arc<AtomicBool>);

impl Drop for StopGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.1.store(true, Ordering::Relaxed);
            self.0
                .set_failing("committer", "stopped by a failed assertion");
        }
    }
}
