-- What persons did, and the ends of operations: append-only, each record sealed with the one before it (D34).
CREATE TABLE audit_records (
    sequence INTEGER PRIMARY KEY,
    at_us BIGINT NOT NULL,
    actor TEXT NOT NULL,
    action TEXT NOT NULL,
    object_id TEXT NOT NULL,
    before TEXT NOT NULL,
    after TEXT NOT NULL,
    reason TEXT NOT NULL,
    request_id TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    previous_hash BLOB NOT NULL CHECK (length(previous_hash) = 32),
    hash BLOB NOT NULL CHECK (length(hash) = 32)
);
CREATE INDEX audit_records_of_object ON audit_records (object_id, sequence);
CREATE INDEX audit_records_of_actor ON audit_records (actor, sequence);
CREATE TRIGGER audit_records_never_change BEFORE UPDATE ON audit_records
BEGIN SELECT RAISE(ABORT, 'audit records never change'); END;
CREATE TRIGGER audit_records_are_kept BEFORE DELETE ON audit_records
BEGIN SELECT RAISE(ABORT, 'audit records are never deleted'); END;
CREATE TRIGGER audit_records_follow BEFORE INSERT ON audit_records
WHEN new.sequence <> COALESCE((SELECT MAX(sequence) FROM audit_records), 0) + 1
    OR new.previous_hash <> COALESCE((SELECT hash FROM audit_records WHERE sequence = new.sequence - 1), zeroblob(32))
BEGIN SELECT RAISE(ABORT, 'an audit record follows the last one'); END;
