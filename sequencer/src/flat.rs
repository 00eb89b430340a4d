//! The archives of what a market is made of, word by word: the same bytes that rkyv writes (a test compares them), without its writer. An archive is a
//! fixed number of little-endian 8-byte words; fields lie as in C, an enumeration has its number in the first byte and its fields behind that at
//! their alignment.

use types::{Command, Event, EventEnvelope, Handle, Id128, Lots, Ticks};

/// Longest archive, in words.
pub(crate) const WORDS_MAX: usize = 16;
/// Words of a command's archive.
pub(crate) const COMMAND_WORDS: usize = 16;
/// Words of the archive of an event's body.
pub(crate) const EVENT_WORDS: usize = 11;

/// An archive; words behind the last are zero.
pub(crate) type Words = [u64; WORDS_MAX];

/// An archive and the number of words from which on it is zero.
pub(crate) type Flat = (Words, usize);

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

/// Bytes side by side from the lowest on.
#[inline(always)]
fn bytes<const N: usize>(bytes: [u8; N]) -> u64 {
    let mut word = [0; 8];
    word[..N].copy_from_slice(&bytes);
    u64::from_le_bytes(word)
}

/// The key at the end; gives the number of words used.
#[inline(always)]
fn key(key: Id128, words: &mut Words, at: usize) -> usize {
    (words[at], words[at + 1]) = key.halves();
    if key.is_none() { at } else { at + 2 }
}

/// Whether there is a value, and the value.
#[inline(always)]
fn option(value: Option<u64>, words: &mut Words, at: usize) {
    if let Some(value) = value {
        (words[at], words[at + 1]) = (1, value);
    }
}

/// The archive of a new order, a cancel or an amend; `None` for what comes rarely.
#[inline]
pub(crate) fn command(command: &Command) -> Option<Flat> {
    let mut words = [0; WORDS_MAX];
    let w = &mut words;
    let used = match command {
        Command::New(c) => {
            w[0] = 11;
            w[1] = bytes([
                u8::from(c.post_only),
                c.side.code(),
                c.order_type.code(),
                c.time_in_force.code(),
                c.stp.code(),
            ]);
            w[2] = handle(c.handle);
            w[3] = price(c.price);
            w[4] = c.quantity.0;
            w[5] = pair(c.instrument.0, c.stp_group.0);
            w[6] = pair(c.user.0, c.session.0);
            w[7] = c.expire_at_ns;
            w[8] = pair(c.pool.0, c.fee_rate.0);
            w[9] = c.client_order_id;
            w[10] = c.client_seq;
            w[11] = c.draw.main.0.cast_unsigned();
            w[12] = c.draw.fee.0.cast_unsigned();
            w[13] = c.budget_minor.0.cast_unsigned();
            key(c.key_hash, w, 14)
        }
        Command::Cancel(c) => {
            w[0] = 12;
            w[1] = handle(c.handle);
            w[2] = pair(c.instrument.0, c.user.0);
            w[3] = pair(c.session.0, u32::from(c.reason.code()));
            w[4] = c.client_seq;
            key(c.key_hash, w, 5)
        }
        Command::Amend(c) => {
            w[0] = 13;
            w[1] = handle(c.handle);
            w[2] = pair(c.instrument.0, c.user.0);
            w[3] = u64::from(c.session.0);
            w[4] = c.client_seq;
            option(c.price.map(price), w, 5);
            option(c.quantity.map(|Lots(quantity)| quantity), w, 7);
            w[9] = c.draw.main.0.cast_unsigned();
            w[10] = c.draw.fee.0.cast_unsigned();
            w[11] = c.budget_minor.0.cast_unsigned();
            key(c.key_hash, w, 12)
        }
        _ => return None,
    };
    Some((words, used))
}

/// The archive of an event's body; `None` for what comes rarely.
#[inline]
pub(crate) fn event(envelope: &EventEnvelope) -> Option<Flat> {
    let mut words = [0; WORDS_MAX];
    let w = &mut words;
    w[0] = envelope.number;
    w[1] = pair(envelope.instrument.0, envelope.index);
    let used = match &envelope.event {
        Event::Accepted(e) => {
            w[2] = 0;
            w[3] = handle(e.handle);
            w[4] = bytes([e.side.code(), u8::from(e.rests)]);
            w[5] = price(e.price);
            w[6] = e.open.0;
            7
        }
        Event::Rested(e) => {
            w[2] = 2;
            w[3] = handle(e.handle);
            w[4] = u64::from(e.side.code());
            w[5] = price(e.price);
            w[6] = e.open.0;
            7
        }
        Event::Trade(e) => {
            w[2] = 3;
            w[3] = pair(u32::from(e.taker_side.code()), e.maker.slot);
            w[4] = pair(e.maker.generation, e.taker.slot);
            w[5] = u64::from(e.taker.generation);
            w[6] = price(e.price);
            w[7] = e.quantity.0;
            w[8] = e.maker_open.0;
            w[9] = e.taker_open.0;
            w[10] = e.trade_number;
            11
        }
        Event::Amended(e) => {
            w[2] = 4;
            w[3] = handle(e.handle);
            w[4] = bytes([e.side.code(), u8::from(e.kept_priority)]);
            w[5] = price(e.price);
            w[6] = e.quantity.0;
            w[7] = e.open.0;
            8
        }
        Event::Cancelled(e) => {
            w[2] = 8;
            w[3] = handle(e.handle);
            w[4] = u64::from(e.reason.code());
            w[5] = e.quantity.0;
            6
        }
        _ => return None,
    };
    Some((words, used))
}
