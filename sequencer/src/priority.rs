//! Who goes first where threads are more than cores: the hot thread and the journal, then the replica,
//! then services, then what writes checkpoints.

use thread_priority::{
    NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy,
    set_thread_priority_and_policy, thread_native_id,
};

/// Of the replica, which the market waits for.
pub const FOLLOWING: i32 = 5;
/// Of the runtime that serves calls, with settlement, history and the stores: there are many of its threads, and
/// each has a thirtieth of the hot thread's share where that wants a whole core.
pub const SERVING: i32 = 15;
/// Of what writes checkpoints.
pub const WRITING_CHECKPOINTS: i32 = 19;

/// Lets threads of the default priority go before the calling one and before those that it starts. One of
/// [`SERVING`] or less takes no core from a thread that runs when it wakes: it waits for that one's slice to end.
pub fn lower(nice: i32) {
    if nice >= SERVING {
        let batch = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Batch);
        if let Err(error) =
            set_thread_priority_and_policy(thread_native_id(), ThreadPriority::Min, batch)
        {
            tracing::warn!(%error, "a thread that serves may interrupt the hot thread");
        }
    }
    let thread = rustix::thread::gettid();
    if let Err(error) = rustix::process::setpriority_process(Some(thread), nice) {
        tracing::warn!(%error, "a thread keeps the priority of the hot thread");
    }
}
