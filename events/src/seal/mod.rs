//! Row seals: any row that is changed, added or deleted past its service is found.
//!
//! Each row of a sealed table has a seal in the same file: an HMAC-SHA256 over its table, its key
//! and its columns. `seal_total` has their number and their sum modulo 2^256, sealed too, so a row
//! that is deleted together with its seal is found. The key of the HMAC is a file beside the store.
//! Seals show an alteration. They do not prevent it, and a person who reads the key can forge them.
//!
//! The writer's connection notes the keys of written rows by triggers in its temporary database,
//! and seals these rows in the same transaction, before its commit. So no statement of a service
//! knows of seals. Another program has no such triggers: its writes leave wrong seals.
//!
//! Cost: four statements per transaction and table that it writes, and one per transaction without
//! sealed rows. Tables with a row per trade are exempt ([`Sealing`]) and checked by other means.
//!
//! | file | contents |
//! |---|---|
//! | `table` | the statements of one table |
//! | `write` | seals the rows of a transaction, on both kinds of writers |
//! | `check` | compares all rows of a file with their seals |

mod check;
mod table;
mod write;

use std::path::{Path, PathBuf};

use hmac::{Hmac, Mac};
use sha2::Sha256;

pub use check::{Altered, Change, SealedStore, StoreCheck, check};
pub(crate) use write::{Seals, prepare};

use crate::{Error, files};

/// Tables of a store without seals, each with the reason.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sealing {
    /// Table and reason.
    pub exempt: &'static [(&'static str, &'static str)],
    /// Table, the condition of its sealed rows in SQL with the row named `ROW`, and the reason why
    /// the other rows have no seal.
    pub partly: &'static [(&'static str, &'static str, &'static str)],
    /// Table of which the seal covers only these columns, besides the key. A write that changes
    /// none of them costs nothing.
    pub columns: &'static [(&'static str, &'static [&'static str])],
}

/// Exempt in every store.
const EXEMPT: [(&str, &str); 5] = [
    ("outbox", "a queue: its rows leave within moments"),
    (
        "inbox",
        "ids of applied events: a repeated event changes nothing",
    ),
    ("_sqlx_migrations", "checksums, checked at each start"),
    ("row_seals", "the seals, counted and summed in seal_total"),
    ("seal_total", "sealed itself"),
];

/// Tables of the seals. `seal_total` has one row.
const TABLES: &str = "CREATE TABLE IF NOT EXISTS row_seals (name TEXT NOT NULL, key TEXT NOT NULL, \
     hash BLOB NOT NULL, PRIMARY KEY (name, key)) WITHOUT ROWID; \
     CREATE TABLE IF NOT EXISTS seal_total (one INTEGER PRIMARY KEY CHECK (one = 1), \
     definition TEXT NOT NULL, rows INTEGER NOT NULL, sum BLOB NOT NULL, seal BLOB NOT NULL); \
     CREATE TABLE IF NOT EXISTS altered_rows (name TEXT NOT NULL, key TEXT NOT NULL, \
     change TEXT NOT NULL, PRIMARY KEY (name, key)) WITHOUT ROWID";

const TOTAL: &str = "SELECT definition, rows, sum, seal FROM seal_total WHERE one = 1";
const SAVE_TOTAL: &str = "UPDATE seal_total SET rows = $1, sum = $2, seal = $3 WHERE one = 1";
/// `$1` table, `$2` array of arrays of key and hash in hex.
const SAVE_SEALS: &str = "INSERT INTO row_seals (name, key, hash) \
     SELECT $1, value ->> 0, unhex(value ->> 1) FROM json_each($2) WHERE TRUE \
     ON CONFLICT (name, key) DO UPDATE SET hash = excluded.hash";
/// `$1` table, `$2` array of keys.
const DROP_SEALS: &str =
    "DELETE FROM row_seals WHERE name = $1 AND key IN (SELECT value FROM json_each($2))";

type Hash = [u8; 32];

impl Sealing {
    /// Every table of a store has seals.
    pub const ALL: Sealing = Sealing {
        exempt: &[],
        partly: &[],
        columns: &[],
    };

    /// Why a table has no seals; `None`: its rows have them, or those of a condition.
    pub fn exemption(&self, table: &str) -> Option<&'static str> {
        let exempt = EXEMPT.iter().chain(self.exempt);
        let mut reasons = exempt.filter(|(name, _)| *name == table);
        reasons.next().map(|(_, reason)| *reason)
    }

    fn condition(&self, table: &str) -> &'static str {
        let mut found = self.partly.iter().filter(|(name, ..)| *name == table);
        found.next().map_or("TRUE", |(_, condition, _)| *condition)
    }

    /// `None`: all columns.
    fn columns(&self, table: &str) -> Option<&'static [&'static str]> {
        let mut found = self.columns.iter().filter(|(name, _)| *name == table);
        found.next().map(|(_, columns)| *columns)
    }
}

/// File with the key of a store's seals.
pub fn key_file(store: &Path) -> PathBuf {
    let mut name = store.as_os_str().to_owned();
    name.push(".seal.key");
    PathBuf::from(name)
}

fn make_key(store: &Path) -> Result<Hash, Error> {
    let make = || Ok::<_, std::io::Error>(hex::encode(rand::random::<Hash>()).into_bytes());
    let text = files::read_or_create(&key_file(store), files::PRIVATE, make)?;
    parse_key(store, &text)
}

fn read_key(store: &Path) -> Result<Hash, Error> {
    let text = std::fs::read(key_file(store))?;
    parse_key(store, &text)
}

fn parse_key(store: &Path, text: &[u8]) -> Result<Hash, Error> {
    let mut key = Hash::default();
    hex::decode_to_slice(text.trim_ascii(), &mut key).map_err(|error| {
        let text = format!("{}: {error}", key_file(store).display());
        Error::Files(std::io::Error::new(std::io::ErrorKind::InvalidData, text))
    })?;
    Ok(key)
}

/// HMAC over texts. Each has its length before it, so different texts have different bytes.
fn seal_of(key: &Hash, texts: &[&[u8]]) -> Hash {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("HMAC takes keys of any length");
    for text in texts {
        mac.update(&(text.len() as u64).to_be_bytes());
        mac.update(text);
    }
    mac.finalize().into_bytes().into()
}

/// Number of seals and their sum modulo 2^256, little-endian.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Total {
    rows: i64,
    sum: Hash,
}

impl Total {
    fn add(&mut self, hash: &Hash) {
        self.rows += 1;
        let mut carry = 0u16;
        for (left, right) in self.sum.iter_mut().zip(hash) {
            let [low, high] = (u16::from(*left) + u16::from(*right) + carry).to_le_bytes();
            (*left, carry) = (low, u16::from(high));
        }
    }

    fn subtract(&mut self, hash: &Hash) {
        self.rows -= 1;
        let mut borrow = false;
        for (left, right) in self.sum.iter_mut().zip(hash) {
            let (rest, first) = left.overflowing_sub(*right);
            let (rest, second) = rest.overflowing_sub(u8::from(borrow));
            (*left, borrow) = (rest, first || second);
        }
    }

    /// Seal of the total and of what all seals depend on.
    fn seal(&self, key: &Hash, definition: &str) -> Hash {
        let rows = self.rows.to_be_bytes();
        seal_of(key, &[definition.as_bytes(), &rows, &self.sum])
    }
}

/// A stored hash; all zeros if it has another length, which no seal equals.
fn stored(hash: &[u8]) -> Hash {
    Hash::try_from(hash).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_returns_to_its_value_when_what_was_added_is_subtracted() {
        let hashes: Vec<Hash> = (0..40u8)
            .map(|number| seal_of(&[7; 32], &[b"row", &[number]]))
            .collect();
        let mut total = Total::default();
        hashes.iter().for_each(|hash| total.add(hash));
        let before = total;
        assert_eq!(total.rows, 40);
        total.add(&[0xFF; 32]);
        assert_ne!(total.sum, before.sum);
        total.subtract(&[0xFF; 32]);
        assert_eq!(total, before);
        hashes.iter().rev().for_each(|hash| total.subtract(hash));
        assert_eq!(total, Total::default());
    }

    #[test]
    fn seals_of_different_texts_differ() {
        let seals = [
            seal_of(&[1; 32], &[b"users", b"a", b"bc"]),
            seal_of(&[1; 32], &[b"users", b"ab", b"c"]),
            seal_of(&[2; 32], &[b"users", b"a", b"bc"]),
        ];
        assert!(seals[0] != seals[1] && seals[0] != seals[2] && seals[1] != seals[2]);
    }
}
