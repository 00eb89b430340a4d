CREATE TABLE IF NOT EXISTS outbox (
    position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- Transaction of the row. The row is relayed once all transactions up to this one have ended.
    transaction_id XID8 NOT NULL DEFAULT pg_current_xact_id(),
    id TEXT NOT NULL UNIQUE,
    aggregatetype TEXT NOT NULL,
    aggregateid TEXT NOT NULL,
    type TEXT NOT NULL,
    payload BYTEA NOT NULL,
    subject TEXT NOT NULL,
    source TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    occurred_at_us BIGINT NOT NULL
);

CREATE TABLE IF NOT EXISTS inbox (
    consumer TEXT NOT NULL,
    event_id TEXT NOT NULL,
    accepted_at_us BIGINT NOT NULL,
    PRIMARY KEY (consumer, event_id)
);
