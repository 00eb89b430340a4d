//! Encoder for the frequent commands and events. Its output is byte-identical to rkyv's archives.
//!
//! An archive is a fixed number of little-endian 8-byte words. Fields have C layout. An enum has
//! its discriminant in the first byte, then the variant's fields at their alignment.

use types::{Command, Event, EventEnvelope, Handle, Id128, Lots, Ticks};

/// Longest archive, in words.
pub(crate) const WORDS_MAX: usize = 16;
/// Words of a command's archive.
pub(crate) const COMMAND_WORDS: usize = 16;
/// Words of the archive of an event's body.
pub(crate) const EVENT_WORDS: usize = 11;

/// rkyv's discriminants of [`Command`].
mod command {
    pub const NEW: u64 = 11;
    pub const CANCEL: u64 = 12;
    pub const AMEND: u64 = 13;
}

/// rkyv's discriminants of [`Event`].
mod event {
    pub const ACCEPTED: u64 = 0;
    pub const RESTED: u64 = 2;
    pub const TRADE: u64 = 3;
    pub const AMENDED: u64 = 4;
    pub const CANCELLED: u64 = 8;
}

/// Sink for the words of an archive, in order. Trailing words that are not put are zero.
pub(crate) trait Put {
    fn put(&mut self, word: u64);
}

/// Two 32-bit fields in one word.
#[inline(always)]
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

#[inline(always)]
fn handle(handle: Handle) -> u64 {
    pair(handle.slot, handle.generation)
}

#[inline(always)]
fn price(price: Ticks) -> u64 {
    price.0.cast_unsigned()
}

/// Bytes packed into a word, lowest first.
#[inline(always)]
fn bytes<const N: usize>(bytes: [u8; N]) -> u64 {
    let mut word = [0; 8];
    word[..N].copy_from_slice(&bytes);
    u64::from_le_bytes(word)
}

/// Writes the key if there is one. It must be the last field: an absent key is trailing zeros.
#[inline(always)]
fn key(key: Id128, to: &mut impl Put) {
    if !key.is_none() {
        let (first, second) = key.halves();
        to.put(first);
        to.put(second);
    }
}

/// Writes whether there is a value, then the value or 0.
#[inline(always)]
fn option(value: Option<u64>, to: &mut impl Put) {
    to.put(u64::from(value.is_some()));
    to.put(value.unwrap_or(0));
}

/// Encodes a new order, cancel or amend. Returns false and writes nothing for other commands.
#[inline(always)]
pub(crate) fn encode_command(command: &Command, to: &mut impl Put) -> bool {
    match command {
        Command::New(c) => {
            to.put(command::NEW);
            to.put(bytes([
                u8::from(c.post_only),
                c.side.code(),
                c.order_type.code(),
                c.time_in_force.code(),
                c.stp.code(),
            ]));
            to.put(handle(c.handle));
            to.put(price(c.price));
            to.put(c.quantity.0);
            to.put(pair(c.instrument.0, c.stp_group.0));
            to.put(pair(c.user.0, c.session.0));
            to.put(c.expire_at_ns);
            to.put(pair(c.hold.0, c.fee_rate.0));
            to.put(c.client_order_id);
            to.put(c.client_seq);
            to.put(c.draw.main.0.cast_unsigned());
            to.put(c.draw.fee.0.cast_unsigned());
            to.put(c.budget_minor.0.cast_unsigned());
            key(c.key_hash, to);
        }
        Command::Cancel(c) => {
            to.put(command::CANCEL);
            to.put(handle(c.handle));
            to.put(pair(c.instrument.0, c.user.0));
            to.put(pair(c.session.0, u32::from(c.reason.code())));
            to.put(c.client_seq);
            key(c.key_hash, to);
        }
        Command::Amend(c) => {
            to.put(command::AMEND);
            to.put(handle(c.handle));
            to.put(pair(c.instrument.0, c.user.0));
            to.put(pair(c.session.0, u32::from(c.budget_returns)));
            to.put(c.client_seq);
            to.put(c.new_client_order_id);
            option(c.price.map(price), to);
            option(c.quantity.map(|Lots(quantity)| quantity), to);
            to.put(c.draw.main.0.cast_unsigned());
            to.put(c.draw.fee.0.cast_unsigned());
            to.put(c.budget_minor.0.cast_unsigned());
            key(c.key_hash, to);
        }
        _ => return false,
    }
    true
}

/// Writes the fields before an event's own, and rkyv's discriminant of the event.
#[inline(always)]
fn event_header(envelope: &EventEnvelope, to: &mut impl Put, discriminant: u64) {
    to.put(envelope.number);
    to.put(pair(envelope.instrument.0, envelope.index));
    to.put(discriminant);
}

/// Encodes the envelope and body of a frequent event. Returns false and writes nothing for other
/// events.
#[inline(always)]
pub(crate) fn encode_event(envelope: &EventEnvelope, to: &mut impl Put) -> bool {
    match &envelope.event {
        Event::Accepted(e) => {
            event_header(envelope, to, event::ACCEPTED);
            to.put(handle(e.handle));
            to.put(bytes([e.side.code(), u8::from(e.rests)]));
            to.put(price(e.price));
            to.put(e.open.0);
        }
        Event::Rested(e) => {
            event_header(envelope, to, event::RESTED);
            to.put(handle(e.handle));
            to.put(u64::from(e.side.code()));
            to.put(price(e.price));
            to.put(e.open.0);
        }
        Event::Trade(e) => {
            event_header(envelope, to, event::TRADE);
            to.put(pair(u32::from(e.taker_side.code()), e.maker.slot));
            to.put(pair(e.maker.generation, e.taker.slot));
            to.put(u64::from(e.taker.generation));
            to.put(price(e.price));
            to.put(e.quantity.0);
            to.put(e.maker_open.0);
            to.put(e.taker_open.0);
            to.put(e.trade_number);
        }
        Event::Amended(e) => {
            event_header(envelope, to, event::AMENDED);
            to.put(handle(e.handle));
            to.put(bytes([e.side.code(), u8::from(e.kept_priority)]));
            to.put(price(e.price));
            to.put(e.quantity.0);
            to.put(e.open.0);
        }
        Event::Cancelled(e) => {
            event_header(envelope, to, event::CANCELLED);
            to.put(handle(e.handle));
            to.put(u64::from(e.reason.code()));
            to.put(e.quantity.0);
        }
        _ => return false,
    }
    true
}
