//! Errors of this library.

use std::sync::Arc;

use wire::{Disconnect, DisconnectCode, WireError};

#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    #[error("certificate checks can be skipped for loopback addresses only")]
    TrustNotAllowed,
    #[error("endpoint: {0}")]
    Endpoint(#[source] Arc<std::io::Error>),
    #[error("tls: {0}")]
    Tls(String),
    #[error("connect: {0}")]
    Connect(#[from] quinn::ConnectError),
    #[error("connection lost: {0}")]
    Lost(#[from] quinn::ConnectionError),
    #[error("stream closed")]
    Stream,
    #[error("the server ended the session: {text}")]
    Disconnected {
        code: Option<DisconnectCode>,
        text: String,
    },
    #[error("the server sent an invalid message: {0}")]
    Wire(#[from] WireError),
    #[error("gap in numbered messages: expected {expected}, received {got}")]
    Gap { expected: u64, got: u64 },
    #[error("connect or login timed out")]
    LoginTimeout,
    #[error("token too long, session name empty or too long, or channel above 63 or in use")]
    LoginField,
    #[error("too many unanswered requests")]
    TooManyUnanswered,
    #[error("not logged in on this channel")]
    NotLoggedIn,
}

impl Error {
    /// Error of a `Disconnect` message.
    pub(crate) fn of_disconnect(message: &Disconnect) -> Self {
        Self::Disconnected {
            code: DisconnectCode::from_code(message.code),
            text: message.text.as_str().to_owned(),
        }
    }

    /// Error of a closed QUIC connection, with the server's reason if it sent one.
    pub(crate) fn of_close(reason: quinn::ConnectionError) -> Self {
        match reason {
            quinn::ConnectionError::ApplicationClosed(close) => Self::Disconnected {
                code: u16::try_from(close.error_code.into_inner())
                    .ok()
                    .and_then(DisconnectCode::from_code),
                text: String::from_utf8_lossy(&close.reason).into_owned(),
            },
            reason => Self::Lost(reason),
        }
    }
}
