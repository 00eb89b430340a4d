-- Tokens whose events cannot be true: units of a holder below zero or beyond 64 bits. The registry keeps what was true before that block.
CREATE TABLE registry_quarantine (
    token        TEXT PRIMARY KEY,
    block_number INTEGER NOT NULL
) WITHOUT ROWID;
