-- Velocity limits as data, and the chain of sealed blocks over operations and postings. The same schema as SQLite's.

CREATE TABLE velocity_limits (
    limit_id TEXT COLLATE "C" PRIMARY KEY,
    -- Empty: every user, each on his own.
    user_id TEXT COLLATE "C" NOT NULL,
    -- Kind of the account; 0: any.
    account_kind INTEGER NOT NULL CHECK (account_kind BETWEEN 0 AND 3),
    instrument_id TEXT COLLATE "C" NOT NULL REFERENCES instruments (instrument_id),
    -- 1: debit, 2: credit.
    side INTEGER NOT NULL CHECK (side IN (1, 2)),
    window_s BIGINT NOT NULL CHECK (window_s > 0),
    amount BIGINT NOT NULL CHECK (amount >= 0),
    -- Bit n: operations of type n; 0: of all types.
    kinds BIGINT NOT NULL,
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL
);
CREATE INDEX velocity_limits_by_instrument ON velocity_limits (instrument_id, user_id);
CREATE INDEX velocity_limits_by_time ON velocity_limits (created_at_us, limit_id);

-- Each committed group that makes operations seals one block; `hash` covers the previous one and everything in the block that never changes.
CREATE TABLE audit_blocks (
    block BIGINT PRIMARY KEY,
    previous_hash BYTEA NOT NULL CHECK (length(previous_hash) = 32),
    hash BYTEA NOT NULL CHECK (length(hash) = 32),
    operations BIGINT NOT NULL CHECK (operations >= 0),
    postings BIGINT NOT NULL CHECK (postings >= 0),
    sealed_at_us BIGINT NOT NULL
);
-- The chain begins here.
INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us)
VALUES (0, decode(repeat('00', 32), 'hex'), decode(repeat('00', 32), 'hex'), 0, 0, 0);

CREATE TRIGGER audit_blocks_never_change BEFORE UPDATE ON audit_blocks
FOR EACH ROW EXECUTE FUNCTION refuse('sealed blocks never change');
CREATE TRIGGER audit_blocks_are_kept BEFORE DELETE ON audit_blocks
FOR EACH ROW EXECUTE FUNCTION refuse('sealed blocks are never deleted');
CREATE TRIGGER audit_blocks_are_all_kept BEFORE TRUNCATE ON audit_blocks
FOR EACH STATEMENT EXECUTE FUNCTION refuse('sealed blocks are never deleted');
CREATE FUNCTION follow_the_last_block() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (
        SELECT 1 FROM audit_blocks b
        WHERE b.block = (SELECT MAX(block) FROM audit_blocks) AND new.block = b.block + 1 AND new.previous_hash = b.hash
            AND new.sealed_at_us >= b.sealed_at_us
    ) THEN
        RAISE EXCEPTION 'a sealed block follows the last one';
    END IF;
    RETURN new;
END $$;
CREATE TRIGGER audit_blocks_follow BEFORE INSERT ON audit_blocks FOR EACH ROW EXECUTE FUNCTION follow_the_last_block();

-- In which block an operation is sealed, and its place there, from 0.
ALTER TABLE operations ADD COLUMN block BIGINT;
ALTER TABLE operations ADD COLUMN place BIGINT;
CREATE UNIQUE INDEX operations_by_block ON operations (block, place);
CREATE TRIGGER operations_keep_their_block BEFORE UPDATE OF block, place ON operations
FOR EACH ROW WHEN (old.block IS NOT NULL AND (old.block, old.place) IS DISTINCT FROM (new.block, new.place))
EXECUTE FUNCTION refuse('a sealed operation stays in its block');

-- Every amount is read by the decimals of its instrument.
CREATE TRIGGER instruments_keep_their_decimals BEFORE UPDATE OF decimals ON instruments
FOR EACH ROW WHEN (new.decimals <> old.decimals) EXECUTE FUNCTION refuse('decimals of an instrument never change');
