-- The ledger's tables. Money is in minor units of the instrument, time in microseconds since the epoch, enumerations by the numbers of the
-- contract. What the fold promises is checked here once more, and what must never change is guarded by triggers.
-- (The outbox and inbox tables are made by `events::Sqlite::open`.)

CREATE TABLE instruments (
    instrument_id TEXT PRIMARY KEY,
    decimals INTEGER NOT NULL CHECK (decimals BETWEEN 0 AND 18)
) WITHOUT ROWID;

CREATE TABLE users (
    user_id TEXT PRIMARY KEY,
    blocked INTEGER NOT NULL DEFAULT 0 CHECK (blocked IN (0, 1))
) WITHOUT ROWID;

CREATE TABLE accounts (
    account_id TEXT PRIMARY KEY,
    user_id TEXT NOT NULL REFERENCES users (user_id),
    kind INTEGER NOT NULL CHECK (kind BETWEEN 1 AND 3),
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL,
    UNIQUE (user_id, kind)
) WITHOUT ROWID;
CREATE INDEX accounts_by_user ON accounts (user_id, created_at_us, account_id);

CREATE TABLE sub_accounts (
    subaccount_id TEXT PRIMARY KEY,
    account_id TEXT NOT NULL REFERENCES accounts (account_id),
    user_id TEXT NOT NULL,
    instrument_id TEXT NOT NULL,
    balance BIGINT NOT NULL DEFAULT 0,
    held BIGINT NOT NULL DEFAULT 0 CHECK (held >= 0),
    unsettled BIGINT NOT NULL DEFAULT 0 CHECK (unsettled >= 0),
    version BIGINT NOT NULL DEFAULT 0,
    -- 1: the user is blocked, 2: frozen by staff.
    freeze INTEGER NOT NULL DEFAULT 0 CHECK (freeze BETWEEN 0 AND 3),
    closed INTEGER NOT NULL DEFAULT 0 CHECK (closed IN (0, 1)),
    -- The reserve is negative by the supply in circulation.
    may_be_negative INTEGER NOT NULL CHECK (may_be_negative IN (0, 1)),
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL,
    CHECK (may_be_negative = 1 OR (balance >= 0 AND balance - held - unsettled >= 0)),
    CHECK (closed = 0 OR (balance = 0 AND held = 0))
) WITHOUT ROWID;
CREATE INDEX sub_accounts_by_user ON sub_accounts (user_id, created_at_us, subaccount_id);
CREATE INDEX sub_accounts_by_instrument ON sub_accounts (instrument_id, created_at_us, subaccount_id);

CREATE TABLE operations (
    operation_id TEXT PRIMARY KEY,
    -- Which call made it: keys of different calls never meet (T12).
    scope INTEGER NOT NULL,
    kind INTEGER NOT NULL CHECK (kind BETWEEN 1 AND 14),
    status INTEGER NOT NULL CHECK (status BETWEEN 1 AND 12),
    user_id TEXT NOT NULL,
    idempotency_key TEXT NOT NULL CHECK (idempotency_key <> ''),
    external_ref TEXT,
    tx_hash TEXT,
    rejection_code INTEGER,
    rejection_message TEXT,
    awaits_chain INTEGER NOT NULL CHECK (awaits_chain IN (0, 1)),
    reverses TEXT UNIQUE REFERENCES operations (operation_id),
    reversed_by TEXT,
    digest BIGINT NOT NULL,
    created_at_us BIGINT NOT NULL,
    finalized_at_us BIGINT,
    -- The key first: keys that clients make by time lie side by side, users do not.
    UNIQUE (idempotency_key, user_id, scope)
);
-- A payment, payout or chain operation acts once per type, whatever key it comes with (T12).
CREATE UNIQUE INDEX operations_by_reference ON operations (external_ref, kind) WHERE external_ref IS NOT NULL;
CREATE INDEX operations_by_tx ON operations (tx_hash) WHERE tx_hash IS NOT NULL;
-- Of one time are only the operations of one group, so lists sort those by id themselves: the id in here would double the pages that each
-- operation touches.
CREATE INDEX operations_by_time ON operations (created_at_us);
CREATE INDEX operations_by_user ON operations (user_id, created_at_us);

CREATE TRIGGER operations_are_kept BEFORE DELETE ON operations
BEGIN SELECT RAISE(ABORT, 'operations are never deleted'); END;
CREATE TRIGGER operations_keep_their_terms
BEFORE UPDATE OF operation_id, scope, kind, user_id, idempotency_key, external_ref, awaits_chain, reverses, digest, created_at_us ON operations
BEGIN SELECT RAISE(ABORT, 'terms of an operation never change'); END;
CREATE TRIGGER operations_end_once BEFORE UPDATE OF status ON operations
WHEN old.status IN (7, 8, 9, 12) AND new.status <> old.status
BEGIN SELECT RAISE(ABORT, 'an operation that has ended stays ended'); END;
CREATE TRIGGER operations_are_reversed_once BEFORE UPDATE OF reversed_by ON operations
WHEN old.reversed_by IS NOT NULL AND new.reversed_by IS NOT old.reversed_by
BEGIN SELECT RAISE(ABORT, 'an operation is reversed once'); END;

-- In the order of writing, so that the two trees by sub-account, which are touched all over, refer to a short number.
CREATE TABLE postings (
    operation_id TEXT NOT NULL REFERENCES operations (operation_id),
    ordinal INTEGER NOT NULL,
    posting_id TEXT NOT NULL,
    debit_subaccount_id TEXT NOT NULL REFERENCES sub_accounts (subaccount_id),
    credit_subaccount_id TEXT NOT NULL REFERENCES sub_accounts (subaccount_id),
    instrument_id TEXT NOT NULL,
    amount BIGINT NOT NULL CHECK (amount > 0),
    hold_id TEXT,
    unsettled INTEGER NOT NULL CHECK (unsettled IN (0, 1)),
    debit_balance_after BIGINT NOT NULL,
    debit_version BIGINT NOT NULL,
    credit_balance_after BIGINT NOT NULL,
    credit_version BIGINT NOT NULL,
    created_at_us BIGINT NOT NULL,
    PRIMARY KEY (operation_id, ordinal),
    CHECK (debit_subaccount_id <> credit_subaccount_id)
);
CREATE UNIQUE INDEX postings_by_debit ON postings (debit_subaccount_id, debit_version);
CREATE UNIQUE INDEX postings_by_credit ON postings (credit_subaccount_id, credit_version);

CREATE TRIGGER postings_never_change BEFORE UPDATE ON postings
BEGIN SELECT RAISE(ABORT, 'postings never change'); END;
CREATE TRIGGER postings_are_kept BEFORE DELETE ON postings
BEGIN SELECT RAISE(ABORT, 'postings are never deleted'); END;

CREATE TABLE holds (
    hold_id TEXT PRIMARY KEY,
    subaccount_id TEXT NOT NULL REFERENCES sub_accounts (subaccount_id),
    user_id TEXT NOT NULL,
    instrument_id TEXT NOT NULL,
    -- Original plus added.
    amount BIGINT NOT NULL CHECK (amount > 0),
    remaining BIGINT NOT NULL CHECK (remaining >= 0),
    added BIGINT NOT NULL CHECK (added >= 0),
    split_off BIGINT NOT NULL CHECK (split_off >= 0),
    consumed BIGINT NOT NULL CHECK (consumed >= 0),
    released BIGINT NOT NULL CHECK (released >= 0),
    returned_by_children BIGINT NOT NULL CHECK (returned_by_children >= 0),
    status INTEGER NOT NULL CHECK (status BETWEEN 1 AND 4),
    expiry_told INTEGER NOT NULL DEFAULT 0,
    reason TEXT NOT NULL,
    owner TEXT NOT NULL,
    parent_hold_id TEXT REFERENCES holds (hold_id),
    destination_subaccount_id TEXT,
    expires_at_us BIGINT,
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL,
    -- The property of every hold, always.
    CHECK (amount + returned_by_children = remaining + split_off + consumed + released),
    CHECK (status = 1 OR remaining = 0)
);
CREATE INDEX holds_by_time ON holds (created_at_us, hold_id);
CREATE INDEX holds_by_subaccount ON holds (subaccount_id, status, created_at_us, hold_id);
CREATE INDEX holds_by_parent ON holds (parent_hold_id) WHERE parent_hold_id IS NOT NULL;
CREATE INDEX holds_due ON holds (expires_at_us) WHERE status = 1 AND expires_at_us IS NOT NULL;
CREATE INDEX holds_active ON holds (instrument_id, remaining) WHERE status = 1;

CREATE TRIGGER holds_are_kept BEFORE DELETE ON holds
BEGIN SELECT RAISE(ABORT, 'holds are never deleted'); END;

-- Answers bound to idempotency keys, for calls whose rows do not answer by themselves. Looked up for each operation of a batch: the key is a
-- tree of its own, beside which the answers of large batches would be read at each step down.
CREATE TABLE answers (
    user_id TEXT NOT NULL,
    idempotency_key TEXT NOT NULL,
    call INTEGER NOT NULL,
    digest BIGINT NOT NULL,
    outcome TEXT NOT NULL CHECK (json_valid(outcome)),
    created_at_us BIGINT NOT NULL,
    PRIMARY KEY (idempotency_key, user_id, call)
);

-- How far each log that feeds the ledger has been applied, written with the postings it caused.
CREATE TABLE sources (
    source TEXT PRIMARY KEY,
    first_sequence BIGINT NOT NULL,
    through_sequence BIGINT NOT NULL,
    digest BIGINT NOT NULL
) WITHOUT ROWID;
CREATE TRIGGER sources_only_advance BEFORE UPDATE ON sources
WHEN new.through_sequence <= old.through_sequence
BEGIN SELECT RAISE(ABORT, 'a source only advances'); END;

-- News of finality that came before the operation it is about.
CREATE TABLE parked (
    match_key TEXT PRIMARY KEY,
    tx_hash TEXT,
    reverted INTEGER NOT NULL CHECK (reverted IN (0, 1)),
    at_us BIGINT NOT NULL
) WITHOUT ROWID;
CREATE INDEX parked_by_time ON parked (at_us);

INSERT INTO instruments (instrument_id, decimals) VALUES ('CFA-RUB', 2);
INSERT INTO users (user_id) VALUES ('system');
INSERT INTO accounts (account_id, user_id, kind, created_at_us, updated_at_us) VALUES
    ('system:MAIN', 'system', 1, 0, 0),
    ('system:INVEST', 'system', 2, 0, 0);
INSERT INTO sub_accounts (subaccount_id, account_id, user_id, instrument_id, may_be_negative, created_at_us, updated_at_us) VALUES
    ('system:reserve:CFA-RUB', 'system:MAIN', 'system', 'CFA-RUB', 1, 0, 0),
    ('system:fees:CFA-RUB', 'system:MAIN', 'system', 'CFA-RUB', 1, 0, 0),
    ('system:reserve:CFA-EQ', 'system:INVEST', 'system', 'CFA-EQ', 1, 0, 0);
