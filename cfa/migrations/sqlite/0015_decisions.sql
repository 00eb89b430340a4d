-- An issue stays a DRAFT until the operator activates it (259-FZ). Issues of earlier versions count as activated.
ALTER TABLE instrument ADD COLUMN activated INTEGER NOT NULL DEFAULT 0;
UPDATE instrument SET activated = 1;
DROP INDEX instrument_draft;
-- Activated issues whose contract is not deployed yet, and drafts of an issuer.
CREATE INDEX instrument_draft ON instrument (registered_at_us) WHERE status = 1 AND activated = 1;
CREATE INDEX instrument_of_issuer ON instrument (issuer_id) WHERE status = 1 AND activated = 0;
-- A document decides on one issue of its issuer.
CREATE INDEX instrument_document ON instrument (issuer_id, document_hash) WHERE document_hash <> '';

-- Hash and address of the document are in the instrument.
CREATE TABLE issue_decision (
    instrument_id      TEXT PRIMARY KEY,
    document           BLOB NOT NULL,
    signature          BLOB NOT NULL,
    signer             TEXT NOT NULL,
    certificate_serial TEXT NOT NULL,
    signed_by          TEXT NOT NULL,
    signed_at_us       INTEGER,
    activated_by       TEXT NOT NULL,
    activated_at_us    INTEGER
);

-- Enforcement acts: freezes (kind 1) and forced transfers (kind 2), each ordered by a document.
-- Status: 1 pending, 2 active, 3 used (all its units were transferred), 4 lifting, 5 lifted, 6 done, 7 failed.
CREATE TABLE enforcement_act (
    act_id         TEXT PRIMARY KEY,
    kind           INTEGER NOT NULL CHECK (kind IN (1, 2)),
    basis          INTEGER NOT NULL,
    instrument_id  TEXT NOT NULL,
    holder_id      TEXT NOT NULL,
    -- empty for a freeze
    to_user_id     TEXT NOT NULL,
    -- 0: a freeze of all units, also of those that are received later
    units_minor    INTEGER NOT NULL CHECK (units_minor >= 0),
    -- units of a freeze that no forced transfer has taken
    left_minor     INTEGER NOT NULL CHECK (left_minor >= 0),
    document       TEXT NOT NULL,
    lift_document  TEXT NOT NULL DEFAULT '',
    -- freeze whose units a forced transfer takes
    freeze_id      TEXT NOT NULL,
    status         INTEGER NOT NULL,
    -- the ledger holds the units or has frozen the sub-account
    held           INTEGER NOT NULL DEFAULT 0,
    -- the contract has frozen the units or the address
    frozen         INTEGER NOT NULL DEFAULT 0,
    attempts       INTEGER NOT NULL DEFAULT 0,
    tx_hash        TEXT NOT NULL DEFAULT '',
    idempotency_key TEXT NOT NULL,
    actor          TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    created_at_us  INTEGER NOT NULL,
    updated_at_us  INTEGER NOT NULL
);
CREATE UNIQUE INDEX act_key ON enforcement_act (actor, idempotency_key) WHERE kind = 1;
CREATE UNIQUE INDEX act_whole ON enforcement_act (holder_id, instrument_id)
    WHERE kind = 1 AND units_minor = 0 AND status IN (1, 2, 4);
CREATE INDEX act_listed ON enforcement_act (created_at_us, act_id);
CREATE INDEX act_of_holder ON enforcement_act (holder_id, created_at_us, act_id);
CREATE INDEX act_of_freeze ON enforcement_act (freeze_id) WHERE kind = 2 AND status = 1;
CREATE INDEX act_live ON enforcement_act (holder_id) WHERE kind = 1 AND status IN (1, 2, 4);
-- Freezes that the sweep continues.
CREATE INDEX act_open ON enforcement_act (updated_at_us) WHERE kind = 1 AND status IN (1, 4);
CREATE INDEX act_freezes ON enforcement_act (holder_id, instrument_id, created_at_us) WHERE kind = 1;

-- Signed extracts from the register. Format: 1 CSV, 2 text. Recipient: 1 holder, 2 court, 3 bailiff.
CREATE TABLE extract (
    extract_id     TEXT PRIMARY KEY,
    instrument_id  TEXT NOT NULL,
    holder_id      TEXT NOT NULL,
    as_of_us       INTEGER NOT NULL,
    format         INTEGER NOT NULL,
    recipient      INTEGER NOT NULL,
    document       TEXT NOT NULL,
    content        BLOB NOT NULL,
    signature      BLOB NOT NULL,
    signer         TEXT NOT NULL,
    actor          TEXT NOT NULL,
    issued_at_us   INTEGER NOT NULL
);
CREATE INDEX extract_of_actor ON extract (actor, issued_at_us);

-- Open operations of a maturing issue's holders.
CREATE INDEX operation_maturing ON operation (external_ref) WHERE flow = 7 AND status IN (1, 5, 6);
