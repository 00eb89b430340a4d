-- What the journal is told of each trade of a batch if the chain refuses it, and of the trades that it has refused.
ALTER TABLE batches ADD COLUMN busts BLOB;
ALTER TABLE bust_trades ADD COLUMN command BLOB;
