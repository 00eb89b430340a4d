//! Thread priorities where threads outnumber cores.
//!
//! First the hot thread, the journal and the replica, then services, then checkpoint writers. The
//! replica keeps up only at equal priority: with a third of the others' share it fell seconds
//! behind under load, and the market waits for it.

/// Nice value of the runtime that serves calls, settlement, history and the stores. It has many
/// threads, and each has a thirtieth of the hot thread's share where that wants a whole core.
pub const SERVING: i32 = 15;
/// Nice value of checkpoint writers.
pub const WRITING_CHECKPOINTS: i32 = 19;

/// Sets the nice value of the calling thread and of those that it starts.
pub fn lower(nice: i32) {
    let thread = rustix::thread::gettid();
    if let Err(error) = rustix::process::setpriority_process(Some(thread), nice) {
        tracing::warn!(%error, "thread priority not lowered: it competes with the hot thread");
    }
}
