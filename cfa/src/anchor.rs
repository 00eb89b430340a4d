//! Anchor on the chain: the ends of the ledger's two hash chains and of the chains of audit records
//! of the other services, signed, as the call data of a transaction. Pure, except for reading the
//! key.
//!
//! ```text
//! tag | block u64 | hash 32 | record u64 | record hash 32 | time i64 | services | signature 64
//! of each service: length of its name u8 | name | record u64 | record hash 32
//! ```
//!
//! Numbers are big-endian, the time is in microseconds. The signature is Ed25519 over all bytes
//! before it. A program that can write a service's rows and the chain's transactions, without the
//! key, cannot make an anchor for altered rows; nor can the key's owner alone undo one that the
//! chain has. Anchors of earlier releases have another tag and no services.

use std::path::{Path, PathBuf};

use events::files;
use ring::rand::SystemRandom;
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};

use crate::error::Error;

const TAG: &[u8] = b"dfa-ledger-head-2";
/// Tag of an anchor without services.
const TAG_OF_LEDGER: &[u8] = b"dfa-ledger-head-1";
/// Bytes between tag and services.
const LEDGER: usize = 8 + 32 + 8 + 32 + 8;
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
    /// Of the services other than the ledger.
    pub services: Vec<LastRecord>,
}

/// Last audit record of a service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LastRecord {
    pub service: String,
    /// 0: none.
    pub record: u64,
    pub hash: [u8; 32],
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

    /// The public key.
    pub fn public(&self) -> &[u8] {
        self.0.public_key().as_ref()
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
        let mut bytes = TAG.to_vec();
        bytes.extend(self.block.to_be_bytes());
        bytes.extend(self.hash);
        bytes.extend(self.record.to_be_bytes());
        bytes.extend(self.record_hash);
        bytes.extend(self.at_us.to_be_bytes());
        for last in &self.services {
            let length = u8::try_from(last.service.len());
            bytes.push(length.expect("names of services are short"));
            bytes.extend(last.service.as_bytes());
            bytes.extend(last.record.to_be_bytes());
            bytes.extend(last.hash);
        }
        bytes
    }

    /// Reads call data. `None`: it is no anchor, or the key has not signed it.
    pub fn read(data: &[u8], public_key: &[u8]) -> Option<Self> {
        let (signed, signature) = data.split_last_chunk::<SIGNATURE>()?;
        let key = UnparsedPublicKey::new(&ED25519, public_key);
        key.verify(signed, signature).ok()?;
        let rest = match signed.strip_prefix(TAG_OF_LEDGER) {
            Some(rest) if rest.len() == LEDGER => rest,
            _ => signed.strip_prefix(TAG)?,
        };
        let (block, rest) = rest.split_first_chunk::<8>()?;
        let (hash, rest) = rest.split_first_chunk::<32>()?;
        let (record, rest) = rest.split_first_chunk::<8>()?;
        let (record_hash, rest) = rest.split_first_chunk::<32>()?;
        let (at_us, mut rest) = rest.split_first_chunk::<8>()?;
        let mut services = Vec::new();
        while !rest.is_empty() {
            let (last, others) = LastRecord::read(rest)?;
            services.push(last);
            rest = others;
        }
        Some(Self {
            block: u64::from_be_bytes(*block),
            hash: *hash,
            record: u64::from_be_bytes(*record),
            record_hash: *record_hash,
            at_us: i64::from_be_bytes(*at_us),
            services,
        })
    }

    /// True if the chains had the same lengths at both anchors.
    pub fn has_lengths_of(&self, other: &Self) -> bool {
        let (own, others) = (self.services.iter(), other.services.iter());
        (self.block, self.record) == (other.block, other.record)
            && own
                .map(LastRecord::length)
                .eq(others.map(LastRecord::length))
    }
}

impl LastRecord {
    fn length(&self) -> (&str, u64) {
        (&self.service, self.record)
    }

    /// Reads the first service of `bytes`. Returns it and the bytes after it.
    fn read(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (length, rest) = bytes.split_first()?;
        let (service, rest) = rest.split_at_checked(usize::from(*length))?;
        let (record, rest) = rest.split_first_chunk::<8>()?;
        let (hash, rest) = rest.split_first_chunk::<32>()?;
        let last = Self {
            service: str::from_utf8(service).ok()?.to_owned(),
            record: u64::from_be_bytes(*record),
            hash: *hash,
        };
        Some((last, rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn anchor() -> Anchor {
        let last = |service: &str, record| LastRecord {
            service: service.to_owned(),
            record,
            hash: [3; 32],
        };
        Anchor {
            block: 7,
            hash: [1; 32],
            record: 3,
            record_hash: [2; 32],
            at_us: 1_700_000_000_000_000,
            services: vec![last("cfa", 5), last("payments", 0)],
        }
    }

    // rows: R215
    #[test]
    fn r215_an_anchor_is_read_back_and_no_altered_byte_is() {
        let folder = tempfile::tempdir().expect("folder");
        let key = Key::load_or_create(folder.path()).expect("key");
        let public = public_key(folder.path()).expect("public key");
        assert_eq!(public, key.public());
        let data = key.sign(&anchor());
        assert_eq!(Anchor::read(&data, &public), Some(anchor()));
        for place in 0..data.len() {
            let mut altered = data.clone();
            altered[place] ^= 1;
            assert_eq!(Anchor::read(&altered, &public), None, "{place}");
        }
        assert_eq!(Anchor::read(&data[1..], &public), None);
        // The same key at the next start.
        let again = Key::load_or_create(folder.path()).expect("key");
        assert_eq!(again.sign(&anchor()), data);
        let other = tempfile::tempdir().expect("folder");
        let other = Key::load_or_create(other.path()).expect("key");
        assert_eq!(Anchor::read(&other.sign(&anchor()), &public), None);
    }

    // rows: R215
    /// Expected bytes, written out field by field, and signed as they are.
    #[test]
    fn r215_anchors_of_both_tags_are_read_and_truncated_ones_are_not() {
        let folder = tempfile::tempdir().expect("folder");
        let key = Key::load_or_create(folder.path()).expect("key");
        let signed = |tag: &[u8], bytes: &[u8]| {
            let mut data = [tag, bytes].concat();
            let signature = key.0.sign(&data);
            data.extend(signature.as_ref());
            data
        };
        let read = |tag, bytes| Anchor::read(&signed(tag, bytes), key.public());
        let time = 1_700_000_000_000_000_i64.to_be_bytes();
        let [seven, three] = [7_u64, 3].map(u64::to_be_bytes);
        let ledger = [&seven[..], &[1; 32], &three, &[2; 32], &time].concat();
        let cfa = [&b"\x03cfa\0\0\0\0\0\0\0\x05"[..], &[3; 32]].concat();
        let payments = [&b"\x08payments\0\0\0\0\0\0\0\0"[..], &[3; 32]].concat();
        let all = [&ledger[..], &cfa, &payments].concat();
        assert_eq!(key.sign(&anchor()), signed(b"dfa-ledger-head-2", &all));
        let of_ledger = Anchor {
            services: Vec::new(),
            ..anchor()
        };
        assert_eq!(read(b"dfa-ledger-head-1", &ledger), Some(of_ledger.clone()));
        assert!(!of_ledger.has_lengths_of(&anchor()));
        for (tag, length) in [
            (b"dfa-ledger-head-1", all.len()),
            (b"dfa-ledger-head-1", ledger.len() - 1),
            (b"dfa-ledger-head-2", all.len() - 1),
            (b"dfa-ledger-head-2", ledger.len() + 1),
            (b"dfa-ledger-head-2", ledger.len() - 1),
            (b"dfa-ledger-head-3", all.len()),
        ] {
            assert_eq!(read(tag, &all[..length]), None, "{length}");
        }
    }

    #[test]
    fn an_anchor_is_known_by_the_lengths_of_all_chains() {
        let mut later = anchor();
        later.at_us += 1;
        assert!(later.has_lengths_of(&anchor()));
        let changes: [fn(&mut Anchor); 4] = [
            |anchor| anchor.block += 1,
            |anchor| anchor.record += 1,
            |anchor| anchor.services[1].record += 1,
            |anchor| anchor.services.truncate(1),
        ];
        for change in changes {
            let mut changed = anchor();
            change(&mut changed);
            assert!(!changed.has_lengths_of(&anchor()), "{changed:?}");
        }
    }
}
