-- Everything this platform ever sent to the chain, stored before it is sent. A nonce is used by one row.
CREATE TABLE submission (
    key           TEXT PRIMARY KEY,
    nonce         INTEGER NOT NULL UNIQUE,
    tx_hash       TEXT NOT NULL UNIQUE,
    raw           BLOB NOT NULL,
    contract      TEXT NOT NULL,
    submitted_us  INTEGER NOT NULL,
    block_number  INTEGER,
    success       INTEGER,
    gas_used      INTEGER
);
CREATE INDEX submission_waiting ON submission (nonce) WHERE block_number IS NULL;
-- The last block that was read and published.
CREATE TABLE cursor (
    id            INTEGER PRIMARY KEY CHECK (id = 1),
    block_number  INTEGER NOT NULL,
    block_hash    TEXT NOT NULL
);
