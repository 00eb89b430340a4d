//! Room `transport`: QUIC on a polled thread. The owner drives quinn-proto's state machines over
//! one UDP socket. Owners are the gateway's front, a spinning client and the benchmarks' echo
//! server.
//!
//! | file | what |
//! |---|---|
//! | `endpoint` | rounds: receive, read, timers, transmit |
//! | `link` | one connection with its one bidirectional stream |
//! | `socket` | the UDP socket, in batches (GRO and GSO where the system has them) |
//!
//! Nothing happens between two calls of the owner. There is no task and no lock. A connection
//! carries one bidirectional stream, which the client opens. This room does not interpret the
//! stream's bytes.
//!
//! Allocations in the steady state: quinn-proto's own, and one per received datagram, parts of
//! which quinn-proto keeps. Datagrams that the kernel's full buffer does not accept are copied.

mod endpoint;
mod link;
mod socket;

pub use endpoint::{ConsumedBytes, Driver, Endpoint, Incoming};
pub use link::{Key, Link, Packets};
pub use quinn_proto as proto;
