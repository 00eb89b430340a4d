//! Who goes first where threads are more than cores: the hot thread, the journal and the replica, then services, then
//! what writes checkpoints. The replica keeps up only as their equal: with a third of their share it fell seconds
//! behind under load, and the market waits for it.

/// Of the runtime that serves calls, with settlement, history and the stores: there are many of its threads, and
/// each has a thirtieth of the hot thread's share where that wants a whole core.
pub const SERVING: i32 = 15;
/// Of what writes checkpoints.
pub const WRITING_CHECKPOINTS: i32 = 19;

/// Lets threads of the default priority go before the calling one and before those that it starts.
pub fn lower(nice: i32) {
    let thread = rustix::thread::gettid();
    if let Err(error) = rustix::process::setpriority_process(Some(thread), nice) {
        tracing::warn!(%error, "a thread keeps the priority of the hot thread");
    }
}
