//! Operations of each user, listed many at once.
//!
//! Why: each lies somewhere else in that tree, and a transaction pays for every page that it
//! touches. Sorted and by the thousand those of one user share his pages. What is not listed yet is
//! found among the last blocks, a scan of at most [`UNLISTED_MAX`] operations and a group. The
//! bound is also that of the pause between two groups: where each operation is of another of very
//! many users, no page is shared, a tenth of a second.

use rusqlite::Connection;

use crate::Error;

/// Operations that wait to be listed, before they are.
pub const UNLISTED_MAX: u64 = 4_096;

/// Operations that are not listed.
pub fn unlisted(db: &Connection) -> Result<u64, Error> {
    let sql = "SELECT COUNT(*) FROM operations INDEXED BY operations_by_block \
               WHERE block > (SELECT through_block FROM operations_listed)";
    let count: i64 = db.query_row(sql, [], |row| row.get(0))?;
    Ok(count.unsigned_abs())
}

/// Lists them; how many. One that stands there already is no reason to take no more money: the
/// check of the ledger names it.
pub fn list(db: &Connection) -> Result<u64, Error> {
    let before = unlisted(db)?;
    db.prepare_cached(
        "INSERT OR IGNORE INTO operations_of_users SELECT user_id, created_at_us, operation_id FROM operations INDEXED BY operations_by_block \
         WHERE block > (SELECT through_block FROM operations_listed) ORDER BY 1, 2, 3",
    )?
    .execute([])?;
    db.prepare_cached(
        "UPDATE operations_listed SET through_block = (SELECT MAX(block) FROM audit_blocks)",
    )?
    .execute([])?;
    Ok(before)
}
