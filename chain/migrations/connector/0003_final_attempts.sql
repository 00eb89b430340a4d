-- A final transaction is never sent again: the chain has its bytes. Its hashes stay.
UPDATE attempt SET raw = x'' WHERE key IN (SELECT key FROM submission WHERE block_number IS NOT NULL);
