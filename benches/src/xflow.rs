//! File format `XFLOW001` of order flow: a header of 128 bytes, then records of 32 bytes,
//! little-endian.
//!
//! ```text
//! header   0 magic                 8 record size u32       12 profile u32
//!         16 seed                 24 prefill records       32 timed records
//!         40 lowest price         48 highest price         56 highest order id
//!         64 trades               72 traded quantity       80 tape hash
//!         88 resting at the end   96 trading records      104 most resting
//!        112 mean resting        120 mean occupied prices
//! record   0 op  1 side  2 kind  3 class  4 account u32  8 order id  16 price in ticks
//!         24 quantity in lots
//! ```
//!
//! Header fields from 16 on have 64 bits. Those from 64 on are results of the generator's own book.
//! A replace has the new *open* quantity. Only a smaller quantity at the same price (`class` 1)
//! keeps queue priority. Prefill records build the book and are not timed. Trades and quantity
//! count the timed records, the tape hash all records.

use std::fmt;

pub const MAGIC: &[u8; 8] = b"XFLOW001";
pub const HEADER_BYTES: usize = 128;
pub const RECORD_BYTES: usize = 32;

/// Operation of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    New(Kind),
    Cancel,
    /// New price and open quantity of a resting order.
    Replace {
        /// True for less quantity at the same price, which keeps priority.
        keeps_place: bool,
    },
}

/// Kind of a new order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Gtc,
    Ioc,
    Fok,
    Market,
}

/// One order, cancel or replace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub op: Op,
    /// 0 buy, 1 sell.
    pub side: u8,
    pub account: u32,
    /// Order id. A generated flow numbers its new orders from 1 without gaps.
    pub id: u64,
    /// In ticks; 0 in a cancel and a market order.
    pub price: i64,
    /// In lots.
    pub quantity: u64,
}

/// Shares of records by operation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mix {
    /// GTC orders, which rest unless they cross.
    pub gtc: f64,
    /// IOC, FOK and market orders.
    pub immediate: f64,
    pub cancels: f64,
    pub replaces: f64,
}

impl Mix {
    pub fn of(records: &[Record]) -> Self {
        let share = |is_counted: fn(Op) -> bool| {
            let count = records
                .iter()
                .filter(|record| is_counted(record.op))
                .count();
            count as f64 / records.len().max(1) as f64
        };
        Self {
            gtc: share(|op| op == Op::New(Kind::Gtc)),
            immediate: share(|op| matches!(op, Op::New(kind) if kind != Kind::Gtc)),
            cancels: share(|op| op == Op::Cancel),
            replaces: share(|op| matches!(op, Op::Replace { .. })),
        }
    }
}

/// Properties of the file and its expected result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// 0 single, 1 deep.
    pub profile: u32,
    pub seed: u64,
    pub prefill: u64,
    pub timed: u64,
    pub price_low: i64,
    pub price_high: i64,
    pub id_max: u64,
    pub trades: u64,
    pub quantity: u64,
    pub tape: u64,
    pub resting_end: u64,
    pub trading: u64,
    pub resting_max: u64,
    pub resting_mean: u64,
    pub levels_mean: u64,
}

impl Header {
    pub fn profile_name(&self) -> &'static str {
        match self.profile {
            0 => "single",
            1 => "deep",
            _ => "other",
        }
    }
}

/// A whole file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flow {
    pub header: Header,
    /// The prefill, then the timed records.
    pub records: Vec<Record>,
}

/// Why a file is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FlowError {
    Magic,
    RecordSize(u32),
    /// The number of records differs from the header's.
    Length {
        announced: u64,
        found: u64,
    },
    /// Index of a record with an unknown code, or with an id of 0 or above the header's maximum.
    Record(u64),
}

impl fmt::Display for FlowError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("not an XFLOW001 file: the first 8 bytes differ"),
            Self::RecordSize(size) => {
                write!(f, "record size {size} bytes, expected {RECORD_BYTES}")
            }
            Self::Length { announced, found } => {
                write!(
                    f,
                    "header announces {announced} records, the file has {found}"
                )
            }
            Self::Record(at) => write!(f, "record {at} has an unknown code or an invalid order id"),
        }
    }
}

impl std::error::Error for FlowError {}

/// Hash of a sequence of trades.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapeHash(pub u64);

impl TapeHash {
    #[inline]
    pub fn trade(&mut self, maker: u64, taker: u64, price: i64, quantity: u64) {
        for word in [maker, taker, price as u64, quantity] {
            self.0 = (self.0 ^ word)
                .rotate_left(23)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }
}

impl Flow {
    /// Decodes a whole file.
    ///
    /// # Errors
    /// The file is invalid.
    pub fn read(bytes: &[u8]) -> Result<Self, FlowError> {
        if bytes.len() < HEADER_BYTES || !bytes.starts_with(MAGIC) {
            return Err(FlowError::Magic);
        }
        let (head, body) = bytes.split_at(HEADER_BYTES);
        let size = word32(head, 8);
        if size as usize != RECORD_BYTES {
            return Err(FlowError::RecordSize(size));
        }
        let field = |at| word(head, at);
        let header = Header {
            profile: word32(head, 12),
            seed: field(16),
            prefill: field(24),
            timed: field(32),
            price_low: field(40) as i64,
            price_high: field(48) as i64,
            id_max: field(56),
            trades: field(64),
            quantity: field(72),
            tape: field(80),
            resting_end: field(88),
            trading: field(96),
            resting_max: field(104),
            resting_mean: field(112),
            levels_mean: field(120),
        };
        let announced = header.prefill.saturating_add(header.timed);
        let found = (body.len() / RECORD_BYTES) as u64;
        if announced != found || body.len() % RECORD_BYTES != 0 {
            return Err(FlowError::Length { announced, found });
        }
        let records = body
            .chunks_exact(RECORD_BYTES)
            .zip(0..)
            .map(|(bytes, at)| {
                Record::read(bytes)
                    .filter(|r| (1..=header.id_max).contains(&r.id))
                    .ok_or(FlowError::Record(at))
            })
            .collect::<Result<_, _>>()?;
        Ok(Self { header, records })
    }

    pub fn write(&self) -> Vec<u8> {
        let h = &self.header;
        let mut out = Vec::with_capacity(HEADER_BYTES + self.records.len() * RECORD_BYTES);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(RECORD_BYTES as u32).to_le_bytes());
        out.extend_from_slice(&h.profile.to_le_bytes());
        for word in [
            h.seed,
            h.prefill,
            h.timed,
            h.price_low as u64,
            h.price_high as u64,
            h.id_max,
            h.trades,
            h.quantity,
            h.tape,
            h.resting_end,
            h.trading,
            h.resting_max,
            h.resting_mean,
            h.levels_mean,
        ] {
            out.extend_from_slice(&word.to_le_bytes());
        }
        for record in &self.records {
            record.write(&mut out);
        }
        out
    }
}

impl Record {
    fn read(bytes: &[u8]) -> Option<Self> {
        let op = match (bytes[0], bytes[2], bytes[3]) {
            (0, 0, _) => Op::New(Kind::Gtc),
            (0, 1, _) => Op::New(Kind::Ioc),
            (0, 2, _) => Op::New(Kind::Fok),
            (0, 3, _) => Op::New(Kind::Market),
            (1, _, _) => Op::Cancel,
            (2, _, class @ 0..=2) => Op::Replace {
                keeps_place: class == 1,
            },
            _ => return None,
        };
        Some(Self {
            op,
            side: (bytes[1] < 2).then_some(bytes[1])?,
            account: word32(bytes, 4),
            id: word(bytes, 8),
            price: word(bytes, 16) as i64,
            quantity: word(bytes, 24),
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        let (op, kind, class) = match self.op {
            Op::New(kind) => (0, kind as u8, 0),
            Op::Cancel => (1, 0, 0),
            Op::Replace { keeps_place } => (2, 0, u8::from(keeps_place)),
        };
        out.extend_from_slice(&[op, self.side, kind, class]);
        out.extend_from_slice(&self.account.to_le_bytes());
        out.extend_from_slice(&self.id.to_le_bytes());
        out.extend_from_slice(&self.price.to_le_bytes());
        out.extend_from_slice(&self.quantity.to_le_bytes());
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mix_is_counted_from_the_records() {
        let replace = Op::Replace { keeps_place: false };
        let gtc = Op::New(Kind::Gtc);
        let ops = [gtc, gtc, Op::New(Kind::Market), Op::New(Kind::Ioc)];
        let ops = [&ops[..], &[Op::Cancel, Op::Cancel, Op::Cancel, replace]].concat();
        let records: Vec<Record> = ops
            .into_iter()
            .map(|op| Record {
                op,
                side: 0,
                account: 1,
                id: 1,
                price: 1,
                quantity: 1,
            })
            .collect();
        let expected = Mix {
            gtc: 0.25,
            immediate: 0.25,
            cancels: 0.375,
            replaces: 0.125,
        };
        assert_eq!(Mix::of(&records), expected);
    }
}
