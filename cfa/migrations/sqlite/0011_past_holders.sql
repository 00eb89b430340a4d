-- A page of ListHolders at a past time costs what it shows: the supply of a token after each block that changed it, and the holders and
-- their history by time.
CREATE TABLE supply_history (
    token        TEXT NOT NULL,
    block_number INTEGER NOT NULL,
    time_us      INTEGER NOT NULL,
    units        INTEGER NOT NULL,
    PRIMARY KEY (token, block_number)
) WITHOUT ROWID;
INSERT INTO supply_history (token, block_number, time_us, units)
SELECT token, block_number, time_us, units FROM (
    SELECT token, block_number, MAX(time_us) AS time_us, SUM(change) AS change,
        SUM(SUM(change)) OVER (PARTITION BY token ORDER BY block_number) AS units
    FROM (
        SELECT token, block_number, time_us,
            units - LAG(units, 1, 0) OVER (PARTITION BY token, address ORDER BY block_number) AS change
        FROM holding_history
    ) GROUP BY token, block_number
) WHERE change <> 0;
CREATE INDEX supply_history_at ON supply_history (token, time_us, block_number);
CREATE INDEX holding_since ON holding (token, since_us, address);
CREATE INDEX holding_history_at ON holding_history (token, address, time_us, block_number);
