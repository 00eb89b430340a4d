//! Client transport for calls in process and over the network.
//!
//! `LedgerServiceClient::new(channel)` works with either. A local channel has the same access
//! layer, limits and metrics as a port, without a socket. It resolves at the first call, so
//! services can be wired in any order. A call before the slot is filled waits up to
//! [`FILL_WAIT_MS_MAX`], then fails with UNAVAILABLE.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Request, Response, header::AUTHORIZATION};
use tokio::sync::watch;
use tonic::{
    Status,
    body::Body,
    service::Routes,
    transport::{Endpoint, channel::Channel as Transport},
};
use tower::{Service, ServiceExt};

use crate::{Error, status};

/// Longest wait for an in-process service that is not wired yet, in milliseconds.
pub const FILL_WAIT_MS_MAX: u64 = 5_000;

/// Longest connection setup to a remote address, in milliseconds (D30).
pub const CONNECT_TIMEOUT_MS: u64 = 2_000;

/// Slot for the routes of a service in this process. Clones share the slot.
#[derive(Clone, Default)]
pub struct LocalSlot(watch::Sender<Wired>);

#[derive(Clone, Default)]
enum Wired {
    #[default]
    NotYet,
    Now(Routes),
    NoMore,
}

impl LocalSlot {
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the service callable: `slot.fill(rpc::with_auth(service.routes.clone(), &auth))`.
    pub fn fill(&self, routes_with_auth: Routes) {
        self.0.send_replace(Wired::Now(routes_with_auth.prepare()));
    }

    /// Removes the service; later calls fail with UNAVAILABLE at once. This breaks the cycle of
    /// services that hold each other's channels, so their stores close at shutdown.
    pub fn clear(&self) {
        self.0.send_replace(Wired::NoMore);
    }
}

/// A client transport: `LedgerServiceClient<rpc::Channel>`.
#[derive(Clone)]
pub struct Channel {
    target: Target,
    credential: HeaderValue,
}

#[derive(Clone)]
enum Target {
    Local(LocalSlot),
    Remote(Transport),
}

impl Channel {
    /// Calls the service in `slot`. Requests without a credential get this one (without `Bearer `).
    ///
    /// # Panics
    /// Bug: a credential that is not a header value.
    pub fn local(slot: &LocalSlot, credential: &str) -> Self {
        Channel {
            target: Target::Local(slot.clone()),
            credential: bearer(credential).expect("local credentials are ASCII constants"),
        }
    }

    /// Calls `uri` (`http://host:port`) over HTTP/2. Connects at the first call and reconnects
    /// after a failure.
    ///
    /// # Errors
    /// [`Error::Address`], [`Error::Credential`].
    pub fn remote(uri: &str, credential: &str) -> Result<Self, Error> {
        let endpoint = Endpoint::from_shared(uri.to_owned()).map_err(|error| Error::Address {
            uri: uri.to_owned(),
            reason: error.to_string(),
        })?;
        let endpoint = endpoint
            .connect_timeout(Duration::from_millis(CONNECT_TIMEOUT_MS))
            .http2_keep_alive_interval(Duration::from_secs(15))
            .keep_alive_timeout(Duration::from_secs(5))
            .tcp_nodelay(true);
        Ok(Channel {
            target: Target::Remote(endpoint.connect_lazy()),
            credential: bearer(credential)?,
        })
    }

    /// The same target with another credential.
    ///
    /// # Errors
    /// [`Error::Credential`].
    pub fn with_credential(&self, credential: &str) -> Result<Self, Error> {
        Ok(Channel {
            target: self.target.clone(),
            credential: bearer(credential)?,
        })
    }
}

fn bearer(credential: &str) -> Result<HeaderValue, Error> {
    let mut value =
        HeaderValue::try_from(format!("Bearer {credential}")).map_err(|_| Error::Credential)?;
    value.set_sensitive(true);
    Ok(value)
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = Status;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Status>> + Send>>;

    /// Always ready: a remote connection is awaited inside the call.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        request
            .headers_mut()
            .entry(AUTHORIZATION)
            .or_insert_with(|| self.credential.clone());
        match &self.target {
            Target::Local(slot) => {
                let mut slot = slot.0.subscribe();
                Box::pin(async move {
                    let wait = Duration::from_millis(FILL_WAIT_MS_MAX);
                    let path = request.uri().path().to_owned();
                    let away = || status::unavailable(service_of(&path), 1_000);
                    let wired = slot.wait_for(|wired| !matches!(wired, Wired::NotYet));
                    let routes = match tokio::time::timeout(wait, wired).await {
                        Ok(Ok(wired)) => match &*wired {
                            Wired::Now(routes) => routes.clone(),
                            Wired::NotYet | Wired::NoMore => return Err(away()),
                        },
                        _ => return Err(away()),
                    };
                    match routes.oneshot(request).await {
                        Ok(response) => Ok(response),
                        Err(never) => match never {},
                    }
                })
            }
            Target::Remote(transport) => {
                let transport = transport.clone();
                Box::pin(async move {
                    let path = request.uri().path().to_owned();
                    let answer = transport.oneshot(request).await;
                    answer.map_err(|error| failure(&error, &path))
                })
            }
        }
    }
}

/// Maps a transport failure to the caller's deadline or an unavailable service.
fn failure(error: &(dyn std::error::Error + 'static), path: &str) -> Status {
    let mut source = Some(error);
    while let Some(cause) = source {
        if cause.is::<tonic::TimeoutExpired>() {
            return Status::deadline_exceeded("Deadline exceeded");
        }
        source = cause.source();
    }
    tracing::warn!(error, path, "remote call failed");
    status::unavailable(service_of(path), 1_000)
}

/// `LedgerService` of `/dfa.ledger.v1.LedgerService/GetHold`.
fn service_of(path: &str) -> &str {
    let service = path.split('/').nth(1).unwrap_or_default();
    service.rsplit('.').next().unwrap_or(service)
}
