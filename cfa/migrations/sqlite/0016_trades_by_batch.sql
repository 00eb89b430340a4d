-- Trades of a transaction are found by their batch (`batch_tx`, `operation_of_batch`), other
-- operations in `operation_tx_other`: one index entry less per trade.
DROP INDEX operation_tx;
