-- Lists: holds of a user, active holds, and all accounts and sub-accounts.
CREATE INDEX holds_by_user ON holds (user_id, created_at_us, hold_id);
CREATE INDEX holds_active_by_time ON holds (created_at_us, hold_id) WHERE status = 1;
CREATE INDEX accounts_by_time ON accounts (created_at_us, account_id);
CREATE INDEX sub_accounts_by_time ON sub_accounts (created_at_us, subaccount_id);
