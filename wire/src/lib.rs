//! Room `wire`: the binary trading protocol (`docs/protocol.md`, rows R343 to R345).
//!
//! The client library and the gateway encode and decode with this crate. It performs no I/O: the
//! caller owns the stream and passes its bytes in a buffer.
//!
//! A message is a header and a body of fixed length per type, all little-endian. A message that
//! violates its layout is a [`WireError`]: the receiver closes the connection and changes no state.
//! Invariant: decoding an encoded message returns the same message. A test compares the tables in
//! `docs/protocol.md` with [`ClientMessage::LAYOUTS`] and [`ServerMessage::LAYOUTS`].
//!
//! | file | what |
//! |---|---|
//! | `message` | protocol version, every message with its fields, and the layout tables |
//! | `field` | length, bytes and valid values of one field |
//! | `frame` | header, `encode`, `decode` |

mod field;
mod frame;
mod message;

pub use field::Text;
pub use frame::{
    HEADER_LEN, Header, MESSAGE_LEN_MAX, WireError, append, decode, encode, encode_into, parse,
    peek, set_channel,
};
pub use message::*;

/// Maximum number of sessions on one connection: channels 0 to 63.
pub const CHANNELS_MAX: usize = 64;
/// Channel of messages that concern the whole connection.
pub const CONNECTION_CHANNEL: u16 = u16::MAX;

/// Value of an instrument field that means "every instrument".
pub const ALL_INSTRUMENTS: u32 = u32::MAX;

/// Value of a side field that means "both sides".
pub const BOTH_SIDES: u8 = 255;

/// `Login.flags`: cancel this session's open orders after its connection is lost and the grace
/// period.
pub const LOGIN_CANCEL_ON_DISCONNECT: u8 = 1;
/// `Login.flags`: skip messages numbered before this login.
pub const LOGIN_FROM_NOW: u8 = 2;

/// `NewOrder.flags`: reject the order if it would trade at once.
pub const ORDER_POST_ONLY: u8 = 1;

/// `outcome` of `TradingHold`, `OpenOrdersEnd` and `RetransmitEnd`: done. Other values are reject
/// reasons.
pub const REQUEST_DONE: u8 = 255;

/// Why the server ends a session or a connection: `Disconnect.code`, and for a connection also the
/// application code of the QUIC close.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u16)]
pub enum DisconnectCode {
    #[error("the client logged out")]
    Logout = 0,
    #[error("bytes that are not a message of this protocol")]
    Malformed = 1,
    #[error("unknown protocol version")]
    Version = 2,
    #[error("unknown message type")]
    UnknownType = 3,
    #[error("a field has an invalid value")]
    BadField = 4,
    #[error("a session must log in first, once, on its own channel")]
    LoginExpected = 5,
    #[error("credentials are not valid")]
    Credentials = 6,
    #[error("the caller may not trade")]
    Role = 7,
    #[error("KYC level too low for trading")]
    KycLevel = 8,
    #[error("the user is blocked")]
    UserBlocked = 9,
    #[error("the session was taken over by a newer connection")]
    TakenOver = 10,
    #[error("the client reads too slowly")]
    SlowConsumer = 11,
    #[error("nothing was received within the heartbeat interval")]
    HeartbeatTimeout = 12,
    #[error("`last_sequence` is above the last number sent")]
    SequenceAhead = 13,
    #[error("the platform is stopping")]
    Shutdown = 14,
    #[error("the platform is not ready")]
    NotReady = 15,
    #[error("the trading hold requested at login was refused")]
    TradingHold = 16,
    #[error("too many failed logins under this session name from this address")]
    TooManyLogins = 17,
    #[error("internal error")]
    Internal = 18,
    #[error("too many sessions or logins per second of this user")]
    TooManySessions = 19,
    #[error("messages after the last received number are no longer kept: log in from now on")]
    MessagesRemoved = 20,
    #[error("the client has finished its stream")]
    StreamFinished = 21,
}

impl DisconnectCode {
    pub const ALL: &'static [Self] = &[
        Self::Logout,
        Self::Malformed,
        Self::Version,
        Self::UnknownType,
        Self::BadField,
        Self::LoginExpected,
        Self::Credentials,
        Self::Role,
        Self::KycLevel,
        Self::UserBlocked,
        Self::TakenOver,
        Self::SlowConsumer,
        Self::HeartbeatTimeout,
        Self::SequenceAhead,
        Self::Shutdown,
        Self::NotReady,
        Self::TradingHold,
        Self::TooManyLogins,
        Self::Internal,
        Self::TooManySessions,
        Self::MessagesRemoved,
        Self::StreamFinished,
    ];

    pub const fn code(self) -> u16 {
        self as u16
    }

    pub fn from_code(code: u16) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl WireError {
    /// Close code sent to the peer.
    pub fn disconnect_code(self) -> DisconnectCode {
        match self {
            WireError::Version { .. } => DisconnectCode::Version,
            WireError::Type { .. } => DisconnectCode::UnknownType,
            WireError::Length { .. } => DisconnectCode::Malformed,
            WireError::Field { .. } => DisconnectCode::BadField,
        }
    }
}

#[cfg(test)]
mod tests;
