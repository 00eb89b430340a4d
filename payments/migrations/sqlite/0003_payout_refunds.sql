-- Payment id of the suspended deposit that the payout pays back.
ALTER TABLE payouts ADD COLUMN refunds TEXT;
