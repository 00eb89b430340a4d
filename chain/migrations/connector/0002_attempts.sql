-- A submission keeps its key and the hash of its first attempt. Its nonce and its later attempts
-- (a higher fee, a cancellation, another nonce) are what the connector needs to get it into a block.
CREATE TABLE attempt (
    tx_hash       TEXT PRIMARY KEY,
    key           TEXT NOT NULL,
    nonce         INTEGER NOT NULL,
    raw           BLOB NOT NULL,
    -- 1: a transfer of nothing to the own account, which only uses up the nonce.
    cancels       INTEGER NOT NULL,
    -- Head of the chain when it was signed.
    signed_block  INTEGER NOT NULL
);
CREATE INDEX attempt_key ON attempt (key, nonce);
CREATE INDEX attempt_nonce ON attempt (nonce);
INSERT INTO attempt (tx_hash, key, nonce, raw, cancels, signed_block)
    SELECT tx_hash, key, nonce, raw, 0, 0 FROM submission;

CREATE TABLE submission_2 (
    key             TEXT PRIMARY KEY,
    -- NULL: another transaction used up the nonce; the submission is parked until it gets a new one.
    nonce           INTEGER UNIQUE,
    tx_hash         TEXT NOT NULL UNIQUE,
    contract        TEXT NOT NULL,
    submitted_us    INTEGER NOT NULL,
    -- Attempt that is sent.
    latest          TEXT NOT NULL,
    -- Attempt that a block contains, and this block. A reorganisation resets both.
    included        TEXT,
    included_block  INTEGER,
    -- Set when the block is final.
    block_number    INTEGER,
    block_hash      TEXT,
    success         INTEGER,
    gas_used        INTEGER
);
INSERT INTO submission_2
    (key, nonce, tx_hash, contract, submitted_us, latest, included, included_block, block_number, success, gas_used)
    SELECT key, nonce, tx_hash, contract, submitted_us, tx_hash,
        CASE WHEN block_number IS NULL THEN NULL ELSE tx_hash END, block_number, block_number, success, gas_used
    FROM submission;
DROP TABLE submission;
ALTER TABLE submission_2 RENAME TO submission;
CREATE INDEX submission_waiting ON submission (nonce) WHERE block_number IS NULL AND included_block IS NULL;
CREATE INDEX submission_included ON submission (included_block)
    WHERE block_number IS NULL AND included_block IS NOT NULL;

-- Blocks above the cursor that were read and are not final yet.
CREATE TABLE unconfirmed (
    number  INTEGER PRIMARY KEY,
    hash    TEXT NOT NULL
);
-- The chain and the account of this store.
CREATE TABLE chain (
    id            INTEGER PRIMARY KEY CHECK (id = 1),
    chain_id      INTEGER NOT NULL,
    genesis_hash  TEXT NOT NULL,
    operator      TEXT NOT NULL
);
