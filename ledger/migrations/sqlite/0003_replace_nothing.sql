-- `INSERT OR REPLACE` deletes the rows it meets, through any unique index and through the number of the row, and fires no trigger of a deletion
-- unless the connection asks for that; so does `UPDATE OR REPLACE`. What is kept is therefore looked for before anything comes into its place: in
-- the trees that the insertion goes down a moment later, and by the row's number, which only such a statement gives (SQLite's own are positive).
-- A block of the audit chain follows the last one, so that none comes into the place of another, and a posting changes in nothing.
-- (PostgreSQL has no such statement: an insertion that meets a row there is an update, which its triggers see.)

CREATE TRIGGER operations_replace_nothing BEFORE INSERT ON operations
WHEN EXISTS (SELECT 1 FROM operations WHERE operation_id = new.operation_id)
    OR EXISTS (
        SELECT 1 FROM operations
        WHERE idempotency_key = new.idempotency_key AND user_id = new.user_id AND scope = new.scope
    )
    OR (new.external_ref IS NOT NULL
        AND EXISTS (SELECT 1 FROM operations WHERE external_ref = new.external_ref AND kind = new.kind))
    OR (new.reverses IS NOT NULL AND EXISTS (SELECT 1 FROM operations WHERE reverses = new.reverses))
    OR EXISTS (SELECT 1 FROM operations WHERE block = new.block AND place = new.place)
    OR (new.rowid > 0 AND EXISTS (SELECT 1 FROM operations WHERE rowid = new.rowid))
BEGIN SELECT RAISE(ABORT, 'operations are never replaced'); END;
CREATE TRIGGER operations_keep_their_number BEFORE UPDATE OF rowid, _rowid_, oid ON operations
BEGIN SELECT RAISE(ABORT, 'operations are never replaced'); END;
CREATE TRIGGER operations_take_a_free_place BEFORE UPDATE OF block, place ON operations
WHEN EXISTS (SELECT 1 FROM operations WHERE block = new.block AND place = new.place AND operation_id <> old.operation_id)
BEGIN SELECT RAISE(ABORT, 'operations are never replaced'); END;

CREATE TRIGGER postings_replace_nothing BEFORE INSERT ON postings
WHEN EXISTS (SELECT 1 FROM postings WHERE operation_id = new.operation_id AND ordinal = new.ordinal)
    OR EXISTS (
        SELECT 1 FROM postings
        WHERE debit_subaccount_id = new.debit_subaccount_id AND debit_version = new.debit_version
    )
    OR EXISTS (
        SELECT 1 FROM postings
        WHERE credit_subaccount_id = new.credit_subaccount_id AND credit_version = new.credit_version
    )
    OR (new.rowid > 0 AND EXISTS (SELECT 1 FROM postings WHERE rowid = new.rowid))
BEGIN SELECT RAISE(ABORT, 'postings are never replaced'); END;

CREATE TRIGGER holds_replace_nothing BEFORE INSERT ON holds
WHEN EXISTS (SELECT 1 FROM holds WHERE hold_id = new.hold_id)
    OR (new.rowid > 0 AND EXISTS (SELECT 1 FROM holds WHERE rowid = new.rowid))
BEGIN SELECT RAISE(ABORT, 'holds are never replaced'); END;
CREATE TRIGGER holds_keep_their_names BEFORE UPDATE OF hold_id, rowid, _rowid_, oid ON holds
BEGIN SELECT RAISE(ABORT, 'holds are never replaced'); END;

-- What only ever advances or stays, whichever statement brings it.
CREATE TRIGGER sources_are_not_turned_back BEFORE INSERT ON sources
WHEN EXISTS (SELECT 1 FROM sources WHERE source = new.source AND through_sequence >= new.through_sequence)
BEGIN SELECT RAISE(ABORT, 'a source only advances'); END;
CREATE TRIGGER instruments_replace_nothing BEFORE INSERT ON instruments
WHEN EXISTS (SELECT 1 FROM instruments WHERE instrument_id = new.instrument_id AND decimals <> new.decimals)
BEGIN SELECT RAISE(ABORT, 'decimals of an instrument never change'); END;
