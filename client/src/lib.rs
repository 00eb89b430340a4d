//! Room `client`: the trading client library.
//!
//! It sends and receives the messages of [`wire`] (`docs/protocol.md`). A [`Connection`] carries up
//! to 64 trading sessions on one QUIC stream, each on its own channel. Requests of all sessions
//! reach the exchange in the order of the calls to [`Connection::send`], and reports arrive as one
//! stream. A lost connection is resumed without a gap and without executing a request twice.
//!
//! | file | what |
//! |---|---|
//! | `trust` | which server certificate is accepted |
//! | `connection` | connect, log in, send, resume |
//! | `endpoint` | how QUIC is set up |
//! | `channel` | what one session knows: numbers, requests without an answer |
//! | `io` | the two tasks that read and write the stream |
//! | `text` | texts of rejections |

mod channel;
mod connection;
mod endpoint;
mod io;
mod text;
mod trust;

pub use connection::{Connection, Error, LoginOptions, Report, Reports, SessionInfo};
pub use text::in_words;
pub use trust::Trust;
