-- Events of one transaction, packed into one value (`events::pack`). AUTOINCREMENT: a position is
-- never reused, so relayed rows can be deleted later.
CREATE TABLE IF NOT EXISTS outbox (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    count INTEGER NOT NULL CHECK (count > 0),
    events BLOB NOT NULL
);

CREATE TABLE IF NOT EXISTS inbox (
    consumer TEXT NOT NULL,
    event_id TEXT NOT NULL,
    accepted_at_us BIGINT NOT NULL,
    PRIMARY KEY (consumer, event_id)
) WITHOUT ROWID;

-- Answers of calls by idempotency key (`events::calls`).
CREATE TABLE IF NOT EXISTS calls (
    call TEXT NOT NULL,
    subject TEXT NOT NULL,
    key TEXT NOT NULL,
    digest BIGINT NOT NULL,
    answer BLOB NOT NULL,
    at_us BIGINT NOT NULL,
    PRIMARY KEY (call, subject, key)
);
CREATE INDEX IF NOT EXISTS calls_by_time ON calls (at_us);
