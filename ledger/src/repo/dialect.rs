//! Where the two schemas differ, as the text of statements.
//!
//! SQLite pays for each page that a transaction touches, so that there nothing lies by sub-account
//! or by user but what has to: postings are a chain, operations of users are listed many at once.
//! PostgreSQL has a tree for each.

use sqlx::{Database, Postgres, Sqlite};

/// What a statement of this database needs to be told.
pub trait Dialect: Database {
    /// Begins a statement with `entries`: the postings of a sub-account (`$1`) whose versions of it
    /// are after `$2` through `$3`, with that `version` and whether it is their debit side
    /// (`is_debit`), in no order. Cost: by their number, wherever they are.
    const ENTRIES: &str;
    /// Begins of statements that find operations `o` of a user, whose id follows; together they
    /// find each once. With them the table that has their `created_at_us` and `operation_id` in
    /// order.
    const OPERATIONS_OF_USER: &[(&str, &str)];
    /// Fills `newest`: version and balance that the last posting of each sub-account leaves.
    const NEWEST: &str;
    /// Finds the first posting or sub-account whose chain is not whole: (operation, posting, sub-account).
    const LOOSE_LINK: Option<&str>;
    /// Finds the first operation that the list of its user leaves out or would have twice, or that
    /// stands in the list of another: (operation, user).
    const UNLISTED: Option<&str>;
}

impl Dialect for Sqlite {
    /// From the nearest version in the tree, or from the last one, back along the chain. Behind a
    /// link that leads elsewhere entries are missing: whoever asks for all of them counts them.
    const ENTRIES: &str = "WITH RECURSIVE near (posting_no, version) AS (\
         SELECT * FROM (SELECT posting_no, debit_version FROM postings \
         WHERE debit_subaccount_id = $1 AND debit_version % 32 = 0 AND debit_version >= $3 ORDER BY debit_version LIMIT 1) \
         UNION ALL SELECT * FROM (SELECT posting_no, credit_version FROM postings \
         WHERE credit_subaccount_id = $1 AND credit_version % 32 = 0 AND credit_version >= $3 ORDER BY credit_version LIMIT 1) \
         UNION ALL SELECT last_posting, version FROM sub_accounts WHERE subaccount_id = $1), \
         walk (posting_no, version) AS (\
         SELECT * FROM (SELECT posting_no, version FROM near ORDER BY version < $3, version LIMIT 1) \
         UNION ALL SELECT CASE p.debit_subaccount_id WHEN $1 THEN p.debit_previous ELSE p.credit_previous END, w.version - 1 \
         FROM walk w CROSS JOIN postings p ON p.posting_no = w.posting_no WHERE w.version > $2 + 1), \
         entries AS (SELECT p.*, w.version, p.debit_subaccount_id = $1 AS is_debit \
         FROM walk w CROSS JOIN postings p ON p.posting_no = w.posting_no WHERE w.version > $2 AND w.version <= $3 \
         AND w.version = CASE $1 WHEN p.debit_subaccount_id THEN p.debit_version WHEN p.credit_subaccount_id THEN p.credit_version END) ";

    const OPERATIONS_OF_USER: &[(&str, &str)] = &[
        (
            "SELECT o.* FROM operations_of_users u CROSS JOIN operations o ON o.operation_id = u.operation_id WHERE u.user_id = ",
            "u",
        ),
        (
            "SELECT o.* FROM operations o INDEXED BY operations_by_block \
             WHERE o.block > (SELECT through_block FROM operations_listed) AND o.user_id = ",
            "o",
        ),
    ];

    /// A bare column beside `MAX` is of the row that has it.
    const NEWEST: &str = "INSERT INTO newest SELECT id, MAX(version), balance FROM (\
         SELECT debit_subaccount_id AS id, debit_version AS version, debit_balance_after AS balance FROM postings \
         UNION ALL SELECT credit_subaccount_id, credit_version, credit_balance_after FROM postings) sides GROUP BY id";

    const LOOSE_LINK: Option<&str> = Some(
        "SELECT p.operation_id, p.posting_id, l.id FROM (\
         SELECT posting_no AS of, debit_subaccount_id AS id, debit_version - 1 AS version, debit_previous AS link FROM postings \
         UNION ALL SELECT posting_no, credit_subaccount_id, credit_version - 1, credit_previous FROM postings \
         UNION ALL SELECT NULL, subaccount_id, version, last_posting FROM sub_accounts) l \
         LEFT JOIN postings q ON q.posting_no = l.link LEFT JOIN postings p ON p.posting_no = l.of \
         WHERE (l.version = 0 AND l.link <> 0) OR (l.version <> 0 AND (q.posting_no IS NULL OR l.version IS NOT \
         CASE l.id WHEN q.debit_subaccount_id THEN q.debit_version WHEN q.credit_subaccount_id THEN q.credit_version END)) \
         ORDER BY l.of IS NULL, l.of LIMIT 1",
    );

    const UNLISTED: Option<&str> = Some(
        "SELECT operation_id, user_id FROM (SELECT o.operation_id, o.user_id FROM operations o LEFT JOIN operations_of_users u \
         ON u.user_id = o.user_id AND u.created_at_us = o.created_at_us AND u.operation_id = o.operation_id WHERE u.operation_id IS NULL \
         AND o.block <= COALESCE((SELECT through_block FROM operations_listed), (SELECT MAX(block) FROM audit_blocks)) \
         UNION ALL SELECT u.operation_id, u.user_id FROM operations_of_users u LEFT JOIN operations o \
         ON o.operation_id = u.operation_id AND o.user_id = u.user_id AND o.created_at_us = u.created_at_us \
         WHERE o.operation_id IS NULL OR o.block > COALESCE((SELECT through_block FROM operations_listed), -1)) LIMIT 1",
    );
}

impl Dialect for Postgres {
    const ENTRIES: &str = "WITH entries AS (\
         SELECT p.*, p.debit_version AS version, TRUE AS is_debit FROM postings p \
         WHERE p.debit_subaccount_id = $1 AND p.debit_version > $2 AND p.debit_version <= $3 \
         UNION ALL SELECT p.*, p.credit_version, FALSE FROM postings p \
         WHERE p.credit_subaccount_id = $1 AND p.credit_version > $2 AND p.credit_version <= $3) ";

    const OPERATIONS_OF_USER: &[(&str, &str)] =
        &[("SELECT o.* FROM operations o WHERE o.user_id = ", "o")];

    const NEWEST: &str = "INSERT INTO newest SELECT s.subaccount_id, last.version, last.balance FROM sub_accounts s \
         CROSS JOIN LATERAL (SELECT version, balance FROM (\
         (SELECT p.debit_version AS version, p.debit_balance_after AS balance FROM postings p \
         WHERE p.debit_subaccount_id = s.subaccount_id ORDER BY p.debit_version DESC LIMIT 1) \
         UNION ALL (SELECT p.credit_version, p.credit_balance_after FROM postings p \
         WHERE p.credit_subaccount_id = s.subaccount_id ORDER BY p.credit_version DESC LIMIT 1)) sides ORDER BY version DESC LIMIT 1) last";

    const LOOSE_LINK: Option<&str> = None;
    const UNLISTED: Option<&str> = None;
}
