-- Fewer bytes per trade: the holds of an order and the operations of a trade stay in these indexes.

-- Of one time are only the holds of one group, so lists sort those by id themselves, as with
-- `operations_by_time`: the id is as long as the rest of an entry.
DROP INDEX holds_by_time;
CREATE INDEX holds_by_time ON holds (created_at_us);
DROP INDEX holds_by_user;
CREATE INDEX holds_by_user ON holds (user_id, created_at_us);
-- All holds of a sub-account by time, and the active ones, which are few.
DROP INDEX holds_by_subaccount;
CREATE INDEX holds_by_subaccount ON holds (subaccount_id, created_at_us);
CREATE INDEX holds_active_of_subaccount ON holds (subaccount_id, created_at_us) WHERE status = 1;
-- Active holds split from a hold: the ended ones are all its orders so far.
CREATE INDEX holds_active_of_parent ON holds (parent_hold_id, created_at_us)
    WHERE parent_hold_id IS NOT NULL AND status = 1;

-- A receipt ends the open operations of its transaction; those that have ended stay as they are. The
-- operations of a trade get their transaction when they end, so they are never in this index.
DROP INDEX operations_by_tx;
CREATE INDEX operations_by_tx ON operations (tx_hash)
    WHERE tx_hash IS NOT NULL AND status NOT IN (7, 8, 9, 12);
