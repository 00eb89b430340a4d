//! Room `client`: the trading client library and the wire it speaks.
//!
//! [`wire`] is the binary protocol, byte by byte, as `docs/protocol.md` draws it; the gateway reads and writes the same code. [`Session`] is a
//! logged-in trading session over QUIC: requests go out without waiting, reports come in as a stream, and a lost connection is resumed without
//! a gap and without acting twice.
//!
//! | file | what |
//! |---|---|
//! | `wire` | messages, header, framing |
//! | `trust` | which server certificate is accepted |
//! | `session` | connect, log in, send, receive, resume |
//! | `unanswered` | requests that a resume may have to send again |

mod session;
mod trust;
mod unanswered;
pub mod wire;

pub use session::{ConnectOptions, Error, LoginInfo, Report, Reports, Session, connect, endpoint};
pub use trust::Trust;
