-- An issue stays a DRAFT until the operator activates it (259-FZ). Issues of earlier versions count as activated.
ALTER TABLE instrument ADD COLUMN activated INTEGER NOT NULL DEFAULT 0;
UPDATE instrument SET activated = 1;
DROP INDEX instrument_draft;
-- Activated issues whose contract is not deployed yet, and drafts of an issuer.
CREATE INDEX instrument_draft ON instrument (registered_at_us) WHERE status = 1 AND activated = 1;
CREATE INDEX instrument_of_issuer ON instrument (issuer_id) WHERE status = 1 AND activated = 0;

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
