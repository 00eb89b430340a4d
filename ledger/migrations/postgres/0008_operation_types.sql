-- Operation types have no upper bound here, as on SQLite: the contract and the fold know which
-- types exist, and the bound of 0001 made the store refuse the first new one. Not validated, since
-- every stored row satisfies the narrower bound: the table is not read while it is locked.
ALTER TABLE operations DROP CONSTRAINT IF EXISTS operations_kind_check;
ALTER TABLE operations ADD CONSTRAINT operations_kind_check CHECK (kind >= 1) NOT VALID;
