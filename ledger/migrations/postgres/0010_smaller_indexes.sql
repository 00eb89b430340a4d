-- A receipt ends the open operations of its transaction; those that have ended stay as they are. The
-- operations of a trade get their transaction when they end, so they are never in this index.
DROP INDEX operations_by_tx;
CREATE INDEX operations_by_tx ON operations (tx_hash) WHERE tx_hash IS NOT NULL AND status NOT IN (7, 8, 9, 12);
-- Active holds split from a hold: the ended ones are all its orders so far.
CREATE INDEX holds_active_of_parent ON holds (parent_hold_id, created_at_us) WHERE parent_hold_id IS NOT NULL AND status = 1;
