-- Adds 40,000 rows to each growing table, all older than the test's clock. Foreign keys and
-- triggers are off: only the keys of these rows matter. ANALYZE runs before the commit, so that no
-- plan is made for a filled table without statistics.
BEGIN;
SET LOCAL session_replication_role = replica;

INSERT INTO instruments (instrument_id, decimals) SELECT 'FILL-' || n, 2 FROM generate_series(1, 40000) n;
INSERT INTO users (user_id) SELECT 'f' || n FROM generate_series(1, 40000) n;
INSERT INTO accounts (account_id, user_id, kind, created_at_us, updated_at_us)
SELECT 'f' || n || ':MAIN', 'f' || n, 1, 1700000000000000 + n, 1700000000000000 FROM generate_series(1, 40000) n;
-- Half of them have one instrument.
INSERT INTO sub_accounts (subaccount_id, account_id, user_id, instrument_id, version, may_be_negative, created_at_us,
    updated_at_us)
SELECT 'f' || n || ':' || i, 'f' || n || ':MAIN', 'f' || n, i, 2, FALSE, 1700000000000000 + n, 1700000000000000
FROM (SELECT n, CASE n % 2 WHEN 0 THEN 'CFA-RUB' ELSE 'FILL-' || n END AS i FROM generate_series(1, 40000) n) f;

-- A quarter of them belong to a user of the test.
INSERT INTO operations (operation_id, scope, kind, status, user_id, idempotency_key, external_ref, tx_hash,
    awaits_chain, digest, created_at_us, finalized_at_us, block, place)
SELECT 'fo' || n, 1, n / 4 % 14 + 1, 7, CASE n % 4 WHEN 0 THEN 'u1' ELSE 'f' || n END, 'fk' || n, 'fr' || n, '0xf' || n,
    TRUE, n, 1700000000000000 + n, 1700000000000000 + n, n, 0
FROM generate_series(1, 40000) n;
INSERT INTO postings (operation_id, ordinal, posting_id, debit_subaccount_id, credit_subaccount_id, instrument_id,
    amount, unsettled, debit_balance_after, debit_version, credit_balance_after, credit_version, created_at_us)
SELECT 'fo' || n, 0, 'fp' || n, 'f' || n || ':CFA-RUB', 'f' || (n % 40000 + 1) || ':CFA-RUB', 'CFA-RUB', 1, FALSE,
    0, 2, 1, 1, 1700000000000000 + n
FROM generate_series(1, 40000) n;
INSERT INTO audit_blocks (block, previous_hash, hash, operations, postings, sealed_at_us)
SELECT n, sha256((n - 1)::text::bytea), sha256(n::text::bytea), 1, 1, 1700000000000000 + n
FROM generate_series(1, 40000) n;

-- One in five has a parent and is active.
INSERT INTO holds (hold_id, subaccount_id, user_id, instrument_id, amount, remaining, added, split_off, consumed,
    released, returned_by_children, status, reason, owner, parent_hold_id, expires_at_us, created_at_us, updated_at_us)
SELECT 'fh' || n, 'f' || n || ':CFA-RUB', 'f' || n, 'CFA-RUB', 100, CASE n % 5 WHEN 0 THEN 100 ELSE 0 END, 0, 0, 0,
    CASE n % 5 WHEN 0 THEN 0 ELSE 100 END, 0, CASE n % 5 WHEN 0 THEN 1 ELSE 2 END, 'filled',
    CASE n % 2 WHEN 0 THEN 'market' ELSE 'cfa' END, CASE n % 5 WHEN 0 THEN 'fh' || (n - 1) END, 1900000000000000,
    1700000000000000 + n, 1700000000000000
FROM generate_series(1, 40000) n;

INSERT INTO answers (user_id, idempotency_key, call, digest, outcome, created_at_us)
SELECT 'f' || n, 'fk' || n, 2, n, '{}', 1700000000000000 FROM generate_series(1, 40000) n;
INSERT INTO sources (source, first_sequence, through_sequence, digest)
SELECT 'fs' || n, 1, n, n FROM generate_series(1, 40000) n;
-- A hundred are past their retention.
INSERT INTO parked (match_key, reverted, at_us)
SELECT 'fp' || n, FALSE, CASE WHEN n <= 100 THEN 0 ELSE 1780000000000000 END FROM generate_series(1, 40000) n;
INSERT INTO inbox (consumer, event_id, accepted_at_us)
SELECT 'ledger.cfa', gen_random_uuid()::text, 1700000000000000 FROM generate_series(1, 40000) n;
-- For a topic that has no consumer.
INSERT INTO outbox (id, aggregatetype, aggregateid, type, payload, subject, source, correlation_id, occurred_at_us)
SELECT gen_random_uuid()::text, 'filled', 'k', 'test.Filled', '', '', 'test', '', 1700000000000000
FROM generate_series(1, 40000) n;
INSERT INTO audit_records (sequence, at_us, actor, action, object_id, before, after, reason, request_id,
    correlation_id, previous_hash, hash)
SELECT n, 1700000000000000 + n, 'filled' || n, 'test.filled', 'f' || n, '', 'x', '', '', '', sha256((n - 1)::text::bytea),
    sha256(n::text::bytea)
FROM generate_series(1, 40000) n;

ANALYZE instruments, users, accounts, sub_accounts, operations, postings, audit_blocks, holds, answers, sources, parked,
    inbox, outbox, audit_records;
COMMIT;
