-- Lists of one instrument. In the order of time within it, so that rows come in at its end.
CREATE INDEX orders_by_instrument ON orders (instrument_id, created_at_us DESC, order_id DESC);
CREATE INDEX trades_by_instrument ON trades (instrument_id, executed_at_us DESC, trade_id DESC);
