-- Trades that were bust: what an operator settles with the two members. One case per trade.
CREATE TABLE cases (
    trade_id      TEXT    PRIMARY KEY,
    batch_id      TEXT    NOT NULL,
    instrument_id TEXT    NOT NULL,
    buyer_id      TEXT    NOT NULL,
    seller_id     TEXT    NOT NULL,
    quantity      TEXT    NOT NULL,
    payment       TEXT    NOT NULL,
    fee           TEXT    NOT NULL,
    reason        TEXT    NOT NULL,
    opened_at_us  INTEGER NOT NULL,
    closed_at_us  INTEGER,
    closed_by     TEXT    NOT NULL DEFAULT '',
    note          TEXT    NOT NULL DEFAULT '',
    -- Fingerprint of the call that closed it.
    digest        INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX cases_listed ON cases (opened_at_us, trade_id);
CREATE INDEX cases_listed_open ON cases (opened_at_us, trade_id) WHERE closed_at_us IS NULL;
CREATE INDEX cases_listed_closed ON cases (opened_at_us, trade_id) WHERE closed_at_us IS NOT NULL;
-- Final batches are removed after their retention, oldest first.
CREATE INDEX batches_final ON batches (changed_at_us) WHERE state = 'FINAL';
