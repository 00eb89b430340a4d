-- Placements of issues among subscribers (F34): the terms, which never change, and the progress of
-- the close. Units are smallest units, money is kopecks; 0 means no bound.
CREATE TABLE placement (
    instrument_id      TEXT PRIMARY KEY,
    opens_at_us        INTEGER NOT NULL,
    closes_at_us       INTEGER NOT NULL,
    price              TEXT NOT NULL,
    minimum_minor      INTEGER NOT NULL,
    investor_min_minor INTEGER NOT NULL,
    investor_max_minor INTEGER NOT NULL,
    allotment          INTEGER NOT NULL,
    stage              INTEGER NOT NULL,
    failed             INTEGER NOT NULL DEFAULT 0,
    -- pending and active subscriptions, and their units
    live               INTEGER NOT NULL DEFAULT 0,
    subscribed_minor   INTEGER NOT NULL DEFAULT 0,
    screened_through   TEXT NOT NULL DEFAULT '',
    allotted_count     INTEGER NOT NULL DEFAULT 0,
    allotted_minor     INTEGER NOT NULL DEFAULT 0,
    parts_done         INTEGER NOT NULL DEFAULT 0,
    issued_minor       INTEGER NOT NULL DEFAULT 0,
    raised_minor       INTEGER NOT NULL DEFAULT 0,
    attempts           INTEGER NOT NULL DEFAULT 0,
    closed_at_us       INTEGER,
    -- an investor gets what was allotted, at most
    CHECK (issued_minor <= allotted_minor)
);
CREATE INDEX placement_open ON placement (closes_at_us) WHERE stage < 8;

-- A subscription to a placement; its reservation of limits at identity (1: made, or to be made;
-- 2: to be confirmed; 3: to be cancelled; 0: none or ended); its allotment, numbered from 1.
ALTER TABLE offer ADD COLUMN in_placement INTEGER NOT NULL DEFAULT 0;
ALTER TABLE offer ADD COLUMN limit_state INTEGER NOT NULL DEFAULT 0;
ALTER TABLE offer ADD COLUMN allotted_minor INTEGER NOT NULL DEFAULT 0;
ALTER TABLE offer ADD COLUMN allotted_payment_minor INTEGER NOT NULL DEFAULT 0;
ALTER TABLE offer ADD COLUMN allotted_number INTEGER NOT NULL DEFAULT 0;
CREATE INDEX offer_limit ON offer (updated_at_us) WHERE limit_state IN (2, 3);
CREATE INDEX offer_allotted ON offer (instrument_id, allotted_number) WHERE allotted_number > 0;

-- The figures of a placement cost its subscriptions one row each: counting would cost all rows.
CREATE TRIGGER offer_placed AFTER INSERT ON offer WHEN NEW.in_placement = 1 AND NEW.status < 3
BEGIN
    UPDATE placement SET live = live + 1, subscribed_minor = subscribed_minor + NEW.units_minor
    WHERE instrument_id = NEW.instrument_id;
END;
CREATE TRIGGER offer_placed_ended AFTER UPDATE OF status ON offer
WHEN OLD.in_placement = 1 AND OLD.status < 3 AND NEW.status >= 3
BEGIN
    UPDATE placement SET live = live - 1, subscribed_minor = subscribed_minor - OLD.units_minor
    WHERE instrument_id = OLD.instrument_id;
END;
CREATE TRIGGER offer_placed_deleted AFTER DELETE ON offer
WHEN OLD.in_placement = 1 AND OLD.status < 3
BEGIN
    UPDATE placement SET live = live - 1, subscribed_minor = subscribed_minor - OLD.units_minor
    WHERE instrument_id = OLD.instrument_id;
END;

-- Deliveries of a placement move with it: the sweep does not look for them (flow 8).
DROP INDEX operation_open;
CREATE INDEX operation_open ON operation (updated_at_us, operation_id)
    WHERE status NOT IN (7, 8, 9, 12) AND flow NOT IN (6, 7, 8);
