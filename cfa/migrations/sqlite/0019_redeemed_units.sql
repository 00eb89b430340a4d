-- Redemptions of single units of a holder by block: the redemption of the issue leaves out those that are burned after its record day.
CREATE INDEX operation_redeemed ON operation (instrument_id, user_id, block_number) WHERE flow = 4 AND status = 7;
