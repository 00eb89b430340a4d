//! Room `client`: the trading client library and the wire it speaks.
//!
//! [`wire`] is the binary protocol, byte by byte, as `docs/protocol.md` draws it; the gateway reads and writes the same code. A [`Connection`]
//! carries up to 64 trading sessions on one QUIC stream, each on a channel of its own: requests of all of them reach the exchange in the order
//! in which [`Connection::send`] was called, reports come in as one stream, and a lost connection is resumed without a gap and without acting twice.
//!
//! | file | what |
//! |---|---|
//! | `wire` | messages, header, framing |
//! | `trust` | which server certificate is accepted |
//! | `connection` | connect, log in, send, resume |
//! | `endpoint` | how QUIC is set up |
//! | `channel` | what one session knows: numbers, requests without an answer |
//! | `io` | the two tasks that read and write the stream |

mod channel;
mod connection;
mod endpoint;
mod io;
mod trust;
pub mod wire;

pub use connection::{Connection, Error, LoginOptions, Report, Reports, SessionInfo};
pub use trust::Trust;
