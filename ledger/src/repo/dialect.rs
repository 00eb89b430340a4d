//! SQL that differs between the two databases.
//!
//! On SQLite a transaction costs per page that it touches, so the schema has no full index by
//! sub-account or by user. The postings of a sub-account are a linked list, and the user index of
//! operations is filled in batches. PostgreSQL has a full index for each.

use sqlx::{Database, Postgres, Sqlite};

/// Statements that depend on the database.
pub trait Dialect: Database {
    /// SQL before and after a bound JSON array of texts, to match a column with any of them.
    const IN_LIST: (&str, &str);
    /// Prefix that defines `entries`, unordered: the postings of sub-account `$1` with versions
    /// after `$2` through `$3`. Adds the columns `version` and `is_debit` (the posting debits the
    /// sub-account). Cost: by the number of entries, not by their position.
    const ENTRIES: &str;
    /// Prefixes that select operations `o` of a user; the user id follows. Together they select
    /// each operation once. Each comes with the alias of the table that is ordered by
    /// `created_at_us` and `operation_id`.
    const OPERATIONS_OF_USER: &[(&str, &str)];
    /// Fills `last_postings` with version and balance after the last posting of each sub-account.
    const FILL_LAST_POSTINGS: &str;
    /// Selects the first posting or sub-account with a wrong link: (operation, posting,
    /// sub-account).
    const BROKEN_LINK: Option<&str>;
    /// Selects the first operation that is missing from the user index, is found twice or under
    /// another user: (operation, user).
    const UNINDEXED_OPERATION: Option<&str>;
}

impl Dialect for Sqlite {
    const IN_LIST: (&str, &str) = ("IN (SELECT value FROM json_each(", "))");

    /// Starts at the nearest indexed version at or after `$3`, or at the last one, and follows the
    /// links back. Entries are missing after a wrong link: a caller that needs all of them counts
    /// them.
    const ENTRIES: &str = "WITH RECURSIVE near (posting_no, version) AS (\
         SELECT * FROM (SELECT posting_no, debit_version FROM postings \
         WHERE debit_subaccount_id = $1 AND debit_version % 32 = 0 AND debit_version >= $3 \
         ORDER BY debit_version LIMIT 1) \
         UNION ALL SELECT * FROM (SELECT posting_no, credit_version FROM postings \
         WHERE credit_subaccount_id = $1 AND credit_version % 32 = 0 AND credit_version >= $3 \
         ORDER BY credit_version LIMIT 1) \
         UNION ALL SELECT last_posting, version FROM sub_accounts WHERE subaccount_id = $1), \
         walk (posting_no, version) AS (\
         SELECT * FROM (SELECT posting_no, version FROM near ORDER BY version < $3, version LIMIT 1) \
         UNION ALL SELECT CASE p.debit_subaccount_id WHEN $1 THEN p.debit_previous ELSE p.credit_previous END, \
         w.version - 1 \
         FROM walk w CROSS JOIN postings p ON p.posting_no = w.posting_no WHERE w.version > $2 + 1), \
         entries AS (SELECT p.*, w.version, p.debit_subaccount_id = $1 AS is_debit \
         FROM walk w CROSS JOIN postings p ON p.posting_no = w.posting_no WHERE w.version > $2 AND w.version <= $3 \
         AND w.version = CASE $1 WHEN p.debit_subaccount_id THEN p.debit_version \
         WHEN p.credit_subaccount_id THEN p.credit_version END) ";

    const OPERATIONS_OF_USER: &[(&str, &str)] = &[
        (
            "SELECT o.* FROM operations_of_users u CROSS JOIN operations o ON o.operation_id = u.operation_id \
             WHERE u.user_id = ",
            "u",
        ),
        (
            "SELECT o.* FROM operations o INDEXED BY operations_by_block \
             WHERE o.block > (SELECT through_block FROM operations_listed) AND o.user_id = ",
            "o",
        ),
    ];

    /// SQLite takes a bare column next to `MAX` from the row with the maximum.
    const FILL_LAST_POSTINGS: &str = "INSERT INTO last_postings SELECT id, MAX(version), balance FROM (\
         SELECT debit_subaccount_id AS id, debit_version AS version, debit_balance_after AS balance FROM postings \
         UNION ALL SELECT credit_subaccount_id, credit_version, credit_balance_after FROM postings) sides GROUP BY id";

    const BROKEN_LINK: Option<&str> = Some(
        "SELECT p.operation_id, p.posting_id, l.id FROM (\
         SELECT posting_no AS of, debit_subaccount_id AS id, debit_version - 1 AS version, debit_previous AS link \
         FROM postings \
         UNION ALL SELECT posting_no, credit_subaccount_id, credit_version - 1, credit_previous FROM postings \
         UNION ALL SELECT NULL, subaccount_id, version, last_posting FROM sub_accounts) l \
         LEFT JOIN postings q ON q.posting_no = l.link LEFT JOIN postings p ON p.posting_no = l.of \
         WHERE (l.version = 0 AND l.link <> 0) OR (l.version <> 0 AND (q.posting_no IS NULL OR l.version IS NOT \
         CASE l.id WHEN q.debit_subaccount_id THEN q.debit_version \
         WHEN q.credit_subaccount_id THEN q.credit_version END)) \
         ORDER BY l.of IS NULL, l.of LIMIT 1",
    );

    const UNINDEXED_OPERATION: Option<&str> = Some(
        "SELECT operation_id, user_id FROM (SELECT o.operation_id, o.user_id FROM operations o \
         LEFT JOIN operations_of_users u \
         ON u.user_id = o.user_id AND u.created_at_us = o.created_at_us AND u.operation_id = o.operation_id \
         WHERE u.operation_id IS NULL \
         AND o.block <= COALESCE((SELECT through_block FROM operations_listed), (SELECT MAX(block) FROM audit_blocks)) \
         UNION ALL SELECT u.operation_id, u.user_id FROM operations_of_users u LEFT JOIN operations o \
         ON o.operation_id = u.operation_id AND o.user_id = u.user_id AND o.created_at_us = u.created_at_us \
         WHERE o.operation_id IS NULL \
         OR o.block > COALESCE((SELECT through_block FROM operations_listed), -1)) LIMIT 1",
    );
}

impl Dialect for Postgres {
    const IN_LIST: (&str, &str) = (
        "= ANY(ARRAY(SELECT jsonb_array_elements_text(",
        "::jsonb)))",
    );

    const ENTRIES: &str = "WITH entries AS (\
         SELECT p.*, p.debit_version AS version, TRUE AS is_debit FROM postings p \
         WHERE p.debit_subaccount_id = $1 AND p.debit_version > $2 AND p.debit_version <= $3 \
         UNION ALL SELECT p.*, p.credit_version, FALSE FROM postings p \
         WHERE p.credit_subaccount_id = $1 AND p.credit_version > $2 AND p.credit_version <= $3) ";

    const OPERATIONS_OF_USER: &[(&str, &str)] =
        &[("SELECT o.* FROM operations o WHERE o.user_id = ", "o")];

    const FILL_LAST_POSTINGS: &str = "INSERT INTO last_postings \
         SELECT s.subaccount_id, last.version, last.balance FROM sub_accounts s \
         CROSS JOIN LATERAL (SELECT version, balance FROM (\
         (SELECT p.debit_version AS version, p.debit_balance_after AS balance FROM postings p \
         WHERE p.debit_subaccount_id = s.subaccount_id ORDER BY p.debit_version DESC LIMIT 1) \
         UNION ALL (SELECT p.credit_version, p.credit_balance_after FROM postings p \
         WHERE p.credit_subaccount_id = s.subaccount_id ORDER BY p.credit_version DESC LIMIT 1)) sides \
         ORDER BY version DESC LIMIT 1) last";

    const BROKEN_LINK: Option<&str> = None;
    const UNINDEXED_OPERATION: Option<&str> = None;
}
