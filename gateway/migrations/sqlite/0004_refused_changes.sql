-- Why the book has refused the change that the call asked for, by code; NULL where it has not.
ALTER TABLE answers ADD COLUMN refusal INTEGER;
