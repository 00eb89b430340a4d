-- History by the journal's own numbers: an order is the sequence of the command that brought it, a trade that of its command and its place among the
-- command's events. Public ids are functions of these and of the time (`types::derived`), so they are not stored. Rows of before are converted.

CREATE TABLE users (
    user    INTEGER PRIMARY KEY,
    user_id TEXT NOT NULL UNIQUE
) STRICT;

-- One unit of the prices and quantities in `orders` and `trades`: mantissa and decimals. An instrument's tick and lot, which never change; powers of
-- ten for one whose first rows were converted from texts, NULL where those had no price.
CREATE TABLE instruments (
    instrument    INTEGER PRIMARY KEY,
    instrument_id TEXT NOT NULL UNIQUE,
    tick_mantissa INTEGER,
    tick_scale    INTEGER,
    lot_mantissa  INTEGER NOT NULL,
    lot_scale     INTEGER NOT NULL
) STRICT;

DROP INDEX orders_by_user;
DROP INDEX orders_by_time;
DROP INDEX orders_by_instrument;
DROP INDEX trades_by_buyer;
DROP INDEX trades_by_seller;
DROP INDEX trades_by_time;
DROP INDEX trades_by_instrument;
ALTER TABLE orders RENAME TO order_texts;
ALTER TABLE trades RENAME TO trade_texts;
ALTER TABLE answers RENAME TO answer_texts;

CREATE TABLE orders (
    -- Of the command that brought it: the order of rows is that of time.
    sequence        INTEGER PRIMARY KEY,
    user            INTEGER NOT NULL,
    instrument      INTEGER NOT NULL,
    side            INTEGER NOT NULL,
    order_type      INTEGER NOT NULL,
    time_in_force   INTEGER NOT NULL,
    post_only       INTEGER NOT NULL,
    stp             INTEGER NOT NULL,
    -- 0 = never.
    expires_at_us   INTEGER NOT NULL,
    -- NULL for a market order without protection price.
    price           INTEGER,
    quantity        INTEGER NOT NULL,
    filled          INTEGER NOT NULL,
    -- Kopecks of its trades together.
    value_minor     INTEGER NOT NULL,
    status          INTEGER NOT NULL,
    cancel_reason   TEXT NOT NULL,
    -- Numbers of 64 bits without sign, as the signed ones of the same bits. The client's: 0 = none.
    client_order_id INTEGER NOT NULL,
    engine_order_id INTEGER NOT NULL,
    created_ns      INTEGER NOT NULL,
    updated_at_us   INTEGER NOT NULL
) STRICT;

CREATE TABLE trades (
    -- Sequence of the command << 20 | index among its events.
    id             INTEGER PRIMARY KEY,
    buy_order      INTEGER NOT NULL,
    sell_order     INTEGER NOT NULL,
    buyer          INTEGER NOT NULL,
    seller         INTEGER NOT NULL,
    instrument     INTEGER NOT NULL,
    price          INTEGER NOT NULL,
    quantity       INTEGER NOT NULL,
    fee_minor      INTEGER NOT NULL,
    number         INTEGER NOT NULL,
    aggressor_side INTEGER NOT NULL,
    executed_ns    INTEGER NOT NULL
) STRICT;

CREATE TABLE answers (
    key_hash       BLOB PRIMARY KEY,
    sequence       INTEGER NOT NULL,
    -- Sequence of the order, 0 for none.
    order_sequence INTEGER NOT NULL,
    cancelled      INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- How far the market's events are published. The outbox keeps those of before this migration.
CREATE TABLE feed (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    sequence INTEGER NOT NULL
);
INSERT INTO feed (id, sequence) SELECT 1, sequence FROM projection;

INSERT INTO users (user_id)
SELECT user_id FROM order_texts UNION SELECT buyer_id FROM trade_texts UNION SELECT seller_id FROM trade_texts;

INSERT INTO instruments (instrument_id, tick_mantissa, tick_scale, lot_mantissa, lot_scale)
WITH texts AS (
    SELECT instrument_id, nullif(price, '') AS price, quantity FROM order_texts
    UNION ALL SELECT instrument_id, price, quantity FROM trade_texts
), scales AS (
    SELECT instrument_id,
        CASE instr(price, '.') WHEN 0 THEN 0 ELSE length(price) - instr(price, '.') END AS tick_scale,
        CASE instr(quantity, '.') WHEN 0 THEN 0 ELSE length(quantity) - instr(quantity, '.') END AS lot_scale
    FROM texts
)
SELECT instrument_id, CASE WHEN max(tick_scale) IS NOT NULL THEN 1 END, max(tick_scale), 1, max(lot_scale)
FROM scales GROUP BY instrument_id;

-- Digits of a decimal text, with as many zeros as its instrument has more decimals.
CREATE TEMP TABLE zeros (scale INTEGER PRIMARY KEY, text TEXT NOT NULL);
WITH RECURSIVE made (scale, text) AS (SELECT 0, '' UNION ALL SELECT scale + 1, text || '0' FROM made WHERE scale < 18)
INSERT INTO zeros SELECT scale, text FROM made;

-- The time of an id, to the nanosecond that gives the same id: microseconds are stored, bits 64 to 75 of the id are the millisecond's 4096ths.
INSERT INTO orders
WITH parts AS (
    SELECT *,
        256 * (instr('0123456789abcdef', substr(order_id, 16, 1)) - 1) + 16 * (instr('0123456789abcdef', substr(order_id, 17, 1)) - 1)
            + instr('0123456789abcdef', substr(order_id, 18, 1)) - 1 AS fraction,
        CASE instr(price, '.') WHEN 0 THEN 0 ELSE length(price) - instr(price, '.') END AS price_scale,
        CASE instr(quantity, '.') WHEN 0 THEN 0 ELSE length(quantity) - instr(quantity, '.') END AS quantity_scale,
        CASE instr(filled, '.') WHEN 0 THEN 0 ELSE length(filled) - instr(filled, '.') END AS filled_scale
    FROM order_texts
)
SELECT o.sequence, u.user, i.instrument, o.side, o.order_type, o.time_in_force, o.post_only, o.stp, o.expires_at_us,
    CASE WHEN o.price <> ''
        THEN CAST(replace(o.price, '.', '') || (SELECT text FROM zeros WHERE scale = i.tick_scale - o.price_scale) AS INTEGER) END,
    CAST(replace(o.quantity, '.', '') || (SELECT text FROM zeros WHERE scale = i.lot_scale - o.quantity_scale) AS INTEGER),
    CAST(replace(o.filled, '.', '') || (SELECT text FROM zeros WHERE scale = i.lot_scale - o.filled_scale) AS INTEGER),
    o.value_minor, o.status, o.cancel_reason,
    CASE WHEN length(o.client_order_id) < 19 OR length(o.client_order_id) = 19 AND o.client_order_id < '9223372036854775808'
        THEN CAST(o.client_order_id AS INTEGER)
        ELSE (CAST(substr(o.client_order_id, 1, length(o.client_order_id) - 10) AS INTEGER) - 1844674406) * 10000000000
            + (CAST(substr(o.client_order_id, -10) AS INTEGER) - 13709551616) END,
    CASE WHEN length(o.engine_order_id) < 19 OR length(o.engine_order_id) = 19 AND o.engine_order_id < '9223372036854775808'
        THEN CAST(o.engine_order_id AS INTEGER)
        ELSE (CAST(substr(o.engine_order_id, 1, length(o.engine_order_id) - 10) AS INTEGER) - 1844674406) * 10000000000
            + (CAST(substr(o.engine_order_id, -10) AS INTEGER) - 13709551616) END,
    max(o.created_at_us * 1000, o.created_at_us / 1000 * 1000000 + (o.fraction * 1000000 + 4095) / 4096),
    o.updated_at_us
FROM parts o JOIN users u ON u.user_id = o.user_id JOIN instruments i ON i.instrument_id = o.instrument_id
ORDER BY o.sequence;

INSERT INTO trades
WITH parts AS (
    SELECT *,
        256 * (instr('0123456789abcdef', substr(trade_id, 16, 1)) - 1) + 16 * (instr('0123456789abcdef', substr(trade_id, 17, 1)) - 1)
            + instr('0123456789abcdef', substr(trade_id, 18, 1)) - 1 AS fraction,
        -- The last 24 bits are the index, from 1.
        1048576 * (instr('0123456789abcdef', substr(trade_id, 31, 1)) - 1) + 65536 * (instr('0123456789abcdef', substr(trade_id, 32, 1)) - 1)
            + 4096 * (instr('0123456789abcdef', substr(trade_id, 33, 1)) - 1) + 256 * (instr('0123456789abcdef', substr(trade_id, 34, 1)) - 1)
            + 16 * (instr('0123456789abcdef', substr(trade_id, 35, 1)) - 1) + instr('0123456789abcdef', substr(trade_id, 36, 1)) - 1 AS place,
        CASE instr(price, '.') WHEN 0 THEN 0 ELSE length(price) - instr(price, '.') END AS price_scale,
        CASE instr(quantity, '.') WHEN 0 THEN 0 ELSE length(quantity) - instr(quantity, '.') END AS quantity_scale
    FROM trade_texts
)
SELECT (t.sequence << 20) + t.place - 1, b.sequence, s.sequence, ub.user, us.user, i.instrument,
    CAST(replace(t.price, '.', '') || (SELECT text FROM zeros WHERE scale = i.tick_scale - t.price_scale) AS INTEGER),
    CAST(replace(t.quantity, '.', '') || (SELECT text FROM zeros WHERE scale = i.lot_scale - t.quantity_scale) AS INTEGER),
    t.fee_minor, t.trade_number, t.aggressor_side,
    max(t.executed_at_us * 1000, t.executed_at_us / 1000 * 1000000 + (t.fraction * 1000000 + 4095) / 4096)
FROM parts t JOIN order_texts b ON b.order_id = t.buy_order_id JOIN order_texts s ON s.order_id = t.sell_order_id
    JOIN users ub ON ub.user_id = t.buyer_id JOIN users us ON us.user_id = t.seller_id JOIN instruments i ON i.instrument_id = t.instrument_id
ORDER BY 1;

INSERT INTO answers
SELECT unhex(replace(a.key_hash, '-', '')), a.sequence, coalesce(o.sequence, 0), a.cancelled
FROM answer_texts a LEFT JOIN order_texts o ON o.order_id = a.order_id;

-- An index ends with the row's key: each list is a walk back along one, or along the table itself.
CREATE INDEX orders_by_user ON orders (user);
CREATE INDEX orders_by_instrument ON orders (instrument);
CREATE INDEX trades_by_buyer ON trades (buyer);
CREATE INDEX trades_by_seller ON trades (seller);
CREATE INDEX trades_by_instrument ON trades (instrument);

DROP TABLE zeros;
DROP TABLE order_texts;
DROP TABLE trade_texts;
DROP TABLE answer_texts;
