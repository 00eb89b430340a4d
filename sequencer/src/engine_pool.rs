//! The threads that poll the engines: one polls all (`shared`), or there are several (`pinned`).
//!
//! In layout `fused` there are none: the hot thread has the books.

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
    threads: Vec<EngineThread>,
    threads_max: usize,
    /// Number of engines assigned to threads.
    assigned: usize,
    /// Core of the first engine thread, if threads are pinned.
    core_first: Option<usize>,
    spin: Duration,
    /// True when an engine thread has panicked: its books are lost.
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
    /// Engines that the thread has not taken over yet.
    arriving: Mutex<Vec<Engine>>,
    has_arriving: AtomicBool,
    is_stopping: AtomicBool,
}

impl EnginePool {
    pub fn new(config: &Config) -> Self {
        Self {
            threads: Vec::new(),
            threads_max: config.engine_threads(),
            assigned: 0,
            core_first: config.core.map(|core| core + 1),
            spin: Duration::from_micros(config.spin_us),
            is_broken: Arc::default(),
        }
    }

    /// Adds an engine. Engines are numbered in this order, as their rings are.
    pub fn add(&mut self, engine: Engine) {
        if self.threads.len() < self.threads_max {
            self.threads.push(self.spawn_engine_thread());
        }
        let thread = &self.threads[self.assigned % self.threads_max];
        self.assigned += 1;
        thread.shared.arriving().push(engine);
        thread.shared.has_arriving.store(true, Ordering::Release);
        thread.shared.parker.unpark();
    }

    fn spawn_engine_thread(&self) -> EngineThread {
        let shared = Arc::new(Shared::default());
        let number = self.threads.len();
        let core = self.core_first.map(|first| first + number);
        let (seen, spin, is_broken) = (shared.clone(), self.spin, self.is_broken.clone());
        let thread = std::thread::Builder::new()
            .name(format!("engine-{number}"))
            .spawn(move || {
                let _guard = BrokenOnPanic(is_broken);
                run(&seen, core, spin);
            })
            .expect("an engine thread can be spawned");
        EngineThread {
            shared,
            thread: Some(thread),
        }
    }

    /// Wakes the thread that polls engine `at`.
    pub fn unpark(&self, at: usize) {
        self.threads[at % self.threads_max].shared.parker.unpark();
    }

    pub fn is_broken(&self) -> bool {
        self.is_broken.load(Ordering::Acquire)
    }
}

impl Drop for EnginePool {
    fn drop(&mut self) {
        for thread in &self.threads {
            thread.shared.is_stopping.store(true, Ordering::Release);
            thread.shared.parker.unpark();
        }
        for thread in &mut self.threads {
            // `BrokenOnPanic` has logged a panic.
            if let Some(handle) = thread.thread.take() {
                drop(handle.join());
            }
        }
    }
}

impl Shared {
    fn arriving(&self) -> std::sync::MutexGuard<'_, Vec<Engine>> {
        self.arriving.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Marks the pool as broken when its thread panics.
struct BrokenOnPanic(Arc<AtomicBool>);

impl Drop for BrokenOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!("an engine thread panicked; no requests are accepted until a restart");
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
    // Books whose unused memory this thread has released before it parked.
    let mut turn = 0_usize;
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
            turn = turn.wrapping_add(1);
            let count = engines.len().max(1);
            if let Some(engine) = engines.get_mut(turn % count) {
                engine.release_unused();
            }
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
        tracing::warn!(
            core,
            "cannot pin the thread to its core; it runs on any core"
        );
    }
}
