-- Differences that are still there: looked for by hold when one is found again or has gone, and listed.
CREATE INDEX breaks_uncleared ON breaks (hold_id) WHERE cleared_at_us IS NULL;
