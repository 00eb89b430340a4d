-- Operation types have no upper bound here: the contract and the fold know which types exist, and
-- the bound of 0001 made the store refuse the first new one. A CHECK of a table changes only with a
-- copy of the table or in the stored text of the schema. The text, since a CHECK decides only about
-- rows to be written: no stored row changes, however many there are.
PRAGMA writable_schema = ON;
UPDATE sqlite_schema SET sql = replace(sql, 'CHECK (kind BETWEEN 1 AND 14)', 'CHECK (kind >= 1)')
WHERE type = 'table' AND name = 'operations';
PRAGMA writable_schema = RESET;

-- The same trigger again: unlike the update, this moves the schema's version, by which other
-- connections notice that they have to load the schema.
DROP TRIGGER operations_are_kept;
CREATE TRIGGER operations_are_kept BEFORE DELETE ON operations
BEGIN SELECT RAISE(ABORT, 'operations are never deleted'); END;
