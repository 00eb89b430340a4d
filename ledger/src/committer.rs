//! The one writer of money: commands queue up, a group is folded in memory and written in one transaction.
//!
//! Natural group commit: while one group is being made durable the next one gathers, so a lone command waits for nobody and a crowd shares one
//! fsync. Each command of a group is all or nothing on its own. An answer leaves only after its transaction is durable. A group that the
//! store refuses is tried again command by command, so that one bad apple spoils nobody's write. A group that lost to another ledger or lost
//! its connection is folded again from the start, whoever asks sees nothing of it: what was written after all is found by the keys of its
//! commands, by the inbox of its event, or leaves nothing to do. It is tried for [`PATIENCE`], while the store is known to be away once.
//! Where the writer keeps its thread until the disk has answered (SQLite), a small command that finds nobody writing is written by the thread that brings
//! it: two wakings of a sleeping thread are a sixth of what a lone command takes. A deadline of its caller is not kept meanwhile.
//! Bounds: [`QUEUE_COMMANDS_MAX`] waiting (callers wait beyond), [`GROUP_COMMANDS_MAX`] and [`GROUP_WEIGHT_MAX`] in one transaction.

use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use events::EventRef;
use rand::Rng;
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::{Mutex, mpsc, oneshot},
    task::block_in_place,
};
use tokio_util::sync::CancellationToken;
use tracing::Instrument;
use uuid::Uuid;

use crate::{
    Error,
    book::Book,
    clock::Clock,
    facts::Fact,
    fold::{self, Act, Answer, Answered, Command, Outcome},
    ids::Fresh,
    outbox,
    repo::{Again, Group, Store},
};

pub const QUEUE_COMMANDS_MAX: usize = 4_096;
pub const GROUP_COMMANDS_MAX: usize = 512;
/// Operations and hold steps of one transaction, unless a single command has more.
pub const GROUP_WEIGHT_MAX: usize = 8_192;

/// Operations and hold steps from which on a command is large: below, waking another thread for it costs more than it gives.
pub const LARGE_WEIGHT_MIN: usize = 64;

/// How far the clock may stand behind the last write before it is told.
const CLOCK_BEHIND_US_MAX: i64 = 5_000_000;

/// How long a group is folded again and again; below the deadline of a call, so that its caller hears that the store is away.
pub const PATIENCE: Duration = Duration::from_secs(4);
/// Tries of a group that meets other ledgers. Two that meet again and again spread out by the jitter of the pauses.
const CONTENTION_TRIES_MAX: u32 = 16;
const FIRST_PAUSE_MS: u64 = 2;
const PAUSE_MS_MAX: u64 = 250;

/// What an event asks for. It is noted as taken in the transaction of its effect.
#[derive(Debug)]
pub struct Asked {
    pub event_id: Uuid,
    pub command: Command,
    pub context: rpc::Context,
}

/// The outcome of a command, each time that it is folded, and then whether the last one is durable. Until it is, nobody may be told of it.
pub struct Early {
    pub folded: mpsc::UnboundedReceiver<Outcome>,
    pub durable: oneshot::Receiver<Result<(), Error>>,
}

/// Where the outcome of one command goes.
enum Reply {
    /// Once it is durable.
    Whole(oneshot::Sender<Result<Outcome, Error>>),
    /// To whoever makes an answer of it meanwhile.
    Early {
        folded: mpsc::UnboundedSender<Outcome>,
        durable: oneshot::Sender<Result<(), Error>>,
    },
}

impl Reply {
    /// Tells what the fold made, where somebody wants to know already.
    fn tell(&self, outcome: &mut Outcome) {
        if let Reply::Early { folded, .. } = self {
            let told = std::mem::replace(outcome, Ok(Answered::new(Answer::Done)));
            let _ = folded.send(told);
        }
    }
}

enum Job {
    One {
        command: Command,
        context: rpc::Context,
        reply: Reply,
    },
    Events {
        consumer: &'static str,
        asked: Vec<Asked>,
        reply: oneshot::Sender<Result<Vec<Outcome>, Error>>,
    },
}

impl Job {
    /// Events are taken in order up to the first refused one, and what a limit counts is loaded before a group is folded: each has a
    /// transaction of its own.
    fn is_alone(&self) -> bool {
        match self {
            Job::Events { .. } => true,
            Job::One { command, .. } => {
                matches!(command.act, Act::SetLimit { .. } | Act::RemoveLimit { .. })
            }
        }
    }

    fn weight(&self) -> usize {
        match self {
            Job::Events { asked, .. } => asked.iter().map(|asked| asked.command.weight()).sum(),
            Job::One { command, .. } => command.weight(),
        }
    }

    /// A caller that went away has its answer stored under its key.
    fn answer(self, mut outcomes: Result<Vec<Outcome>, Error>) {
        match self {
            Job::Events { reply, .. } => drop(reply.send(outcomes)),
            Job::One { reply, .. } => {
                let outcome = outcomes.as_mut().map(|outcomes| outcomes.remove(0));
                let outcome = outcome.map_err(|error| std::mem::replace(error, Error::Closed));
                match reply {
                    Reply::Whole(reply) => drop(reply.send(outcome)),
                    Reply::Early { durable, .. } => drop(durable.send(outcome.map(drop))),
                }
            }
        }
    }
}

/// Hands commands to the committer task.
#[derive(Clone)]
pub struct Committer {
    queue: mpsc::Sender<Job>,
    /// `None`: callers never write themselves.
    worker: Option<Arc<Mutex<Worker>>>,
    span: tracing::Span,
}

impl Committer {
    /// Starts the writer, on a thread of its own where the store wants one. It ends when `shutdown` is cancelled and what was queued is
    /// written, which the receiver hears; it hears nothing of one that was stopped by a failed assertion.
    ///
    /// # Errors
    /// [`Error::Events`]: no thread is to be had.
    pub fn spawn(
        store: Store,
        clock: Clock,
        health: rpc::Health,
        shutdown: CancellationToken,
    ) -> Result<(Self, oneshot::Receiver<()>), Error> {
        let (queue, receiver) = mpsc::channel(QUEUE_COMMANDS_MAX);
        let has_thread = store.keeps_its_thread();
        let worker = Arc::new(Mutex::new(Worker {
            store,
            clock,
            is_away: false,
            is_broken: Arc::default(),
            health,
        }));
        let span = tracing::info_span!("worker", service_name = "ledger", worker = "committer");
        let committer = Committer {
            queue,
            worker: has_thread.then(|| worker.clone()),
            span: span.clone(),
        };
        let (ended, end) = oneshot::channel();
        let work = async move {
            if run(&worker, receiver, shutdown).await {
                let _ = ended.send(());
            }
        };
        let work = work.instrument(span);
        if has_thread {
            let runtime = Handle::current();
            std::thread::Builder::new()
                .name("ledger-writer".to_owned())
                .spawn(move || runtime.block_on(work))
                .map_err(events::Error::Files)?;
        } else {
            tokio::spawn(work);
        }
        Ok((committer, end))
    }

    /// Folds and commits one command.
    ///
    /// # Errors
    /// [`Error::Closed`] at shutdown, otherwise what the store answered. A refusal is an [`Outcome`], not an error.
    pub async fn submit(&self, command: Command, context: rpc::Context) -> Result<Outcome, Error> {
        let (reply, answer) = oneshot::channel();
        let job = Job::One {
            command,
            context,
            reply: Reply::Whole(reply),
        };
        if let Some(job) = self.write_here(job) {
            self.send(job).await?;
        }
        answer.await.map_err(|_| Error::Closed)?
    }

    /// Writes it on this thread, unless it is large, or somebody is writing or waits to: then it comes back.
    fn write_here(&self, job: Job) -> Option<Job> {
        let is_quiet = self.queue.capacity() == QUEUE_COMMANDS_MAX
            && job.weight() < LARGE_WEIGHT_MIN
            && !job.is_alone();
        let runtime = Handle::current();
        let Some(worker) = (self.worker.as_ref())
            .filter(|_| is_quiet && runtime.runtime_flavor() == RuntimeFlavor::MultiThread)
        else {
            return Some(job);
        };
        let Ok(mut worker) = worker.try_lock() else {
            return Some(job);
        };
        // Behind the lock: the writer's thread closes the queue before it takes the lock for the last time.
        if worker.is_broken() || self.queue.is_closed() {
            return Some(job);
        }
        block_in_place(|| {
            let write = worker.commit(vec![job]).instrument(self.span.clone());
            // A failed assertion ends the writer, not whoever asked.
            let _ = catch_unwind(AssertUnwindSafe(|| runtime.block_on(write)));
        });
        None
    }

    /// As [`Self::submit`], for a large command: the caller makes the answer while it is being written.
    ///
    /// # Errors
    /// [`Error::Closed`] at shutdown.
    pub async fn submit_early(
        &self,
        command: Command,
        context: rpc::Context,
    ) -> Result<Early, Error> {
        let (folded, outcomes) = mpsc::unbounded_channel();
        let (durable, end) = oneshot::channel();
        self.send(Job::One {
            command,
            context,
            reply: Reply::Early { folded, durable },
        })
        .await?;
        Ok(Early {
            folded: outcomes,
            durable: end,
        })
    }

    /// Folds what events ask for in their order and commits it together, each once per consumer: what was taken before changes nothing. The first
    /// refused one ends the answer; neither it nor anything behind it is taken.
    ///
    /// # Errors
    /// As [`Self::submit`]; then none is taken.
    pub async fn take(
        &self,
        consumer: &'static str,
        asked: Vec<Asked>,
    ) -> Result<Vec<Outcome>, Error> {
        let (reply, answer) = oneshot::channel();
        self.send(Job::Events {
            consumer,
            asked,
            reply,
        })
        .await?;
        answer.await.map_err(|_| Error::Closed)?
    }

    async fn send(&self, job: Job) -> Result<(), Error> {
        self.queue.send(job).await.map_err(|_| Error::Closed)
    }
}

struct Worker {
    store: Store,
    clock: Clock,
    health: rpc::Health,
    /// The last group found no store.
    is_away: bool,
    /// An assertion failed: nothing is written any more.
    is_broken: Arc<AtomicBool>,
}

/// Writes what is queued, until `shutdown` and the end of the queue; `false`: an assertion failed.
async fn run(
    worker: &Mutex<Worker>,
    mut queue: mpsc::Receiver<Job>,
    shutdown: CancellationToken,
) -> bool {
    loop {
        let first = tokio::select! {
            biased;
            job = queue.recv() => job,
            () = shutdown.cancelled(), if !queue.is_closed() => {
                queue.close();
                continue;
            }
        };
        // Whoever writes by himself ends first.
        let mut worker = worker.lock().await;
        if worker.is_broken() {
            drop((first, worker));
            queue.close();
            // Whoever is on the way into it hears of the end too.
            while queue.recv().await.is_some() {}
            return false;
        }
        let Some(first) = first else { return true };
        let mut weight = first.weight();
        let mut group = vec![first];
        while !group[0].is_alone() && group.len() < GROUP_COMMANDS_MAX && weight < GROUP_WEIGHT_MAX
        {
            let Ok(job) = queue.try_recv() else { break };
            if job.is_alone() {
                worker.commit(std::mem::take(&mut group)).await;
                group.push(job);
                break;
            }
            weight += job.weight();
            group.push(job);
        }
        worker.commit(group).await;
        worker.catch_up().await;
    }
}

impl Worker {
    fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Relaxed)
    }

    /// Behind the answers of a group.
    async fn catch_up(&self) {
        let _guard = StopGuard(self.health.clone(), self.is_broken.clone());
        if let Err(error) = self.store.catch_up().await {
            tracing::warn!(%error, "what the store has put off is left to the next group");
        }
    }

    async fn commit(&mut self, group: Vec<Job>) {
        let _guard = StopGuard(self.health.clone(), self.is_broken.clone());
        match self.attempt(&group).await {
            Ok((outcomes, book)) => {
                self.health.set_ok("store");
                answer(group, outcomes);
                // Taking it apart takes a while, which nobody has to wait for.
                drop(book);
            }
            Err(error) if group.len() > 1 && !self.is_away => {
                tracing::warn!(%error, commands = group.len(), "group refused by the store, trying one by one");
                for job in group {
                    let one = vec![job];
                    match self.attempt(&one).await {
                        Ok((outcomes, _)) => {
                            self.health.set_ok("store");
                            answer(one, outcomes);
                        }
                        Err(error) => self.fail(one, error),
                    }
                }
            }
            Err(error) => self.fail(group, error),
        }
    }

    fn fail(&self, group: Vec<Job>, error: Error) {
        tracing::error!(%error, "ledger store refused a write");
        self.health.set_failing("store", "the last write failed");
        // Who had to give way to others for too long may come again as well.
        let is_away = error.is_away() || self.store.again(&error) != Again::No;
        let text = error.to_string();
        for job in group {
            let text = text.clone();
            job.answer(Err(Error::Commit { text, is_away }));
        }
    }

    /// Tells when the clock stands more than a moment behind the time that the group was given.
    fn tell_clock(&self, clock_us: i64, now_us: i64) {
        if now_us - clock_us > CLOCK_BEHIND_US_MAX {
            tracing::warn!(
                clock_us,
                now_us,
                "the clock was set back, the ledger's time stands still"
            );
            self.health
                .set_failing("clock", "stands behind the last write");
        } else {
            self.health.set_ok("clock");
        }
    }

    /// Folds and commits a group, anew as long as the store says that this may help. With what its commands came to goes the working set.
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
            let is_over = began.elapsed() >= PATIENCE;
            let again = self.store.again(&error);
            if again != Again::Lost {
                // It said something.
                self.is_away = false;
            }
            let why = match again {
                Again::No => return Err(error),
                Again::Contention if is_over || tries >= CONTENTION_TRIES_MAX => return Err(error),
                Again::Contention => "contention",
                Again::Lost if is_over || self.is_away => {
                    self.is_away = true;
                    return Err(error);
                }
                Again::Lost => "connection",
            };
            tracing::debug!(%error, tries, "group is folded again");
            metrics::counter!("ledger_commit_retries_total", "reason" => why).increment(1);
            tokio::time::sleep(pause(tries)).await;
        }
    }

    async fn attempt_once(&self, group: &[Job]) -> Result<(Vec<Outcome>, Book), Error> {
        if let [
            Job::Events {
                consumer, asked, ..
            },
        ] = group
        {
            return self.take_events(consumer, asked).await;
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
        let (book, mut outcomes) = self.fold(&mut *tx, &commands, false).await?;
        for (job, outcome) in group.iter().zip(&mut outcomes) {
            if let Job::One { reply, .. } = job {
                reply.tell(outcome);
            }
        }
        let has_chores = commands
            .iter()
            .any(|(command, _)| matches!(command.act, Act::ForgetParked { .. }));
        if !book.is_clean() || has_chores {
            write(tx, &book, &commands).await?;
        }
        Ok((outcomes, book))
    }

    /// Takes events up to the first refused one: those before it are folded again without it, to the same unless another ledger came between.
    async fn take_events(
        &self,
        consumer: &str,
        asked: &[Asked],
    ) -> Result<(Vec<Outcome>, Book), Error> {
        let mut taken = asked;
        let mut refused = None;
        loop {
            let (mut outcomes, book) = self.take_together(consumer, taken).await?;
            match outcomes.pop_if(|last| last.is_err()) {
                Some(first) if outcomes.is_empty() => return Ok((vec![first], book)),
                Some(first) => {
                    taken = &taken[..outcomes.len()];
                    refused = Some(first);
                }
                None => {
                    outcomes.extend(refused);
                    return Ok((outcomes, book));
                }
            }
        }
    }

    /// Takes all of these events, or none where one is refused; then its outcome is the last.
    async fn take_together(
        &self,
        consumer: &str,
        asked: &[Asked],
    ) -> Result<(Vec<Outcome>, Book), Error> {
        let mut tx = self.store.begin().await?;
        let event_ids: Vec<Uuid> = asked.iter().map(|asked| asked.event_id).collect();
        let are_new = tx.accept(consumer, &event_ids).await?;
        let commands: Vec<(&Command, &rpc::Context)> = asked
            .iter()
            .zip(&are_new)
            .filter(|(_, is_new)| **is_new)
            .map(|(asked, _)| (&asked.command, &asked.context))
            .collect();
        let (book, folded) = self.fold(&mut *tx, &commands, true).await?;
        let is_refused = folded.last().is_some_and(Result::is_err);
        let changes_nothing = book.is_clean()
            && commands
                .iter()
                .all(|(command, _)| command.act.is_settled_by_itself());
        if !is_refused && !changes_nothing {
            write(tx, &book, &commands).await?;
        }
        let mut folded = folded.into_iter();
        let outcomes = are_new.iter().map_while(|is_new| match is_new {
            true => folded.next(),
            false => Some(Ok(Answered::new(Answer::Done))),
        });
        let mut outcomes: Vec<Outcome> = outcomes.collect();
        if let Some(refused) = outcomes.iter().position(Result::is_err) {
            outcomes.truncate(refused + 1);
        }
        Ok((outcomes, book))
    }

    /// Folds commands into what the store has of them; up to the first refused one, where that ends it.
    async fn fold(
        &self,
        tx: &mut dyn Group,
        commands: &[(&Command, &rpc::Context)],
        ends_at_refusal: bool,
    ) -> Result<(Book, Vec<Outcome>), Error> {
        let bare: Vec<&Command> = commands.iter().map(|(command, _)| *command).collect();
        let clock_us = self.clock.now_us();
        let mut book = tx.load(&bare, clock_us).await?;
        self.tell_clock(clock_us, book.now_us);
        book.reserve(bare.iter().map(|command| command.weight()).sum());
        let mut fresh = Fresh::at(book.now_us);
        let mut ids = || fresh.id();
        let mut outcomes = Vec::with_capacity(bare.len());
        for (index, command) in bare.into_iter().enumerate() {
            let outcome = fold::fold(&mut book, index, command, &mut ids);
            let is_over = ends_at_refusal && outcome.is_err();
            outcomes.push(outcome);
            if is_over {
                break;
            }
        }
        Ok((book, outcomes))
    }
}

/// Doubles up to the bound; half of it is chance.
fn pause(tries: u32) -> Duration {
    let full = (FIRST_PAUSE_MS << tries.min(16)).min(PAUSE_MS_MAX);
    Duration::from_millis(full / 2 + rand::rng().random_range(0..=full / 2))
}

/// Writes what the fold made of the commands, and makes it durable.
async fn write(
    mut tx: Box<dyn Group>,
    book: &Book,
    commands: &[(&Command, &rpc::Context)],
) -> Result<(), Error> {
    let contexts: Vec<&rpc::Context> = commands.iter().map(|(_, context)| *context).collect();
    for (command, _) in commands {
        tx.tidy(command).await?;
    }
    let events = |tell: &mut dyn FnMut(EventRef<'_>)| {
        outbox::tell(&book.facts, &contexts, book.now_us, tell)
    };
    tx.save(book, &events).await?;
    tx.commit().await?;
    count(book);
    Ok(())
}

fn answer(mut group: Vec<Job>, outcomes: Vec<Outcome>) {
    if let [Job::Events { .. }] = group.as_slice() {
        group.remove(0).answer(Ok(outcomes));
        return;
    }
    for (job, outcome) in group.into_iter().zip(outcomes) {
        job.answer(Ok(vec![outcome]));
    }
}

/// Metrics of specification 1.6, counted when the change is durable.
fn count(book: &Book) {
    let mut operations: BTreeMap<(&'static str, &'static str), u64> = BTreeMap::new();
    let mut postings = 0;
    for (_, fact) in &book.facts {
        match fact {
            Fact::OperationCreated { kind, status, .. } => {
                *operations.entry((kind.name(), status.name())).or_default() += 1;
            }
            Fact::StatusChanged {
                operation_id, new, ..
            } => {
                if let Some(row) = book.operations.get(operation_id) {
                    let key = (row.terms.kind.name(), new.name());
                    *operations.entry(key).or_default() += 1;
                }
            }
            Fact::PostingCreated { .. } => postings += 1,
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

impl Act {
    /// Finality: an operation that is final or failed stays so, whatever comes again.
    fn is_settled_by_itself(&self) -> bool {
        matches!(self, Act::Confirm { .. } | Act::Receipt { .. })
    }
}

impl Command {
    /// Operations and hold steps in it.
    pub fn weight(&self) -> usize {
        match &self.act {
            Act::Post(batch) => batch.operations.len() + batch.steps.len(),
            Act::Finalize { targets, .. } | Act::Confirm { targets, .. } => targets.len(),
            Act::ExpireHolds(due) => due.len(),
            _ => 1,
        }
    }
}

/// A committer that stops outside a shutdown is an assertion that failed: nothing is written any more, and health says so.
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
