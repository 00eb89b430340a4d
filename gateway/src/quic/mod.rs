//! Trading sessions over QUIC (`docs/protocol.md`).
//!
//! | file | what |
//! |---|---|
//! | `tls` | the server's certificate and its fingerprint |
//! | `server` | the endpoint: who may connect, one task a connection |
//! | `connection` | one stream: cut into messages, each handled in order |
//! | `channel` | one session on a connection: state and requests |
//! | `login` | from a credential to an attached session |
//! | `resume` | what a client that comes back has missed |
//! | `limit`, `hold` | the TRADING limit, `SetTradingHold` |
//! | `answers` | what the trading path says at once: hints and refusals |
//! | `outbound` | what waits to be written |

mod answers;
mod channel;
mod connection;
mod hold;
mod limit;
pub mod login;
pub mod outbound;
mod resume;
pub mod server;
pub mod tls;
