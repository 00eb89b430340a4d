-- More of what a group locks and then reads, in one trip of the writer each. Volatile: each statement in here sees what was committed before it began, so what is read
-- behind a lock is whatever the one who had it has written.

-- Sub-accounts by id, and every one of these users, in the order of their ids.
CREATE FUNCTION locked_sub_accounts(ids TEXT[], users TEXT[])
RETURNS TABLE (sub_account sub_accounts, decimals INTEGER)
LANGUAGE plpgsql VOLATILE AS $$
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
    RETURN QUERY SELECT s, COALESCE(i.decimals, 0) FROM sub_accounts s LEFT JOIN instruments i ON i.instrument_id = s.instrument_id
        WHERE s.subaccount_id = ANY(locked);
END
$$;

-- Slots of parked news, the stronger lock of each at once and in the order of the slots: news exclude makers, makers share. The end of the chain
-- behind them, which nobody is kept from moving on.
CREATE FUNCTION start_behind_news(of_makers TEXT[], of_news TEXT[])
RETURNS TABLE (block BIGINT, hash BYTEA, sealed_at_us BIGINT, has_limits BOOLEAN, has_news BOOLEAN)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM CASE WHEN slots.is_news THEN pg_advisory_xact_lock(slots.slot) ELSE pg_advisory_xact_lock_shared(slots.slot) END
        FROM (SELECT ('parked'::regclass::oid::bigint << 8) | (hashtext(keys.key) & 63) AS slot, BOOL_OR(keys.is_news) AS is_news
            FROM (SELECT UNNEST(of_makers) AS key, FALSE AS is_news UNION ALL SELECT UNNEST(of_news), TRUE) keys
            GROUP BY 1 ORDER BY 1) slots;
    RETURN QUERY SELECT b.block, b.hash, b.sealed_at_us, EXISTS (SELECT 1 FROM velocity_limits), EXISTS (SELECT 1 FROM parked)
        FROM audit_blocks b ORDER BY b.block DESC LIMIT 1;
END
$$;
