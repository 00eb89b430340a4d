//! Message header, and framing of a byte stream into messages.
//!
//! ```text
//!  0        2      3         4         6                       14
//!  +--------+------+---------+---------+-----------------------+--------- ... -+
//!  | length | type | version | channel | sequence              | body          |
//!  | u16    | u8   | u8 = 3  | u16     | u64                   | length - 14   |
//!  +--------+------+---------+---------+-----------------------+--------- ... -+
//! ```
//!
//! `length` includes the header. `channel` names the session on this connection. The client chooses
//! it at login. `sequence` from a client is the request's client sequence, 0 if it has none.
//! `sequence` from the server is the message's number in the session. An unnumbered message has 0:
//! it is not resent.

use bytes::{Buf, BytesMut};

use crate::message::VERSION;

/// Bytes of the header.
pub const HEADER_LEN: usize = 14;
/// Offsets of channel and sequence in the header.
const CHANNEL_AT: usize = 4;
const SEQUENCE_AT: usize = 6;
/// Longest message with its header. A receiver must be able to buffer this many bytes.
pub const MESSAGE_LEN_MAX: usize = 2_048;

/// Header of every message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Header and body, in bytes.
    pub length: u16,
    pub kind: u8,
    /// Session on this connection, or [`crate::CONNECTION_CHANNEL`].
    pub channel: u16,
    pub sequence: u64,
}

/// The bytes are not a message of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    #[error("unknown protocol version {version}")]
    Version { version: u8 },
    #[error("unknown message type {kind:#04x}")]
    Type { kind: u8 },
    #[error("message type {kind:#04x} with invalid length {length}")]
    Length { kind: u8, length: u16 },
    #[error("field {field} of message type {kind:#04x} has an invalid value")]
    Field { kind: u8, field: &'static str },
}

/// The message types of one direction.
pub trait Message: Sized {
    fn kind(&self) -> u8;
    /// Body length of a type, `None` for an unknown type or one of the other direction.
    fn body_len(kind: u8) -> Option<usize>;
    fn put_body(&self, out: &mut [u8]);
    fn get_body(kind: u8, body: &[u8]) -> Result<Self, WireError>;
}

/// Appends one message.
pub fn encode<M: Message>(message: &M, channel: u16, sequence: u64, out: &mut BytesMut) {
    let start = out.len();
    let body_len = M::body_len(message.kind()).expect("the kind of a message is in its set");
    out.resize(start + HEADER_LEN + body_len, 0);
    encode_into(message, channel, sequence, &mut out[start..]);
}

/// Writes one message at the start of `out` and returns its length.
///
/// # Panics
/// If `out` is shorter than the message.
#[inline]
pub fn encode_into<M: Message>(message: &M, channel: u16, sequence: u64, out: &mut [u8]) -> usize {
    let kind = message.kind();
    let body_len = M::body_len(kind).expect("the kind of a message is in its set");
    let length = HEADER_LEN + body_len;
    let out = &mut out[..length];
    out[..2].copy_from_slice(&(length as u16).to_le_bytes());
    out[2] = kind;
    out[3] = VERSION;
    out[CHANNEL_AT..SEQUENCE_AT].copy_from_slice(&channel.to_le_bytes());
    out[SEQUENCE_AT..HEADER_LEN].copy_from_slice(&sequence.to_le_bytes());
    message.put_body(&mut out[HEADER_LEN..]);
    length
}

/// Appends one message to a `Vec`.
pub fn append<M: Message>(message: &M, channel: u16, sequence: u64, out: &mut Vec<u8>) {
    let start = out.len();
    let body_len = M::body_len(message.kind()).expect("the kind of a message is in its set");
    out.resize(start + HEADER_LEN + body_len, 0);
    encode_into(message, channel, sequence, &mut out[start..]);
}

/// Replaces the channel of an encoded message.
pub fn set_channel(message: &mut [u8], channel: u16) {
    message[CHANNEL_AT..SEQUENCE_AT].copy_from_slice(&channel.to_le_bytes());
}

/// Header of the first message, checked against the message types; `None` until it is complete.
///
/// # Errors
/// The bytes are not the header of a message.
pub fn peek<M: Message>(buffer: &[u8]) -> Result<Option<Header>, WireError> {
    let Some(mut head) = buffer.get(..HEADER_LEN) else {
        return Ok(None);
    };
    let (length, kind, version) = (head.get_u16_le(), head.get_u8(), head.get_u8());
    let (channel, sequence) = (head.get_u16_le(), head.get_u64_le());
    if version != VERSION {
        return Err(WireError::Version { version });
    }
    let Some(body_len) = M::body_len(kind) else {
        return Err(WireError::Type { kind });
    };
    if usize::from(length) != HEADER_LEN + body_len {
        return Err(WireError::Length { kind, length });
    }
    Ok(Some(Header {
        length,
        kind,
        channel,
        sequence,
    }))
}

/// First message of the buffer; `None` until it is complete.
///
/// # Errors
/// The bytes are not a message. The bytes after them cannot be interpreted.
pub fn parse<M: Message>(buffer: &[u8]) -> Result<Option<(Header, M)>, WireError> {
    let Some(header) = peek::<M>(buffer)? else {
        return Ok(None);
    };
    match buffer.get(HEADER_LEN..usize::from(header.length)) {
        Some(body) => Ok(Some((header, M::get_body(header.kind, body)?))),
        None => Ok(None),
    }
}

/// Decodes the next message and removes it from the buffer; `None` until it is complete.
///
/// # Errors
/// As [`parse`].
pub fn decode<M: Message>(buffer: &mut BytesMut) -> Result<Option<(Header, M)>, WireError> {
    let next = parse::<M>(buffer)?;
    if let Some((header, _)) = &next {
        buffer.advance(usize::from(header.length));
    }
    Ok(next)
}
