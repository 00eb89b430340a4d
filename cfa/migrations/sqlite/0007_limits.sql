-- The reservation of the user's day limit at identity (T24): 0 not asked, 1 reserved, 2 refused, 3 confirmed or cancelled.
ALTER TABLE operation ADD COLUMN fact_limit INTEGER NOT NULL DEFAULT 0;
-- An open operation may be at the chain without its record: it gets no reservation, and its event counts.
UPDATE operation SET fact_limit = 3 WHERE status NOT IN (7, 8, 9, 12);
-- Ended operations whose reservation is still open at identity.
CREATE INDEX operation_limit ON operation (updated_at_us) WHERE fact_limit = 1 AND status IN (7, 8, 9, 12);
-- Compliance has ended a blocked redemption: what it has done is being undone.
ALTER TABLE operation ADD COLUMN fact_refunding INTEGER NOT NULL DEFAULT 0;
