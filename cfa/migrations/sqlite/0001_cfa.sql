-- CFA lifecycle service. Amounts are smallest units of their instrument (kopecks for CFA-RUB); times are microseconds since 1970.

CREATE TABLE instrument (
    instrument_id     TEXT PRIMARY KEY,
    name              TEXT NOT NULL,
    kind              INTEGER NOT NULL,
    decimals          INTEGER NOT NULL CHECK (decimals BETWEEN 0 AND 18),
    issuer_id         TEXT NOT NULL,
    contract_address  TEXT NOT NULL,
    currency_code     TEXT NOT NULL,
    status            INTEGER NOT NULL,
    issue_limit_minor INTEGER,
    issued_minor      INTEGER NOT NULL DEFAULT 0 CHECK (issued_minor >= 0),
    nominal           TEXT,
    coupons           TEXT NOT NULL,
    issued_at_us      INTEGER,
    matures_at_us     INTEGER,
    tick_size         TEXT NOT NULL,
    lot_size          TEXT NOT NULL,
    price_band_low    TEXT,
    price_band_high   TEXT,
    document_hash     TEXT NOT NULL,
    document_uri      TEXT NOT NULL,
    idempotency_key   TEXT NOT NULL,
    registered_at_us  INTEGER NOT NULL,
    updated_at_us     INTEGER NOT NULL,
    -- the limit of the issue holds whatever the code above it does
    CHECK (issue_limit_minor IS NULL OR issued_minor <= issue_limit_minor)
);
CREATE INDEX instrument_listed ON instrument (registered_at_us, instrument_id);

CREATE TABLE operation (
    operation_id        TEXT PRIMARY KEY,
    flow                INTEGER NOT NULL,
    kind                INTEGER NOT NULL,
    status              INTEGER NOT NULL,
    status_before_block INTEGER,
    user_id             TEXT NOT NULL,
    hold_id             TEXT,
    amount              TEXT NOT NULL,
    units_minor         INTEGER NOT NULL,
    currency_code       TEXT NOT NULL,
    idempotency_key     TEXT NOT NULL,
    external_ref        TEXT NOT NULL,
    tx_hash             TEXT,
    rejection           INTEGER,
    rejection_message   TEXT,
    finalized_at_us     INTEGER,
    instrument_id       TEXT NOT NULL,
    from_user_id        TEXT NOT NULL,
    to_user_id          TEXT NOT NULL,
    trade_id            TEXT NOT NULL,
    bookbuilding_id     TEXT NOT NULL,
    payment_minor       INTEGER NOT NULL,
    fee_minor           INTEGER NOT NULL,
    created_at_us       INTEGER NOT NULL,
    updated_at_us       INTEGER NOT NULL,
    block_number        INTEGER,
    attempts            INTEGER NOT NULL,
    correlation_id      TEXT NOT NULL,
    batch_id            TEXT,
    fact_gated          INTEGER NOT NULL,
    fact_chain          INTEGER NOT NULL,
    fact_payout         INTEGER NOT NULL,
    fact_settled        INTEGER NOT NULL,
    fact_minted_back    INTEGER NOT NULL,
    fact_undone         INTEGER NOT NULL,
    fact_blocked        INTEGER NOT NULL
);
-- idempotency scope (T12)
CREATE UNIQUE INDEX operation_key ON operation (flow, user_id, idempotency_key);
-- one payment, payout or trade acts once (T12); a rejected one did not act
CREATE UNIQUE INDEX operation_reference ON operation (kind, external_ref) WHERE external_ref <> '' AND status NOT IN (8, 12);
CREATE INDEX operation_tx ON operation (tx_hash) WHERE tx_hash IS NOT NULL;
CREATE INDEX operation_listed ON operation (created_at_us, operation_id);
CREATE INDEX operation_of_user ON operation (user_id, created_at_us, operation_id);
CREATE INDEX operation_of_batch ON operation (batch_id) WHERE batch_id IS NOT NULL;
CREATE INDEX operation_open ON operation (updated_at_us) WHERE status NOT IN (7, 8, 9, 12);

CREATE TABLE batch (
    batch_id      TEXT PRIMARY KEY,
    status        INTEGER NOT NULL,
    tx_hash       TEXT,
    block_number  INTEGER,
    trades        INTEGER NOT NULL,
    failed        TEXT NOT NULL,
    gas_used      INTEGER NOT NULL,
    payload       TEXT NOT NULL,
    created_at_us INTEGER NOT NULL
);
CREATE INDEX batch_open ON batch (created_at_us) WHERE status = 1;
CREATE INDEX batch_tx ON batch (tx_hash) WHERE tx_hash IS NOT NULL;

-- Who is who on chain. The address is derived from the id; two users with one address are refused (T14).
CREATE TABLE user_address (
    user_id       TEXT PRIMARY KEY,
    address       TEXT NOT NULL UNIQUE,
    -- the allow-list transaction was handed to the queue
    registered    INTEGER NOT NULL,
    -- that transaction, and whether its receipt was seen; the platform's own accounts have none
    tx_hash       TEXT,
    confirmed     INTEGER NOT NULL DEFAULT 0,
    correlation_id TEXT NOT NULL DEFAULT '',
    created_at_us INTEGER NOT NULL
);
CREATE INDEX user_address_open ON user_address (tx_hash) WHERE tx_hash IS NOT NULL AND confirmed = 0;

CREATE TABLE suspended_deposit (
    payment_id    TEXT PRIMARY KEY,
    user_id       TEXT NOT NULL,
    amount_minor  INTEGER NOT NULL,
    operation_id  TEXT NOT NULL,
    reason        TEXT NOT NULL,
    created_at_us INTEGER NOT NULL,
    resolved      INTEGER NOT NULL
);

CREATE TABLE issue_redemption (
    redemption_id   TEXT PRIMARY KEY,
    instrument_id   TEXT NOT NULL UNIQUE,
    reason          INTEGER NOT NULL,
    status          INTEGER NOT NULL,
    record_date_us  INTEGER NOT NULL,
    total_minor     INTEGER NOT NULL,
    parts_done      INTEGER NOT NULL,
    tx_hash         TEXT,
    idempotency_key TEXT NOT NULL,
    created_at_us   INTEGER NOT NULL,
    finalized_at_us INTEGER
);
CREATE TABLE redemption_line (
    redemption_id TEXT NOT NULL REFERENCES issue_redemption (redemption_id),
    position      INTEGER NOT NULL,
    user_id       TEXT NOT NULL,
    address       TEXT NOT NULL,
    units_minor   INTEGER NOT NULL,
    payment_minor INTEGER NOT NULL,
    PRIMARY KEY (redemption_id, position)
);

-- The holder registry: what the tokens' own Transfer events say, block by block.
CREATE TABLE holding (
    token         TEXT NOT NULL,
    address       TEXT NOT NULL,
    units         INTEGER NOT NULL,
    since_us      INTEGER NOT NULL,
    block_number  INTEGER NOT NULL,
    updated_at_us INTEGER NOT NULL,
    PRIMARY KEY (token, address)
) WITHOUT ROWID;
CREATE TABLE holding_history (
    token         TEXT NOT NULL,
    address       TEXT NOT NULL,
    block_number  INTEGER NOT NULL,
    time_us       INTEGER NOT NULL,
    units         INTEGER NOT NULL,
    PRIMARY KEY (token, address, block_number)
) WITHOUT ROWID;

CREATE TABLE setting (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
);
