//! Per-RPC processing: log span and access line, deadline, message limit, metrics.
//!
//! Calls of all protocols and in-process calls arrive here as gRPC, so each call is counted once,
//! with the handler's code. The span has `service_name`, `method`, and, once the handler reads its
//! context, `correlation_id`, `user_id` and `trace_id` (R259, R260).

use std::{
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context as Poller, Poll},
    time::Duration,
};

use axum::{
    body::Body,
    extract::{OriginalUri, Request, State},
    middleware::Next,
    response::Response,
};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body::Frame;
use tokio::time::{Instant, Sleep};
use tonic::{Code, Status};
use tracing::{Instrument, Span, field::Empty};

use crate::{
    Caller, Context, DEADLINE_MS_DEFAULT, MESSAGE_BYTES_MAX_SERVICE, Role,
    checked_body::CheckedBody, contract::Contract, guard, roles,
};

/// Counter of finished RPCs, labels `method` and `code`.
pub const REQUESTS: &str = "rpc_requests_total";
/// Histogram of RPC durations in seconds, label `method`.
pub const DURATION: &str = "rpc_duration_seconds";

/// Header with the correlation id of HTTP reads and of RPCs without a context.
pub const CORRELATION_HEADER: &str = "x-correlation-id";

/// Trailing metadata of an answer, which tonic does not support. Put it into the extensions of a
/// `tonic::Response`.
#[derive(Clone, Debug, Default)]
pub struct Trailers(pub HeaderMap);

#[derive(Clone)]
struct Scope {
    span: Span,
    correlation_id: Option<String>,
    /// `None` for an HTTP read.
    deadline: Option<Instant>,
}

tokio::task_local! {
    static SCOPE: Scope;
}

pub(crate) fn header_correlation_id() -> Option<String> {
    SCOPE
        .try_with(|scope| scope.correlation_id.clone())
        .ok()
        .flatten()
}

/// Time until the deadline of the RPC whose handler runs in this task. `None` outside of an RPC, as
/// in a sweep.
///
/// A handler that waits answers before its deadline: at the deadline it is dropped, and its caller
/// gets `DEADLINE_EXCEEDED` for what may have taken effect.
pub fn time_left() -> Option<Duration> {
    let deadline = SCOPE.try_with(|scope| scope.deadline).ok().flatten();
    deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
}

pub(crate) fn record_context(context: &Context) {
    let _ = SCOPE.try_with(|scope| {
        scope
            .span
            .record("correlation_id", &*context.correlation_id);
        scope.span.record("trace_id", &*context.trace_id);
        if !context.user_id.is_empty() {
            scope.span.record("user_id", &*context.user_id);
        }
    });
}

/// Runs an HTTP read of a service in a span with the fields of an RPC's span.
pub(crate) async fn observe_http(
    State(service): State<&'static str>,
    request: Request,
    next: Next,
) -> Response {
    // Inside a nested router the request's own path lacks the prefix.
    let original = request.extensions().get::<OriginalUri>();
    let path = original.map_or_else(|| request.uri().path(), |uri| uri.0.path());
    let path = path.to_owned();
    let scope = scope_of(service, &path, &request);
    let span = scope.span.clone();
    SCOPE.scope(scope, next.run(request)).instrument(span).await
}

/// Runs an RPC that arrived as gRPC.
pub(crate) async fn observe(
    State(bounds): State<Bounds>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path().to_owned();
    let method = label(&path);
    let started = Instant::now();
    let asked = timeout_of(request.headers());
    let first = asked.unwrap_or(Duration::from_millis(DEADLINE_MS_DEFAULT));
    let scope = Scope {
        deadline: started.checked_add(first),
        ..scope_of(service_of(&path), method, &request)
    };
    let call = Call {
        method,
        span: scope.span.clone(),
        started,
        finished: false,
    };
    let single = bounds
        .contract
        .method(&path)
        .is_some_and(|method| !method.client_streaming);
    let trusted = request
        .extensions()
        .get::<Caller>()
        .is_some_and(|caller| caller.roles.contains(Role::Service));
    let bytes_max = if trusted {
        MESSAGE_BYTES_MAX_SERVICE
    } else {
        bounds.message_bytes_max
    };
    let request = request.map(|body| Body::new(CheckedBody::new(body, bytes_max, single)));
    let handler = SCOPE
        .scope(scope, next.run(request))
        .instrument(call.span.clone());
    // In addition to the port's guard: in-process calls pass only here, and the call must be
    // counted.
    let handler = guard::caught(method, handler);
    let response = match tokio::time::timeout(first, handler).await {
        Ok(Ok(response)) => response,
        Ok(Err(panicked)) => panicked.into_http(),
        Err(_) => Status::deadline_exceeded("Deadline exceeded").into_http(),
    };
    watch(response, call, asked)
}

/// Counts a call that ended before it reached a handler.
pub(crate) fn count(path: &str, status: &Status) {
    let (method, code) = (label(path), code_name(status.code()));
    ::metrics::counter!(REQUESTS, "method" => method, "code" => code).increment(1);
}

/// Counts and logs a call that was refused before it reached a handler.
pub(crate) fn refused(path: &str, status: &Status) {
    count(path, status);
    tracing::warn!(
        service_name = service_of(path),
        method = label(path),
        code = code_name(status.code()),
        reason = status.message(),
        "call refused"
    );
}

fn scope_of(service: &str, method: &str, request: &Request) -> Scope {
    let span = tracing::info_span!(
        "request",
        service_name = service,
        method,
        correlation_id = Empty,
        user_id = Empty,
        trace_id = Empty
    );
    if let Some(user) = request
        .extensions()
        .get::<Caller>()
        .and_then(|c| c.user_id.as_ref())
    {
        span.record("user_id", &**user);
    }
    let correlation_id = request
        .headers()
        .get(CORRELATION_HEADER)
        .and_then(|value| value.to_str().ok())
        .filter(|id| !id.is_empty() && id.len() <= proto::checks::CONTEXT_ID_BYTES_MAX)
        .map(str::to_owned);
    if let Some(id) = &correlation_id {
        span.record("correlation_id", &**id);
    }
    Scope {
        span,
        correlation_id,
        deadline: None,
    }
}

/// The path as a metrics label. Paths outside the contract share one label, so clients cannot grow
/// the registry.
pub(crate) fn label(path: &str) -> &'static str {
    static LABELS: OnceLock<std::collections::HashSet<&'static str>> = OnceLock::new();
    let labels = LABELS.get_or_init(|| {
        Contract::platform()
            .paths()
            .map(|path| &*Box::leak(path.to_owned().into_boxed_str()))
            .collect()
    });
    labels.get(path).copied().unwrap_or("other")
}

/// `ledger` of `/dfa.ledger.v1.LedgerService/GetHold`; `rpc` for any other path.
fn service_of(path: &str) -> &str {
    match roles::is_rpc_path(path) {
        true => path.split('.').nth(1).unwrap_or("rpc"),
        false => "rpc",
    }
}

/// Parses `grpc-timeout`: at most 8 digits and a unit. Anything else is ignored; the default
/// deadline applies.
fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 {
        return None;
    }
    let amount: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(amount * 3600),
        "M" => Duration::from_secs(amount * 60),
        "S" => Duration::from_secs(amount),
        "m" => Duration::from_millis(amount),
        "u" => Duration::from_micros(amount),
        "n" => Duration::from_nanos(amount),
        _ => return None,
    })
}

/// One running call. Its code is reported once, as `canceled` if it is dropped before its end.
struct Call {
    method: &'static str,
    span: Span,
    started: Instant,
    finished: bool,
}

impl Call {
    fn finish(&mut self, code: Code) {
        if std::mem::replace(&mut self.finished, true) {
            return;
        }
        let elapsed = self.started.elapsed();
        let code = code_name(code);
        ::metrics::counter!(REQUESTS, "method" => self.method, "code" => code).increment(1);
        ::metrics::histogram!(DURATION, "method" => self.method).record(elapsed.as_secs_f64());
        let elapsed_us = elapsed.as_micros() as u64;
        self.span
            .in_scope(|| tracing::info!(code, elapsed_us, "call"));
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.finish(Code::Cancelled);
    }
}

fn code_of(headers: &HeaderMap) -> Option<Code> {
    headers
        .get("grpc-status")
        .map(|value| Code::from_bytes(value.as_bytes()))
}

fn watch(mut response: Response, mut call: Call, asked: Option<Duration>) -> Response {
    if let Some(code) = code_of(response.headers()) {
        call.finish(code);
        return response;
    }
    let trailers = response.extensions_mut().remove::<Trailers>();
    let deadline = asked.map(|asked| Box::pin(tokio::time::sleep_until(call.started + asked)));
    response.map(|body| {
        Body::new(WatchedBody {
            body,
            call,
            deadline,
            trailers,
        })
    })
}

/// Response body that reads the code from the trailers and ends a stream at its deadline.
struct WatchedBody {
    body: Body,
    call: Call,
    deadline: Option<Pin<Box<Sleep>>>,
    trailers: Option<Trailers>,
}

impl http_body::Body for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        poller: &mut Poller<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if this.call.finished {
            return Poll::Ready(None);
        }
        let span = this.call.span.clone();
        let polled = span.in_scope(|| Pin::new(&mut this.body).poll_frame(poller));
        let polled = polled.map_ok(|frame| match frame.into_trailers() {
            Ok(mut trailers) => {
                trailers.extend(this.trailers.take().unwrap_or_default().0);
                Frame::trailers(trailers)
            }
            Err(frame) => frame,
        });
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(trailers) = frame.trailers_ref() {
                    this.call.finish(code_of(trailers).unwrap_or(Code::Unknown));
                }
            }
            Poll::Ready(Some(Err(_))) => this.call.finish(Code::Unknown),
            Poll::Ready(None) => this.call.finish(Code::Ok),
            Poll::Pending => {
                let due = this
                    .deadline
                    .as_mut()
                    .is_some_and(|deadline| deadline.as_mut().poll(poller).is_ready());
                if due {
                    this.call.finish(Code::DeadlineExceeded);
                    let mut trailers = HeaderMap::new();
                    trailers.insert("grpc-status", HeaderValue::from_static("4"));
                    trailers.insert(
                        "grpc-message",
                        HeaderValue::from_static("Deadline exceeded"),
                    );
                    return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                }
            }
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.call.finished
    }
}

/// Limits of request bodies.
#[derive(Clone)]
pub(crate) struct Bounds {
    pub contract: Arc<Contract>,
    pub message_bytes_max: usize,
}

/// Connect's spelling of a code.
pub(crate) const fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "ok",
        Code::Cancelled => "canceled",
        Code::Unknown => "unknown",
        Code::InvalidArgument => "invalid_argument",
        Code::DeadlineExceeded => "deadline_exceeded",
        Code::NotFound => "not_found",
        Code::AlreadyExists => "already_exists",
        Code::PermissionDenied => "permission_denied",
        Code::ResourceExhausted => "resource_exhausted",
        Code::FailedPrecondition => "failed_precondition",
        Code::Aborted => "aborted",
        Code::OutOfRange => "out_of_range",
        Code::Unimplemented => "unimplemented",
        Code::Internal => "internal",
        Code::Unavailable => "unavailable",
        Code::DataLoss => "data_loss",
        Code::Unauthenticated => "unauthenticated",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grpc_timeouts_parse_and_nonsense_is_ignored() {
        let parse = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("grpc-timeout", text.parse().unwrap());
            timeout_of(&headers)
        };
        assert_eq!(parse("250m"), Some(Duration::from_millis(250)));
        assert_eq!(
            parse("99999999H"),
            Some(Duration::from_secs(99_999_999 * 3600))
        );
        for bad in ["", "m", "123456789m", "5x", "-1S"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn labels_are_the_contract_and_other() {
        assert_eq!(label("/anything/else"), "other");
        let known = "/dfa.ledger.v1.LedgerService/GetHold";
        assert_eq!(label(known), known);
        assert_eq!(service_of(known), "ledger");
        // An id in a path may contain dots.
        assert_eq!(service_of("/payouts/a.b"), "rpc");
    }
}
