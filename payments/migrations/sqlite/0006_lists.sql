-- Lists by status alone. Statements that name a status for another reason name their own index: SQLite would rather take these.
CREATE INDEX intents_by_status ON intents (status, created_at_us DESC, payment_id DESC);
CREATE INDEX payouts_by_status ON payouts (status, created_at_us DESC, payout_id DESC);
CREATE INDEX unmatched_open ON unmatched_receipts (payment_id) WHERE NOT resolved;
