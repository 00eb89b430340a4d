//! The market service. Trading sessions over QUIC and MarketService over RPC share one trading
//! path. The queryable history and the market event feed follow the journal.
//!
//! ```text
//! QUIC session --> front ==ring==+==> hot thread ==> reports (from memory, at the commit position)
//! MarketService --> checks ------+        |
//!             (identity, ledger holds)    +--> journal --> replica --+--> projection --> history
//!                                                                    +--> feed --> market events
//!                                                                    +--> reads, old messages
//! ```
//!
//! Architecture invariants: the gateway touches no order book and no other service's tables. Final
//! messages to clients derive from the journal at the commit position; hints are provisional. Money
//! is blocked in the ledger before an order reaches a book. Prost types appear under `api` and
//! where events are read and written (`api/consumers`, `feed/publish`), SQL in `projection/repo`
//! and `acts/repo`.
//!
//! | file | contents |
//! |---|---|
//! | `start`, `config`, `guard` | assembly, settings, health and restart of the tasks |
//! | `market` | state shared by the modules |
//! | `api` | MarketService, book views (`depth`), diagnostic reads, event consumers (`consumers`) |
//! | `clock` | ConfirmClock |
//! | `acts` | audit records of what callers set |
//! | `orders` | calls over RPC: place, cancel, amend, mass cancel, kill switch, member bounds |
//! | `funding`, `sweeper` | trading holds; reconciliation of ledger holds with the journal |
//! | `front` | trading sessions, on a polled thread |
//! | `budget` | each user's remaining daily budget and KYC level for session orders |
//! | `idle_sessions` | forgets sessions that were closed long ago |
//! | `resend_source` | session messages older than the window, rebuilt from the journal |
//! | `dispatch` | health and gauges of the trading path and the replica |
//! | `projection` | the history, written from the replica |
//! | `feed` | market events, published from the replica |
//! | `instruments` | import of the instrument registry into the journal; trading phases |
//! | `retry` | back-off while a store or the log is unavailable |
//! | `identity` | permission to trade and daily limit, with a profile cache |
//! | `refusal` | RPC errors of refusals |

mod acts;
mod api;
mod budget;
mod clock;
mod config;
mod dispatch;
mod feed;
mod front;
mod funding;
mod guard;
mod identity;
mod idle_sessions;
mod instruments;
mod market;
mod orders;
pub mod projection;
mod refusal;
mod request_retention;
mod resend_source;
mod retry;
mod start;
mod sweeper;

use api::consumers;

pub use acts::{sealed_store, verify_audit};
pub use config::GatewayConfig;
pub use front::report::message as session_message;
pub use identity::LimitBasis;
pub use projection::verify::{HistoryCheck, verify_history};
pub use start::{GatewayDeps, GatewayHandle, published_through, start};

/// Operational failures of the gateway. A refused call or request is never one of these.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("invalid node number {0}")]
    Node(u8),
    #[error("store: {0}")]
    Events(#[from] events::Error),
    #[error("store: {0}")]
    Store(#[from] sqlx::Error),
    #[error("the store contains invalid data: {0}")]
    Stored(String),
    #[error("journal: {0}")]
    Replica(#[from] replica::ReplicaError),
    #[error("trading path: {0}")]
    Start(String),
    #[error("instrument registry: {0}")]
    Registry(#[source] tonic::Status),
    #[error("the trading path refused the gateway's own request: {0}")]
    Refused(String),
    #[error("settings: {0}")]
    Settings(String),
    #[error("files and sockets: {0}")]
    Files(#[from] std::io::Error),
    #[error("certificate: {0}")]
    Tls(String),
}

impl Error {
    /// True when the store or the log is unavailable, so that a retry may succeed.
    fn is_away(&self) -> bool {
        match self {
            Error::Events(error) => error.is_away(),
            Error::Store(error) => events::is_away(error),
            _ => false,
        }
    }
}
