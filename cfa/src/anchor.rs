//! Anchor of the ledger on the chain: the ends of its two hash chains, signed, as the call data of
//! a transaction. Pure, except for reading the key.
//!
//! ```text
//! tag | block u64 | hash 32 | record u64 | record hash 32 | microseconds i64 | signature 64
//! ```
//!
//! Numbers are big-endian. The signature is Ed25519 over all bytes before it. A program that can
//! write the ledger's rows and the chain's transactions, without the key, cannot make an anchor for
//! altered rows; nor can the key's owner alone undo one that the chain has.

use std::path::{Path, PathBuf};

use events::files;
use ring::rand::SystemRandom;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};

use crate::error::Error;

const TAG: &[u8] = b"dfa-ledger-head-1";
const SIGNED: usize = TAG.len() + 8 + 32 + 8 + 32 + 8;
const SIGNATURE: usize = 64;

/// What is anchored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Anchor {
    pub block: u64,
    pub hash: [u8; 32],
    /// Last audit record; 0: none.
    pub record: u64,
    pub record_hash: [u8; 32],
    pub at_us: i64,
}

/// A stored anchor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredAnchor {
    pub number: i64,
    pub block: i64,
    pub record: i64,
    pub at_us: i64,
    /// Call data.
    pub data: Vec<u8>,
    /// Empty: not submitted.
    pub tx_hash: String,
}

/// Files of the key below the service's folder: the private key, and the public one in hex.
pub fn key_files(data_dir: &Path) -> [PathBuf; 2] {
    ["anchor_ed25519.pk8", "anchor_ed25519.pub"].map(|name| data_dir.join(name))
}

/// The signing key.
pub struct Key(Ed25519KeyPair);

impl Key {
    /// Reads the key, or creates it at the first start, with the file of the public one.
    ///
    /// # Errors
    /// [`Error::Config`]: a file cannot be read or written, or has no key.
    pub fn load_or_create(data_dir: &Path) -> Result<Self, Error> {
        let [private, public] = key_files(data_dir);
        let failed =
            |path: &Path, text: String| Error::Config(format!("{}: {text}", path.display()));
        let create = || {
            let made = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new());
            let made = made.map_err(|_| std::io::Error::other("no randomness"))?;
            Ok::<_, std::io::Error>(made.as_ref().to_vec())
        };
        let bytes = files::read_or_create(&private, files::PRIVATE, create);
        let bytes = bytes.map_err(|error| failed(&private, error.to_string()))?;
        let key = Ed25519KeyPair::from_pkcs8(&bytes);
        let key = key.map_err(|_| failed(&private, "not an Ed25519 key".to_owned()))?;
        let text = hex::encode(key.public_key().as_ref()).into_bytes();
        files::read_or_create(&public, files::PUBLIC, || Ok::<_, std::io::Error>(text))
            .map_err(|error| failed(&public, error.to_string()))?;
        Ok(Self(key))
    }

    /// Call data of the signed anchor.
    pub fn sign(&self, anchor: &Anchor) -> Vec<u8> {
        let mut bytes = anchor.bytes();
        let signature = self.0.sign(&bytes);
        bytes.extend(signature.as_ref());
        bytes
    }
}

/// The public key of a data folder.
///
/// # Errors
/// [`Error::Config`]: the file cannot be read or has no key.
pub fn public_key(data_dir: &Path) -> Result<Vec<u8>, Error> {
    let [_, path] = key_files(data_dir);
    let failed = |text: String| Error::Config(format!("{}: {text}", path.display()));
    let text = std::fs::read_to_string(&path).map_err(|error| failed(error.to_string()))?;
    hex::decode(text.trim()).map_err(|error| failed(error.to_string()))
}

impl Anchor {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(SIGNED + SIGNATURE);
        bytes.extend(TAG);
        bytes.extend(self.block.to_be_bytes());
        bytes.extend(self.hash);
        bytes.extend(self.record.to_be_bytes());
        bytes.extend(self.record_hash);
        bytes.extend(self.at_us.to_be_bytes());
        bytes
    }

    /// Reads call data. `None`: it is no anchor, or the key has not signed it.
    pub fn read(data: &[u8], public_key: &[u8]) -> Option<Self> {
        if data.len() != SIGNED + SIGNATURE {
            return None;
        }
        let (signed, signature) = data.split_at(SIGNED);
        let key = UnparsedPublicKey::new(&ED25519, public_key);
        key.verify(signed, signature).ok()?;
        let rest = signed.strip_prefix(TAG)?;
        let (block, rest) = rest.split_first_chunk::<8>()?;
        let (hash, rest) = rest.split_first_chunk::<32>()?;
        let (record, rest) = rest.split_first_chunk::<8>()?;
        let (record_hash, rest) = rest.split_first_chunk::<32>()?;
        let (at_us, _) = rest.split_first_chunk::<8>()?;
        Some(Self {
            block: u64::from_be_bytes(*block),
            hash: *hash,
            record: u64::from_be_bytes(*record),
            record_hash: *record_hash,
            at_us: i64::from_be_bytes(*at_us),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R215
    #[test]
    fn r215_an_anchor_is_read_back_and_no_altered_byte_is() {
        let folder = tempfile::tempdir().expect("folder");
        let key = Key::load_or_create(folder.path()).expect("key");
        let public = public_key(folder.path()).expect("public key");
        let anchor = Anchor {
            block: 7,
            hash: [1; 32],
            record: 3,
            record_hash: [2; 32],
            at_us: 1_700_000_000_000_000,
        };
        let data = key.sign(&anchor);
        assert_eq!(Anchor::read(&data, &public), Some(anchor));
        for place in 0..data.len() {
            let mut altered = data.clone();
            altered[place] ^= 1;
            assert_eq!(Anchor::read(&altered, &public), None, "{place}");
        }
        assert_eq!(Anchor::read(&data[1..], &public), None);
        // The same key at the next start.
        let again = Key::load_or_create(folder.path()).expect("key");
        let anchor = Anchor::read(&data, &public).expect("read");
        assert_eq!(again.sign(&anchor), data);
    }
}
