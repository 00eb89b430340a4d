-- Adds 40,000 rows to each table of the service, all older than the test's clock. Triggers are off:
-- an approval is written in its last state. ANALYZE runs before the commit, so that no plan is made
-- for a filled table without statistics.
BEGIN;
SET LOCAL session_replication_role = replica;

-- The failed ones are few and the oldest: a list of them by time would read all rows. One of a
-- hundred is pending, since the open requests of a person are bounded and expire. A quarter is
-- approved. None of both is due before the year 2096. A person of the test has requested a quarter,
-- another has decided a quarter.
INSERT INTO approvals (approval_id, method, request, hash, reason, document, requester, request_key,
    request_digest, status, decider, decision_key, decision_digest, decision_reason, attempts,
    next_attempt_at_us, execute_by_us, result_code, result_text, correlation_id, created_at_us,
    expires_at_us, decided_at_us, ended_at_us)
SELECT 'f' || n, 'filled', ''::bytea, '', 'filled', '', CASE n % 4 WHEN 2 THEN 'anna' ELSE 'f' || n END,
    'fk' || n, n, status,
    CASE WHEN status = 'PENDING' THEN '' WHEN n % 4 = 3 THEN 'boris' ELSE 'g' || n END,
    CASE status WHEN 'PENDING' THEN '' ELSE 'fd' || n END, 0, '', 0, 4000000000000000 + n,
    4100000000000000, 0, '', '', 1700000000000000 + n, 4000000000000000 + n, 0, 0
FROM (
    SELECT n, CASE WHEN n <= 100 THEN 'FAILED' WHEN n % 100 = 0 THEN 'PENDING'
        WHEN n % 4 = 1 THEN 'APPROVED' ELSE 'EXECUTED' END AS status
    FROM generate_series(1, 40000) n
) f;

-- The records of a person of the test are the oldest.
INSERT INTO audit_records (sequence, at_us, actor, action, object_id, before, after, reason,
    request_id, correlation_id, previous_hash, hash)
SELECT n, 1700000000000000 + n, CASE WHEN n <= 100 THEN 'anna' ELSE 'filled' || n END, 'filled',
    'f' || n, '', 'x', '', '', '', sha256((n - 1)::text::bytea), sha256(n::text::bytea)
FROM generate_series(1, 40000) n;

ANALYZE approvals, audit_records;
COMMIT;
