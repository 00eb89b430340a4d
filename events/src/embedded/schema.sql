CREATE TABLE IF NOT EXISTS log (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    topic TEXT NOT NULL,
    id TEXT NOT NULL,
    key TEXT NOT NULL,
    type TEXT NOT NULL,
    subject TEXT NOT NULL,
    source TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    occurred_at_us BIGINT NOT NULL,
    payload BLOB NOT NULL,
    headers TEXT
);

CREATE INDEX IF NOT EXISTS log_by_topic ON log (topic, position);

-- A relay that crashed after publishing sends the same ids again; they are in the log already. Records with headers of their own
-- (dead letters, replays) are meant to repeat.
CREATE UNIQUE INDEX IF NOT EXISTS log_once ON log (topic, id) WHERE headers IS NULL;
