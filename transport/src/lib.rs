//! Room `transport`: QUIC on a polled thread. quinn-proto's state machines over one UDP socket,
//! driven by the owner: the gateway's front, a spinning client, the echo server of the benchmarks.
//!
//! | file | what |
//! |---|---|
//! | `endpoint` | rounds: receive, timers, connections, transmit |
//! | `link` | one connection with its one bidirectional stream |
//! | `socket` | the UDP socket, in batches (GRO and GSO where the system has them) |
//!
//! The owner polls: nothing happens between two calls. There is no task, no lock, and per message
//! no allocation other than quinn-proto's own. A connection carries one bidirectional stream, which
//! the client opens. The bytes of the stream are opaque to this room.

mod endpoint;
mod link;
mod socket;

pub use endpoint::{ConsumedBytes, Driver, Endpoint, Incoming};
pub use link::{Key, Link, Packets};
pub use quinn_proto as proto;
