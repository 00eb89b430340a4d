//! User index of operations, filled in batches.
//!
//! Entries of different users are on different pages, and a transaction pays for every page that it
//! touches; in a sorted batch of thousands the entries of one user share pages. Operations not
//! indexed yet are found by a scan of the last blocks, at most [`UNINDEXED_MAX`] operations plus one
//! group. The bound also limits the pause between two groups: a tenth of a second if each operation
//! belongs to another of very many users, so that no page is shared.

use rusqlite::Connection;

use crate::Error;

/// Number of operations without index entries that triggers a batch.
pub const UNINDEXED_MAX: u64 = 4_096;

/// Number of operations without index entries.
pub fn unindexed(db: &Connection) -> Result<u64, Error> {
    let sql = "SELECT COUNT(*) FROM operations INDEXED BY operations_by_block \
               WHERE block > (SELECT through_block FROM operations_listed)";
    let count: i64 = db.query_row(sql, [], |row| row.get(0))?;
    Ok(count.unsigned_abs())
}

/// Adds them to the index; returns how many. An entry that exists already does not stop writes:
/// `verify` reports it.
pub fn fill(db: &Connection) -> Result<u64, Error> {
    let before = unindexed(db)?;
    db.prepare_cached(
        "INSERT OR IGNORE INTO operations_of_users SELECT user_id, created_at_us, operation_id \
         FROM operations INDEXED BY operations_by_block \
         WHERE block > (SELECT through_block FROM operations_listed) ORDER BY 1, 2, 3",
    )?
    .execute([])?;
    db.prepare_cached(
        "UPDATE operations_listed SET through_block = (SELECT MAX(block) FROM audit_blocks)",
    )?
    .execute([])?;
    Ok(before)
}
