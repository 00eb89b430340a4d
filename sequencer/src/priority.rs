//! Thread priorities, for machines with more threads than cores.
//!
//! The hot thread, the journal and the replica come before services and checkpoint writers. The
//! replica has the hot thread's priority, since the market waits for it: with a third of that share
//! its lag grew to seconds under load.

use std::io;
use std::sync::{OnceLock, mpsc};
use std::thread::{Builder, JoinHandle};

/// Nice value of the many threads that serve calls, settlement, history and the stores. On a core
/// shared with the hot thread, each gets about a seventieth of that thread's share.
pub const SERVING: i32 = 19;
/// Nice value of checkpoint writers.
pub const WRITING_CHECKPOINTS: i32 = 19;

type Job = Box<dyn FnOnce() + Send>;

/// Jobs of the thread that keeps the initial priority of the process.
static LAUNCHER: OnceLock<mpsc::SyncSender<Job>> = OnceLock::new();

/// Starts the thread from which [`spawn`] starts threads. Call it before the calling thread lowers
/// its priority. Idempotent.
///
/// # Errors
/// The thread cannot be spawned.
pub fn keep() -> io::Result<()> {
    if LAUNCHER.get().is_some() {
        return Ok(());
    }
    let (jobs, received) = mpsc::sync_channel::<Job>(1);
    Builder::new()
        .name("launcher".to_owned())
        .spawn(move || received.into_iter().for_each(|job| job()))?;
    // If another call was first, this thread ends with its channel.
    let _ = LAUNCHER.set(jobs);
    Ok(())
}

/// Spawns a thread of the trading path, with the initial priority of the process after [`keep`].
///
/// A thread inherits the priority of its parent, and only a privileged thread can raise it.
///
/// # Errors
/// The thread cannot be spawned.
pub fn spawn<T: Send + 'static>(
    name: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    let thread = Builder::new().name(name.to_owned());
    let Some(launcher) = LAUNCHER.get() else {
        return thread.spawn(work);
    };
    let (handle, spawned) = mpsc::sync_channel(1);
    let job: Job = Box::new(move || drop(handle.send(thread.spawn(work))));
    let ended = || io::Error::other("the launcher has ended");
    launcher.send(job).map_err(|_| ended())?;
    spawned.recv().map_err(|_| ended())?
}

/// Sets the nice value of the calling thread. Threads that it starts inherit it, except through
/// [`spawn`].
pub fn lower(nice: i32) {
    let thread = rustix::thread::gettid();
    if let Err(error) = rustix::process::setpriority_process(Some(thread), nice) {
        tracing::warn!(%error, "cannot lower the priority of a thread; it competes with the hot thread");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nice() -> i32 {
        rustix::process::getpriority_process(Some(rustix::thread::gettid())).expect("a nice value")
    }

    #[test]
    fn a_thread_of_the_trading_path_keeps_the_first_priority() {
        let first = nice();
        std::thread::spawn(move || {
            keep().expect("a launcher");
            lower(first + 1);
            let inherited = std::thread::spawn(nice).join().expect("a nice value");
            let kept = spawn("kept", nice).expect("a thread").join();
            let lowered = (first + 1).min(19);
            assert_eq!((inherited, kept.expect("a nice value")), (lowered, first));
        })
        .join()
        .expect("no failed assertion");
    }
}
