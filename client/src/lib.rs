//! Room `client`: the trading client library.
//!
//! It sends and receives the messages of [`wire`] (`docs/protocol.md`). A connection carries up to
//! 64 trading sessions on one QUIC stream, each on its own channel. Requests of all sessions reach
//! the exchange in the order of the calls, and reports arrive as one stream. A lost connection is
//! resumed without a gap and without executing a request twice.
//!
//! [`Sessions`] implements these rules without I/O. It has two drivers: [`Connection`] on tokio,
//! and [`spinning::Connection`] on a polling thread, for members that dedicate a core to latency.
//! `examples/` shows both.
//!
//! | file | what |
//! |---|---|
//! | `sessions` | the sessions of a connection as a state machine: bytes in, events out |
//! | `channel` | state of one session: numbers, unanswered requests |
//! | `login` | login options of a session |
//! | `connection` | async driver: connect, log in, send, resume |
//! | `io` | the two tasks that read and write the stream of the async driver |
//! | `spinning` | spinning driver on [`transport`] |
//! | `endpoint` | QUIC configuration |
//! | `trust` | which server certificate is accepted |
//! | `error` | errors of the library |
//! | `text` | texts of rejections |

mod channel;
mod connection;
mod endpoint;
mod error;
mod io;
mod login;
mod sessions;
pub mod spinning;
mod text;
mod trust;

pub use connection::{Connection, Reports};
pub use error::Error;
pub use login::LoginOptions;
pub use sessions::{Event, LOGIN_TIMEOUT, Report, SessionInfo, Sessions};
pub use text::{outcome_text, reason_text, reject_text};
pub use trust::Trust;
