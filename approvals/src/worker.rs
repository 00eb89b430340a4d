//! Background work: ends undecided requests after their time, repeats approved calls.
//!
//! Sleeps until the next row is due or a decision wakes it. A failure is logged; the row stays due.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use tokio_util::sync::CancellationToken;

use crate::service::Approvals;

/// Maximum rows per read, and calls in flight.
const BATCH: i64 = 32;
/// Longest sleep, also when nothing is due.
const SLEEP_MS_MAX: u64 = 2_000;
/// Shortest sleep after work, so that a row that stays due does not spin.
const SLEEP_MS_MIN: u64 = 20;

pub async fn run(approvals: Arc<Approvals>, shutdown: CancellationToken) {
    loop {
        // Cancel-safe: an attempt is stored before its call, and the next start repeats it.
        let sleep = tokio::select! {
            () = shutdown.cancelled() => return,
            sleep = step(&approvals) => sleep,
        };
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = approvals.due.notified() => {}
            () = tokio::time::sleep(sleep) => {}
        }
    }
}

/// Works off what is due; returns the pause until the next row is.
async fn step(approvals: &Approvals) -> Duration {
    let now_us = approvals.clock.now_us();
    let expiring = approvals.store.expiring(now_us, BATCH).await;
    for id in log_store(approvals, expiring).unwrap_or_default() {
        if let Err(fault) = approvals.expire(&id).await {
            tracing::warn!(approval_id = id, %fault, "approval cannot expire; retrying later");
        }
    }
    let due = approvals.store.due(now_us, BATCH).await;
    let due = log_store(approvals, due).unwrap_or_default();
    join_all(due.iter().map(|id| attempt(approvals, id))).await;
    let next = approvals.store.next_us().await;
    let left_ms = log_store(approvals, next)
        .flatten()
        .map_or(SLEEP_MS_MAX, |due_us| {
            u64::try_from((due_us - approvals.clock.now_us()) / 1_000 + 1).unwrap_or(0)
        });
    Duration::from_millis(left_ms.clamp(SLEEP_MS_MIN, SLEEP_MS_MAX))
}

async fn attempt(approvals: &Approvals, approval_id: &str) {
    if let Err(fault) = approvals.execute(approval_id).await {
        tracing::warn!(approval_id, %fault, "approved call failed; retrying later");
    }
}

fn log_store<T>(approvals: &Approvals, result: sqlx::Result<T>) -> Option<T> {
    match result {
        Ok(value) => {
            approvals.health.set_ok("store");
            Some(value)
        }
        Err(error) => {
            tracing::error!(%error, "approvals store cannot be read; retrying");
            approvals.health.set_failing("store", "cannot be read");
            None
        }
    }
}
