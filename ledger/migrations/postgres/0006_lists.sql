-- Lists: holds of a user, and active holds.
CREATE INDEX holds_by_user ON holds (user_id, created_at_us, hold_id);
CREATE INDEX holds_active_by_time ON holds (created_at_us, hold_id) WHERE status = 1;
