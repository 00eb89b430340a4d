//! Thread priorities where threads outnumber cores.
//!
//! First the hot thread, the journal and the replica, then services and checkpoint writers. The
//! replica keeps up only at equal priority: with a third of the others' share it fell seconds
//! behind under load, and the market waits for it.

use std::io;
use std::sync::{OnceLock, mpsc};
use std::thread::{Builder, JoinHandle};

/// Nice value of the threads that serve calls, settlement, history and the stores. There are many,
/// and each has a seventieth of the hot thread's share where that wants a whole core.
pub const SERVING: i32 = 19;
/// Nice value of checkpoint writers.
pub const WRITING_CHECKPOINTS: i32 = 19;

type Job = Box<dyn FnOnce() + Send>;

/// Jobs of the thread that keeps the process's first priority.
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
    // A second one would end with its channel.
    let _ = LAUNCHER.set(jobs);
    Ok(())
}

/// Spawns a thread of the trading path: with the priority that the process began with, after
/// [`keep`], from whichever thread it is called. A thread has the priority of its parent, and only
/// a privileged one can raise it.
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

/// Sets the nice value of the calling thread and of those that it starts, except by [`spawn`].
pub fn lower(nice: i32) {
    let thread = rustix::thread::gettid();
    if let Err(error) = rustix::process::setpriority_process(Some(thread), nice) {
        tracing::warn!(%error, "thread priority not lowered: it competes with the hot thread");
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
