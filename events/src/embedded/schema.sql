-- A row has consecutive records of one topic in one value (`events::pack`). The first has position
-- `position`, the next ones follow without a gap. Only the oldest rows are deleted, and the last
-- one never.
CREATE TABLE IF NOT EXISTS log (
    position INTEGER PRIMARY KEY,
    topic TEXT NOT NULL,
    count INTEGER NOT NULL CHECK (count > 0),
    records BLOB NOT NULL
);

-- Finds the rows of a topic in order of position: an entry ends with the rowid, `position`.
CREATE INDEX IF NOT EXISTS log_by_topic ON log (topic);
