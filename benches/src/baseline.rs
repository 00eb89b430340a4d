//! Baselines of `pipeline`: the same open loop over two rings and a thread that only echoes
//! messages. There is no admission, no book and no frame.
//!
//! With a journal, another thread writes as many bytes at the same interval to the same file
//! system, on the same cores. The measured latency is that of the machine. With a service time it
//! also contains the queueing delay of a server with that service time.
//!
//! [`run_with_plain_client`] has a client that only counts: it is the baseline of the goals.
//! [`run`] has the client of the measured run, which generates the requests and keeps their state:
//! it shows what that client costs on its core. Near that core's capacity the requests wait for it
//! with and without the path, so a ratio to it hides the path's cost.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use admission::{OrderRef, ReportBody, Request, SessionRequest};
use disruptor::{
    BusySpin, EventPoller, Polling, Producer, SingleConsumerBarrier, SingleProducer,
    SingleProducerBarrier, build_single_producer,
};
use journal::{FileStorage, Storage, aligned::Buffer};
use sequencer::{Commit, Report, Stamp, Submission, SubmitError};
use types::{Handle, Id128, InstrumentIx, Lots, Sequence, SessionIx, Ticks, UserIx};

use thread_priority::{
    RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

use crate::hop::{self, Percentiles, Timer, histogram};
use crate::load::{Load, USERS};
use crate::open_loop::{Client, Rings, SENT_TOGETHER, Timing};

/// Messages per ring, here and in the measured run.
pub const RING: usize = 4_096;
/// Bytes of a segment, like the journal's.
const SEGMENT_BYTES: u64 = 16 << 20;
/// Slots per session of the orders in the reports of the echo: some eight times the orders that a
/// session has open at a time.
const SESSION_SLOTS: u64 = 64;

/// A request of two cache lines.
type RequestMessage = [u64; 16];
/// A report of one cache line.
type ReportMessage = [u64; 8];

/// The load of the echo.
#[derive(Clone, Copy)]
pub struct EchoLoad {
    pub timing: Timing,
    /// Core of the echo thread.
    pub core: usize,
    /// Core of the writer thread. `None`: the client's.
    pub writer_core: Option<usize>,
    /// Nanoseconds that the echo thread spins for each message.
    pub service_ns: u64,
}

/// Writes of the writer thread.
#[derive(Clone, Copy, Debug)]
pub struct Writes {
    /// Bytes per write, whole blocks.
    pub bytes: usize,
    /// Time between the starts of two writes. After a write that takes longer the next one starts
    /// at once.
    pub every: Duration,
}

impl Writes {
    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({ "bytes": self.bytes, "per_s": 1.0 / self.every.as_secs_f64() })
    }
}

/// Runs the client of the measured run over bare rings. Returns the latencies from each request's
/// due time to its report.
///
/// The calling thread is the client; it must already be pinned to a core. `commit` is that of the
/// measured run: each report is durable at once, but the client does the same for it.
///
/// # Errors
/// The folder cannot be written.
pub fn run(
    echo: EchoLoad,
    journal_writes: Option<(Writes, &Path)>,
    load: &mut Load,
    commit: Option<Commit>,
) -> anyhow::Result<Percentiles> {
    beside_writer(echo, journal_writes, || {
        let (rings, echo_thread) = BareRings::connect(echo);
        let mut client = Client::new(rings, load, commit);
        client.run(echo.timing)?;
        let percentiles = Percentiles::of(&client.results.accepted);
        // Ends the echo thread.
        drop(client);
        echo_thread.join().expect("the echo panicked");
        Ok(percentiles)
    })
}

/// As [`run`], with a client that only counts messages, over rings of smaller messages.
///
/// # Errors
/// The folder cannot be written.
pub fn run_with_plain_client(
    echo: EchoLoad,
    journal_writes: Option<(Writes, &Path)>,
) -> anyhow::Result<Percentiles> {
    beside_writer(echo, journal_writes, || Ok(run_echo(echo)))
}

/// Runs `measure` beside a thread that writes, if there are writes.
fn beside_writer(
    echo: EchoLoad,
    journal_writes: Option<(Writes, &Path)>,
    measure: impl FnOnce() -> anyhow::Result<Percentiles>,
) -> anyhow::Result<Percentiles> {
    let is_stopped = Arc::new(AtomicBool::new(false));
    let failed = Arc::new(AtomicU64::new(0));
    let writer = match journal_writes {
        Some((writes, dir)) => Some(spawn_writer(writes, dir, echo, &is_stopped, &failed)?),
        None => None,
    };
    let percentiles = measure();
    is_stopped.store(true, Ordering::Relaxed);
    if let Some(writer) = writer {
        writer.join().expect("the writer panicked");
    }
    anyhow::ensure!(
        failed.load(Ordering::Relaxed) == 0,
        "the writer thread could not write"
    );
    percentiles
}

/// Ring slot of a request, of the size of the node's.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct RequestSlot {
    submission: Submission,
    request: Request,
}

/// Ring slot of a report, of the size of the node's.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct ReportSlot(Report);

// As the node asserts of its own slots, which are private.
const _: () = assert!(size_of::<ReportSlot>() == 128);
const _: () = assert!(size_of::<RequestSlot>() <= 192);

/// The client's side of two rings to a thread that answers each request with one report and does
/// nothing else. It ends when this side is dropped.
pub struct BareRings {
    requests: SingleProducer<RequestSlot, SingleConsumerBarrier>,
    reports: EventPoller<ReportSlot, SingleProducerBarrier>,
}

impl BareRings {
    /// Makes the rings and starts the thread.
    pub fn connect(load: EchoLoad) -> (Self, JoinHandle<()>) {
        // Placeholders: a slot is written before it is read.
        let request = || RequestSlot {
            submission: Submission::default(),
            request: Request::OpenSession(SessionRequest {
                key: Id128::NONE,
                user: UserIx::NONE,
                stp_group: None,
                cancel_on_disconnect: false,
            }),
        };
        let report = || {
            ReportSlot(Report::TakenOver {
                session: SessionIx::NONE,
                epoch: Sequence::ZERO,
            })
        };
        let answer = |slot: &RequestSlot| ReportSlot(answer(slot));
        let (requests, reports, thread) = connect(load, request, report, answer);
        (Self { requests, reports }, thread)
    }
}

/// The client's side of two rings.
type ClientSide<Q, R> = (
    SingleProducer<Q, SingleConsumerBarrier>,
    EventPoller<R, SingleProducerBarrier>,
    JoinHandle<()>,
);

/// Makes two rings of placeholders, and starts a thread that answers each request. It ends when the
/// client's producer is dropped.
fn connect<Q, R>(
    load: EchoLoad,
    request: impl FnMut() -> Q,
    report: impl FnMut() -> R,
    answer: impl Fn(&Q) -> R + Send + 'static,
) -> ClientSide<Q, R>
where
    Q: Send + Sync + 'static,
    R: Send + Sync + 'static,
{
    let (requests_poller, builder) =
        build_single_producer(RING, request, BusySpin).new_event_poller();
    let requests = builder.build();
    let (reports, builder) = build_single_producer(RING, report, BusySpin).new_event_poller();
    let producer = builder.build();
    let thread = std::thread::spawn(move || answer_all(requests_poller, producer, load, answer));
    (requests, reports, thread)
}

impl Rings for BareRings {
    #[inline]
    fn submit(&mut self, request: &Request) -> Result<(), SubmitError> {
        let published = self.requests.try_publish(|slot| {
            slot.submission = Submission::default();
            slot.request = *request;
        });
        published.map_err(|_| SubmitError::Busy)?;
        Ok(())
    }

    #[inline]
    fn poll(&mut self, mut each: impl FnMut(&Report)) -> Result<(), SubmitError> {
        match self.reports.poll() {
            Ok(mut reports) => {
                for report in &mut reports {
                    each(&report.0);
                }
                Ok(())
            }
            Err(Polling::NoEvents) => Ok(()),
            Err(Polling::Shutdown) => Err(SubmitError::Stopping),
        }
    }
}

/// Answers requests until the other side is dropped.
fn answer_all<Q, R>(
    mut requests: EventPoller<Q, SingleProducerBarrier>,
    mut reports: SingleProducer<R, SingleConsumerBarrier>,
    load: EchoLoad,
    answer: impl Fn(&Q) -> R,
) {
    hop::pin(load.core);
    let timer = Timer::start();
    loop {
        match requests.poll() {
            Ok(mut slots) => {
                for slot in &mut slots {
                    spin(&timer, load.service_ns);
                    let report = answer(slot);
                    reports.publish(|slot| *slot = report);
                }
            }
            Err(Polling::NoEvents) => spin_loop(),
            Err(Polling::Shutdown) => return,
        }
    }
}

/// The report on a request: every order rests, and every cancel and amend succeeds.
fn answer(slot: &RequestSlot) -> Report {
    let request = &slot.request;
    let (session, client_seq) = request.client().unwrap_or((SessionIx::NONE, 0));
    let id_of = |order| match order {
        OrderRef::Client(id) => id,
        OrderRef::Handle(handle) => handle.engine_id(),
    };
    let price_of = |price: Option<Ticks>| price.unwrap_or(Ticks(0));
    let (client_order_id, body) = match request {
        Request::New(new) => (
            new.client_order_id,
            ReportBody::Acknowledged {
                side: new.side,
                price: price_of(new.price),
                open: new.quantity,
            },
        ),
        Request::Cancel(cancel) => (
            id_of(cancel.order),
            ReportBody::Cancelled {
                reason: cancel.reason,
                quantity: Lots(0),
            },
        ),
        Request::Amend(amend) => (
            id_of(amend.order),
            ReportBody::Amended {
                kept_priority: false,
                price: price_of(amend.price),
                quantity: Lots(0),
                open: Lots(0),
            },
        ),
        other => unreachable!("the load has no such request: {other:?}"),
    };
    let message = admission::Report {
        session,
        instrument: InstrumentIx::NONE,
        number: client_seq,
        client_seq,
        client_order_id,
        handle: slot_of(session, client_order_id),
        body,
    };
    let stamp = Stamp {
        sequence: Sequence::ZERO,
        time_ns: 0,
        received_ns: slot.submission.received_ns,
    };
    Report::SessionMessage(stamp, message)
}

/// Handle of a session's order. All slots fit the cache, like the node's. An order that is open for
/// longer than the session's next [`SESSION_SLOTS`] orders shares its slot with one of them: the
/// end of one then ends the other in the client's state, so the client cancels a little less.
fn slot_of(session: SessionIx, client_order_id: u64) -> Handle {
    let session = session.index() % USERS;
    let slot = session as u64 * SESSION_SLOTS + client_order_id % SESSION_SLOTS;
    Handle {
        slot: slot as u32,
        generation: 1,
    }
}

/// Spins for this time.
#[inline]
fn spin(timer: &Timer, ns: u64) {
    if ns > 0 {
        let end_ns = timer.ns() + ns;
        while timer.ns() < end_ns {}
    }
}

/// Sends messages at the rate of the load and reads their echoes.
fn run_echo(load: EchoLoad) -> Percentiles {
    let Timing {
        rate,
        seconds,
        warm_up,
    } = load.timing;
    let first_line =
        |message: &RequestMessage| -> ReportMessage { message[..8].try_into().expect("two lines") };
    let (mut requests, mut reports, thread) =
        connect(load, || [0u64; 16], || [0u64; 8], first_line);
    let total = rate * (warm_up + seconds);
    let mut times = histogram();
    let warm_up_end_ns = warm_up * 1_000_000_000;
    let due_ns = |number: u64| number * 1_000_000_000 / rate;
    let mut in_flight = VecDeque::with_capacity(RING);
    let (mut sent, mut answered, mut next_due_ns) = (0, 0, 0);
    let timer = Timer::start();
    while answered < total {
        for _ in 0..SENT_TOGETHER {
            let is_sent = sent < total
                && in_flight.len() < RING
                && timer.ns() >= next_due_ns
                && requests.try_publish(|slot| *slot = [sent; 16]).is_ok();
            if !is_sent {
                break;
            }
            in_flight.push_back(next_due_ns);
            sent += 1;
            next_due_ns = due_ns(sent);
        }
        let Ok(mut messages) = reports.poll() else {
            continue;
        };
        for _ in &mut messages {
            answered += 1;
            let Some(due_ns) = in_flight.pop_front() else {
                continue;
            };
            if due_ns >= warm_up_end_ns {
                times.saturating_record(timer.ns().saturating_sub(due_ns).max(1));
            }
        }
    }
    // Ends the echo thread.
    drop(requests);
    thread.join().expect("the echo panicked");
    Percentiles::of(&times)
}

/// Starts the writer thread. Without a chosen core it does not run on that of the echo thread, as
/// the journal's threads keep off the hot core.
fn spawn_writer(
    writes: Writes,
    dir: &Path,
    echo: EchoLoad,
    is_stopped: &Arc<AtomicBool>,
    failed: &Arc<AtomicU64>,
) -> anyhow::Result<JoinHandle<()>> {
    let storage = FileStorage::new(dir, true)?;
    storage.create(1, SEGMENT_BYTES)?;
    let mut buffer = Buffer::default();
    buffer.resize(writes.bytes);
    buffer.bytes_mut().fill(7);
    let (is_stopped, failed) = (is_stopped.clone(), failed.clone());
    let room = SEGMENT_BYTES - writes.bytes as u64;
    Ok(std::thread::spawn(move || {
        // Otherwise it has inherited the client's core.
        if let Some(core) = echo.writer_core {
            hop::pin(core);
        }
        // The journal's thread also has real-time priority if the system allows it.
        let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::RoundRobin);
        let _ = set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, policy);
        let mut offset = 0;
        let mut due = Instant::now();
        while !is_stopped.load(Ordering::Relaxed) {
            let blocks = buffer.padded(storage.block_bytes());
            let written = storage
                .write(1, offset, blocks)
                .and_then(|()| storage.sync(1));
            if written.is_err() {
                failed.fetch_add(1, Ordering::Relaxed);
                return;
            }
            offset += writes.bytes as u64;
            if offset > room {
                offset = 0;
            }
            due += writes.every;
            let now = Instant::now();
            if let Some(left) = due.checked_duration_since(now) {
                std::thread::sleep(left);
            } else {
                due = now;
            }
        }
    }))
}
