//! Own types for addresses and hashes: other crates do not depend on the chain library.

use std::fmt;
use std::str::FromStr;

use alloy::primitives::{Address as RawAddress, B256};

/// Returns the keccak256 of `bytes` as `0x` and lower-case hex.
pub fn keccak256(bytes: &[u8]) -> String {
    format!("{:#x}", alloy::primitives::keccak256(bytes))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not a chain address or hash")]
pub struct ParseHexError;

/// Address of an account, 20 bytes. Displayed with the EIP-55 checksum, parsed in any letter case.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Address(RawAddress);

impl Address {
    pub(crate) fn raw(&self) -> RawAddress {
        self.0
    }

    /// The address derived from a user id (T14). It has no private key.
    pub fn of_user(user_id: &str) -> Self {
        Self(RawAddress::from(types::address::onchain_address(user_id)))
    }
}

impl From<RawAddress> for Address {
    fn from(raw: RawAddress) -> Self {
        Self(raw)
    }
}

impl FromStr for Address {
    type Err = ParseHexError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text.strip_prefix("0x").unwrap_or(text);
        let bytes = hex::decode(digits).map_err(|_| ParseHexError)?;
        RawAddress::try_from(bytes.as_slice())
            .map(Self)
            .map_err(|_| ParseHexError)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.to_checksum(None))
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Hash of a transaction, block or document, 32 bytes. Displayed as `0x` and lower-case hex.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TxHash(B256);

impl TxHash {
    pub(crate) fn raw(&self) -> B256 {
        self.0
    }
}

impl From<B256> for TxHash {
    fn from(raw: B256) -> Self {
        Self(raw)
    }
}

impl FromStr for TxHash {
    type Err = ParseHexError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let bytes =
            hex::decode(text.strip_prefix("0x").unwrap_or(text)).map_err(|_| ParseHexError)?;
        B256::try_from(bytes.as_slice())
            .map(Self)
            .map_err(|_| ParseHexError)
    }
}

impl fmt::Display for TxHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl fmt::Debug for TxHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R048
    #[test]
    fn r048_address_derives_from_the_user_id() {
        let forty = "00112233-44556677-8899aabb-ccddeeff-00112233-ffff";
        assert_eq!(
            Address::of_user(forty).to_string().to_lowercase(),
            "0x00112233445566778899aabbccddeeff00112233"
        );
        let uuid = "018f3c1e-7b7a-7c11-9d3e-0123456789ab";
        assert_eq!(
            Address::of_user(uuid).to_string().to_lowercase(),
            "0x018f3c1e7b7a7c119d3e0123456789ab00000000"
        );
        let name = Address::of_user("alice");
        assert_eq!(
            name,
            name.to_string().parse().expect("displayed addresses parse")
        );
        assert_ne!(name, Address::of_user("Alice"));
    }
}
