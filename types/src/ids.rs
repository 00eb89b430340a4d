//! Ids of the trading path: dense indexes, order handles, sequence numbers and 128-bit ids.
//!
//! Journalled commands bind the indexes to text ids.

use core::fmt;

use uuid::Uuid;

macro_rules! index {
    ($(#[$meta:meta])* $name:ident) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash,
            rkyv::Archive, rkyv::Serialize, rkyv::Deserialize, zerocopy::FromZeros,
        )]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// No user, no session, no hold, or no single instrument.
            pub const NONE: Self = Self(u32::MAX);

            pub const fn get(self) -> u32 {
                self.0
            }

            /// The value as an index into a table.
            pub const fn index(self) -> usize {
                self.0 as usize
            }

            pub const fn is_none(self) -> bool {
                self.0 == u32::MAX
            }
        }

        #[cfg(feature = "serde")]
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
                serde::Serialize::serialize(&(!self.is_none()).then_some(self.0), out)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Display::fmt(&self.0, f)
            }
        }
    };
}

index!(
    /// Instrument on this node, dense from 0 in the order of `SetInstrument`.
    InstrumentIx
);
index!(
    /// User on this node, dense from 0 in the order of `BindUser`.
    UserIx
);
index!(
    /// Trading session, dense from 0 in order of first `OpenSession`. `NONE` = no session (gRPC).
    SessionIx
);
index!(
    /// Index of a hold, dense from 0 in the order of first `Fund`.
    HoldIx
);
index!(
    /// Self-trade group. By default a user is its own group; explicit groups have the top bit set.
    StpGroup
);

impl StpGroup {
    const EXPLICIT: u32 = 1 << 31;

    /// The default group of a user.
    pub const fn of_user(user: UserIx) -> Self {
        assert!(user.0 < Self::EXPLICIT);
        Self(user.0)
    }

    /// A group chosen by a member, distinct from all users' default groups.
    pub const fn explicit(number: u32) -> Self {
        assert!(number < Self::EXPLICIT - 1);
        Self(number | Self::EXPLICIT)
    }

    /// True for a chosen group.
    pub const fn is_explicit(self) -> bool {
        self.0 & Self::EXPLICIT != 0 && !self.is_none()
    }
}

/// Asset of a hold: CFA-RUB, or the units of an instrument.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    rkyv::Archive,
    rkyv::Serialize,
    rkyv::Deserialize,
)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[repr(transparent)]
pub struct AssetIx(u32);

impl AssetIx {
    /// CFA-RUB, in kopecks.
    pub const MONEY: Self = Self(0);
    /// Highest possible asset index.
    pub const LAST: Self = Self(u32::MAX);

    /// Units of an instrument.
    pub const fn units(instrument: InstrumentIx) -> Self {
        assert!(!instrument.is_none());
        Self(instrument.0 + 1)
    }

    /// The instrument, `None` for money.
    pub const fn instrument(self) -> Option<InstrumentIx> {
        match self.0 {
            0 => None,
            n => Some(InstrumentIx(n - 1)),
        }
    }

    pub const fn is_money(self) -> bool {
        self.0 == 0
    }

    pub const fn get(self) -> u32 {
        self.0
    }
}

/// Identifies one open order on its node. A slot is reused after the order has closed, a generation
/// is not.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    rkyv::Archive,
    rkyv::Serialize,
    rkyv::Deserialize,
)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Handle {
    pub slot: u32,
    /// From 1 upwards; 0 = none.
    pub generation: u32,
}

impl Handle {
    pub const NONE: Self = Self {
        slot: u32::MAX,
        generation: 0,
    };

    /// The 64-bit engine order id of the binary protocol.
    pub const fn engine_id(self) -> u64 {
        ((self.generation as u64) << 32) | self.slot as u64
    }

    pub const fn from_engine_id(id: u64) -> Self {
        Self {
            slot: id as u32,
            generation: (id >> 32) as u32,
        }
    }

    pub const fn is_none(self) -> bool {
        self.generation == 0
    }
}

impl fmt::Display for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.slot, self.generation)
    }
}

/// Gapless number of a command in its node's journal; the first is 1, 0 is before all.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    rkyv::Archive,
    rkyv::Serialize,
    rkyv::Deserialize,
)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[repr(transparent)]
pub struct Sequence(pub u64);

impl Sequence {
    pub const ZERO: Self = Self(0);

    pub const fn get(self) -> u64 {
        self.0
    }

    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl fmt::Display for Sequence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

/// Engine node, 0 to 63.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    rkyv::Archive,
    rkyv::Serialize,
    rkyv::Deserialize,
)]
#[repr(transparent)]
pub struct NodeId(u8);

impl NodeId {
    pub const COUNT_MAX: u8 = 64;

    /// `None` past 63.
    pub const fn new(node: u8) -> Option<Self> {
        if node < Self::COUNT_MAX {
            Some(Self(node))
        } else {
            None
        }
    }

    pub const fn get(self) -> u8 {
        self.0
    }
}

/// A 128-bit id or hash (hold id, session key, idempotency key hash), alignment 8. Zero = none.
#[derive(
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    rkyv::Archive,
    rkyv::Serialize,
    rkyv::Deserialize,
)]
pub struct Id128 {
    high: u64,
    low: u64,
}

impl Id128 {
    pub const NONE: Self = Self { high: 0, low: 0 };

    pub const fn from_u128(value: u128) -> Self {
        Self {
            high: (value >> 64) as u64,
            low: value as u64,
        }
    }

    pub const fn as_u128(self) -> u128 {
        ((self.high as u128) << 64) | self.low as u128
    }

    pub const fn is_none(self) -> bool {
        self.high == 0 && self.low == 0
    }

    pub const fn halves(self) -> (u64, u64) {
        (self.high, self.low)
    }

    /// Parses a UUID; `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let id = Uuid::parse_str(text).ok()?;
        Some(Self::from_u128(id.as_u128()))
    }
}

impl From<u128> for Id128 {
    fn from(value: u128) -> Self {
        Self::from_u128(value)
    }
}

impl From<Id128> for u128 {
    fn from(value: Id128) -> Self {
        value.as_u128()
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Id128 {
    fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.collect_str(self)
    }
}

impl fmt::Debug for Id128 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.as_u128())
    }
}

impl fmt::Display for Id128 {
    /// The hyphenated lower-case form of a UUID.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let v = self.as_u128();
        write!(
            f,
            "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
            v >> 96,
            (v >> 80) as u16,
            (v >> 64) as u16,
            (v >> 48) as u16,
            v & 0xffff_ffff_ffff
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn engine_id_round_trips() {
        let handle = Handle {
            slot: 7,
            generation: 9,
        };
        assert_eq!(Handle::from_engine_id(handle.engine_id()), handle);
        assert!(Handle::NONE.is_none());
    }

    #[test]
    fn a_128_bit_id_is_read_from_its_text() {
        let id = Id128::from_u128(0x0190_f2a1_7c3d_7e10_8a55_1234_5678_90ab);
        assert_eq!(Id128::parse(&id.to_string()), Some(id));
        assert_eq!(Id128::parse("CFA-RUB"), None);
    }
}
