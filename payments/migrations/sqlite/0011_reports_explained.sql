-- The age of an unexplained difference: it begins with the first report after the last one without.
CREATE INDEX reports_explained ON reports (unexplained_minor, created_at_us) WHERE unexplained_minor = 0;
