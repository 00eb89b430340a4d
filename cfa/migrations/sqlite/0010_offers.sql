-- Offers to buy units of an issue (subscriptions, side 1) and offers of holders to sell units back
-- to its issuer (side 2), in one table (D46). The ledger holds the payment or the units.
-- Status: 1 pending (the hold is not confirmed), 2 active, 3 used, 4 cancelled, 5 expired.
CREATE TABLE offer (
    offer_id        TEXT PRIMARY KEY,
    side            INTEGER NOT NULL CHECK (side IN (1, 2)),
    instrument_id   TEXT NOT NULL,
    user_id         TEXT NOT NULL,
    units_minor     INTEGER NOT NULL CHECK (units_minor > 0),
    -- side 1: the payment; side 2: the least payment
    payment_minor   INTEGER NOT NULL CHECK (payment_minor > 0),
    status          INTEGER NOT NULL,
    -- 1: the hold is to be made, or to be released; 2: that has failed; 0: neither
    step            INTEGER NOT NULL,
    operation_id    TEXT NOT NULL DEFAULT '',
    idempotency_key TEXT NOT NULL,
    correlation_id  TEXT NOT NULL,
    expires_at_us   INTEGER NOT NULL,
    created_at_us   INTEGER NOT NULL,
    updated_at_us   INTEGER NOT NULL
);
INSERT INTO offer SELECT subscription_id, 1, instrument_id, investor_id, units_minor, payment_minor,
    status, step, operation_id, idempotency_key, correlation_id, expires_at_us, created_at_us,
    updated_at_us FROM subscription;
DROP TABLE subscription;
CREATE UNIQUE INDEX offer_key ON offer (user_id, side, idempotency_key);
CREATE INDEX offer_of_user ON offer (user_id, side, created_at_us, offer_id);
CREATE INDEX offer_of_both ON offer (user_id, side, instrument_id, created_at_us, offer_id);
CREATE INDEX offer_of_instrument ON offer (instrument_id, side, created_at_us, offer_id);
-- Those that an operation may use, that count against the bounds, and that will expire.
CREATE INDEX offer_active ON offer (user_id, instrument_id, side, created_at_us) WHERE status = 2;
CREATE INDEX offer_live ON offer (user_id, side) WHERE status < 3 OR step > 0;
CREATE INDEX offer_live_of_issue ON offer (instrument_id, side, offer_id) WHERE status < 3 OR step > 0;
CREATE INDEX offer_expiry ON offer (expires_at_us) WHERE status < 3;
CREATE INDEX offer_open ON offer (updated_at_us) WHERE step > 0;
CREATE INDEX offer_failed ON offer (side, updated_at_us) WHERE step = 2;
CREATE INDEX offer_operation ON offer (operation_id) WHERE operation_id <> '';
