//! A disciplined clock with many readers and one writer at a time.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Source, Time};
use crate::discipline::{Confirmed, Discipline, Reading, Segment, State, Stored};

/// Segments kept, so that an interrupted reader still finds its own unchanged.
const SLOTS: usize = 4;
/// Longest time around the real-time read at which both clock reads count as simultaneous.
const READ_TOGETHER_NS: u64 = 20_000;
const READ_TRIES: usize = 5;

/// Shares a [`crate::discipline`] state machine. Readers never block: the writer puts a new segment
/// into the slot of the oldest one.
pub struct Disciplined {
    source: Box<dyn Source>,
    rule: Mutex<Discipline>,
    slots: [Slot; SLOTS],
    /// Number of the newest segment.
    newest: AtomicU64,
    /// Offset while suspect, in nanoseconds; 0 = normal.
    suspect_ns: AtomicI64,
}

#[derive(Default)]
struct Slot {
    monotonic_ns: AtomicU64,
    time_ns: AtomicU64,
    slew_ns: AtomicI64,
}

impl Disciplined {
    pub fn new(source: impl Source + 'static) -> Self {
        let rule = Discipline::new(read(&source, false));
        let clock = Self {
            source: Box::new(source),
            slots: Default::default(),
            newest: AtomicU64::new(0),
            suspect_ns: AtomicI64::new(0),
            rule: Mutex::new(rule),
        };
        clock.publish(&clock.rule());
        clock
    }

    /// Compares platform time with the machine's clocks and corrects it. Call about once per
    /// second, from a thread that may enter the kernel.
    pub fn observe(&self) -> State {
        let is_synchronised = self.source.is_synchronised();
        self.change(|rule| rule.observe(read(&*self.source, is_synchronised)))
    }

    /// Changes the state machine, publishes and logs the result.
    fn change<T>(&self, change: impl FnOnce(&mut Discipline) -> T) -> T {
        let mut rule = self.rule();
        let was = rule.state();
        let now_ns = rule.segment().at(self.source.monotonic_ns());
        let outcome = change(&mut rule);
        self.publish(&rule);
        let stepped_ns = i128::from(rule.segment().time_ns) - i128::from(now_ns);
        log_transition(was, rule.state(), stepped_ns);
        outcome
    }

    fn rule(&self) -> MutexGuard<'_, Discipline> {
        self.rule.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes the state machine's segment. The caller holds the lock.
    fn publish(&self, rule: &Discipline) {
        let segment = rule.segment();
        let number = self.newest.load(Ordering::Relaxed) + 1;
        let slot = &self.slots[number as usize % SLOTS];
        fence(Ordering::Release);
        slot.monotonic_ns
            .store(segment.monotonic_ns, Ordering::Relaxed);
        slot.time_ns.store(segment.time_ns, Ordering::Relaxed);
        slot.slew_ns.store(segment.slew_ns, Ordering::Relaxed);
        self.newest.store(number, Ordering::Release);
        let suspect_ns = rule.state().suspect_ns().unwrap_or(0);
        self.suspect_ns.store(suspect_ns, Ordering::Release);
    }

    /// The newest segment. An interrupted reader may get one of the two segments before it.
    #[inline]
    fn segment(&self) -> Segment {
        loop {
            let number = self.newest.load(Ordering::Acquire);
            let slot = &self.slots[number as usize % SLOTS];
            let segment = Segment {
                monotonic_ns: slot.monotonic_ns.load(Ordering::Relaxed),
                time_ns: slot.time_ns.load(Ordering::Relaxed),
                slew_ns: slot.slew_ns.load(Ordering::Relaxed),
            };
            fence(Ordering::Acquire);
            // The writer reuses this slot `SLOTS` segments later.
            if self.newest.load(Ordering::Relaxed) < number + SLOTS as u64 - 1 {
                return segment;
            }
        }
    }
}

impl Time for Disciplined {
    #[inline]
    fn now_ns(&self) -> u64 {
        self.segment().at(self.source.monotonic_ns())
    }

    #[inline]
    fn state(&self) -> State {
        match self.suspect_ns.load(Ordering::Acquire) {
            0 => State::Normal {
                slew_ns: self.segment().slew_ns,
            },
            offset_ns => State::Suspect { offset_ns },
        }
    }

    #[inline]
    fn suspect_ns(&self) -> Option<i64> {
        Some(self.suspect_ns.load(Ordering::Acquire)).filter(|offset_ns| *offset_ns != 0)
    }

    fn latest_ns(&self) -> u64 {
        self.rule().latest_ns(self.source.monotonic_ns())
    }

    fn check_stored(&self, stored: Stored) {
        let is_synchronised = self.source.is_synchronised();
        self.change(|rule| rule.check_stored(stored, read(&*self.source, is_synchronised)));
    }

    fn confirm(&self) -> Option<Confirmed> {
        self.change(|rule| rule.confirm(read(&*self.source, false)))
    }
}

/// Reads both clocks as simultaneously as possible. A preemption between the two reads would look
/// like a difference of the clocks.
fn read(source: &dyn Source, is_synchronised: bool) -> Reading {
    let once = || {
        let before_ns = source.monotonic_ns();
        let realtime_ns = source.realtime_ns();
        (source.monotonic_ns() - before_ns, before_ns, realtime_ns)
    };
    let mut best = once();
    for _ in 1..READ_TRIES {
        if best.0 <= READ_TOGETHER_NS {
            break;
        }
        best = best.min(once());
    }
    let (apart_ns, before_ns, realtime_ns) = best;
    Reading {
        monotonic_ns: before_ns + apart_ns / 2,
        realtime_ns,
        is_synchronised,
    }
}

fn log_transition(was: State, is: State, stepped_ns: i128) {
    let (suspect_ns, slew_ns) = match is {
        State::Normal { slew_ns } => (0, slew_ns),
        State::Suspect { offset_ns } => (offset_ns, 0),
    };
    metrics::gauge!("clock_offset_seconds").set((suspect_ns + slew_ns) as f64 / 1e9);
    metrics::gauge!("clock_suspect").set(f64::from(u8::from(suspect_ns != 0)));
    let stepped_s = stepped_ns as f64 / 1e9;
    match (was.suspect_ns(), is.suspect_ns()) {
        (None, Some(_)) => {
            let trouble = is.operator_message().unwrap_or_default();
            tracing::error!(
                offset_ns = suspect_ns,
                trouble,
                "the machine's clock is suspect"
            );
        }
        (Some(_), None) => tracing::warn!(stepped_s, "the machine's clock is trusted again"),
        _ if stepped_ns.abs() > i128::from(crate::discipline::SLEW_MAX_NS) => {
            tracing::warn!(
                stepped_s,
                "platform time followed a step of the synchronised clock"
            );
        }
        _ => {}
    }
}
