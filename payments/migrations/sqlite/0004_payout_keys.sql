-- A repeated call with the same key gets the payout that it made (T12). Payouts recorded before this have no key.
ALTER TABLE payouts ADD COLUMN idempotency_key TEXT;
CREATE UNIQUE INDEX payouts_by_key ON payouts (user_id, idempotency_key) WHERE idempotency_key IS NOT NULL;
