-- What persons did: append-only, each record sealed with the one before it (D34). The same schema as SQLite's.
CREATE TABLE audit_records (
    sequence BIGINT PRIMARY KEY,
    at_us BIGINT NOT NULL,
    actor TEXT COLLATE "C" NOT NULL,
    action TEXT COLLATE "C" NOT NULL,
    object_id TEXT COLLATE "C" NOT NULL,
    before TEXT NOT NULL,
    after TEXT NOT NULL,
    reason TEXT NOT NULL,
    request_id TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    previous_hash BYTEA NOT NULL CHECK (length(previous_hash) = 32),
    hash BYTEA NOT NULL CHECK (length(hash) = 32)
);
CREATE INDEX audit_records_of_object ON audit_records (object_id, sequence);
CREATE INDEX audit_records_of_actor ON audit_records (actor, sequence);
CREATE TRIGGER audit_records_never_change BEFORE UPDATE ON audit_records
FOR EACH ROW EXECUTE FUNCTION approvals_refuse('audit records never change');
CREATE TRIGGER audit_records_are_kept BEFORE DELETE ON audit_records
FOR EACH ROW EXECUTE FUNCTION approvals_refuse('audit records are never deleted');
CREATE TRIGGER audit_records_are_all_kept BEFORE TRUNCATE ON audit_records
FOR EACH STATEMENT EXECUTE FUNCTION approvals_refuse('audit records are never deleted');
CREATE FUNCTION approvals_follow_the_last_record() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF new.sequence <> COALESCE((SELECT MAX(sequence) FROM audit_records), 0) + 1
        OR new.previous_hash <> COALESCE(
            (SELECT r.hash FROM audit_records r WHERE r.sequence = new.sequence - 1), decode(repeat('00', 32), 'hex'))
    THEN
        RAISE EXCEPTION 'an audit record follows the last one';
    END IF;
    RETURN new;
END $$;
CREATE TRIGGER audit_records_follow BEFORE INSERT ON audit_records FOR EACH ROW EXECUTE FUNCTION approvals_follow_the_last_record();
