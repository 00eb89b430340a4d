//! Expiry of connections without a first request in time, or idle for too long between requests.
//!
//! A request lasts from its head to the end of its answer, so a stream in progress keeps its
//! connection.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::Instant;

use crate::Limits;

/// Requests of one connection. Clones refer to the same one.
#[derive(Clone)]
pub(crate) struct Activity(Arc<Mutex<Requests>>);

struct Requests {
    running: usize,
    is_new: bool,
    /// Time of the accept or of the last request's end.
    quiet_since: Instant,
}

impl Activity {
    pub(crate) fn new() -> Self {
        Activity(Arc::new(Mutex::new(Requests {
            running: 0,
            is_new: true,
            quiet_since: Instant::now(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Requests> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a request, which lasts until the returned guard is dropped.
    pub(crate) fn begin(&self) -> Running {
        let mut requests = self.lock();
        requests.running += 1;
        requests.is_new = false;
        Running(self.clone())
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.lock().running == 0
    }

    /// Returns once the connection has expired.
    pub(crate) async fn expired(&self, limits: &Limits) {
        loop {
            let due = {
                let requests = self.lock();
                match (requests.running, requests.is_new) {
                    (0, true) => requests.quiet_since + limits.first_request,
                    (0, false) => requests.quiet_since + limits.idle,
                    // Earliest possible expiry, even if the request ends now.
                    _ => Instant::now() + limits.idle,
                }
            };
            let now = Instant::now();
            if due <= now {
                return;
            }
            // A request in the meantime changes the expiry: check again.
            tokio::time::sleep_until(due.min(now + limits.idle)).await;
        }
    }
}

/// A request without a complete answer.
pub(crate) struct Running(Activity);

impl Drop for Running {
    fn drop(&mut self) {
        let mut requests = self.0.lock();
        requests.running -= 1;
        requests.quiet_since = Instant::now();
    }
}

/// The body of an answer, which keeps its request running.
pub(crate) struct Answer {
    pub body: Body,
    pub _running: Running,
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
