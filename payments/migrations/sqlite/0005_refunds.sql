-- Whether a deposit is being paid back already is asked before another refund of it leaves.
CREATE INDEX payouts_by_refund ON payouts (refunds) WHERE refunds IS NOT NULL;
