-- Operations of an issue that may still move its units: its redemption waits for them. Those of the redemption itself (flow 7) and those
-- that compliance has stopped (status 11) are not waited for.
CREATE INDEX operation_moving ON operation (instrument_id) WHERE status NOT IN (7, 8, 9, 11, 12) AND flow <> 7;
-- Issues that stopped trading and are not redeemed.
CREATE INDEX instrument_matured ON instrument (matures_at_us) WHERE status = 4;
-- Payouts whose burn is final and that payments has not released.
CREATE INDEX operation_unreleased ON operation (created_at_us)
    WHERE fact_payout = 1 AND fact_chain = 2 AND status NOT IN (7, 8, 9, 11, 12);
