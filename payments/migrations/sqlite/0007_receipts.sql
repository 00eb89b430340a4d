-- Money that the bank reports as received, one row per bank transaction (D51). Replaces the receipts without an intent, of which a payment had one.
CREATE TABLE receipts (
    receipt_id TEXT PRIMARY KEY,
    bank_id TEXT NOT NULL,
    -- NULL: the bank has not named the transaction yet.
    transaction_id TEXT,
    -- As the bank names it; may be unknown.
    payment_id TEXT NOT NULL,
    amount_minor BIGINT NOT NULL CHECK (amount_minor > 0),
    status TEXT NOT NULL CHECK (status IN ('MATCHED', 'UNMATCHED')),
    -- Why no intent accounts for it.
    reason TEXT,
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL,
    CHECK ((status = 'UNMATCHED') = (reason IS NOT NULL)),
    UNIQUE (bank_id, transaction_id)
);
CREATE INDEX receipts_by_time ON receipts (created_at_us DESC, receipt_id DESC);
CREATE INDEX receipts_by_status ON receipts (status, created_at_us DESC, receipt_id DESC);
CREATE INDEX receipts_by_payment ON receipts (payment_id, status, created_at_us DESC);
CREATE INDEX receipts_unmatched ON receipts (amount_minor) WHERE status = 'UNMATCHED';

INSERT INTO receipts (receipt_id, bank_id, payment_id, amount_minor, status, reason, created_at_us, updated_at_us)
SELECT 'unmatched-' || payment_id, 'bank', payment_id, amount_minor, 'UNMATCHED',
    CASE reason WHEN 'amount differs' THEN 'AMOUNT_DIFFERS' ELSE 'UNKNOWN_PAYMENT' END, received_at_us, received_at_us
FROM unmatched_receipts WHERE NOT resolved AND amount_minor > 0;

INSERT INTO receipts (receipt_id, bank_id, payment_id, amount_minor, status, created_at_us, updated_at_us)
SELECT 'matched-' || payment_id, 'bank', payment_id, amount_minor, 'MATCHED', updated_at_us, updated_at_us
FROM intents WHERE status IN ('SUCCESS', 'REFUNDED');

-- The transactions of paid intents are in the bodies of their webhooks.
UPDATE OR IGNORE receipts SET transaction_id = reported.transaction_id
FROM (
    SELECT subject_id, json_extract(CAST(body AS TEXT), '$.transactionId') AS transaction_id, MIN(received_at_us)
    FROM webhooks WHERE status = 'SUCCESS' AND json_valid(CAST(body AS TEXT)) GROUP BY subject_id
) AS reported
WHERE receipts.payment_id = reported.subject_id AND receipts.status = 'MATCHED'
    AND typeof(reported.transaction_id) = 'text' AND reported.transaction_id <> '';

DROP TABLE unmatched_receipts;

-- Also after an intent has expired or failed: its money may still arrive while the webhook is lost.
ALTER TABLE intents ADD COLUMN polled BOOLEAN NOT NULL DEFAULT FALSE;
UPDATE intents SET polled = TRUE WHERE status = 'PENDING'
    OR (status IN ('FAILED', 'EXPIRED') AND expires_at_us > (CAST(strftime('%s', 'now') AS INTEGER) - 86400) * 1000000);
CREATE INDEX intents_polled ON intents (next_poll_at_us) WHERE polled;
