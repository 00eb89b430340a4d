//! Engine threads: the threads that poll the engines.
//!
//! The hot thread polls them itself (`fused`), one thread polls all (`shared`), or each has its own
//! as long as there are cores (`pinned`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::engine_ring::Engine;
use crate::park::Parker;

/// Longest sleep of an idle engine thread.
const PARK: Duration = Duration::from_millis(500);

/// The engines and the threads that poll them.
pub(crate) struct EnginePool {
    /// Engines that the hot thread polls.
    own: Vec<Engine>,
    threads: Vec<EngineThread>,
    threads_max: usize,
    /// Number of engines assigned to threads.
    given: usize,
    /// Core of the first engine thread, if threads are pinned.
    core_first: Option<usize>,
    spin: Duration,
    /// An engine thread panicked: its books are lost.
    is_broken: Arc<AtomicBool>,
}

/// One engine thread.
struct EngineThread {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    parker: Parker,
    /// Engines that the thread has yet to take.
    arriving: Mutex<Vec<Engine>>,
    has_arriving: AtomicBool,
    is_stopping: AtomicBool,
}

impl EnginePool {
    pub fn new(config: &Config) -> Self {
        Self {
            own: Vec::new(),
            threads: Vec::new(),
            threads_max: config.engine_threads(),
            given: 0,
            core_first: config.core.map(|core| core + 1),
            spin: Duration::from_micros(config.spin_us),
            is_broken: Arc::default(),
        }
    }

    /// Adds an engine. EngineRing `n` belongs to the `n`th engine added.
    pub fn add(&mut self, engine: Engine) {
        if self.threads_max == 0 {
            self.own.push(engine);
            return;
        }
        if self.threads.len() < self.threads_max {
            self.threads.push(self.spawn_engine_thread());
        }
        let hand = &self.threads[self.given % self.threads_max];
        self.given += 1;
        hand.shared.arriving().push(engine);
        hand.shared.has_arriving.store(true, Ordering::Release);
        hand.shared.parker.unpark();
    }

    fn spawn_engine_thread(&self) -> EngineThread {
        let shared = Arc::new(Shared::default());
        let number = self.threads.len();
        let core = self.core_first.map(|first| first + number);
        let (seen, spin, is_broken) = (shared.clone(), self.spin, self.is_broken.clone());
        let thread = std::thread::Builder::new()
            .name(format!("engine-{number}"))
            .spawn(move || {
                let _guard = Guard(is_broken);
                run(&seen, core, spin);
            })
            .expect("an engine thread can be spawned");
        EngineThread {
            shared,
            thread: Some(thread),
        }
    }

    /// Polls the engine of ring `engine_ring` if it is the hot thread's own; true when it did work.
    pub fn step(&mut self, engine_ring: usize) -> bool {
        self.own.get_mut(engine_ring).is_some_and(Engine::step)
    }

    /// Polls all of the hot thread's own engines.
    pub fn step_all(&mut self) {
        for engine in &mut self.own {
            engine.step();
        }
    }

    /// Wakes the thread that polls the engine of ring `engine_ring`.
    pub fn ring(&self, engine_ring: usize) {
        if self.threads_max > 0 {
            self.threads[engine_ring % self.threads_max]
                .shared
                .parker
                .unpark();
        }
    }

    pub fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }
}

impl Drop for EnginePool {
    fn drop(&mut self) {
        for hand in &self.threads {
            hand.shared.is_stopping.store(true, Ordering::Release);
            hand.shared.parker.unpark();
        }
        for hand in &mut self.threads {
            // The thread's guard has logged a panic.
            if let Some(thread) = hand.thread.take() {
                drop(thread.join());
            }
        }
    }
}

impl Shared {
    fn arriving(&self) -> std::sync::MutexGuard<'_, Vec<Engine>> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Guard(Arc<AtomicBool>);

impl Drop for Guard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("an engine thread panicked; no requests are taken until a restart");
            self.0.store(true, Ordering::Release);
        }
    }
}

fn run(shared: &Shared, core: Option<usize>, spin: Duration) {
    if let Some(core) = core {
        pin(core);
    }
    let mut engines: Vec<Engine> = Vec::new();
    let mut last_work = Instant::now();
    loop {
        if shared.has_arriving.swap(false, Ordering::Acquire) {
            engines.append(&mut shared.arriving());
        }
        let mut did_work = false;
        for engine in &mut engines {
            did_work |= engine.step();
        }
        if did_work {
            last_work = Instant::now();
        } else if shared.is_stopping.load(Ordering::Acquire) {
            return;
        } else if last_work.elapsed() < spin || engines.iter().any(Engine::has_work) {
            std::hint::spin_loop();
        } else {
            shared.parker.park(PARK, &[], || {
                engines.iter().any(Engine::has_work)
                    || shared.has_arriving.load(Ordering::Acquire)
                    || shared.is_stopping.load(Ordering::Acquire)
            });
        }
    }
}

/// Pins the calling thread to a core; logs a warning when that fails.
pub(crate) fn pin(core: usize) {
    if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        tracing::warn!(core, "the thread could not be pinned to its core");
    }
}
