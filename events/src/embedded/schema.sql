-- Consecutively published records of one topic, packed into one value (`events::pack`). Their
-- positions start at `position`. Rows are never deleted.
CREATE TABLE IF NOT EXISTS log (
    position INTEGER PRIMARY KEY,
    topic TEXT NOT NULL,
    count INTEGER NOT NULL CHECK (count > 0),
    records BLOB NOT NULL
);

-- By topic and position.
CREATE INDEX IF NOT EXISTS log_by_topic ON log (topic);
