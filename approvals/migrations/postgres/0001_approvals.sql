-- Calls that one person requests and another approves (D32). Time is microseconds since the epoch, 0 if unset. The same schema
-- as SQLite's; texts that are keys are compared by their bytes, as they are there.

CREATE TABLE approvals (
    approval_id TEXT COLLATE "C" PRIMARY KEY,
    method TEXT NOT NULL,
    -- The exact bytes that are sent, and their hash with the method's name.
    request BYTEA NOT NULL,
    hash TEXT NOT NULL,
    reason TEXT NOT NULL,
    document TEXT NOT NULL,
    requester TEXT COLLATE "C" NOT NULL,
    request_key TEXT COLLATE "C" NOT NULL,
    request_digest BIGINT NOT NULL,
    status TEXT COLLATE "C" NOT NULL CHECK (status IN ('PENDING', 'APPROVED', 'EXECUTED', 'FAILED', 'REJECTED', 'EXPIRED')),
    decider TEXT COLLATE "C" NOT NULL,
    decision_key TEXT COLLATE "C" NOT NULL,
    decision_digest BIGINT NOT NULL,
    decision_reason TEXT NOT NULL,
    attempts BIGINT NOT NULL,
    next_attempt_at_us BIGINT NOT NULL,
    execute_by_us BIGINT NOT NULL,
    result_code BIGINT NOT NULL,
    result_text TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    created_at_us BIGINT NOT NULL,
    expires_at_us BIGINT NOT NULL,
    decided_at_us BIGINT NOT NULL,
    ended_at_us BIGINT NOT NULL,
    -- T12: the scope of a key is its caller.
    UNIQUE (requester, request_key),
    -- Two persons.
    CHECK (status NOT IN ('APPROVED', 'EXECUTED', 'FAILED') OR (decider <> '' AND decider <> requester))
);
CREATE UNIQUE INDEX approvals_by_decision ON approvals (decider, decision_key) WHERE decider <> '';
CREATE INDEX approvals_by_time ON approvals (created_at_us DESC, approval_id DESC);
CREATE INDEX approvals_by_status ON approvals (status, created_at_us DESC, approval_id DESC);
CREATE INDEX approvals_open ON approvals (requester) WHERE status = 'PENDING';
CREATE INDEX approvals_expiring ON approvals (expires_at_us) WHERE status = 'PENDING';
CREATE INDEX approvals_due ON approvals (next_attempt_at_us) WHERE status = 'APPROVED';

-- What was requested does not change, and a final state is final.
CREATE FUNCTION approvals_refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '%', TG_ARGV[0]; END $$;
CREATE TRIGGER approvals_requested BEFORE UPDATE OF approval_id, method, request, hash, reason, document, requester, request_key,
    request_digest, correlation_id, created_at_us, expires_at_us ON approvals
    FOR EACH ROW EXECUTE FUNCTION approvals_refuse('a requested call does not change');
CREATE TRIGGER approvals_ended BEFORE UPDATE ON approvals
    FOR EACH ROW WHEN (OLD.status IN ('EXECUTED', 'FAILED', 'REJECTED', 'EXPIRED'))
    EXECUTE FUNCTION approvals_refuse('an ended approval does not change');
CREATE TRIGGER approvals_kept BEFORE DELETE ON approvals
    FOR EACH ROW EXECUTE FUNCTION approvals_refuse('an approval is kept');
