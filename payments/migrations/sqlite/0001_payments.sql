-- Money is kopecks, time is microseconds since the epoch, ids are text.

CREATE TABLE intents (
    payment_id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL,
    amount_minor BIGINT NOT NULL CHECK (amount_minor > 0),
    method TEXT NOT NULL CHECK (method IN ('SBP_C2B', 'SBP_QR', 'BANK_TRANSFER')),
    status TEXT NOT NULL CHECK (status IN ('PENDING', 'SUCCESS', 'FAILED', 'EXPIRED', 'REFUNDED')),
    payment_url TEXT NOT NULL,
    qr_payload TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    late BOOLEAN NOT NULL DEFAULT FALSE,
    -- The mint is in the token supply: reconciliation need not ask any more.
    settled BOOLEAN NOT NULL DEFAULT FALSE,
    next_poll_at_us BIGINT NOT NULL,
    polls BIGINT NOT NULL DEFAULT 0,
    created_at_us BIGINT NOT NULL,
    expires_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL,
    -- T12: a key speaks for one user's calls only.
    UNIQUE (user_id, idempotency_key)
);
CREATE INDEX intents_by_user ON intents (user_id, created_at_us DESC, payment_id DESC);
CREATE INDEX intents_by_time ON intents (created_at_us DESC, payment_id DESC);
CREATE INDEX intents_pending ON intents (next_poll_at_us) WHERE status = 'PENDING';
CREATE INDEX intents_unsettled ON intents (payment_id) WHERE status = 'SUCCESS' AND NOT settled;

-- Webhooks that were verified and taken, by the bank's own id (T25).
CREATE TABLE webhooks (
    event_id TEXT PRIMARY KEY,
    subject_id TEXT NOT NULL,
    status TEXT NOT NULL,
    body BLOB NOT NULL,
    received_at_us BIGINT NOT NULL
);

-- Money the bank says it has and no intent accounts for: another amount than asked, or an id nobody knows. Part of the suspense.
CREATE TABLE unmatched_receipts (
    payment_id TEXT PRIMARY KEY,
    amount_minor BIGINT NOT NULL,
    reason TEXT NOT NULL,
    received_at_us BIGINT NOT NULL,
    resolved BOOLEAN NOT NULL DEFAULT FALSE
);

CREATE TABLE payouts (
    payout_id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL,
    amount_minor BIGINT NOT NULL CHECK (amount_minor > 0),
    bank_account TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('PENDING', 'SUCCESS', 'FAILED')),
    released_at_us BIGINT,
    -- Set before the order goes out: from then on money may be under way.
    ordered_at_us BIGINT CHECK (ordered_at_us IS NULL OR released_at_us IS NOT NULL),
    stopped TEXT,
    bank_transfer_id TEXT NOT NULL DEFAULT '',
    failure_code TEXT NOT NULL DEFAULT '',
    failure_message TEXT NOT NULL DEFAULT '',
    settled BOOLEAN NOT NULL DEFAULT FALSE,
    attempts BIGINT NOT NULL DEFAULT 0,
    next_attempt_at_us BIGINT NOT NULL DEFAULT 0,
    correlation_id TEXT NOT NULL,
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL
);
CREATE INDEX payouts_by_user ON payouts (user_id, created_at_us DESC, payout_id DESC);
CREATE INDEX payouts_by_time ON payouts (created_at_us DESC, payout_id DESC);
CREATE INDEX payouts_open ON payouts (next_attempt_at_us) WHERE status = 'PENDING';
CREATE INDEX payouts_unsettled ON payouts (payout_id) WHERE NOT settled;

-- Users whose payouts wait (T48).
CREATE TABLE blocked_users (
    user_id TEXT PRIMARY KEY,
    reason TEXT NOT NULL,
    at_us BIGINT NOT NULL
);

CREATE TABLE reports (
    report_id TEXT PRIMARY KEY,
    business_day BIGINT NOT NULL,
    bank_balance_minor BIGINT NOT NULL,
    token_supply_minor BIGINT NOT NULL,
    in_flight_deposits_minor BIGINT NOT NULL,
    in_flight_payouts_minor BIGINT NOT NULL,
    suspense_minor BIGINT NOT NULL,
    unexplained_minor BIGINT NOT NULL,
    created_at_us BIGINT NOT NULL
);
CREATE INDEX reports_by_time ON reports (created_at_us DESC, report_id DESC);
CREATE INDEX reports_by_day ON reports (business_day);
