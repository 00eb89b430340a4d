-- Batches in the order in which they were sealed. `request` and `legs` are kept as long as they are needed to repeat a step.
CREATE TABLE batches (
    number           INTEGER PRIMARY KEY AUTOINCREMENT,
    batch_id         TEXT    NOT NULL UNIQUE,
    source           TEXT    NOT NULL,
    first_sequence   INTEGER NOT NULL,
    through_sequence INTEGER NOT NULL,
    covers           INTEGER NOT NULL,
    state            TEXT    NOT NULL CHECK (state IN ('SEALED', 'POSTED', 'SUBMITTED', 'INCLUDED', 'FINAL')),
    saga             TEXT    NOT NULL,
    trades           INTEGER NOT NULL,
    tx_hash          TEXT,
    request          BLOB,
    legs             BLOB,
    executed         BLOB,
    sealed_at_us     INTEGER NOT NULL,
    changed_at_us    INTEGER NOT NULL
) STRICT;
CREATE INDEX batches_open ON batches (number) WHERE state <> 'FINAL';

-- Trades that were given up: reversed in the ledger, never on chain.
CREATE TABLE bust_trades (
    trade_id   TEXT    PRIMARY KEY,
    batch_id   TEXT    NOT NULL,
    bust_at_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- Differences between journal and ledger. A user with one that is not cleared is not settled.
CREATE TABLE breaks (
    name          TEXT    NOT NULL,
    hold_id       TEXT    NOT NULL,
    user_id       TEXT    NOT NULL,
    sequence      INTEGER NOT NULL,
    expected      INTEGER NOT NULL,
    found         INTEGER NOT NULL,
    found_at_us   INTEGER NOT NULL,
    cleared_at_us INTEGER,
    PRIMARY KEY (name, hold_id, found_at_us)
) STRICT, WITHOUT ROWID;
