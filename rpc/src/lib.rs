//! Serving and calling of services.
//!
//! One port serves gRPC, gRPC-Web, Connect and the HTTP diagnostic reads ([`serve()`]). One client
//! transport works in process and over the network ([`Channel`]). One layer authenticates and
//! authorizes all of them ([`Authenticator`], [`roles`]). Connections and bodies of a port are
//! bounded ([`Limits`], [`connections`]), and so are the calls of each caller ([`rates`]). A
//! service can make a call of another one without its generated types ([`forward`]). Errors share
//! one vocabulary ([`status`], D23), requests one context ([`context`], D02), lists one paging
//! ([`page`], D04), audit records one form ([`audit`], D34).
//!
//! Architecture invariants: handlers are written once, against tonic. There is no business rule
//! here. Only `connect/` names the `connectrpc` crate.

pub mod access;
mod approved;
pub mod audit;
pub mod caller;
pub mod channel;
mod checked_body;
pub mod connect;
pub mod connections;
pub mod context;
pub mod contract;
mod drain;
pub mod forward;
mod guard;
pub mod health;
mod idle;
pub mod json;
pub mod logging;
pub mod metrics;
mod observe;
pub mod page;
pub mod rates;
pub mod roles;
pub mod serve;
pub mod status;

pub use access::{Authenticator, with_auth};
pub use approved::Approved;
pub use caller::{Caller, Role, Roles, caller};
pub use channel::{Channel, LocalSlot};
pub use connections::ConnectionBudget;
pub use context::Context;
pub use health::Health;
pub use metrics::{MetricsHandle, metrics_init};
pub use observe::{Trailers, time_left};
pub use rates::{CallRateConfig, CallRates, OverRate};
pub use serve::{Limits, Service, serve};

/// Largest accepted message, in bytes on the wire (D33).
pub const MESSAGE_BYTES_MAX: usize = 1024 * 1024;

/// Message limit of calls between services, and of a decompressed message.
///
/// Services limit their batches themselves.
pub const MESSAGE_BYTES_MAX_SERVICE: usize = 16 * MESSAGE_BYTES_MAX;

/// Deadline of a call without one, in milliseconds (D33).
pub const DEADLINE_MS_DEFAULT: u64 = 10_000;

/// Operational failures of this crate. A refused call is a `tonic::Status` instead.
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

/// Applies the common settings to a generated tonic server: message size (D33) and gzip in both
/// directions. The layer in front limits callers that are not services to [`MESSAGE_BYTES_MAX`].
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
