-- Operations of a transaction other than trades: the ledger asks for them after every block, and a
-- batch has hundreds of trades.
CREATE INDEX operation_tx_other ON operation (tx_hash) WHERE tx_hash IS NOT NULL AND flow <> 6;
-- The trades as sent are needed until the batch has ended; their operations stay.
UPDATE batch SET payload = '' WHERE status <> 1;
