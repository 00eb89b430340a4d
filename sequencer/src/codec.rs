//! Codec for the frequent commands and events: the bytes that rkyv writes (a test compares them).
//!
//! An archive is a fixed number of little-endian 8-byte words. Fields are laid out as in C; an enum
//! has its number in the first byte and its fields after that at their alignment.

use types::{Command, Event, EventEnvelope, Handle, Id128, Lots, Ticks};

/// Longest archive, in words.
pub(crate) const WORDS_MAX: usize = 16;
/// Words of a command's archive.
pub(crate) const COMMAND_WORDS: usize = 16;
/// Words of the archive of an event's body.
pub(crate) const EVENT_WORDS: usize = 11;

/// Receives the words of an archive in order. Trailing words that are not put are zero.
pub(crate) trait Put {
    fn put(&mut self, word: u64);
}

/// Two 32-bit fields side by side.
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

/// Writes the key at the end, if there is one.
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

/// Encodes a new order, a cancel or an amend; false, and nothing put, for other commands.
#[inline(always)]
pub(crate) fn command(command: &Command, to: &mut impl Put) -> bool {
    match command {
        Command::New(c) => {
            to.put(11);
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
            to.put(pair(c.pool.0, c.fee_rate.0));
            to.put(c.client_order_id);
            to.put(c.client_seq);
            to.put(c.draw.main.0.cast_unsigned());
            to.put(c.draw.fee.0.cast_unsigned());
            to.put(c.budget_minor.0.cast_unsigned());
            key(c.key_hash, to);
        }
        Command::Cancel(c) => {
            to.put(12);
            to.put(handle(c.handle));
            to.put(pair(c.instrument.0, c.user.0));
            to.put(pair(c.session.0, u32::from(c.reason.code())));
            to.put(c.client_seq);
            key(c.key_hash, to);
        }
        Command::Amend(c) => {
            to.put(13);
            to.put(handle(c.handle));
            to.put(pair(c.instrument.0, c.user.0));
            to.put(u64::from(c.session.0));
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

/// Encodes the body of a frequent event; false, and nothing put, for other events.
#[inline(always)]
pub(crate) fn event(envelope: &EventEnvelope, to: &mut impl Put) -> bool {
    let mut begin = |kind: u64| {
        to.put(envelope.number);
        to.put(pair(envelope.instrument.0, envelope.index));
        to.put(kind);
    };
    match &envelope.event {
        Event::Accepted(e) => {
            begin(0);
            to.put(handle(e.handle));
            to.put(bytes([e.side.code(), u8::from(e.rests)]));
            to.put(price(e.price));
            to.put(e.open.0);
        }
        Event::Rested(e) => {
            begin(2);
            to.put(handle(e.handle));
            to.put(u64::from(e.side.code()));
            to.put(price(e.price));
            to.put(e.open.0);
        }
        Event::Trade(e) => {
            begin(3);
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
            begin(4);
            to.put(handle(e.handle));
            to.put(bytes([e.side.code(), u8::from(e.kept_priority)]));
            to.put(price(e.price));
            to.put(e.quantity.0);
            to.put(e.open.0);
        }
        Event::Cancelled(e) => {
            begin(8);
            to.put(handle(e.handle));
            to.put(u64::from(e.reason.code()));
            to.put(e.quantity.0);
        }
        _ => return false,
    }
    true
}
