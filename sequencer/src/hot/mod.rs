//! The hot thread: admission, sequencing, books or the rings of their engines, journal, answers.
//!
//! One iteration of its loop serves up to [`TURN_REQUESTS`] requests of the queue and as many of
//! each ring, and ends with a flush to the journal. In layout `fused` it has the books and
//! applies each command to its book right after its admission. In the other layouts it sends the
//! commands to engines over rings. It waits without a time limit only for engines, and only to
//! inspect the books, to disconnect a front, or to send a list of orders that is longer than a
//! ring.

use std::collections::{HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use admission::{CancelRequest, MassCancelRequest, Reject, Request};
use journal::Room;
use types::command::{ExpireOrders, Listed, Route};
use types::{Command, Envelope, Handle, InstrumentIx, RejectReason, Sequence, SessionIx, UserIx};

use crate::backlog::{Backlog, Intake};
use crate::config::Config;
use crate::core::Core;
use crate::engine_pool::{EnginePool, pin};
use crate::engine_ring::EngineRing;
use crate::expiries::{Expiries, NEVER};
use crate::in_flight::{InFlights, ReplyTo};
use crate::polled::{PARK, Polled, sleep_for};
use crate::port::{Gate, Job, Reply, SubmitError};
use crate::ring_port::{HotRingPort, Submission};
use crate::sink::JournalSink;
use crate::stats::{Stats, Tally};
use crate::timers::Timers;
use crate::window_pool::WindowPool;
use lists::Sweeping;
use meter::Meters;
use outline::{Dispatch, Outline, filtered_mass_cancel};
use scan_limit::ScanLimiter;

mod clock;
mod complete;
mod disconnect;
mod inspect;
mod launch;
mod lists;
mod meter;
mod outline;
mod room;
mod scan_limit;
mod time;
mod waits;

/// Requests of the queue per iteration; a ring and the expiry commands have the same limit
/// (`design.md` 5).
const TURN_REQUESTS: usize = 64;
/// Room for events of a command other than those of the orders that it ends or fills.
const FEW_EVENTS: usize = 1_024;
/// Commands in flight at once; with more, requests wait in the queue.
const IN_FLIGHT_MAX: usize = 8_192;
/// Checks for requests between two iterations of an idle thread that spins.
const SPIN_CHECKS: usize = 64;
/// Maximum wait for a full ring, with reports drained meanwhile, before the request is `BUSY`.
///
/// It is longer than a scheduler's slice, so that an engine that loses its core for a moment costs
/// no order. After a timeout further requests of the engine are `BUSY` at once until it reports
/// again, so that requests of other engines do not wait.
const ROOM_WAIT: Duration = Duration::from_millis(10);
/// How long the thread spins for the disk. Most writes of a small batch take less; after a longer
/// one the wake-up adds little.
const SPIN_FOR_DISK: Duration = Duration::from_micros(200);
/// Longest sleep while a front lags: its reads of reports do not wake this thread.
const PARK_WHILE_SPILLED: Duration = Duration::from_millis(1);
/// Route of a session that no front has.
const NO_PORT: u16 = u16::MAX;

pub(crate) struct Hot {
    config: Config,
    core: Core,
    gate: Arc<Gate>,
    keep: JournalSink,
    backlog: Arc<Backlog>,
    intake: Intake,
    timers: Timers,
    /// In layout `fused` there is none: the hot thread has the books and matches itself.
    engine_rings: Vec<EngineRing>,
    is_fused: bool,
    /// Indexes of the engine rings with commands in flight.
    busy: Vec<usize>,
    /// When the next expiry command of each book is due.
    expiries: Expiries,
    /// The last amend that changes a client order id, and its user. Until it completes, the ids of
    /// the user's orders are not known.
    renaming: (Sequence, UserIx),
    /// First command in flight when a change of a trading hold last timed out; see
    /// [`Hot::await_in_flight`].
    timed_out: Sequence,
    engine_pool: EnginePool,
    in_flight: InFlights,
    /// The last command in flight is not in admission's state yet. It is applied when it completes,
    /// or before the next request is admitted.
    is_last_unapplied: bool,
    /// The clock is suspect, or its recovery is not journalled yet. New orders are refused.
    is_clock_suspect: bool,
    /// Orders that the command being admitted ends, if it ends a list, by instrument and slot.
    listed: Vec<Listed>,
    /// Calls that wait for the last slice of their command.
    sweeping: Vec<Sweeping>,
    /// Owner of the orders that the last slice ended.
    swept: UserIx,
    scan_limiter: ScanLimiter,
    meters: Meters,
    /// Orders reduced since the journal's buffer is in its reserve. Each may be reduced once: lot
    /// by lot, amends would fill the reserve that cancels need.
    reduced: HashSet<Handle>,
    /// Rings of the fronts.
    rings: Vec<HotRingPort>,
    /// By session: index of the ring for its messages.
    routes: Vec<u16>,
    /// Sessions without a front that are to be closed, each with the epoch of its last login.
    disconnected: VecDeque<(SessionIx, Sequence)>,
    /// A front that shares this thread.
    polled: Option<Box<dyn Polled>>,
    stats: Arc<Stats>,
    tally: Tally,
}

impl Hot {
    pub fn new(
        config: Config,
        mut core: Core,
        gate: Arc<Gate>,
        keep: JournalSink,
        backlog: Arc<Backlog>,
        stats: Arc<Stats>,
    ) -> Self {
        // Published at the end of each iteration, and the first may already serve many requests.
        gate.time_ns.store(core.time_ns(), Ordering::Relaxed);
        // A self-trade that reduces both orders causes two events per maker.
        let orders_max = core.admission().orders_max() as usize;
        let events_max = 2 * orders_max + FEW_EVENTS;
        core.set_window_source(&WindowPool::start(engine::LEVELS_DEFAULT));
        Self {
            engine_pool: EnginePool::new(&config),
            is_fused: config.engine_threads() == 0,
            config,
            core,
            gate,
            keep,
            backlog,
            intake: Intake::default(),
            timers: Timers::default(),
            engine_rings: Vec::new(),
            busy: Vec::new(),
            expiries: Expiries::default(),
            renaming: (Sequence::ZERO, UserIx::NONE),
            timed_out: Sequence::ZERO,
            in_flight: InFlights::new(IN_FLIGHT_MAX, nothing(), events_max),
            is_last_unapplied: false,
            is_clock_suspect: false,
            listed: Vec::with_capacity(orders_max),
            sweeping: Vec::new(),
            swept: UserIx::NONE,
            scan_limiter: ScanLimiter::default(),
            meters: Meters::default(),
            reduced: HashSet::new(),
            rings: Vec::new(),
            routes: Vec::new(),
            disconnected: VecDeque::new(),
            polled: None,
            stats,
            tally: Tally::default(),
        }
    }

    /// Connects the recovered books to engines and closes the sessions of the last run. Called
    /// once, before the first iteration.
    pub fn begin(&mut self) {
        if self.is_fused {
            for (at, book) in self.core.places().iter().enumerate() {
                let book = book.as_ref().expect("recovery restores every book");
                let expiry_ns = book.next_expiry_ns().unwrap_or(NEVER);
                self.expiries.set(at, expiry_ns);
            }
        } else {
            for at in 0..self.core.places().len() {
                let book = self.core.places()[at].take();
                self.open_engine_ring(book.expect("recovery restores every book"));
            }
        }
        self.disconnect_all();
    }

    /// Runs until the gate stops and every waiting request is served.
    pub fn run(mut self) {
        // Waiting callers get an answer also if this thread panics.
        let _closing = Closing(self.gate.clone());
        self.stats.begin();
        if let Some(core) = self.config.core {
            pin(core);
        }
        self.begin();
        let mut idle_since = None;
        loop {
            let is_stopping = self.gate.is_stopping.load(Ordering::Acquire);
            // The first iteration without work hands nothing over: the next request may be near.
            if self.step_once(idle_since.is_none()) {
                idle_since = None;
                continue;
            }
            if !self.in_flight.is_empty() {
                std::hint::spin_loop();
            } else if is_stopping {
                self.keep.finish();
                self.publish();
                return;
            } else if self.is_spinning(*idle_since.get_or_insert_with(Instant::now)) {
                self.watch();
            } else if self.keep.is_handed_over() {
                self.park();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// True while the thread does not park yet: until its spin time is over, longer while records
    /// wait for the disk, since their reports would wait for the wake-up.
    fn is_spinning(&self, idle_since: Instant) -> bool {
        let spin = Duration::from_micros(self.config.spin_us);
        let idle = idle_since.elapsed();
        idle < spin || (idle < SPIN_FOR_DISK && !self.keep.is_durable())
    }

    /// Polls the front that shares the thread; true when it did work.
    fn poll_front(&mut self) -> bool {
        let Some(polled) = &mut self.polled else {
            return false;
        };
        // A panic of the front must not stop the market: its rings are dropped, and its sessions
        // count as disconnected.
        let round = catch_unwind(AssertUnwindSafe(|| polled.round()));
        let Ok(did_work) = round else {
            tracing::error!("the front panicked; its sessions are disconnected");
            self.polled = None;
            return true;
        };
        if polled.is_over() {
            self.polled = None;
        }
        did_work
    }

    /// Spins on requests only for a moment: the other work of an iteration is not urgent.
    fn watch(&self) {
        if self.polled.is_some() {
            return;
        }
        for _ in 0..SPIN_CHECKS {
            if self.rings.iter().any(HotRingPort::has_request) || !self.gate.queue.is_empty() {
                return;
            }
            std::hint::spin_loop();
        }
    }

    /// One iteration: requests, the front that shares the thread, the flush to the journal. True
    /// when it did work.
    pub fn step(&mut self) -> bool {
        self.step_once(false)
    }

    /// As [`Hot::step`]. With `is_busy`, few records may wait for another iteration also when it
    /// did no work.
    #[inline]
    fn step_once(&mut self, is_busy: bool) -> bool {
        let did_work = self.run_round() | self.poll_front();
        self.begin_last();
        // After the front: a writer that wakes may take this core before *accepted* is sent.
        self.keep.flush(did_work || is_busy);
        self.watch_journal();
        if did_work {
            self.rings.iter().for_each(HotRingPort::wake);
            self.publish();
        }
        did_work
    }

    /// Serves the waiting requests and flushes the journal, for a node without a hot thread.
    pub fn end(mut self) {
        let _closing = Closing(self.gate.clone());
        while self.step() || !self.in_flight.is_empty() {}
        self.keep.finish();
        self.publish();
    }

    /// Checks that the journal has room for the request.
    ///
    /// While the journal has no next segment or its buffer is nearly full, the rest of the buffer
    /// is reserved for requests that reduce risk. Each order may be reduced once by an amend: the
    /// caller records that order once the request is admitted. A member's cancels pass if they end
    /// an order: others would use up what all members' cancels need.
    #[inline]
    fn journal(&mut self, source: Source, is_order: bool) -> Result<JournalRoom, SubmitError> {
        if self.keep.is_failed() {
            return Err(SubmitError::JournalFailed);
        }
        let room = self.keep.room();
        if room == Room::Full || self.in_flight.room() == 0 {
            return Err(SubmitError::Busy);
        }
        // Orders stop for a front that does not read only when its spill is half full.
        if is_order && self.rings.iter().any(HotRingPort::is_overrun) {
            return Err(SubmitError::Busy);
        }
        if room == Room::Free {
            if !self.reduced.is_empty() {
                self.reduced.clear();
            }
            return Ok(JournalRoom::Any);
        }
        let reduced = match self.request(source) {
            Request::New(_) | Request::CancelAllAfter(_) => None,
            Request::Amend(amend) => self.core.admission().reduced_by(amend),
            Request::Cancel(CancelRequest { user, .. }) if !user.is_none() => {
                return Ok(JournalRoom::Reductions);
            }
            Request::MassCancel(MassCancelRequest { user, .. }) if !user.is_none() => {
                return Ok(JournalRoom::Sweeps);
            }
            _ => return Ok(JournalRoom::Any),
        };
        reduced
            .filter(|order| !self.reduced.contains(order))
            .map(JournalRoom::Reduced)
            .ok_or(SubmitError::Busy)
    }

    /// Error of a refused request. `BUSY` means that the request was not seen, so a repeat gets
    /// `ALREADY_SEEN` instead. Other errors are unchanged: after a journal failure the first answer
    /// may never become durable.
    #[cold]
    fn unless_seen(&self, source: Source, error: SubmitError) -> SubmitError {
        if error != SubmitError::Busy {
            return error;
        }
        let unseen = self.core.admission().check_unseen(self.request(source));
        unseen.map_or_else(SubmitError::Refused, |()| error)
    }

    fn request<'a>(&'a self, source: Source<'a>) -> &'a Request {
        match source {
            Source::Given(request) => request,
            Source::Ring { port, at } => self.rings[port].request(at),
        }
    }

    /// Publishes a failure of the journal, so that ports refuse requests.
    fn watch_journal(&self) {
        if self.keep.is_failed() {
            self.gate.is_failed.store(true, Ordering::Release);
        }
    }

    fn publish(&self) {
        let (sequence, trades) = (self.core.sequence().get(), self.core.trades());
        self.tally.publish(&self.stats, sequence, trades);
        let time_ns = self.core.time_ns();
        self.gate.time_ns.store(time_ns, Ordering::Relaxed);
    }

    fn park(&mut self) {
        self.tally.parks += 1;
        let turn = usize::try_from(self.tally.parks).unwrap_or_default();
        self.core.release_unused(turn);
        self.publish();
        self.check_backlog();
        self.drop_closed_rings();
        let mut sleep = match self.next_ns() {
            // After a journal failure no timer command is issued.
            Some(at_ns) if !self.keep.is_failed() => {
                Duration::from_nanos(at_ns.saturating_sub(self.config.clock.now_ns())).min(PARK)
            }
            _ => PARK,
        };
        if self.rings.iter().any(HotRingPort::has_spill) {
            sleep = sleep.min(PARK_WHILE_SPILLED);
        }
        let (gate, rings, polled) = (&self.gate, &self.rings, self.polled.as_deref());
        if let Some(polled) = polled {
            sleep = sleep.min(sleep_for(polled));
        }
        let fd = polled.map(|polled| [polled.fd()]);
        let fds = fd.as_ref().map_or(&[][..], |fd| &fd[..]);
        gate.parker.park(sleep, fds, || {
            !gate.queue.is_empty()
                || rings.iter().any(HotRingPort::has_request)
                || polled.is_some_and(Polled::has_work)
                || gate.is_stopping.load(Ordering::Acquire)
        });
    }

    /// Removes closed fronts from the end of the list: an index identifies a ring.
    fn drop_closed_rings(&mut self) {
        if !self.in_flight.is_empty() {
            return;
        }
        while self.rings.last().is_some_and(HotRingPort::is_closed) {
            self.rings.pop();
            let gone = self.rings.len();
            for port in &mut self.routes {
                if usize::from(*port) == gone {
                    *port = NO_PORT;
                }
            }
        }
    }

    /// Serves the timers, the rings and the queue once; true when it did work.
    fn run_round(&mut self) -> bool {
        let mut did_work = self.pump() | self.check_clock() | self.submit_due_timers();
        if !self.disconnected.is_empty() {
            did_work |= self.close_disconnected();
        }
        for at in 0..self.rings.len() {
            did_work |= self.serve_ring(at);
        }
        for _ in 0..TURN_REQUESTS {
            // Checked first: popping from an empty queue costs a fence.
            if self.in_flight.room() == 0 || self.gate.queue.is_empty() {
                break;
            }
            let Some(job) = self.gate.queue.pop() else {
                break;
            };
            did_work = true;
            match job {
                Job::Request(request, reply) => {
                    let now_ns = self.config.clock.now_ns();
                    self.check_backlog();
                    self.serve(Source::Given(&request), now_ns, ReplyTo::Reply(reply));
                }
                Job::Inspect(read) => self.inspect(read),
                Job::Attach(ring) => {
                    self.drop_closed_rings();
                    self.rings.push(*ring);
                }
                Job::Host(polled) => self.polled = Some(polled),
            }
            self.pump();
        }
        did_work | self.sweep_on()
    }

    /// Serves the requests of one front, all with one time; true when there were any.
    fn serve_ring(&mut self, port: usize) -> bool {
        if !self.rings[port].fill() {
            return self.rings[port].has_just_closed() && self.disconnect_front(port);
        }
        let now_ns = self.config.clock.now_ns();
        // Once for all requests: it reads atomics that other threads write.
        self.check_backlog();
        let mut did_work = false;
        while self.in_flight.room() > 0
            && let Some(at) = self.rings[port].next()
        {
            did_work = true;
            let tag = self.rings[port].submission(at).tag;
            let request = Source::Ring { port, at };
            self.serve(request, now_ns, ReplyTo::Ring { port, tag });
            self.pump();
        }
        did_work
    }

    fn serve(&mut self, request: Source, now_ns: u64, reply_to: ReplyTo) {
        match self.admit(request, now_ns) {
            Ok(()) => self.launch(reply_to),
            Err(error) => {
                self.tally.not_submitted += 1;
                self.tally.busy += u64::from(error == SubmitError::Busy);
                match reply_to {
                    ReplyTo::Reply(reply) => {
                        self.publish_sequence();
                        reply.send(Err(error));
                    }
                    ReplyTo::Ring { port, .. } => {
                        if let Source::Ring { at, .. } = request {
                            self.rings[port].refuse(at, error);
                        }
                    }
                }
            }
        }
    }

    /// Publishes the sequence before an answer: a read after the answer is not older than it
    /// (R178).
    fn publish_sequence(&self) {
        let sequence = self.core.sequence().get();
        self.stats.sequence.store(sequence, Ordering::Release);
    }

    /// Submits a request of the platform itself.
    fn own_request(&mut self, request: &Request) -> Result<(), SubmitError> {
        self.admit(Source::Given(request), self.config.clock.now_ns())?;
        self.launch(ReplyTo::Reply(Reply::None));
        Ok(())
    }

    /// Turns a request into the next command, in its in-flight slot.
    ///
    /// Changes no state, but drains reports. Journalled time never decreases, even if the clock
    /// does.
    ///
    /// # Errors
    /// Why the request is refused.
    fn admit(&mut self, source: Source, mut clock_ns: u64) -> Result<(), SubmitError> {
        // First: the draw and the changes of the last command affect this request.
        self.begin_last();
        let (asked, outline) = self.asked(source);
        self.check_epoch(source, asked.epoch)?;
        let over = self.over_rate(&asked, &outline, clock_ns);
        let waited = self.journal(source, outline.is_order);
        let waited = waited.and_then(|room| self.await_earlier(source).map(|()| room));
        let room = waited.map_err(|error| self.unless_seen(source, error))?;
        let over = over.or_else(|| room.over());
        let mut waiting_since = None;
        loop {
            let refuses = self.refuses_orders(clock_ns);
            self.core.refuse_orders(refuses);
            let now_ns = clock_ns.max(self.core.time_ns());
            let request = match source {
                Source::Given(request) => request,
                Source::Ring { port, at } => self.rings[port].request(at),
            };
            let admission = self.core.admission();
            let place = self.in_flight.vacant();
            let admitted = match over {
                None => admission.admit_into(request, now_ns, &mut place.command),
                Some(over) => admission.admit_reduction(request, now_ns, over, &mut place.command),
            };
            if let Err(reject) = admitted {
                if over.is_some() {
                    return Err(not_admitted(reject));
                }
                // A session's refusal is journalled too, so that its numbered answer survives.
                place.command = admission
                    .refusal(request, &reject)
                    .ok_or(SubmitError::Refused(reject))?;
                if matches!(room, JournalRoom::Sweeps) {
                    return Err(SubmitError::Busy);
                }
                // Not while the market is closed: a record would add to the lag or to a full disk.
                if self.intake.is_closed() {
                    return Err(SubmitError::Refused(reject));
                }
            }
            place.sequence = self.core.sequence().next();
            place.time_ns = now_ns;
            place.received_ns = asked.received_ns(now_ns);
            let dispatch = Dispatch::of(&place.command);
            let route = dispatch.route;
            if let Route::Listed = route {
                let filtered = filtered_mass_cancel(request);
                let useless = room.useless(over.filter(|_| filtered.is_some()));
                self.list(filtered, clock_ns, useless)?;
            }
            if self.is_fused || self.has_room(route, outline.is_order) {
                if outline.is_fok && !self.is_fused {
                    self.reserve_visits(&dispatch);
                }
                if let Some(message) = dispatch.message {
                    self.count_message(source, dispatch.member, message, clock_ns);
                }
                if let JournalRoom::Reduced(order) = room {
                    self.reduced.insert(order);
                }
                return Ok(());
            }
            // Admitted again after the wait: reports drained meanwhile may change the outcome.
            let since = *waiting_since.get_or_insert_with(Instant::now);
            self.await_room(route, outline.is_order, since)?;
            clock_ns = self.config.clock.now_ns();
        }
    }

    #[inline]
    fn asked(&self, source: Source) -> (Submission, Outline) {
        match source {
            Source::Given(request) => (Submission::default(), Outline::of(request)),
            Source::Ring { port, at } => {
                let ring = &self.rings[port];
                (*ring.submission(at), Outline::of(ring.request(at)))
            }
        }
    }

    /// Refuses a request that was read before a later login took its session.
    fn check_epoch(&self, source: Source, epoch: Sequence) -> Result<(), SubmitError> {
        if epoch == Sequence::ZERO {
            return Ok(());
        }
        let Some((session, _)) = self.request(source).client() else {
            return Ok(());
        };
        match self.core.admission().session(session) {
            Some(row) if row.epoch == epoch => Ok(()),
            _ => Err(SubmitError::Refused(RejectReason::UnknownSession.into())),
        }
    }

    fn check_backlog(&mut self) {
        if self.intake.update(&self.backlog, self.core.sequence()) {
            let stage = self.intake.stage();
            self.gate.stage.store(stage.code(), Ordering::Relaxed);
        }
    }

    fn check_engine_pool(&self) {
        assert!(!self.engine_pool.is_broken(), "an engine thread has ended");
    }
}

/// Where a request is stored.
#[derive(Clone, Copy)]
enum Source<'a> {
    Given(&'a Request),
    /// In the inbox of a front's rings.
    Ring {
        port: usize,
        at: usize,
    },
}

/// Requests that the journal has room for.
#[derive(Clone, Copy)]
enum JournalRoom {
    Any,
    /// An amend that reduces this order.
    Reduced(Handle),
    /// Those that [`admission::Admission::admit_reduction`] admits.
    Reductions,
    /// Mass cancels that end orders at once.
    Sweeps,
}

impl JournalRoom {
    /// Why only requests that reduce risk pass, if so.
    #[inline]
    fn over(self) -> Option<Reject> {
        matches!(self, Self::Reductions).then(|| RejectReason::Busy.into())
    }

    /// Why a mass cancel that ends no order at once is refused, if so. `over`: the limit that it
    /// exceeds.
    fn useless(self, over: Option<Reject>) -> Option<Reject> {
        match self {
            Self::Sweeps => Some(RejectReason::Busy.into()),
            _ => over,
        }
    }
}

/// Error of a request that does not reduce risk. Admission itself never refuses with `BUSY`.
#[cold]
fn not_admitted(reject: Reject) -> SubmitError {
    match reject.reason {
        RejectReason::Busy => SubmitError::Busy,
        _ => SubmitError::Refused(reject),
    }
}

/// Placeholder for slots that hold no command.
pub(crate) fn nothing() -> Envelope {
    Envelope {
        sequence: Sequence::ZERO,
        time_ns: 0,
        received_ns: 0,
        command: Command::ExpireOrders(ExpireOrders {
            instrument: InstrumentIx::NONE,
            orders_max: 0,
        }),
    }
}

/// Closes the gate when the hot thread ends, normally or by a panic.
struct Closing(Arc<Gate>);

impl Drop for Closing {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("the hot thread panicked; no requests are accepted until a restart");
        }
        self.0.close();
    }
}
