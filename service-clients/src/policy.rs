//! The policy of all calls between services (D30).
//!
//! | result of a call | becomes | repeated |
//! |---|---|---|
//! | timeout, no connection, or a transient code | [`CallError::Unavailable`] | yes |
//! | any other code | [`CallError::Refused`], the status as received | no |
//! | an unreadable message | [`CallError::Unreadable`] | no |
//!
//! Every attempt sends the same message, so a write is repeated under its idempotency key only.
//! Pauses double from [`Policy::initial_backoff`].

use std::time::Duration;

use async_recursion::async_recursion as boxed;
use proto::common::v1::{PaginationRequest, PaginationResponse, RequestContext};
use rpc::Context;
use service_kit::backoff::doubled;
use tonic::{Code, Request, Response, Status};

/// Rows per page of a list that is read completely.
const PAGE_SIZE: i32 = 1_000;
/// Retry delay in the answer to this service's caller if the called service is unavailable.
const RETRY_AFTER_MS: u64 = 1_000;

/// Result of a call.
pub type Answer<T> = Result<T, CallError>;

/// Limits of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Deadline of one attempt.
    pub call_timeout: Duration,
    /// Maximum number of attempts, the first one included.
    pub max_attempts: u32,
    /// Pause before the second attempt. It doubles before each further one.
    pub initial_backoff: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            call_timeout: Duration::from_millis(rpc::DEADLINE_MS_DEFAULT),
            max_attempts: 3,
            initial_backoff: Duration::from_millis(200),
        }
    }
}

impl Policy {
    /// One attempt, for callers with their own retries.
    pub fn once() -> Self {
        Self {
            max_attempts: 1,
            ..Self::default()
        }
    }
}

/// Error of a failed call.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CallError {
    /// Every attempt failed. The same call may succeed later.
    #[error("{service} is unavailable")]
    Unavailable {
        service: &'static str,
        reason: String,
    },
    /// The service has processed the request and refused it.
    #[error("{}", .0.message())]
    Refused(Status),
    #[error("{service} sent an unreadable answer: {what}")]
    Unreadable { service: &'static str, what: String },
}

impl CallError {
    pub fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unavailable { .. })
    }

    pub fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(status) if status.code() == Code::NotFound)
    }

    /// `ErrorInfo.reason` of a refusal.
    pub fn reason(&self) -> Option<String> {
        match self {
            Self::Refused(status) => rpc::status::reason(status),
            _ => None,
        }
    }

    /// Text for logs and health: the reason and the service's message.
    pub fn describe(&self) -> String {
        match self {
            Self::Unavailable { service, reason } => format!("{service} is unavailable: {reason}"),
            Self::Refused(status) => describe(status),
            Self::Unreadable { .. } => self.to_string(),
        }
    }
}

impl From<CallError> for Status {
    /// Passes a refusal through. A refusal of this service's own credential becomes an internal
    /// error, because it is an installation fault.
    fn from(error: CallError) -> Self {
        match error {
            CallError::Unavailable { service, .. } => {
                rpc::status::unavailable(service, RETRY_AFTER_MS)
            }
            CallError::Refused(status) => match status.code() {
                Code::Unauthenticated | Code::PermissionDenied => rpc::status::internal(&status),
                _ => status,
            },
            unreadable => rpc::status::internal(&unreadable),
        }
    }
}

fn describe(status: &Status) -> String {
    let reason = rpc::status::reason(status).unwrap_or_else(|| format!("{:?}", status.code()));
    format!("{reason}: {}", status.message())
}

/// True for a transient code: the service, its store or the network is down or overloaded.
fn is_unavailable(code: Code) -> bool {
    matches!(
        code,
        Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::Unknown
            | Code::Internal
            | Code::ResourceExhausted
            | Code::Aborted
    )
}

/// Context of a call that a stored operation or an event has caused.
pub fn caused_by(correlation_id: &str) -> Context {
    let mut context = Context::new("");
    if !correlation_id.is_empty() {
        correlation_id.clone_into(&mut context.correlation_id);
    }
    context
}

/// Turns the refusal `NOT_FOUND` into `None`.
pub(crate) fn not_found_as_none<T>(answer: Answer<T>) -> Answer<Option<T>> {
    match answer {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// Reads all pages of a list.
pub(crate) async fn all_pages<T, F>(
    mut read: impl FnMut(Option<PaginationRequest>) -> F,
) -> Answer<Vec<T>>
where
    F: Future<Output = Answer<(Vec<T>, Option<PaginationResponse>)>>,
{
    let mut rows = Vec::new();
    let mut page_token = String::new();
    loop {
        let page = PaginationRequest {
            page_size: PAGE_SIZE,
            page_token,
        };
        let (part, next) = read(Some(page)).await?;
        rows.extend(part);
        page_token = next.unwrap_or_default().next_page_token;
        if page_token.is_empty() {
            return Ok(rows);
        }
    }
}

/// State common to all clients.
#[derive(Clone)]
pub(crate) struct Peer<C> {
    pub client: C,
    /// Name of the called service, in errors.
    pub service: &'static str,
    /// Name of the calling service, in contexts.
    pub source: &'static str,
    pub policy: Policy,
}

impl<C: Clone> Peer<C> {
    /// Context of a read.
    pub fn context(&self, context: &Context) -> Option<RequestContext> {
        Some(context.child(self.source, "").to_proto())
    }

    pub fn malformed_response(&self, what: impl Into<String>) -> CallError {
        CallError::Unreadable {
            service: self.service,
            what: what.into(),
        }
    }

    /// Context of a write. It takes effect once per key.
    pub fn keyed(&self, context: &Context, key: &str) -> Option<RequestContext> {
        assert!(
            !key.is_empty(),
            "a write without an idempotency key must not be repeated"
        );
        Some(context.child(self.source, key).to_proto())
    }

    /// Like [`Peer::call`], for a call with an empty answer.
    pub async fn send<M, T, F>(&self, message: M, call: impl Fn(C, Request<M>) -> F) -> Answer<()>
    where
        M: Clone,
        F: Future<Output = Result<Response<T>, Status>>,
    {
        self.call(message, call).await.map(drop)
    }

    /// Sends the same message until it is answered, at most [`Policy::max_attempts`] times.
    pub async fn call<M, T, F>(&self, message: M, call: impl Fn(C, Request<M>) -> F) -> Answer<T>
    where
        M: Clone,
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let call_timeout = self.policy.call_timeout;
        let mut message = Some(message);
        let mut attempt = 1;
        loop {
            // The last attempt needs no copy.
            let sent = match attempt < self.policy.max_attempts {
                true => message.clone(),
                false => message.take(),
            };
            let mut request = Request::new(sent.expect("no attempt follows the last one"));
            request.set_timeout(call_timeout);
            let called = Box::pin(call(self.client.clone(), request));
            let status = match tokio::time::timeout(call_timeout, called).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                Ok(Err(status)) => status,
                Err(_) => Status::deadline_exceeded("no answer within the deadline"),
            };
            pause_after(attempt, self.service, &self.policy, status).await?;
            attempt += 1;
        }
    }
}

/// Waits before the next attempt of a call, or returns the error if there is none. Separate from
/// [`Peer::call`], which is compiled once per method.
#[boxed]
async fn pause_after(
    attempt: u32,
    service: &'static str,
    policy: &Policy,
    status: Status,
) -> Answer<()> {
    if !is_unavailable(status.code()) {
        return Err(CallError::Refused(status));
    }
    if attempt >= policy.max_attempts {
        let reason = describe(&status);
        tracing::warn!(
            service,
            reason,
            attempt,
            "service call failed after all attempts"
        );
        return Err(CallError::Unavailable { service, reason });
    }
    tokio::time::sleep(doubled(policy.initial_backoff, attempt - 1, Duration::MAX)).await;
    Ok(())
}

/// A closure that calls a method of the generated client: `call!(get_hold)`.
macro_rules! call {
    ($method:ident) => {
        |mut client, request| async move { client.$method(request).await }
    };
}
pub(crate) use call;

/// Defines a client type: `client!(LedgerClient, LedgerServiceClient, "Ledger service")`.
macro_rules! client {
    ($(#[$meta:meta])* $name:ident, $grpc:ident, $service:literal) => {
        $(#[$meta])*
        #[derive(Clone)]
        pub struct $name {
            peer: $crate::policy::Peer<$grpc<rpc::Channel>>,
        }

        impl $name {
            /// Name of the service, in errors.
            pub const SERVICE: &'static str = $service;

            /// A client that calls over `channel`. `source` is the calling service's name in every
            /// context.
            pub fn new(channel: rpc::Channel, source: &'static str) -> Self {
                let client = $grpc::new(channel)
                    .max_decoding_message_size(rpc::MESSAGE_BYTES_MAX_SERVICE)
                    .max_encoding_message_size(rpc::MESSAGE_BYTES_MAX_SERVICE);
                let (service, policy) = (Self::SERVICE, $crate::Policy::default());
                let peer = $crate::policy::Peer { client, service, source, policy };
                Self { peer }
            }

            /// The same client with another policy.
            #[must_use]
            pub fn with_policy(mut self, policy: $crate::Policy) -> Self {
                self.peer.policy = policy;
                self
            }
        }
    };
}
pub(crate) use client;
