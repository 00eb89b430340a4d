-- A repeat of a key with another call is noticed (D50). Older submissions have no fingerprint.
ALTER TABLE submission ADD COLUMN call_digest INTEGER;
