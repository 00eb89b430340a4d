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
