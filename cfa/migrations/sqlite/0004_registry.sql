-- The registry keeps the events of active tokens alone. Those of strangers' contracts are removed, and those of drafts (status 1), whose
-- activation reads them from their first block.
DELETE FROM holding WHERE token NOT IN (SELECT contract_address FROM instrument WHERE status <> 1);
DELETE FROM holding_history WHERE token NOT IN (SELECT contract_address FROM instrument WHERE status <> 1);
-- Tokens registered since the registry last moved: their events from this block up to where the registry stands are still to be read.
CREATE TABLE registry_backlog (
    token      TEXT PRIMARY KEY,
    from_block INTEGER NOT NULL
) WITHOUT ROWID;
