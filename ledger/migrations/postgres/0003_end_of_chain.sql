-- Locks the chain of blocks until the end of the transaction, then reads its end, in one trip of the writer. Volatile: each statement in here sees what was
-- committed before it began, the second one whatever the one who had the lock has written.
CREATE FUNCTION locked_end_of_chain()
RETURNS TABLE (block BIGINT, hash BYTEA, sealed_at_us BIGINT, has_limits BOOLEAN, has_news BOOLEAN)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    PERFORM pg_advisory_xact_lock('audit_blocks'::regclass::oid::bigint << 8);
    RETURN QUERY SELECT b.block, b.hash, b.sealed_at_us, EXISTS (SELECT 1 FROM velocity_limits), EXISTS (SELECT 1 FROM parked)
        FROM audit_blocks b ORDER BY b.block DESC LIMIT 1;
END
$$;
