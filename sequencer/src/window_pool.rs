//! Threads that prepare wider price windows, so that no book asks the system for memory while it
//! trades.

use std::sync::Arc;
use std::thread;

use crossbeam::channel::{Receiver, Sender, bounded, select};
use engine::{Window, WindowSource, window_steps};

/// Replaced windows that wait to be freed. Beyond that a book frees its window itself.
const REPLACED_MAX: usize = 16;

/// Prepared windows. Their threads end with it.
#[derive(Debug)]
pub(crate) struct WindowPool {
    /// By width in ticks.
    prepared: Vec<(u32, Receiver<Window>)>,
    replaced: Sender<Window>,
}

impl WindowPool {
    /// Starts the threads, for books whose windows grow up to this width, in ticks.
    pub fn start(levels_max: u32) -> Arc<dyn WindowSource> {
        let (replaced, to_free) = bounded(REPLACED_MAX);
        let steps = window_steps(levels_max);
        let prepared = steps.map(|ticks| (ticks, prepare(ticks, to_free.clone())));
        Arc::new(Self {
            prepared: prepared.collect(),
            replaced,
        })
    }
}

/// Starts a thread that keeps a window of this width ready, and a second one for the moment when
/// that is taken.
fn prepare(ticks: u32, to_free: Receiver<Window>) -> Receiver<Window> {
    let (ready, windows) = bounded(1);
    let run = move || {
        loop {
            let window = Window::new(ticks).with_middle_touched();
            // Replaced windows are freed while the next one waits to be taken.
            let is_taken = loop {
                select! {
                    recv(to_free) -> replaced => match replaced {
                        Ok(replaced) => drop(replaced),
                        Err(_) => break false,
                    },
                    send(ready, window) -> sent => break sent.is_ok(),
                }
            };
            if !is_taken {
                return;
            }
        }
    };
    let thread = thread::Builder::new().name("price-windows".to_owned());
    thread.spawn(run).expect("a thread can be spawned");
    windows
}

impl WindowSource for WindowPool {
    fn take(&self, ticks: u32) -> Option<Window> {
        let found = self.prepared.iter().find(|(width, _)| *width == ticks);
        found.and_then(|(_, windows)| windows.try_recv().ok())
    }

    fn free(&self, window: Window) {
        // Freed here when the queue is full.
        let _ = self.replaced.try_send(window);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_of_each_width_are_ready_again_and_again() {
        let pool = WindowPool::start(1 << 20);
        for _ in 0..2 * REPLACED_MAX {
            for ticks in [1 << 16, 1 << 20] {
                let window = loop {
                    match pool.take(ticks) {
                        Some(window) => break window,
                        None => thread::yield_now(),
                    }
                };
                assert_eq!(window.ticks(), ticks);
                pool.free(window);
            }
        }
        assert!(pool.take(1 << 12).is_none(), "no step has this width");
    }
}
