//! Who goes first where threads are more than cores: the hot thread and the journal, then the replica
//! and services, then what writes checkpoints.

/// Of the replica and of the runtime that serves calls.
pub const SERVING: i32 = 5;
/// Of what writes checkpoints.
pub const WRITING_CHECKPOINTS: i32 = 10;

/// Lets threads of the default priority go before the calling one and before those that it starts.
pub fn lower(nice: i32) {
    let thread = rustix::thread::gettid();
    if let Err(error) = rustix::process::setpriority_process(Some(thread), nice) {
        tracing::warn!(%error, "a thread keeps the priority of the hot thread");
    }
}
