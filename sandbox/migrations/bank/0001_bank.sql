-- Money is kopecks, time is microseconds since the epoch.

CREATE TABLE account (
    account_number TEXT PRIMARY KEY,
    balance_minor BIGINT NOT NULL CHECK (balance_minor >= 0)
);

-- What a payer can pay: QR codes and announced transfers.
CREATE TABLE codes (
    payment_id TEXT PRIMARY KEY,
    payload TEXT NOT NULL UNIQUE,
    amount_minor BIGINT NOT NULL CHECK (amount_minor > 0),
    purpose TEXT NOT NULL,
    status TEXT NOT NULL,
    paid_minor BIGINT,
    transaction_id TEXT,
    created_at_us BIGINT NOT NULL,
    expires_at_us BIGINT NOT NULL
);

CREATE TABLE pays (
    idempotency_key TEXT PRIMARY KEY,
    transaction_id TEXT NOT NULL,
    status TEXT NOT NULL
);

CREATE TABLE transfers (
    transfer_id TEXT PRIMARY KEY,
    request_id TEXT NOT NULL UNIQUE,
    recipient_account TEXT NOT NULL,
    amount_minor BIGINT NOT NULL CHECK (amount_minor > 0),
    purpose TEXT NOT NULL,
    status TEXT NOT NULL,
    error_code TEXT NOT NULL DEFAULT '',
    error_message TEXT NOT NULL DEFAULT '',
    created_at_us BIGINT NOT NULL
);
CREATE INDEX transfers_by_time ON transfers (created_at_us DESC, transfer_id DESC);
CREATE INDEX transfers_open ON transfers (created_at_us) WHERE status = 'PENDING';

CREATE TABLE webhooks (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    webhook_id TEXT NOT NULL UNIQUE,
    body BLOB NOT NULL,
    state TEXT NOT NULL DEFAULT 'QUEUED' CHECK (state IN ('QUEUED', 'DELIVERED', 'REFUSED', 'GIVEN_UP')),
    attempts BIGINT NOT NULL DEFAULT 0,
    next_attempt_at_us BIGINT NOT NULL
);
CREATE INDEX webhooks_queued ON webhooks (next_attempt_at_us) WHERE state = 'QUEUED';

-- An empty account means all of them.
CREATE TABLE faults (
    account TEXT NOT NULL,
    fault TEXT NOT NULL,
    PRIMARY KEY (account, fault)
) WITHOUT ROWID;
