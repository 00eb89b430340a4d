-- Lists: all accounts and all sub-accounts, as on SQLite.
CREATE INDEX accounts_by_time ON accounts (created_at_us, account_id);
CREATE INDEX sub_accounts_by_time ON sub_accounts (created_at_us, subaccount_id);

-- As before, but with a condition on the key that only the index of the keys serves. With
-- `o.user_id = j.user_id` the planner took the index of the users' lists for a group of hundreds of
-- keys, and read all operations of the user for each of them.
CREATE OR REPLACE FUNCTION start_behind_news(of_makers TEXT[], of_news TEXT[],
    operation_users TEXT[], operation_keys TEXT[], operation_scopes INTEGER[],
    answer_users TEXT[], answer_keys TEXT[], answer_calls INTEGER[])
RETURNS TABLE (block BIGINT, hash BYTEA, sealed_at_us BIGINT, has_limits BOOLEAN, has_news BOOLEAN,
    has_operations BOOLEAN, has_answers BOOLEAN)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM CASE WHEN slots.is_news THEN pg_advisory_xact_lock(slots.slot)
            ELSE pg_advisory_xact_lock_shared(slots.slot) END
        FROM (SELECT ('parked'::regclass::oid::bigint << 8) | (hashtext(keys.key) & 63) AS slot,
                BOOL_OR(keys.is_news) AS is_news
            FROM (SELECT UNNEST(of_makers) AS key, FALSE AS is_news UNION ALL SELECT UNNEST(of_news), TRUE) keys
            GROUP BY 1 ORDER BY 1) slots;
    RETURN QUERY SELECT b.block, b.hash, b.sealed_at_us,
        EXISTS (SELECT 1 FROM velocity_limits), EXISTS (SELECT 1 FROM parked),
        EXISTS (SELECT 1 FROM UNNEST(operation_users, operation_keys, operation_scopes) AS j (user_id, key, scope)
            JOIN operations o ON o.idempotency_key = j.key
            AND (o.user_id, o.scope) >= (j.user_id, j.scope) AND (o.user_id, o.scope) <= (j.user_id, j.scope)),
        EXISTS (SELECT 1 FROM UNNEST(answer_users, answer_keys, answer_calls) AS j (user_id, key, call) JOIN answers a
            ON a.idempotency_key = j.key AND a.user_id = j.user_id AND a.call = j.call)
        FROM audit_blocks b ORDER BY b.block DESC LIMIT 1;
END
$$;
