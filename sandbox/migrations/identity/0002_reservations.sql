-- Amounts reserved for operations (T24). They are part of `uses` from the reservation on, until it is cancelled. A refusal is an answer, too.
CREATE TABLE reservations (
    reservation_id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL,
    limit_type TEXT NOT NULL,
    business_day BIGINT NOT NULL,
    amount TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('RESERVED', 'REFUSED', 'CONFIRMED', 'CANCELLED')),
    -- Why it was refused.
    reason TEXT NOT NULL
) WITHOUT ROWID;
