-- Differences between chain and ledger that outlasted the in-flight window, per instrument and
-- holder; an empty address: the supply.
CREATE TABLE chain_break (
    instrument_id TEXT NOT NULL,
    address       TEXT NOT NULL,
    found_at_us   INTEGER NOT NULL,
    -- empty: not an address of a user
    user_id       TEXT NOT NULL,
    -- smallest units; a chain's number may have 128 bits
    chain_units   TEXT NOT NULL,
    ledger_units  TEXT NOT NULL,
    compared_at_us INTEGER NOT NULL,
    cleared_at_us INTEGER,
    PRIMARY KEY (instrument_id, address, found_at_us)
) WITHOUT ROWID;
CREATE UNIQUE INDEX chain_break_open ON chain_break (instrument_id, address) WHERE cleared_at_us IS NULL;
CREATE INDEX chain_break_listed ON chain_break (found_at_us, instrument_id, address);
CREATE INDEX chain_break_of ON chain_break (instrument_id, found_at_us, address);
CREATE INDEX chain_break_listed_open ON chain_break (found_at_us, instrument_id, address) WHERE cleared_at_us IS NULL;

-- Differences that two persons have accepted: chain - ledger in smallest units.
CREATE TABLE accepted_difference (
    instrument_id  TEXT NOT NULL,
    address        TEXT NOT NULL,
    units          TEXT NOT NULL,
    actor          TEXT NOT NULL,
    reason         TEXT NOT NULL,
    accepted_at_us INTEGER NOT NULL,
    PRIMARY KEY (instrument_id, address)
) WITHOUT ROWID;

-- Ends of the ledger's hash chains, signed and sent to the chain.
CREATE TABLE ledger_anchor (
    number  INTEGER PRIMARY KEY,
    block   INTEGER NOT NULL,
    record  INTEGER NOT NULL,
    at_us   INTEGER NOT NULL,
    data    BLOB NOT NULL,
    tx_hash TEXT NOT NULL
);
