//! Short text ids stored inline: records have a fixed size, copies need no heap.

use core::fmt;
use core::str::FromStr;

/// Reason why a text is not an id or a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextError {
    /// Shorter or longer than allowed.
    Length { min: usize, max: usize },
    /// A character outside the alphabet, at this byte.
    Character { at: usize },
    /// Not one of the known names.
    Unknown,
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { min, max } => write!(f, "must have {min} to {max} characters"),
            Self::Character { at } => write!(f, "has a character that is not allowed at {at}"),
            Self::Unknown => f.write_str("is not a known name"),
        }
    }
}

impl core::error::Error for TextError {}

macro_rules! inline_text {
    ($(#[$meta:meta])* $name:ident, $min:literal, $max:literal, $allowed:expr) => {
        $(#[$meta])*
        #[derive(
            Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash,
            rkyv::Archive, rkyv::Serialize, rkyv::Deserialize,
        )]
        pub struct $name {
            // Bytes after `len` are zero, so that derived comparison compares the texts.
            bytes: [u8; $max],
            len: u8,
        }

        impl $name {
            /// Maximum length in bytes.
            pub const LEN_MAX: usize = $max;

            /// Checks length and alphabet.
            pub fn new(text: &str) -> Result<Self, TextError> {
                let source = text.as_bytes();
                if source.len() < $min || source.len() > $max {
                    return Err(TextError::Length { min: $min, max: $max });
                }
                let allowed: fn(u8) -> bool = $allowed;
                if let Some(at) = source.iter().position(|b| !allowed(*b)) {
                    return Err(TextError::Character { at });
                }
                let mut bytes = [0; $max];
                bytes[..source.len()].copy_from_slice(source);
                Ok(Self { bytes, len: source.len() as u8 })
            }

            pub fn as_str(&self) -> &str {
                // A record from disk has passed its checksum, but not `new`: a broken text reads as
                // empty.
                self.bytes
                    .get(..usize::from(self.len))
                    .and_then(|b| core::str::from_utf8(b).ok())
                    .unwrap_or("")
            }
        }

        #[cfg(feature = "serde")]
        impl serde::Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
                out.serialize_str(self.as_str())
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                fmt::Debug::fmt(self.as_str(), f)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.as_str())
            }
        }

        impl FromStr for $name {
            type Err = TextError;

            fn from_str(text: &str) -> Result<Self, TextError> {
                Self::new(text)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                self.as_str()
            }
        }
    };
}

inline_text!(
    /// Public id of an instrument: `[A-Z0-9-]{3,32}`.
    InstrumentId, 3, 32, |b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'-'
);
inline_text!(
    /// Public id of a user: 1 to 64 visible ASCII characters but `:`, the sub-account separator.
    UserId, 1, 64, |b| b.is_ascii_graphic() && b != b':'
);

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn instrument_id_keeps_its_alphabet() {
        assert_eq!(
            InstrumentId::new("BOND-2027").unwrap().as_str(),
            "BOND-2027"
        );
        assert!(InstrumentId::new("AB").is_err());
        assert!(InstrumentId::new("bond").is_err());
        assert!(InstrumentId::new(&"A".repeat(33)).is_err());
        assert_eq!(
            InstrumentId::new(&"A".repeat(32)).unwrap().as_str().len(),
            32
        );
    }

    #[test]
    fn user_id_refuses_the_separator() {
        assert_eq!(UserId::new("alice@x").unwrap().to_string(), "alice@x");
        assert_eq!(UserId::new("a:b"), Err(TextError::Character { at: 1 }));
        assert!(UserId::new("").is_err());
        assert!(UserId::new("a b").is_err());
        assert!(UserId::new(&"u".repeat(65)).is_err());
    }
}
