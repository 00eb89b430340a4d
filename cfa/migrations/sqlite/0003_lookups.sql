-- What runs per trade, per batch and per sweep costs the same however many rows are stored.
-- SQLite uses a partial index only for a statement that repeats the index's condition: a bound value does not imply `external_ref <> ''`.

-- Refused operations of a reference; the others are in `operation_reference`.
CREATE INDEX operation_refused ON operation (kind, external_ref) WHERE external_ref <> '' AND status IN (8, 12);
-- Trades move with their batch and holders of a maturing issue with its redemption: the sweep does not look for them.
DROP INDEX operation_open;
CREATE INDEX operation_open ON operation (updated_at_us, operation_id) WHERE status NOT IN (7, 8, 9, 12) AND flow NOT IN (6, 7);

CREATE INDEX instrument_key ON instrument (issuer_id, idempotency_key);
CREATE INDEX instrument_token ON instrument (contract_address);
CREATE INDEX instrument_draft ON instrument (registered_at_us) WHERE status = 1;
CREATE INDEX instrument_due ON instrument (matures_at_us) WHERE status IN (2, 3, 4);
CREATE INDEX redemption_open ON issue_redemption (created_at_us) WHERE status NOT IN (5, 6);
