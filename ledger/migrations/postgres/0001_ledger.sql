-- The ledger's tables. Money is in minor units of the instrument, time in microseconds since the epoch, enumerations by the numbers of the
-- contract. What the fold promises is checked here once more, and what must never change is guarded by triggers.
-- (The outbox and inbox tables are made by `events::Postgres::open`.) The same schema as SQLite's; texts that are keys are compared by their bytes,
-- as they are there.

CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION '%', TG_ARGV[0]; END $$;

CREATE TABLE instruments (
    instrument_id TEXT COLLATE "C" PRIMARY KEY,
    decimals INTEGER NOT NULL CHECK (decimals BETWEEN 0 AND 18)
);

CREATE TABLE users (
    user_id TEXT COLLATE "C" PRIMARY KEY,
    blocked BOOLEAN NOT NULL DEFAULT FALSE
);

CREATE TABLE accounts (
    account_id TEXT COLLATE "C" PRIMARY KEY,
    user_id TEXT COLLATE "C" NOT NULL REFERENCES users (user_id),
    kind INTEGER NOT NULL CHECK (kind BETWEEN 1 AND 3),
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL,
    UNIQUE (user_id, kind)
);
CREATE INDEX accounts_by_user ON accounts (user_id, created_at_us, account_id);

CREATE TABLE sub_accounts (
    subaccount_id TEXT COLLATE "C" PRIMARY KEY,
    account_id TEXT COLLATE "C" NOT NULL REFERENCES accounts (account_id),
    user_id TEXT COLLATE "C" NOT NULL,
    instrument_id TEXT COLLATE "C" NOT NULL,
    balance BIGINT NOT NULL DEFAULT 0,
    held BIGINT NOT NULL DEFAULT 0 CHECK (held >= 0),
    unsettled BIGINT NOT NULL DEFAULT 0 CHECK (unsettled >= 0),
    version BIGINT NOT NULL DEFAULT 0,
    -- 1: the user is blocked, 2: frozen by staff.
    "freeze" INTEGER NOT NULL DEFAULT 0 CHECK ("freeze" BETWEEN 0 AND 3),
    closed BOOLEAN NOT NULL DEFAULT FALSE,
    -- The reserve is negative by the supply in circulation.
    may_be_negative BOOLEAN NOT NULL,
    created_at_us BIGINT NOT NULL,
    updated_at_us BIGINT NOT NULL,
    CHECK (may_be_negative OR (balance >= 0 AND balance - held - unsettled >= 0)),
    CHECK (NOT closed OR (balance = 0 AND held = 0))
) WITH (fillfactor = 70);
CREATE INDEX sub_accounts_by_user ON sub_accounts (user_id, created_at_us, subaccount_id);
CREATE INDEX sub_accounts_by_instrument ON sub_accounts (instrument_id, created_at_us, subaccount_id);

CREATE TABLE operations (
    operation_id TEXT COLLATE "C" PRIMARY KEY,
    -- Which call made it: keys of different calls never meet (T12).
    scope INTEGER NOT NULL,
    kind INTEGER NOT NULL CHECK (kind BETWEEN 1 AND 14),
    status INTEGER NOT NULL CHECK (status BETWEEN 1 AND 12),
    user_id TEXT COLLATE "C" NOT NULL,
    idempotency_key TEXT COLLATE "C" NOT NULL CHECK (idempotency_key <> ''),
    external_ref TEXT COLLATE "C",
    tx_hash TEXT COLLATE "C",
    rejection_code INTEGER,
    rejection_message TEXT,
    awaits_chain BOOLEAN NOT NULL,
    reverses TEXT COLLATE "C" UNIQUE REFERENCES operations (operation_id),
    reversed_by TEXT COLLATE "C",
    digest BIGINT NOT NULL,
    created_at_us BIGINT NOT NULL,
    finalized_at_us BIGINT,
    UNIQUE (user_id, idempotency_key, scope)
);
-- A payment, payout or chain operation acts once per type, whatever key it comes with (T12).
CREATE UNIQUE INDEX operations_by_reference ON operations (external_ref, kind) WHERE external_ref IS NOT NULL;
CREATE INDEX operations_by_tx ON operations (tx_hash) WHERE tx_hash IS NOT NULL;
CREATE INDEX operations_by_time ON operations (created_at_us, operation_id);
CREATE INDEX operations_by_user ON operations (user_id, created_at_us, operation_id);

CREATE TRIGGER operations_are_kept BEFORE DELETE ON operations
FOR EACH ROW EXECUTE FUNCTION refuse('operations are never deleted');
CREATE TRIGGER operations_are_all_kept BEFORE TRUNCATE ON operations
FOR EACH STATEMENT EXECUTE FUNCTION refuse('operations are never deleted');
CREATE TRIGGER operations_keep_their_terms BEFORE UPDATE ON operations
FOR EACH ROW WHEN ((old.operation_id, old.scope, old.kind, old.user_id, old.idempotency_key, old.external_ref, old.awaits_chain, old.reverses,
    old.digest, old.created_at_us) IS DISTINCT FROM (new.operation_id, new.scope, new.kind, new.user_id, new.idempotency_key, new.external_ref,
    new.awaits_chain, new.reverses, new.digest, new.created_at_us))
EXECUTE FUNCTION refuse('terms of an operation never change');
CREATE TRIGGER operations_end_once BEFORE UPDATE OF status ON operations
FOR EACH ROW WHEN (old.status IN (7, 8, 9, 12) AND new.status <> old.status)
EXECUTE FUNCTION refuse('an operation that has ended stays ended');
CREATE TRIGGER operations_are_reversed_once BEFORE UPDATE OF reversed_by ON operations
FOR EACH ROW WHEN (old.reversed_by IS NOT NULL AND new.reversed_by IS DISTINCT FROM old.reversed_by)
EXECUTE FUNCTION refuse('an operation is reversed once');

CREATE TABLE postings (
    operation_id TEXT COLLATE "C" NOT NULL REFERENCES operations (operation_id),
    ordinal INTEGER NOT NULL,
    posting_id TEXT COLLATE "C" NOT NULL,
    debit_subaccount_id TEXT COLLATE "C" NOT NULL REFERENCES sub_accounts (subaccount_id),
    credit_subaccount_id TEXT COLLATE "C" NOT NULL REFERENCES sub_accounts (subaccount_id),
    instrument_id TEXT COLLATE "C" NOT NULL,
    amount BIGINT NOT NULL CHECK (amount > 0),
    hold_id TEXT COLLATE "C",
    unsettled BOOLEAN NOT NULL,
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
FOR EACH ROW EXECUTE FUNCTION refuse('postings never change');
CREATE TRIGGER postings_are_kept BEFORE DELETE ON postings
FOR EACH ROW EXECUTE FUNCTION refuse('postings are never deleted');
CREATE TRIGGER postings_are_all_kept BEFORE TRUNCATE ON postings
FOR EACH STATEMENT EXECUTE FUNCTION refuse('postings are never deleted');

CREATE TABLE holds (
    hold_id TEXT COLLATE "C" PRIMARY KEY,
    subaccount_id TEXT COLLATE "C" NOT NULL REFERENCES sub_accounts (subaccount_id),
    user_id TEXT COLLATE "C" NOT NULL,
    instrument_id TEXT COLLATE "C" NOT NULL,
    -- Original plus added.
    amount BIGINT NOT NULL CHECK (amount > 0),
    remaining BIGINT NOT NULL CHECK (remaining >= 0),
    added BIGINT NOT NULL CHECK (added >= 0),
    split_off BIGINT NOT NULL CHECK (split_off >= 0),
    consumed BIGINT NOT NULL CHECK (consumed >= 0),
    released BIGINT NOT NULL CHECK (released >= 0),
    returned_by_children BIGINT NOT NULL CHECK (returned_by_children >= 0),
    status INTEGER NOT NULL CHECK (status BETWEEN 1 AND 4),
    expiry_told BOOLEAN NOT NULL DEFAULT FALSE,
    reason TEXT NOT NULL,
    owner TEXT COLLATE "C" NOT NULL,
    parent_hold_id TEXT COLLATE "C" REFERENCES holds (hold_id),
    destination_subaccount_id TEXT COLLATE "C",
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
FOR EACH ROW EXECUTE FUNCTION refuse('holds are never deleted');
CREATE TRIGGER holds_are_all_kept BEFORE TRUNCATE ON holds
FOR EACH STATEMENT EXECUTE FUNCTION refuse('holds are never deleted');

-- Answers bound to idempotency keys, for calls whose rows do not answer by themselves.
CREATE TABLE answers (
    user_id TEXT COLLATE "C" NOT NULL,
    idempotency_key TEXT COLLATE "C" NOT NULL,
    call INTEGER NOT NULL,
    digest BIGINT NOT NULL,
    outcome TEXT NOT NULL CHECK (outcome::json IS NOT NULL),
    created_at_us BIGINT NOT NULL,
    PRIMARY KEY (user_id, idempotency_key, call)
);

-- How far each log that feeds the ledger has been applied, written with the postings it caused.
CREATE TABLE sources (
    source TEXT COLLATE "C" PRIMARY KEY,
    first_sequence BIGINT NOT NULL,
    through_sequence BIGINT NOT NULL,
    digest BIGINT NOT NULL
);
CREATE TRIGGER sources_only_advance BEFORE UPDATE ON sources
FOR EACH ROW WHEN (new.through_sequence <= old.through_sequence)
EXECUTE FUNCTION refuse('a source only advances');

-- News of finality that came before the operation it is about.
CREATE TABLE parked (
    match_key TEXT COLLATE "C" PRIMARY KEY,
    tx_hash TEXT COLLATE "C",
    reverted BOOLEAN NOT NULL,
    at_us BIGINT NOT NULL
);
CREATE INDEX parked_by_time ON parked (at_us);

INSERT INTO instruments (instrument_id, decimals) VALUES ('CFA-RUB', 2);
INSERT INTO users (user_id) VALUES ('system');
INSERT INTO accounts (account_id, user_id, kind, created_at_us, updated_at_us) VALUES
    ('system:MAIN', 'system', 1, 0, 0),
    ('system:INVEST', 'system', 2, 0, 0);
INSERT INTO sub_accounts (subaccount_id, account_id, user_id, instrument_id, may_be_negative, created_at_us, updated_at_us) VALUES
    ('system:reserve:CFA-RUB', 'system:MAIN', 'system', 'CFA-RUB', TRUE, 0, 0),
    ('system:fees:CFA-RUB', 'system:MAIN', 'system', 'CFA-RUB', TRUE, 0, 0),
    ('system:reserve:CFA-EQ', 'system:INVEST', 'system', 'CFA-EQ', TRUE, 0, 0);
