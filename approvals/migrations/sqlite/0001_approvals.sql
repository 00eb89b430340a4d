-- Calls that one person requests and another approves (D32). Time is microseconds since the epoch, 0 if unset.

CREATE TABLE approvals (
    approval_id TEXT PRIMARY KEY,
    method TEXT NOT NULL,
    -- The exact bytes that are sent, and their hash with the method's name.
    request BLOB NOT NULL,
    hash TEXT NOT NULL,
    reason TEXT NOT NULL,
    document TEXT NOT NULL,
    requester TEXT NOT NULL,
    request_key TEXT NOT NULL,
    request_digest BIGINT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('PENDING', 'APPROVED', 'EXECUTED', 'FAILED', 'REJECTED', 'EXPIRED')),
    decider TEXT NOT NULL,
    decision_key TEXT NOT NULL,
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
CREATE TRIGGER approvals_requested BEFORE UPDATE OF approval_id, method, request, hash, reason, document, requester, request_key,
    request_digest, correlation_id, created_at_us, expires_at_us ON approvals
BEGIN SELECT RAISE(ABORT, 'a requested call does not change'); END;
CREATE TRIGGER approvals_ended BEFORE UPDATE ON approvals WHEN OLD.status IN ('EXECUTED', 'FAILED', 'REJECTED', 'EXPIRED')
BEGIN SELECT RAISE(ABORT, 'an ended approval does not change'); END;
CREATE TRIGGER approvals_kept BEFORE DELETE ON approvals
BEGIN SELECT RAISE(ABORT, 'an approval is kept'); END;
