//! Room `wire`: the binary trading protocol (`docs/protocol.md`, rows R343 to R345).
//!
//! The client library and the gateway encode and decode with this crate. It performs no I/O: the
//! caller owns the stream and passes its bytes in a buffer.
//!
//! A message is a header and a body of fixed length per type, all little-endian. A message that
//! violates its layout is a [`WireError`]: the receiver closes the connection and changes no state.
//! Invariant: decoding an encoded message returns the same message. A test compares the tables in
//! `docs/protocol.md`, with the meaning of each field, with [`ClientMessage::LAYOUTS`] and
//! [`ServerMessage::LAYOUTS`].
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

types::code_enum! {
    /// Why the server ends a session or a connection: `Disconnect.code`, and for a connection also
    /// the application code of the QUIC close.
    DisconnectCode: u16 {
        Logout = 0 "the client logged out",
        Malformed = 1 "bytes that are not a message of this protocol",
        Version = 2 "unknown protocol version",
        UnknownType = 3 "unknown message type",
        BadField = 4 "a field has an invalid value",
        LoginExpected = 5 "a session must log in first, once, on its own channel",
        Credentials = 6 "credentials are not valid",
        Role = 7 "the caller may not trade",
        KycLevel = 8 "KYC level too low for trading",
        UserBlocked = 9 "the user is blocked",
        TakenOver = 10 "the session was taken over by a newer connection",
        SlowConsumer = 11 "the client reads too slowly",
        HeartbeatTimeout = 12 "nothing was received within the heartbeat interval",
        SequenceAhead = 13 "`last_sequence` is above the last number sent",
        Shutdown = 14 "the platform is stopping",
        NotReady = 15 "the platform is not ready",
        TradingHold = 16 "the trading hold requested at login was refused",
        TooManyLogins = 17 "too many failed logins under this session name from this address",
        Internal = 18 "internal error",
        TooManySessions = 19 "too many sessions or logins per second of this user",
        MessagesRemoved = 20 "messages after the last received number are no longer kept: log in from now on",
        StreamFinished = 21 "the client has finished its stream or stopped the server's",
    }
}

impl std::error::Error for DisconnectCode {}

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
