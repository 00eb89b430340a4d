-- Pages of a list cost what they show.
-- Operations of a user, each in one of these and `operation_of_user`: SQLite uses a partial index only for a statement that repeats its condition.
CREATE INDEX operation_from_user ON operation (from_user_id, created_at_us, operation_id) WHERE from_user_id <> user_id AND from_user_id <> '';
CREATE INDEX operation_to_user ON operation (to_user_id, created_at_us, operation_id) WHERE to_user_id <> user_id AND to_user_id <> from_user_id AND to_user_id <> '';
CREATE INDEX suspended_deposit_listed ON suspended_deposit (created_at_us, payment_id);
CREATE INDEX suspended_deposit_open ON suspended_deposit (created_at_us, payment_id) WHERE resolved = 0;
CREATE INDEX holding_listed ON holding (token, since_us, address) WHERE units <> 0;
