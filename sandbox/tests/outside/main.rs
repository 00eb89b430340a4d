//! The sandboxes at their boundaries: identity over RPC, HTTP and events; the bank over HTTP.

mod bank;
mod bounds;
mod identity;

/// Panics if `work` takes longer than [`testkit::PATIENCE`].
async fn in_time<T>(what: &str, work: impl Future<Output = T>) -> T {
    tokio::time::timeout(testkit::PATIENCE, work)
        .await
        .unwrap_or_else(|_| panic!("not in time: {what}"))
}
