-- Offers of investors to buy units of an issue (D46). The payment is held in the ledger.
-- Status: 1 pending (the hold is not confirmed), 2 active, 3 used, 4 cancelled, 5 expired.
CREATE TABLE subscription (
    subscription_id TEXT PRIMARY KEY,
    instrument_id   TEXT NOT NULL,
    investor_id     TEXT NOT NULL,
    units_minor     INTEGER NOT NULL CHECK (units_minor > 0),
    payment_minor   INTEGER NOT NULL CHECK (payment_minor > 0),
    status          INTEGER NOT NULL,
    -- 1: the hold is to be made, or its money to be made available; 2: that has failed; 0: neither
    step            INTEGER NOT NULL,
    operation_id    TEXT NOT NULL DEFAULT '',
    idempotency_key TEXT NOT NULL,
    correlation_id  TEXT NOT NULL,
    expires_at_us   INTEGER NOT NULL,
    created_at_us   INTEGER NOT NULL,
    updated_at_us   INTEGER NOT NULL
);
CREATE UNIQUE INDEX subscription_key ON subscription (investor_id, idempotency_key);
CREATE INDEX subscription_of_investor ON subscription (investor_id, created_at_us, subscription_id);
CREATE INDEX subscription_of_both ON subscription (investor_id, instrument_id, created_at_us, subscription_id);
CREATE INDEX subscription_of_instrument ON subscription (instrument_id, created_at_us, subscription_id);
-- Those that an issue may use, and that will expire.
CREATE INDEX subscription_active ON subscription (investor_id, instrument_id, created_at_us) WHERE status = 2;
CREATE INDEX subscription_live ON subscription (investor_id) WHERE status < 3 OR step > 0;
CREATE INDEX subscription_expiry ON subscription (expires_at_us) WHERE status < 3;
CREATE INDEX subscription_open ON subscription (updated_at_us) WHERE step > 0;
CREATE INDEX subscription_failed ON subscription (updated_at_us) WHERE step = 2;
CREATE INDEX subscription_operation ON subscription (operation_id) WHERE operation_id <> '';
