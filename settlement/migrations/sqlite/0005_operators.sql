-- Differences are listed for operators: by time, by instrument, those that are open.
ALTER TABLE breaks ADD COLUMN instrument_id TEXT NOT NULL DEFAULT '';
ALTER TABLE breaks ADD COLUMN decimals INTEGER NOT NULL DEFAULT 0;
CREATE INDEX breaks_listed ON breaks (found_at_us, hold_id);
CREATE INDEX breaks_listed_open ON breaks (found_at_us, hold_id) WHERE cleared_at_us IS NULL;
CREATE INDEX breaks_listed_cleared ON breaks (found_at_us, hold_id) WHERE cleared_at_us IS NOT NULL;
CREATE INDEX breaks_of_instrument ON breaks (instrument_id, found_at_us, hold_id);
-- Trades that an operator has bust before their batch reached the chain, with the operator and the reason.
CREATE TABLE requested_busts (
    trade_id        TEXT    PRIMARY KEY,
    batch_id        TEXT    NOT NULL,
    actor           TEXT    NOT NULL,
    reason          TEXT    NOT NULL,
    digest          INTEGER NOT NULL,
    requested_at_us INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
CREATE INDEX requested_busts_of_batch ON requested_busts (batch_id);
