-- A repeated call with the same key gets the report it made (T12); runs of the cut-off have none.
ALTER TABLE reports ADD COLUMN idempotency_key TEXT;
CREATE UNIQUE INDEX reports_by_key ON reports (idempotency_key) WHERE idempotency_key IS NOT NULL;
