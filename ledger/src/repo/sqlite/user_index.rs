//! User index of operations, filled in batches.
//!
//! Entries of different users are on different pages, and a transaction costs per page that it
//! touches. In a sorted batch of thousands the entries of one user share pages. Operations that are
//! not indexed yet are found by a scan of the last blocks: at most [`UNINDEXED_MAX`] operations
//! plus one group. The bound also limits the pause between two groups, to a tenth of a second if no
//! two operations have the same user.

use rusqlite::Connection;

use crate::Error;

/// Number of operations without index entries from which a batch is indexed.
pub const UNINDEXED_MAX: u64 = 4_096;

/// Number of operations without index entries.
pub fn unindexed(db: &Connection) -> Result<u64, Error> {
    let sql = "SELECT COUNT(*) FROM operations INDEXED BY operations_by_block \
               WHERE block > (SELECT through_block FROM operations_listed)";
    let count: i64 = db.query_row(sql, [], |row| row.get(0))?;
    Ok(count.unsigned_abs())
}

/// Indexes the operations without entries. Returns their number. Ignores an entry that exists
/// already, which `verify` reports.
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
