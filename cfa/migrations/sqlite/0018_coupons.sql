-- Coupons of activated issues, numbered from 1 by payment day, each paid to the holders at the end of its day.
-- Status: 1 snapshot, 2 underfunded, 3 funded, 4 submitted, 5 paid, 6 failed, 7 scheduled, 8 paid with the redemption of the issue,
-- 9 cancelled: the issue was redeemed before.
CREATE TABLE coupon (
    instrument_id   TEXT NOT NULL,
    number          INTEGER NOT NULL,
    pays_at_us      INTEGER NOT NULL,
    -- roubles per unit
    amount          TEXT NOT NULL,
    status          INTEGER NOT NULL,
    total_minor     INTEGER NOT NULL DEFAULT 0 CHECK (total_minor >= 0),
    parts_done      INTEGER NOT NULL DEFAULT 0,
    attempt         INTEGER NOT NULL DEFAULT 0,
    tx_hash         TEXT,
    -- time of the snapshot
    recorded_at_us  INTEGER,
    finalized_at_us INTEGER,
    PRIMARY KEY (instrument_id, number)
) WITHOUT ROWID;
CREATE INDEX coupon_due ON coupon (pays_at_us, instrument_id, number) WHERE status = 7;
CREATE INDEX coupon_open ON coupon (recorded_at_us, instrument_id, number) WHERE status IN (1, 2, 3, 4, 6);
CREATE INDEX coupon_listed ON coupon (pays_at_us, instrument_id, number);
-- The holders at the record date and their payments, in kopecks.
CREATE TABLE coupon_line (
    instrument_id TEXT NOT NULL,
    number        INTEGER NOT NULL,
    position      INTEGER NOT NULL,
    user_id       TEXT NOT NULL,
    address       TEXT NOT NULL,
    units_minor   INTEGER NOT NULL,
    payment_minor INTEGER NOT NULL,
    PRIMARY KEY (instrument_id, number, position),
    FOREIGN KEY (instrument_id, number) REFERENCES coupon (instrument_id, number)
) WITHOUT ROWID;
-- Coupons of issues whose redemption is recorded were paid with it.
INSERT INTO coupon (instrument_id, number, pays_at_us, amount, status)
SELECT i.instrument_id,
    ROW_NUMBER() OVER (PARTITION BY i.instrument_id ORDER BY c.value ->> 'pays_at_us', c.key),
    c.value ->> 'pays_at_us', c.value ->> 'amount', 7
FROM instrument AS i, json_each(i.coupons) AS c
WHERE i.activated = 1
    AND NOT EXISTS (SELECT 1 FROM issue_redemption AS r WHERE r.instrument_id = i.instrument_id);
-- Payments of a coupon (flow 10) are driven with it, as those of a redemption (flow 7), and move no units.
DROP INDEX operation_open;
CREATE INDEX operation_open ON operation (updated_at_us, operation_id)
    WHERE status NOT IN (7, 8, 9, 12) AND flow NOT IN (6, 7, 8, 10);
DROP INDEX operation_moving;
CREATE INDEX operation_moving ON operation (instrument_id)
    WHERE status NOT IN (7, 8, 9, 11, 12) AND flow NOT IN (7, 10);
DROP INDEX operation_maturing;
CREATE INDEX operation_maturing ON operation (external_ref) WHERE flow IN (7, 10) AND status IN (1, 5, 6);
