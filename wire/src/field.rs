//! Length, bytes and valid values of one message field.

use types::command::{FundingCause, RequestKind};
use types::{CancelReason, Id128, OrderType, Phase, RejectReason, Side, StpMode, TimeInForce};

/// A value of fixed length. `get` receives exactly `LEN` bytes, and returns `None` for an invalid
/// value.
pub trait Field: Sized {
    const LEN: usize;
    /// Name in the layout tables.
    const KIND: &'static str;

    fn put(&self, out: &mut [u8]);
    fn get(bytes: &[u8]) -> Option<Self>;
}

macro_rules! integer {
    ($($int:ident),+) => {$(
        impl Field for $int {
            const LEN: usize = size_of::<$int>();
            const KIND: &'static str = stringify!($int);

            fn put(&self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }

            fn get(bytes: &[u8]) -> Option<Self> {
                bytes.try_into().ok().map($int::from_le_bytes)
            }
        }
    )+};
}

integer!(u8, u16, u32, u64, i64);

macro_rules! code {
    ($($name:ident),+) => {$(
        impl Field for $name {
            const LEN: usize = 1;
            const KIND: &'static str = concat!("u8 ", stringify!($name));

            fn put(&self, out: &mut [u8]) {
                out[0] = self.code();
            }

            fn get(bytes: &[u8]) -> Option<Self> {
                $name::from_code(bytes[0])
            }
        }
    )+};
}

code!(
    Side,
    OrderType,
    TimeInForce,
    StpMode,
    Phase,
    CancelReason,
    RejectReason,
    RequestKind,
    FundingCause
);

/// UUIDs are encoded in the byte order of their text form, not as a little-endian number.
impl Field for Id128 {
    const LEN: usize = 16;
    const KIND: &'static str = "uuid";

    fn put(&self, out: &mut [u8]) {
        out.copy_from_slice(&self.as_u128().to_be_bytes());
    }

    fn get(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; 16] = bytes.try_into().ok()?;
        Some(Id128::from_u128(u128::from_be_bytes(bytes)))
    }
}

/// UTF-8 text in a field of `N` bytes, padded with zero bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Text<const N: usize>([u8; N]);

impl<const N: usize> Text<N> {
    /// `None` if the text is longer than `N` bytes or contains a zero byte.
    pub fn new(text: &str) -> Option<Self> {
        if text.len() > N || text.as_bytes().contains(&0) {
            return None;
        }
        let mut bytes = [0; N];
        bytes[..text.len()].copy_from_slice(text.as_bytes());
        Some(Self(bytes))
    }

    /// The text, truncated at a character boundary if it is too long, and at the first zero byte.
    pub fn truncated(text: &str) -> Self {
        let mut end = text.len().min(N);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let end = text[..end].find('\0').unwrap_or(end);
        Self::new(&text[..end]).expect("truncated to the length and without a zero byte")
    }

    pub fn as_str(&self) -> &str {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(N);
        std::str::from_utf8(&self.0[..end]).expect("UTF-8 was checked at construction")
    }
}

impl<const N: usize> std::fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self.as_str(), f)
    }
}

impl<const N: usize> Field for Text<N> {
    const LEN: usize = N;
    const KIND: &'static str = "text";

    fn put(&self, out: &mut [u8]) {
        out.copy_from_slice(&self.0);
    }

    fn get(bytes: &[u8]) -> Option<Self> {
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(N);
        if bytes[end..].iter().any(|b| *b != 0) {
            return None;
        }
        Self::new(std::str::from_utf8(&bytes[..end]).ok()?)
    }
}
