//! Layer in front of access control: time limits for the body and for an HTTP read, and a status
//! instead of a panic. Refusals use the protocol of the request.

use std::{any::Any, future::Future, panic::AssertUnwindSafe, pin::Pin, task, time::Duration};

use axum::{
    body::Body,
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::FutureExt;
use http_body::{Body as _, Frame, SizeHint};
use tokio::sync::oneshot;
use tonic::Status;

use crate::{Limits, connect, contract::Contract, json::HttpError, observe, roles};

/// Counter of handlers that panicked, label `method`.
pub const PANICS: &str = "rpc_panics_total";

pub(crate) async fn layer(State(limits): State<Limits>, request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let headers = request.headers().clone();
    let is_rpc = roles::is_rpc_path(&path);
    let (request, arrival) = match streams_requests(&path) {
        true => (request, None),
        false => watched(request),
    };
    let late = async {
        match arrival {
            Some(arrival) => body_is_late(arrival, limits.body).await,
            None => std::future::pending().await,
        }
    };
    // RPCs have deadlines of their own.
    let slow = async {
        match is_rpc {
            true => std::future::pending().await,
            false => tokio::time::sleep(limits.http).await,
        }
    };
    let refused = tokio::select! {
        answer = caught(&path, next.run(request)) => match answer {
            Ok(response) => return response,
            Err(status) => status,
        },
        () = late => Status::deadline_exceeded("The request body did not arrive in time"),
        () = slow => Status::deadline_exceeded("Deadline exceeded"),
    };
    observe::refused(&path, &refused);
    match is_rpc {
        true => connect::refusal(&method, &headers, refused),
        false => HttpError::from(refused).into_response(),
    }
}

/// Runs a handler. A panic becomes an internal error, is counted and logged.
pub(crate) async fn caught<F: Future>(method: &str, handler: F) -> Result<F::Output, Status> {
    // Unwind safe: shared handler state is behind locks that survive a panic or fail the next call.
    let ended = AssertUnwindSafe(handler).catch_unwind().await;
    ended.map_err(|panic| {
        ::metrics::counter!(PANICS, "method" => observe::label(method)).increment(1);
        tracing::error!(method, reason = reason_of(&*panic), "handler panicked");
        Status::internal("Internal error")
    })
}

fn reason_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("no text")
}

/// Methods whose requests may arrive during the whole call.
fn streams_requests(path: &str) -> bool {
    let contract = Contract::platform();
    let method = contract.method(path);
    method.is_some_and(|method| method.client_streaming) || path.starts_with("/grpc.reflection.")
}

/// Wraps the body to signal its end; `None` for a request without a body.
fn watched(request: Request) -> (Request, Option<oneshot::Receiver<()>>) {
    if request.body().is_end_stream() {
        return (request, None);
    }
    let (ended, arrival) = oneshot::channel();
    let request = request.map(|body| {
        Body::new(Watched {
            body,
            ended: Some(ended),
        })
    });
    (request, Some(arrival))
}

/// Returns once the limit has passed and the body is still incomplete.
async fn body_is_late(arrival: oneshot::Receiver<()>, limit: Duration) {
    if tokio::time::timeout(limit, arrival).await.is_ok() {
        std::future::pending().await
    }
}

struct Watched {
    body: Body,
    /// Dropped at the end of the body, or with the body.
    ended: Option<oneshot::Sender<()>>,
}

impl http_body::Body for Watched {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut task::Context<'_>,
    ) -> task::Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let polled = Pin::new(&mut self.body).poll_frame(context);
        if matches!(polled, task::Poll::Ready(None | Some(Err(_)))) || self.body.is_end_stream() {
            self.ended = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
