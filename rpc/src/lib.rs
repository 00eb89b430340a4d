//! How services are served and called.
//!
//! One port speaks gRPC, gRPC-Web, Connect and the HTTP diagnostic reads ([`serve()`]); one kind of
//! client works in process and over the network ([`Channel`]); one layer answers "who is calling,
//! and may he" for all of them ([`Authenticator`], [`roles`]). What a port takes is bounded
//! ([`Limits`], [`connections`]). Errors have one vocabulary ([`status`], D23), requests one
//! context ([`context`], D02), lists one paging ([`page`], D04).
//!
//! Architecture invariants: handlers are written once, against tonic; nothing here knows a business
//! rule; the `connectrpc` crate is named only under `connect/`.

pub mod access;
pub mod caller;
pub mod channel;
mod checked_body;
pub mod connect;
pub mod connections;
pub mod context;
pub mod contract;
mod drain;
mod guard;
pub mod health;
mod idle;
pub mod json;
pub mod logging;
pub mod metrics;
mod observe;
pub mod page;
pub mod roles;
pub mod serve;
pub mod status;

pub use access::{Authenticator, with_auth};
pub use caller::{Caller, Role, Roles, caller};
pub use channel::{Channel, LocalSlot};
pub use connections::Connections;
pub use context::Context;
pub use health::Health;
pub use metrics::{MetricsHandle, metrics_init};
pub use observe::Trailers;
pub use serve::{Limits, Service, serve};

/// Largest message a service accepts, in bytes on the wire (D33).
pub const MESSAGE_BYTES_MAX: usize = 1024 * 1024;

/// The same for calls of one service to another, whose batches are bounded by their own rules; also
/// what a compressed message may unpack to.
pub const MESSAGE_BYTES_MAX_SERVICE: usize = 16 * MESSAGE_BYTES_MAX;

/// Deadline of a call that names none, in milliseconds (D33).
pub const DEADLINE_MS_DEFAULT: u64 = 10_000;

/// Operational failures of this room. A refused call is never one of these: it is a `tonic::Status`.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("not a usable address: {uri}: {reason}")]
    Address { uri: String, reason: String },
    #[error("credential is not a header value")]
    Credential,
    #[error("listener failed: {0}")]
    Listener(#[from] std::io::Error),
    #[error("reflection service cannot be built: {0}")]
    Reflection(String),
    #[error("metrics recorder cannot be installed: {0}")]
    Metrics(String),
    #[error("logging cannot be installed: {0}")]
    Logging(String),
}

/// Applies the limits every service shares to a generated tonic server: message size (D33; the
/// layer in front holds other callers to [`MESSAGE_BYTES_MAX`]) and gzip in both directions.
///
/// ```text
/// let server = rpc::grpc_server!(LedgerServiceServer::from_arc(api));
/// ```
#[macro_export]
macro_rules! grpc_server {
    ($server:expr) => {
        $server
            .max_decoding_message_size($crate::MESSAGE_BYTES_MAX_SERVICE)
            .accept_compressed($crate::CompressionEncoding::Gzip)
            .send_compressed($crate::CompressionEncoding::Gzip)
    };
}

#[doc(hidden)]
pub use tonic::codec::CompressionEncoding;
