//! A double of the event log, and a latch for releases in the ledger.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use events::Log;
use tokio::sync::{Semaphore, watch};
use tonic::service::Routes;

/// An event log that refuses events while it is unavailable.
pub struct UnavailableLog {
    pub log: Arc<dyn Log>,
    pub is_unavailable: Arc<AtomicBool>,
    /// While unavailable, `publish` blocks like a Kafka client instead of returning an error.
    pub hangs: bool,
}

impl UnavailableLog {
    fn check(&self) -> Result<(), events::Error> {
        match self.is_unavailable.load(Ordering::SeqCst) {
            true => Err(events::Error::Closed),
            false => Ok(()),
        }
    }
}

#[tonic::async_trait]
impl Log for UnavailableLog {
    async fn publish(&self, events: &[events::Event]) -> Result<(), events::Error> {
        while self.hangs && self.is_unavailable.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        self.check()?;
        self.log.publish(events).await
    }

    async fn append(&self, records: &[events::Record]) -> Result<(), events::Error> {
        self.check()?;
        self.log.append(records).await
    }

    async fn subscribe(
        &self,
        group: &str,
        topics: &[&str],
    ) -> Result<events::Subscription, events::Error> {
        self.log.subscribe(group, topics).await
    }

    async fn backlog(
        &self,
        group: &str,
        topics: &[&str],
    ) -> Result<Vec<events::Delivery>, events::Error> {
        self.log.backlog(group, topics).await
    }

    async fn commit(&self, group: &str, position: &events::Position) -> Result<(), events::Error> {
        self.log.commit(group, position).await
    }

    fn failing(&self) -> watch::Receiver<Option<String>> {
        self.log.failing()
    }

    fn waiting(&self) -> &events::Waiting {
        self.log.waiting()
    }
}

/// Delays the release of one hold in the ledger. Clones share the state.
#[derive(Clone, Default)]
pub struct ReleaseLatch {
    /// The hold, and the semaphore that its releases wait for. It has no permits.
    blocked: Arc<Mutex<Option<(String, Arc<Semaphore>)>>>,
    /// Number of calls that waited or wait.
    calls: Arc<AtomicU32>,
}

impl ReleaseLatch {
    /// Delays the releases of a hold until the returned semaphore is closed.
    pub fn block(&self, hold_id: &str) -> Arc<Semaphore> {
        let opened = Arc::new(Semaphore::new(0));
        *self.blocked.lock().unwrap() = Some((hold_id.to_owned(), opened.clone()));
        opened
    }

    /// Number of calls that were delayed.
    pub fn calls(&self) -> u32 {
        self.calls.load(Ordering::SeqCst)
    }

    /// The ledger's routes after this latch.
    pub fn before(&self, routes: Routes) -> Routes {
        let layer = from_fn_with_state(self.clone(), delay);
        Routes::from(routes.into_axum_router().layer(layer))
    }

    /// What a release with this body waits for.
    fn of(&self, body: &[u8]) -> Option<Arc<Semaphore>> {
        let blocked = self.blocked.lock().unwrap();
        let (hold_id, opened) = blocked.as_ref()?;
        let mut texts = body.windows(hold_id.len());
        let is_of_hold = texts.any(|text| text == hold_id.as_bytes());
        is_of_hold.then(|| opened.clone())
    }
}

async fn delay(State(latch): State<ReleaseLatch>, request: Request, next: Next) -> Response {
    if !request.uri().path().ends_with("/ReleaseHold") {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    if let Some(opened) = latch.of(&body) {
        latch.calls.fetch_add(1, Ordering::SeqCst);
        drop(opened.acquire().await);
    }
    next.run(Request::from_parts(parts, Body::from(body))).await
}
