-- What each operation writes lies where the last one wrote, apart from its sub-accounts themselves. Three trees were touched all over instead, a page for each
-- entry: postings by their two sub-accounts, operations by user.

-- Postings of a sub-account are a chain from its last one back: each names the one of the version before on either side. So that no look-up walks far,
-- every 32nd version is in a tree. The number is that of writing; a sub-account that a posting names is updated in the same transaction, and
-- its operation is inserted, so that no reference is left to be looked up.
CREATE TABLE chained_postings (
    posting_no INTEGER PRIMARY KEY,
    operation_id TEXT NOT NULL,
    ordinal INTEGER NOT NULL,
    posting_id TEXT NOT NULL,
    debit_subaccount_id TEXT NOT NULL,
    credit_subaccount_id TEXT NOT NULL,
    instrument_id TEXT NOT NULL,
    amount BIGINT NOT NULL CHECK (amount > 0),
    hold_id TEXT,
    unsettled INTEGER NOT NULL CHECK (unsettled IN (0, 1)),
    debit_balance_after BIGINT NOT NULL,
    debit_version BIGINT NOT NULL,
    credit_balance_after BIGINT NOT NULL,
    credit_version BIGINT NOT NULL,
    created_at_us BIGINT NOT NULL,
    -- Number of the posting that made the version before; 0: there is none.
    debit_previous INTEGER NOT NULL CHECK (debit_previous >= 0 AND debit_previous < posting_no),
    credit_previous INTEGER NOT NULL CHECK (credit_previous >= 0 AND credit_previous < posting_no),
    CHECK (debit_subaccount_id <> credit_subaccount_id)
);
INSERT INTO chained_postings
SELECT p.rowid, p.operation_id, p.ordinal, p.posting_id, p.debit_subaccount_id, p.credit_subaccount_id, p.instrument_id, p.amount, p.hold_id, p.unsettled,
    p.debit_balance_after, p.debit_version, p.credit_balance_after, p.credit_version, p.created_at_us,
    COALESCE((SELECT q.rowid FROM postings q WHERE q.debit_subaccount_id = p.debit_subaccount_id AND q.debit_version = p.debit_version - 1),
        (SELECT q.rowid FROM postings q WHERE q.credit_subaccount_id = p.debit_subaccount_id AND q.credit_version = p.debit_version - 1), 0),
    COALESCE((SELECT q.rowid FROM postings q WHERE q.debit_subaccount_id = p.credit_subaccount_id AND q.debit_version = p.credit_version - 1),
        (SELECT q.rowid FROM postings q WHERE q.credit_subaccount_id = p.credit_subaccount_id AND q.credit_version = p.credit_version - 1), 0)
FROM postings p ORDER BY p.rowid;

ALTER TABLE sub_accounts ADD COLUMN last_posting INTEGER NOT NULL DEFAULT 0;
UPDATE sub_accounts SET last_posting = COALESCE(
    (SELECT p.rowid FROM postings p WHERE p.debit_subaccount_id = sub_accounts.subaccount_id AND p.debit_version = sub_accounts.version),
    (SELECT p.rowid FROM postings p WHERE p.credit_subaccount_id = sub_accounts.subaccount_id AND p.credit_version = sub_accounts.version), 0);

-- Their triggers and trees go with them.
DROP TABLE postings;
ALTER TABLE chained_postings RENAME TO postings;
CREATE UNIQUE INDEX postings_by_operation ON postings (operation_id, ordinal);
CREATE INDEX postings_by_debit ON postings (debit_subaccount_id, debit_version) WHERE debit_version % 32 = 0;
CREATE INDEX postings_by_credit ON postings (credit_subaccount_id, credit_version) WHERE credit_version % 32 = 0;

CREATE TRIGGER postings_never_change BEFORE UPDATE ON postings
BEGIN SELECT RAISE(ABORT, 'postings never change'); END;
CREATE TRIGGER postings_are_kept BEFORE DELETE ON postings
BEGIN SELECT RAISE(ABORT, 'postings are never deleted'); END;
CREATE TRIGGER postings_replace_nothing BEFORE INSERT ON postings
WHEN EXISTS (SELECT 1 FROM postings WHERE posting_no = new.posting_no)
    OR EXISTS (SELECT 1 FROM postings WHERE operation_id = new.operation_id AND ordinal = new.ordinal)
BEGIN SELECT RAISE(ABORT, 'postings are never replaced'); END;

-- Operations by user. They come in here many at once, sorted; those of blocks behind `through_block` are looked for among themselves.
CREATE TABLE operations_of_users (
    user_id TEXT NOT NULL,
    created_at_us BIGINT NOT NULL,
    operation_id TEXT NOT NULL,
    PRIMARY KEY (user_id, created_at_us, operation_id)
) WITHOUT ROWID;
CREATE TABLE operations_listed (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    through_block BIGINT NOT NULL
);
INSERT INTO operations_of_users SELECT user_id, created_at_us, operation_id FROM operations ORDER BY 1, 2, 3;
INSERT INTO operations_listed SELECT 1, MAX(block) FROM audit_blocks;
DROP INDEX operations_by_user;
