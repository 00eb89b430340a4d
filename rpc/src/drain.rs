//! Reads the rest of HTTP/1.1 requests that are answered before their body has been read.
//!
//! hyper closes such a connection at once, and a client that is still sending gets a broken pipe
//! instead of the answer. So the rest of the body is read in the background, within limits. Then
//! the connection serves its next request. HTTP/2 does not need this.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::{body::Body, extract::Request};
use bytes::Bytes;
use http::Version;
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::BodyExt;

/// Maximum bytes read of an unwanted body.
const BYTES_MAX: usize = 4 * 1024 * 1024;
/// Maximum time for reading an unwanted body, in milliseconds.
const TIME_MS_MAX: u64 = 2_000;

pub(crate) async fn layer(request: Request) -> Request {
    if request.version() >= Version::HTTP_2 || request.body().is_end_stream() {
        return request;
    }
    request.map(|body| Body::new(Drained(Some(body))))
}

/// `None` once the body has ended.
struct Drained(Option<Body>);

impl http_body::Body for Drained {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = &mut self.0 else {
            return Poll::Ready(None);
        };
        let polled = Pin::new(body).poll_frame(context);
        if matches!(polled, Poll::Ready(None | Some(Err(_)))) {
            self.0 = None;
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.0.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.0.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

impl Drop for Drained {
    fn drop(&mut self) {
        let Some(body) = self.0.take() else {
            return;
        };
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(tokio::time::timeout(
                Duration::from_millis(TIME_MS_MAX),
                read_rest(body),
            ));
        }
    }
}

async fn read_rest(mut body: Body) {
    let mut left = BYTES_MAX;
    while let Some(Ok(frame)) = body.frame().await {
        let read = frame.data_ref().map_or(0, Bytes::len);
        let Some(rest) = left.checked_sub(read) else {
            return;
        };
        left = rest;
    }
}
