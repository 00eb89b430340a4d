-- The key first, as on SQLite: keys that clients make by time lie side by side, users do not, and a user with many operations is no way to one of
-- them that looks as short while nothing is known about the table.
CREATE UNIQUE INDEX operations_by_key ON operations (idempotency_key, user_id, scope);
ALTER TABLE operations DROP CONSTRAINT operations_user_id_idempotency_key_scope_key;

-- As before, and whether any of these keys is there, of operations (user, key, scope) and of stored answers (user, key, call): mostly none is, and then nobody has
-- to look for them. (The older function stays, for ledgers of the release before that still run.)
CREATE FUNCTION start_behind_news(of_makers TEXT[], of_news TEXT[], operation_users TEXT[], operation_keys TEXT[], operation_scopes INTEGER[],
    answer_users TEXT[], answer_keys TEXT[], answer_calls INTEGER[])
RETURNS TABLE (block BIGINT, hash BYTEA, sealed_at_us BIGINT, has_limits BOOLEAN, has_news BOOLEAN, has_operations BOOLEAN, has_answers BOOLEAN)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM CASE WHEN slots.is_news THEN pg_advisory_xact_lock(slots.slot) ELSE pg_advisory_xact_lock_shared(slots.slot) END
        FROM (SELECT ('parked'::regclass::oid::bigint << 8) | (hashtext(keys.key) & 63) AS slot, BOOL_OR(keys.is_news) AS is_news
            FROM (SELECT UNNEST(of_makers) AS key, FALSE AS is_news UNION ALL SELECT UNNEST(of_news), TRUE) keys
            GROUP BY 1 ORDER BY 1) slots;
    RETURN QUERY SELECT b.block, b.hash, b.sealed_at_us, EXISTS (SELECT 1 FROM velocity_limits), EXISTS (SELECT 1 FROM parked),
        EXISTS (SELECT 1 FROM UNNEST(operation_users, operation_keys, operation_scopes) AS j (user_id, key, scope) JOIN operations o
            ON o.idempotency_key = j.key AND o.user_id = j.user_id AND o.scope = j.scope),
        EXISTS (SELECT 1 FROM UNNEST(answer_users, answer_keys, answer_calls) AS j (user_id, key, call) JOIN answers a
            ON a.idempotency_key = j.key AND a.user_id = j.user_id AND a.call = j.call)
        FROM audit_blocks b ORDER BY b.block DESC LIMIT 1;
END
$$;

-- As before, but planned once a session: a writer's session goes by keys alone, and for each statement in here there is one such way, also where the plan
-- was made while the tables were empty.
CREATE OR REPLACE FUNCTION locked_sub_accounts(ids TEXT[], users TEXT[])
RETURNS TABLE (sub_account sub_accounts, decimals INTEGER)
LANGUAGE plpgsql VOLATILE SET plan_cache_mode = force_generic_plan AS $$
DECLARE
    locked TEXT[];
BEGIN
    IF cardinality(users) = 0 THEN
        locked := ARRAY(SELECT s.subaccount_id FROM sub_accounts s WHERE s.subaccount_id = ANY(ids)
            ORDER BY s.subaccount_id FOR UPDATE);
    ELSE
        locked := ARRAY(SELECT s.subaccount_id FROM sub_accounts s WHERE s.subaccount_id = ANY(ids) OR s.user_id = ANY(users)
            ORDER BY s.subaccount_id FOR UPDATE);
    END IF;
    RETURN QUERY SELECT s, COALESCE((SELECT i.decimals FROM instruments i WHERE i.instrument_id = s.instrument_id), 0)
        FROM sub_accounts s WHERE s.subaccount_id = ANY(locked);
END
$$;
