-- Velocity limits as data, and the chain of sealed blocks over operations and postings.

CREATE TABLE velocity_limits (
    limit_id TEXT PRIMARY KEY,
    -- Empty: every user, each on his own.
    user_id TEXT NOT NULL,
    -- Kind of the account; 0: any.
    account_kind INTEGER NOT NULL CHECK (account_kind BETWEEN 0 AND 3),
    instrument_id TEXT NOT NULL REFERENCES instruments (instrument_id),
    -- 1: debit, 2: credit.
    side INTEGER NOT NULL CHECK (side IN (1, 2)),
    window_s BIGINT NOT NULL CHECK (window_s > 0),
    amount BIGINT NOT NULL CHECK (amount >= 0),
    -- Bit n: operations of type n; 0: of all types.
    kinds BIGINT NOT NULL,
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL
) WITHOUT ROWID;
CREATE INDEX velocity_limits_by_instrument ON velocity_limits (instrument_id, user_id);
CREATE INDEX velocity_limits_by_time ON velocity_limits (created_at_us, limit_id);

-- Each committed group that makes operations seals one block; `hash` covers the previous one and everything in the block that never changes.
CREATE TABLE audit_blocks (
    block INTEGER PRIMARY KEY,
    previous_hash BLOB NOT NULL CHECK (length(previous_hash) = 32),
    hash BLOB NOT NULL CHECK (length(hash) = 32),
    operations BIGINT NOT NULL CHECK (operations >= 0),
    postings BIGINT NOT NULL CHECK (postings >= 0),
    sealed_at_us BIGINT NOT NULL
);
-- The chain begins here.
INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us) VALUES (0, zeroblob(32), zeroblob(32), 0, 0, 0);

CREATE TRIGGER audit_blocks_never_change BEFORE UPDATE ON audit_blocks
BEGIN SELECT RAISE(ABORT, 'sealed blocks never change'); END;
CREATE TRIGGER audit_blocks_are_kept BEFORE DELETE ON audit_blocks
BEGIN SELECT RAISE(ABORT, 'sealed blocks are never deleted'); END;
CREATE TRIGGER audit_blocks_follow BEFORE INSERT ON audit_blocks
WHEN NOT EXISTS (
    SELECT 1 FROM audit_blocks b
    WHERE b.block = (SELECT MAX(block) FROM audit_blocks) AND new.block = b.block + 1 AND new.previous_hash = b.hash
        AND new.sealed_at_us >= b.sealed_at_us
)
BEGIN SELECT RAISE(ABORT, 'a sealed block follows the last one'); END;

-- In which block an operation is sealed, and its place there, from 0.
ALTER TABLE operations ADD COLUMN block BIGINT;
ALTER TABLE operations ADD COLUMN place BIGINT;
CREATE UNIQUE INDEX operations_by_block ON operations (block, place);
CREATE TRIGGER operations_keep_their_block BEFORE UPDATE OF block, place ON operations
WHEN old.block IS NOT NULL
BEGIN SELECT RAISE(ABORT, 'a sealed operation stays in its block'); END;

-- Every amount is read by the decimals of its instrument.
CREATE TRIGGER instruments_keep_their_decimals BEFORE UPDATE OF decimals ON instruments WHEN new.decimals <> old.decimals
BEGIN SELECT RAISE(ABORT, 'decimals of an instrument never change'); END;
