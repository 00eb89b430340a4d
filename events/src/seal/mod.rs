//! Row seals: any row that is changed, added or deleted past its service is found.
//!
//! Each row of a sealed table has a seal in the same file: an HMAC-SHA256 over its table, its key
//! and its columns. `seal_total` has their number and their sum modulo 2^256, sealed too, so a row
//! that is deleted together with its seal is found. A *summed* table has a total alone: an
//! alteration is found, and its table is named, not its row. Seals show an alteration. They do not
//! prevent it, and a person who reads the key can forge them.
//!
//! The writer's connection notes written rows by triggers in its temporary database, and the
//! commit seals them in the same transaction. So no statement of a service knows of seals, and a
//! rollback or a crash undoes rows and seals together. Another program has no such triggers: its
//! writes leave wrong seals. `INSERT OR REPLACE` fires no trigger for the rows that it removes, so
//! services do not use it.
//!
//! Cost: one statement per write transaction, and five per table that it writes. A sealed row costs
//! one more row. Tables with a row per trade have neither seal nor total ([`Sealing::exempt`],
//! [`Sealing::partly`]) and are checked by other means. Tables with a row per order or per batch of
//! trades are summed, which adds no row.
//!
//! The key is a file beside the store. It exists from the commit of the first seals on. A start
//! that finds a key without seals, or seals without a key, keeps a finding in `altered_rows`, as
//! does a migration for rows that differ before it. [`accept`] ends findings: it removes seals and
//! key, and the next start seals the rows as they are, with a new key.
//!
//! | file | contents |
//! |---|---|
//! | `key` | the file of the key |
//! | `table` | the statements of one table |
//! | `write` | seals the rows of a transaction, on both kinds of writers |
//! | `prepare` | opening a store: finds its tables, checks it before a migration, seals all rows |
//! | `check` | compares all rows of a file with their seals |

mod check;
mod key;
mod prepare;
mod table;
mod write;

use hmac::{Hmac, Mac};
use sha2::Sha256;
use sqlx::{Row, SqliteConnection, sqlite::SqliteRow};

use crate::Error;
use table::Table;

pub use check::{Altered, Change, SealedStore, StoreCheck, accept, check};
pub(crate) use key::keep as keep_key;
pub use key::key_file;
pub(crate) use prepare::prepare;
pub(crate) use write::Seals;

/// Tables of a store without seals, each with the reason.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sealing {
    /// Table and reason.
    pub exempt: &'static [(&'static str, &'static str)],
    /// Table, the condition of its sealed rows in SQL with the row named `ROW`, and the reason why
    /// the other rows have no seal.
    pub partly: &'static [(&'static str, &'static str, &'static str)],
    /// Table of which the seal covers only these columns, besides the key. A statement that sets
    /// none of them costs nothing. Includes the columns of the condition.
    pub columns: &'static [(&'static str, &'static [&'static str])],
    /// Table with a total instead of a seal per row, and the reason.
    pub summed: &'static [(&'static str, &'static str)],
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

/// Tables of the seals. `seal_total` has a row without a name for all rows with seals, and one per
/// summed table.
const TABLES: &str = "CREATE TABLE IF NOT EXISTS row_seals (name TEXT NOT NULL, key TEXT NOT NULL, \
     hash BLOB NOT NULL, PRIMARY KEY (name, key)) WITHOUT ROWID; \
     CREATE TABLE IF NOT EXISTS seal_total (name TEXT PRIMARY KEY, definition TEXT NOT NULL, \
     rows INTEGER NOT NULL, sum BLOB NOT NULL, seal BLOB NOT NULL) WITHOUT ROWID; \
     CREATE TABLE IF NOT EXISTS altered_rows (name TEXT NOT NULL, key TEXT NOT NULL, \
     change TEXT NOT NULL, PRIMARY KEY (name, key)) WITHOUT ROWID";
const DROP_TABLES: &str = "BEGIN IMMEDIATE; DROP TABLE IF EXISTS row_seals; \
     DROP TABLE IF EXISTS seal_total; DROP TABLE IF EXISTS altered_rows; COMMIT";

/// Name of the total of all rows with seals.
const ALL_SEALED: &str = "";
const TOTAL: &str = "SELECT definition, rows, sum, seal FROM seal_total WHERE name = $1";
/// The parameters appear in the order of their numbers: the writer on the calling thread binds them
/// by position.
const SAVE_TOTAL: &str = "UPDATE seal_total SET rows = $1, sum = $2, seal = $3 WHERE name = $4";
/// `$1` table, `$2` array of arrays of key and hash in hex.
const SAVE_SEALS: &str = "INSERT INTO row_seals (name, key, hash) \
     SELECT $1, value ->> 0, unhex(value ->> 1) FROM json_each($2) WHERE TRUE \
     ON CONFLICT (name, key) DO UPDATE SET hash = excluded.hash";
/// `$1` table, `$2` array of keys.
const DROP_SEALS: &str =
    "DELETE FROM row_seals WHERE name = $1 AND key IN (SELECT value FROM json_each($2))";

type Hash = [u8; 32];

impl Sealing {
    /// Every row of every table has a seal.
    pub const ALL: Sealing = Sealing {
        exempt: &[],
        partly: &[],
        columns: &[],
        summed: &[],
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

    fn is_summed(&self, table: &str) -> bool {
        self.summed.iter().any(|(name, _)| *name == table)
    }
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

    /// Seal of the total, and of the definition on which its seals depend.
    fn seal(&self, key: &Hash, name: &str, definition: &str) -> Hash {
        let rows = self.rows.to_be_bytes();
        let (name, definition) = (name.as_bytes(), definition.as_bytes());
        seal_of(key, &[name, definition, &rows, &self.sum])
    }

    fn read(rows: i64, sum: &[u8]) -> Self {
        Total {
            rows,
            sum: stored(sum),
        }
    }
}

/// A row of `seal_total`.
struct StoredTotal {
    definition: String,
    total: Total,
    seal: Hash,
}

impl StoredTotal {
    /// `None`: it is missing.
    async fn find(db: &mut SqliteConnection, name: &str) -> Result<Option<Self>, Error> {
        let row = sqlx::query(TOTAL).bind(name).fetch_optional(db).await?;
        let read = |row: SqliteRow| -> Result<Self, sqlx::Error> {
            let (sum, seal): (Vec<u8>, Vec<u8>) = (row.try_get("sum")?, row.try_get("seal")?);
            Ok(StoredTotal {
                definition: row.try_get("definition")?,
                total: Total::read(row.try_get("rows")?, &sum),
                seal: stored(&seal),
            })
        };
        Ok(row.map(read).transpose()?)
    }

    fn is_sealed(&self, key: &Hash, name: &str) -> bool {
        self.seal == self.total.seal(key, name, &self.definition)
    }
}

/// The seal of a row. `key`: its key as text; empty in a summed table, whose columns include it.
fn row_seal(seal_key: &Hash, table: &Table, key: &str, image: &str) -> Hash {
    let texts = [table.name.as_bytes(), key.as_bytes(), image.as_bytes()];
    seal_of(seal_key, &texts)
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
