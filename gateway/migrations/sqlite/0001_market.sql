-- Orders and trades as the journal tells them; rebuilt from it when this file is lost. Amounts are kopecks, prices and quantities exact decimals as
-- text, times microseconds since 1970.

CREATE TABLE projection (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    -- Last journal sequence in these tables; moves in the transaction that writes them.
    sequence INTEGER NOT NULL
);
INSERT INTO projection (id, sequence) VALUES (1, 0);

CREATE TABLE orders (
    order_id        TEXT PRIMARY KEY,
    user_id         TEXT NOT NULL,
    instrument_id   TEXT NOT NULL,
    side            INTEGER NOT NULL,
    order_type      INTEGER NOT NULL,
    time_in_force   INTEGER NOT NULL,
    post_only       INTEGER NOT NULL,
    stp             INTEGER NOT NULL,
    expires_at_us   INTEGER NOT NULL,
    -- Empty for a market order without protection price.
    price           TEXT NOT NULL,
    quantity        TEXT NOT NULL,
    filled          TEXT NOT NULL,
    value_minor     INTEGER NOT NULL,
    status          INTEGER NOT NULL,
    cancel_reason   TEXT NOT NULL,
    -- The number the trading path knows it by, as text; 0 = none.
    client_order_id TEXT NOT NULL,
    engine_order_id TEXT NOT NULL,
    own_hold        INTEGER NOT NULL,
    sequence        INTEGER NOT NULL,
    created_at_us   INTEGER NOT NULL,
    updated_at_us   INTEGER NOT NULL
) STRICT;
CREATE INDEX orders_by_user ON orders (user_id, created_at_us DESC, order_id DESC);
CREATE INDEX orders_by_time ON orders (created_at_us DESC, order_id DESC);

CREATE TABLE trades (
    trade_id          TEXT PRIMARY KEY,
    buy_order_id      TEXT NOT NULL,
    sell_order_id     TEXT NOT NULL,
    buyer_id          TEXT NOT NULL,
    seller_id         TEXT NOT NULL,
    instrument_id     TEXT NOT NULL,
    price             TEXT NOT NULL,
    quantity          TEXT NOT NULL,
    fee_minor         INTEGER NOT NULL,
    trade_number      INTEGER NOT NULL,
    aggressor_side    INTEGER NOT NULL,
    executed_at_us    INTEGER NOT NULL,
    sequence          INTEGER NOT NULL
) STRICT;
CREATE INDEX trades_by_buyer ON trades (buyer_id, executed_at_us DESC, trade_id DESC);
CREATE INDEX trades_by_seller ON trades (seller_id, executed_at_us DESC, trade_id DESC);
CREATE INDEX trades_by_time ON trades (executed_at_us DESC, trade_id DESC);

-- Answers to calls with an idempotency key that the journal knows.
CREATE TABLE answers (
    key_hash  TEXT PRIMARY KEY,
    sequence  INTEGER NOT NULL,
    -- Empty for a mass cancel.
    order_id  TEXT NOT NULL,
    cancelled INTEGER NOT NULL
) STRICT;

-- Not from the journal: what a call said that the journal has no room for.
CREATE TABLE requests (
    key_hash        TEXT PRIMARY KEY,
    correlation_id  TEXT NOT NULL,
    created_at_us   INTEGER NOT NULL
) STRICT;
CREATE TABLE client_order_ids (
    user_id TEXT NOT NULL,
    number  TEXT NOT NULL,
    text    TEXT NOT NULL,
    PRIMARY KEY (user_id, number)
) STRICT;

-- Positions as the CFA service's events tell them (R159).
CREATE TABLE positions (
    user_id       TEXT NOT NULL,
    instrument_id TEXT NOT NULL,
    quantity      TEXT NOT NULL,
    PRIMARY KEY (user_id, instrument_id)
) STRICT;

-- Status of each instrument in the registry when it was last taken over; 1 draft, 2 active, 3 halted, 4 ended.
CREATE TABLE listed (
    instrument_id TEXT PRIMARY KEY,
    status        INTEGER NOT NULL
) STRICT;
