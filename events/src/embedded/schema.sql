-- Records that were published one after the other to one topic, packed into one value (`events::pack`). They have the positions from
-- `position` on. Nothing is ever removed.
CREATE TABLE IF NOT EXISTS log (
    position INTEGER PRIMARY KEY,
    topic TEXT NOT NULL,
    count INTEGER NOT NULL CHECK (count > 0),
    records BLOB NOT NULL
);

-- By topic and position.
CREATE INDEX IF NOT EXISTS log_by_topic ON log (topic);
