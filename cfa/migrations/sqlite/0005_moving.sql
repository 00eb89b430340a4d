-- Operations of an issue that may still move its units: its redemption waits for them. Those of the redemption itself (flow 7) and those
-- that compliance has stopped (status 11) are not waited for.
CREATE INDEX operation_moving ON operation (instrument_id) WHERE status NOT IN (7, 8, 9, 11, 12) AND flow <> 7;
