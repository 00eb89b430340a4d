-- A break that has gone lets its user trade again: when the market has done so. One open row per hold.
ALTER TABLE breaks ADD COLUMN lifted_at_us INTEGER;
UPDATE breaks SET lifted_at_us = cleared_at_us;
CREATE INDEX breaks_open ON breaks (user_id) WHERE lifted_at_us IS NULL;
