//! Room `gateway`: the market service. Trading sessions over QUIC and MarketService over RPC in front
//! of one trading path; the queryable history and the market event feed that follow the journal.
//!
//! ```text
//! QUIC session --> front ==ring==+==> hot thread ==> reports (from memory, at the commit position)
//! MarketService --> checks ------+        |
//!             (identity, ledger holds)    +--> journal --> replica --+--> projection --> orders, trades
//!                                                                    +--> feed --> market events
//!                                                                    +--> reads, resends of old messages
//! ```
//!
//! Architecture invariants: the gateway never touches a book and no other room's tables; what a client is told
//! for good derives from the journal at the commit position, hints excepted; money is blocked in the ledger
//! before an order can reach a book. Prost types appear under `api` and where events are read and written
//! (`api/consumers`, `feed/publish`); SQL in `projection/repo`.
//!
//! | file | what |
//! |---|---|
//! | `start`, `config`, `guard` | putting the room together; what fails the health read |
//! | `market` | what the parts share |
//! | `api` | MarketService, book views (`depth`), the diagnostic reads, other services' events (`consumers`) |
//! | `clock` | ConfirmClock |
//! | `orders` | place, cancel, amend, mass cancel over RPC |
//! | `funding`, `sweeper` | trading holds, and how every hold ends |
//! | `front` | trading sessions, on a polled thread |
//! | `budget` | what a user may still order today |
//! | `past` | from the journal to a session that lacks old messages |
//! | `dispatch` | what health and gauges show of the trading path |
//! | `projection` | from the replica to the history |
//! | `feed` | from the replica to the market's events |
//! | `instruments` | what a change of an instrument changes here |
//! | `retry` | pauses while a store or the log is away |
//! | `identity` | who may trade, with a cache of profiles |
//! | `refusal` | error texts |

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
mod instruments;
mod market;
mod orders;
mod past;
pub mod projection;
mod refusal;
mod retry;
mod start;
mod sweeper;

use api::consumers;

pub use config::GatewayConfig;
pub use front::report::message as session_message;
pub use identity::LimitBasis;
pub use start::{GatewayDeps, GatewayHandle, start, told_through};

/// Operational failures of this room. A refusal of a call or a request is never one of these.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0} is no node number")]
    Node(u8),
    #[error("store: {0}")]
    Events(#[from] events::Error),
    #[error("store: {0}")]
    Store(#[from] sqlx::Error),
    #[error("store holds what this room cannot have written: {0}")]
    Stored(String),
    #[error("journal: {0}")]
    Replica(#[from] replica::ReplicaError),
    #[error("the sessions do not catch up with the journal: {0}")]
    Start(String),
    #[error("instrument registry: {0}")]
    Registry(#[source] tonic::Status),
    #[error("the trading path refused an own request: {0}")]
    Refused(String),
    #[error("settings: {0}")]
    Settings(String),
    #[error("files and sockets: {0}")]
    Files(#[from] std::io::Error),
    #[error("certificate: {0}")]
    Tls(String),
}

impl Error {
    /// True when the store is away, so that the same may work later.
    fn is_away(&self) -> bool {
        match self {
            Error::Events(error) => error.is_away(),
            Error::Store(error) => events::is_away(error),
            _ => false,
        }
    }
}
