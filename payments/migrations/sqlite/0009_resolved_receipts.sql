-- Unmatched receipts are assigned to an intent, or refunded to their sender (D51).
CREATE TABLE receipts_with_resolution (
    receipt_id TEXT PRIMARY KEY,
    bank_id TEXT NOT NULL,
    -- NULL: the bank has not named the transaction yet.
    transaction_id TEXT,
    -- As the bank names it; may be unknown.
    payment_id TEXT NOT NULL,
    amount_minor BIGINT NOT NULL CHECK (amount_minor > 0),
    status TEXT NOT NULL CHECK (status IN ('MATCHED', 'UNMATCHED', 'REFUNDED')),
    -- Why no intent of the bank's report accounts for it.
    reason TEXT,
    -- The intent to which persons assigned it.
    assigned_payment_id TEXT,
    -- The payout that refunds it. A failed one is removed.
    refund_payout_id TEXT,
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL,
    CHECK ((status = 'MATCHED') = (reason IS NULL)),
    CHECK (status = 'MATCHED' OR assigned_payment_id IS NULL),
    CHECK (status <> 'MATCHED' OR refund_payout_id IS NULL),
    CHECK (status <> 'REFUNDED' OR refund_payout_id IS NOT NULL),
    UNIQUE (bank_id, transaction_id)
);
INSERT INTO receipts_with_resolution (receipt_id, bank_id, transaction_id, payment_id, amount_minor, status, reason,
    created_at_us, updated_at_us)
SELECT receipt_id, bank_id, transaction_id, payment_id, amount_minor, status, reason, created_at_us, updated_at_us
FROM receipts;
DROP TABLE receipts;
ALTER TABLE receipts_with_resolution RENAME TO receipts;
CREATE INDEX receipts_by_time ON receipts (created_at_us DESC, receipt_id DESC);
CREATE INDEX receipts_by_status ON receipts (status, created_at_us DESC, receipt_id DESC);
CREATE INDEX receipts_by_payment ON receipts (payment_id, status, created_at_us DESC);
CREATE INDEX receipts_unmatched ON receipts (amount_minor) WHERE status = 'UNMATCHED';

-- Receipt that the payout refunds.
ALTER TABLE payouts ADD COLUMN refunds_receipt TEXT;
