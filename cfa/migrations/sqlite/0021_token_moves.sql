-- Moves of all holders of an issue to a new token. Finished ones are the history of the issue's
-- tokens: until `moved_at_us` its holders were in the old one, whose rows in the registry end with
-- the pause before the move.
CREATE TABLE token_move (
    move_id        TEXT PRIMARY KEY,
    instrument_id  TEXT NOT NULL,
    reason         TEXT NOT NULL,
    actor          TEXT NOT NULL,
    correlation_id TEXT NOT NULL,
    old_token      TEXT NOT NULL,
    -- empty until it is deployed, as the migration contract
    new_token      TEXT NOT NULL,
    migration      TEXT NOT NULL,
    -- blocks of the new token's deployment and of the last part
    new_block      INTEGER NOT NULL,
    last_block     INTEGER NOT NULL,
    -- of the old token, in smallest units
    supply_minor   INTEGER NOT NULL CHECK (supply_minor >= 0),
    -- the next step; 15: none
    step           INTEGER NOT NULL,
    -- reverted transactions of the step
    attempts       INTEGER NOT NULL,
    parts_done     INTEGER NOT NULL,
    -- addresses of the next part, a JSON array; empty: to be listed
    part           TEXT NOT NULL,
    -- the last address or user that was listed
    listed_through TEXT NOT NULL,
    tx_hash        TEXT NOT NULL,
    -- time of the last part's block
    moved_at_us    INTEGER NOT NULL,
    created_at_us  INTEGER NOT NULL,
    updated_at_us  INTEGER NOT NULL,
    finished_at_us INTEGER
);
CREATE UNIQUE INDEX token_move_open ON token_move (instrument_id) WHERE finished_at_us IS NULL;
CREATE INDEX token_move_past ON token_move (instrument_id, moved_at_us) WHERE finished_at_us IS NOT NULL;
CREATE INDEX token_move_of ON token_move (instrument_id, created_at_us);
-- Holders of an issue all of whose units are frozen: their addresses are frozen in the token, also
-- without units.
CREATE INDEX act_whole_of ON enforcement_act (instrument_id, holder_id)
    WHERE kind = 1 AND units_minor = 0 AND status IN (1, 2, 4);
