-- The registry keeps the events of registered tokens alone. What strangers' contracts told goes.
DELETE FROM holding WHERE token NOT IN (SELECT contract_address FROM instrument);
DELETE FROM holding_history WHERE token NOT IN (SELECT contract_address FROM instrument);
-- Tokens registered since the registry last moved: their events from this block up to where the registry stands are still to be read.
CREATE TABLE registry_backlog (
    token      TEXT PRIMARY KEY,
    from_block INTEGER NOT NULL
) WITHOUT ROWID;
