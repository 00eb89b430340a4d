-- Amounts are decimal text, days are counted from 1970-01-01 in Europe/Moscow, time is microseconds since the epoch.

CREATE TABLE users (
    user_id TEXT PRIMARY KEY,
    kyc_level BIGINT NOT NULL,
    bank_account TEXT NOT NULL,
    blocked TEXT,
    qualified_investor BOOLEAN NOT NULL,
    sanctioned BOOLEAN NOT NULL DEFAULT FALSE,
    -- T14: two users with one address are refused.
    onchain_address TEXT NOT NULL UNIQUE,
    full_name_hash TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    -- The id was made here, not given: the key alone tells a repeated call.
    generated BOOLEAN NOT NULL,
    created_at_us BIGINT NOT NULL
);
CREATE UNIQUE INDEX users_generated ON users (idempotency_key) WHERE generated;
CREATE INDEX users_by_time ON users (created_at_us DESC, user_id DESC);

-- What differs from the configured limits.
CREATE TABLE limits (
    user_id TEXT NOT NULL REFERENCES users (user_id),
    limit_type TEXT NOT NULL,
    daily TEXT NOT NULL,
    refuse_with TEXT NOT NULL DEFAULT '',
    PRIMARY KEY (user_id, limit_type)
) WITHOUT ROWID;

CREATE TABLE uses (
    user_id TEXT NOT NULL,
    business_day BIGINT NOT NULL,
    limit_type TEXT NOT NULL,
    used TEXT NOT NULL,
    PRIMARY KEY (user_id, business_day, limit_type)
) WITHOUT ROWID;
