-- The whole development chain: blocks with their receipts, and the state after the last of them. One transaction per block.
CREATE TABLE block (
    number       INTEGER PRIMARY KEY,
    hash         BLOB NOT NULL UNIQUE,
    header       BLOB NOT NULL
);
CREATE TABLE transaction_ (
    hash         BLOB PRIMARY KEY,
    block_number INTEGER NOT NULL REFERENCES block (number),
    position     INTEGER NOT NULL,
    raw          BLOB NOT NULL,
    receipt      TEXT NOT NULL,
    UNIQUE (block_number, position)
);
CREATE TABLE account (
    address      BLOB PRIMARY KEY,
    nonce        INTEGER NOT NULL,
    balance      BLOB NOT NULL,
    code_hash    BLOB NOT NULL
);
CREATE TABLE code (
    hash         BLOB PRIMARY KEY,
    bytecode     BLOB NOT NULL
);
CREATE TABLE slot (
    address      BLOB NOT NULL,
    key          BLOB NOT NULL,
    value        BLOB NOT NULL,
    PRIMARY KEY (address, key)
) WITHOUT ROWID;
CREATE TABLE setting (
    name         TEXT PRIMARY KEY,
    value        TEXT NOT NULL
);
