//! Operations and postings: creation, reads, refusals, guards of the database, reversal, finality.

use proto::common::v1::{OperationStatus, OperationType};
use proto::ledger::v1::*;
use tonic::Code;

use crate::{harness::*, rows::Rows};

// rows: R195 R196 R197 R206 R207
#[tokio::test]
async fn r195_create_operation_returns_both_and_reads_return_the_same() {
    let world = World::new().await;
    let mut request = operation(
        OperationType::Deposit,
        "u1",
        "k1",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "100.5", RUB)],
    );
    request.operation.as_mut().unwrap().external_ref = Some("pay-1".to_owned());
    let answer = world
        .client
        .clone()
        .create_operation(request)
        .await
        .unwrap();
    assert!(!is_replay(&answer));
    let created = answer.into_inner();
    let operation = created.operation.clone().unwrap();
    assert!(!operation.operation_id.is_empty());
    assert_eq!(operation.r#type(), OperationType::Deposit);
    assert_eq!(operation.status(), OperationStatus::Settled);
    assert_eq!(
        (
            operation.user_id.as_str(),
            operation.idempotency_key.as_str()
        ),
        ("u1", "k1")
    );
    assert_eq!(operation.external_ref.as_deref(), Some("pay-1"));
    assert!(operation.created_at.is_some() && operation.finalized_at.is_none());
    assert!(operation.onchain_tx_hash.is_none() && operation.rejection_reason.is_none());
    let [posting] = created.postings.as_slice() else {
        panic!("one posting")
    };
    assert!(!posting.posting_id.is_empty() && posting.created_at.is_some());
    assert_eq!(posting.operation_id, operation.operation_id);
    assert_eq!(posting.debit_subaccount_id, "system:reserve:CFA-RUB");
    assert_eq!(posting.credit_subaccount_id, "u1:CFA-RUB");
    assert_eq!(posting.amount, amount(RUB, "100.50"));
    assert_eq!(
        posting.debit_balance_after.as_ref().unwrap().value,
        "-100.50"
    );
    assert_eq!(
        posting.credit_balance_after.as_ref().unwrap().value,
        "100.50"
    );

    let read = world.get_operation(&operation.operation_id).await;
    assert_eq!(
        (read.operation, read.postings),
        (created.operation, created.postings)
    );
    world.fund("u1", RUB, "1").await;
    world.fund("u2", RUB, "1").await;
    let mut found = Vec::new();
    let mut token = String::new();
    loop {
        let request = ListOperationsRequest {
            user_id: "u1".to_owned(),
            r#type: OperationType::Deposit as i32,
            status: OperationStatus::Settled as i32,
            pagination: Some(proto::common::v1::PaginationRequest {
                page_size: 1,
                page_token: token,
            }),
            ..Default::default()
        };
        let answer = world
            .client
            .clone()
            .list_operations(request)
            .await
            .unwrap()
            .into_inner();
        found.extend(answer.operations);
        token = answer.pagination.unwrap().next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(found.len(), 2);
    assert!(found.contains(&operation));
    let by_key = ListOperationsRequest {
        idempotency_key: "k1".to_owned(),
        ..Default::default()
    };
    let answer = world
        .client
        .clone()
        .list_operations(by_key)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(answer.operations, [operation]);
    let missing = GetOperationRequest {
        operation_id: "nope".to_owned(),
        ..Default::default()
    };
    let answer = world.client.clone().get_operation(missing).await;
    refused(
        answer,
        Code::NotFound,
        "OPERATION_NOT_FOUND",
        "Operation not found",
    );
}

// rows: R209 R210
#[tokio::test]
async fn r209_every_type_and_the_statuses_of_the_text_are_in_the_contract() {
    let types = [
        "DEPOSIT",
        "WITHDRAWAL",
        "P2P_TRANSFER",
        "PAYMENT",
        "ISSUANCE",
        "REDEMPTION",
        "TRADE_BUY",
        "TRADE_SELL",
        "DIVIDEND",
        "COUPON",
        "EXTERNAL_WITHDRAWAL",
        "EXTERNAL_TRANSFER",
        "TRADING",
        "FEE",
    ];
    for name in types {
        assert!(
            OperationType::from_str_name(&format!("OPERATION_TYPE_{name}")).is_some(),
            "{name}"
        );
    }
    let statuses = [
        "CREATED",
        "KYC_REQUIRED",
        "COMPLIANCE_CHECK",
        "AWAITING_PAYMENT",
        "PROCESSING",
        "ONCHAIN_SUBMITTED",
        "FINALIZED",
        "REJECTED",
        "FAILED",
        "SETTLED",
        "BLOCKED",
        "REFUNDED",
    ];
    for name in statuses {
        assert!(
            OperationStatus::from_str_name(&format!("OPERATION_STATUS_{name}")).is_some(),
            "{name}"
        );
    }
    // The ledger writes and reads every type.
    let world = World::new().await;
    for kind in types::OperationType::ALL {
        let code = kind.code();
        let name = format!("OPERATION_TYPE_{kind}");
        let in_contract = OperationType::from_str_name(&name).map(i32::from);
        assert_eq!(in_contract, Some(code), "{name}");
        let mut request = operation(
            OperationType::Deposit,
            "u1",
            &format!("k{code}"),
            &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "1", RUB)],
        );
        request.operation.as_mut().unwrap().r#type = code;
        let id = world
            .client
            .clone()
            .create_operation(request)
            .await
            .unwrap()
            .into_inner()
            .operation
            .unwrap();
        assert_eq!(
            world
                .get_operation(&id.operation_id)
                .await
                .operation
                .unwrap()
                .r#type,
            code
        );
    }
}

// rows: R214
#[tokio::test]
async fn r214_second_posting_invalid_applies_none() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let request = operation(
        OperationType::Payment,
        "u1",
        "k1",
        &[
            ("u1:CFA-RUB", "u2:CFA-RUB", "10", RUB),
            ("u2:CFA-RUB", "u3:CFA-RUB", "10.01", RUB),
        ],
    );
    let answer = world.client.clone().create_operation(request.clone()).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "0.00", "0.00", "100.00"]
    );
    let missing = GetBalanceRequest {
        subaccount_id: "u2:CFA-RUB".to_owned(),
        ..Default::default()
    };
    let answer = world.client.clone().get_balance(missing).await;
    refused(
        answer,
        Code::NotFound,
        "SUB_ACCOUNT_NOT_FOUND",
        "Sub-account not found",
    );
    // The refusal stays bound to its key, although the balance is sufficient now.
    world.fund("u2", RUB, "1").await;
    let answer = world.client.clone().create_operation(request.clone()).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    let again = CreateOperationRequest {
        context: write("k2"),
        ..request
    };
    world.client.clone().create_operation(again).await.unwrap();
    assert_eq!(world.balance("u3:CFA-RUB").await[0], "10.01");
    world.assert_books_balance().await;
}

// rows: R329
#[tokio::test]
async fn d17_postings_are_validated() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    world.fund("u1", BOND, "5").await;
    let reserve = "system:reserve:CFA-RUB";
    let bad_fields: &[(&[Leg], &str)] = &[
        (&[], "postings: must not be empty"),
        (
            &[(reserve, "u1:CFA-RUB", "0", RUB)],
            "postings[0].amount: must be greater than zero",
        ),
        (
            &[(reserve, "u1:CFA-RUB", "-1", RUB)],
            "postings[0].amount: must be greater than zero",
        ),
        (
            &[(reserve, "u1:CFA-RUB", "1.001", RUB)],
            "postings[0].amount.amount: has more fraction digits than allowed",
        ),
        (
            &[(reserve, "u1:CFA-RUB", "1", BOND)],
            "postings[0].amount.currency_code: must be CFA-RUB",
        ),
        (
            &[(reserve, "u1:BOND-1", "1", RUB)],
            "postings[0].credit_subaccount_id: must be of instrument CFA-RUB",
        ),
        (
            &[(reserve, reserve, "1", RUB)],
            "postings[0].credit_subaccount_id: must differ from the debit side",
        ),
        (
            &[("", "u1:CFA-RUB", "1", RUB)],
            "postings[0].debit_subaccount_id: must not be empty",
        ),
        (
            &[(reserve, "u1:CFA-RUB", "99999999999999999999", RUB)],
            "postings[0].amount.amount: is too large",
        ),
    ];
    for (legs, text) in bad_fields {
        let answer = world
            .client
            .clone()
            .create_operation(operation(OperationType::Payment, "u1", &fresh(), legs))
            .await;
        refused(answer, Code::InvalidArgument, "INVALID_ARGUMENT", text);
    }
    let not_found: &[(Leg, &str, &str)] = &[
        (
            ("u9:CFA-RUB", "u1:CFA-RUB", "1", RUB),
            "SUB_ACCOUNT_NOT_FOUND",
            "Sub-account not found",
        ),
        (
            ("nonsense", "u1:CFA-RUB", "1", RUB),
            "SUB_ACCOUNT_NOT_FOUND",
            "Sub-account not found",
        ),
        (
            ("system:reserve:NEW-1", "u1:NEW-1", "1", "NEW-1"),
            "INSTRUMENT_NOT_FOUND",
            "Instrument not found",
        ),
    ];
    for (leg, reason, text) in not_found {
        let answer = world
            .client
            .clone()
            .create_operation(operation(OperationType::Payment, "u1", &fresh(), &[*leg]))
            .await;
        refused(answer, Code::NotFound, reason, text);
    }
    for (field, change) in [
        ("operation.type: must be one of the operation types", 0),
        ("operation.user_id: must not be empty", 1),
    ] {
        let mut request = operation(
            OperationType::Payment,
            "u1",
            &fresh(),
            &[(reserve, "u1:CFA-RUB", "1", RUB)],
        );
        match change {
            0 => request.operation.as_mut().unwrap().r#type = 0,
            _ => request.operation.as_mut().unwrap().user_id.clear(),
        }
        refused(
            world.client.clone().create_operation(request).await,
            Code::InvalidArgument,
            "INVALID_ARGUMENT",
            field,
        );
    }
    let mut keyless = operation(
        OperationType::Payment,
        "u1",
        "",
        &[(reserve, "u1:CFA-RUB", "1", RUB)],
    );
    keyless.context = write("");
    let status = world
        .client
        .clone()
        .create_operation(keyless)
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::InvalidArgument);
    assert!(status.message().starts_with("context.idempotency_key"));
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["100.00", "0.00", "0.00", "100.00"]
    );
}

// rows: R206
#[tokio::test]
async fn t12_key_returns_the_stored_operation_and_reference_acts_once() {
    let world = World::new().await;
    let deposit = |key: &str, value: &str, reference: Option<&str>| {
        let mut request = operation(
            OperationType::Deposit,
            "u1",
            key,
            &[("system:reserve:CFA-RUB", "u1:CFA-RUB", value, RUB)],
        );
        request.operation.as_mut().unwrap().external_ref = reference.map(str::to_owned);
        request
    };
    let first = world
        .client
        .clone()
        .create_operation(deposit("k1", "10", Some("pay-1")))
        .await
        .unwrap();
    let again = world
        .client
        .clone()
        .create_operation(deposit("k1", "10", Some("pay-1")))
        .await
        .unwrap();
    assert!(is_replay(&again) && !is_replay(&first));
    assert_eq!(first.into_inner(), again.into_inner());
    let other = world
        .client
        .clone()
        .create_operation(deposit("k1", "99", None))
        .await
        .unwrap();
    assert!(is_replay(&other));
    assert_eq!(other.into_inner().postings[0].amount, amount(RUB, "10.00"));
    let answer = world
        .client
        .clone()
        .create_operation(deposit("k2", "10", Some("pay-1")))
        .await;
    refused(
        answer,
        Code::AlreadyExists,
        "OPERATION_EXISTS",
        "Operation already exists",
    );
    // The key of another user is independent, and another type may have the same reference.
    let mut request = deposit("k1", "5", Some("pay-1"));
    request.operation.as_mut().unwrap().user_id = "u2".to_owned();
    request.operation.as_mut().unwrap().r#type = OperationType::Payment as i32;
    assert!(!is_replay(
        &world
            .client
            .clone()
            .create_operation(request)
            .await
            .unwrap()
    ));
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "15.00");
    let world = world.restart().await;
    let again = world
        .client
        .clone()
        .create_operation(deposit("k1", "10", Some("pay-1")))
        .await
        .unwrap();
    assert!(is_replay(&again));
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "15.00");
}

// rows: R215
#[tokio::test]
async fn r215_database_refuses_to_change_postings() {
    let world = World::new().await;
    world.fund("u1", RUB, "10").await;
    let rows = world.rows().await;
    for (sql, text) in [
        ("UPDATE postings SET amount = 1", "postings never change"),
        ("DELETE FROM postings", "postings are never deleted"),
        ("DELETE FROM operations", "operations are never deleted"),
        (
            "UPDATE operations SET user_id = 'x'",
            "terms of an operation never change",
        ),
        (
            "UPDATE sub_accounts SET balance = -1 WHERE subaccount_id = 'u1:CFA-RUB'",
            "CHECK constraint failed",
        ),
        (
            "UPDATE sub_accounts SET held = 2000 WHERE subaccount_id = 'u1:CFA-RUB'",
            "CHECK constraint failed",
        ),
    ] {
        let error = rows.execute(sql).await.unwrap_err().to_string();
        let error = error.replace("violates check constraint", "CHECK constraint failed");
        assert!(error.contains(text), "{sql}: {error}");
    }
    rows.close().await;
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "10.00");
}

/// A conflicting row cannot change a stored one, through any unique index or, on SQLite, through
/// the rowid.
///
/// `REPLACE` of SQLite deletes conflicting rows and fires no delete trigger. PostgreSQL has no
/// `REPLACE`, but an insert can request an update.
// rows: R215
#[tokio::test]
async fn r215_database_refuses_to_replace_rows() {
    const OPERATION: &str = "operation_id, scope, kind, status, user_id, idempotency_key, external_ref, awaits_chain, \
         reverses, digest, created_at_us, block, place";
    const POSTING: &str = "posting_no, operation_id, ordinal, posting_id, debit_subaccount_id, credit_subaccount_id, \
         instrument_id, amount, hold_id, unsettled, debit_balance_after, debit_version, credit_balance_after, \
         credit_version, created_at_us, debit_previous, credit_previous";
    let world = World::new().await;
    let mut deposit = operation(
        OperationType::Deposit,
        "u1",
        "k1",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "10", RUB)],
    );
    deposit.operation.as_mut().unwrap().external_ref = Some("pay-1".to_owned());
    let made = world.client.clone().create_operation(deposit).await;
    let made = made.unwrap().into_inner().operation.unwrap();
    let reversing = reversal("r1", &made.operation_id);
    (world.client.clone())
        .reverse_operation(reversing)
        .await
        .unwrap();
    world.fund("u1", RUB, "10").await;
    world.hold("u1", RUB, "4").await;
    let rows = world.rows().await;
    let is_sqlite = matches!(rows, Rows::Sqlite(_));
    if is_sqlite {
        as_of_an_older_release(&rows).await;
    }
    rows.close().await;
    let world = world.restart().await;
    assert_eq!(ledger::verify(&world.config()).await.unwrap().fault, None);
    let rows = world.rows().await;
    let of_types = match is_sqlite {
        true => "SELECT sql FROM sqlite_master WHERE type = 'table' AND name = 'operations'",
        false => {
            "SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conname = 'operations_kind_check'"
        }
    };
    let bound = rows.texts(of_types).await.concat();
    let is_open = !bound.contains("AND 14") && !bound.contains("<= 14");
    assert!(bound.contains("kind >= 1") && is_open, "{bound}");
    let all = "SELECT 'operation ' || operation_id || user_id || status || idempotency_key || block || place \
         FROM operations \
         UNION ALL SELECT 'posting ' || operation_id || ordinal || amount || debit_version || credit_version \
         FROM postings \
         UNION ALL SELECT 'hold ' || hold_id || amount || remaining FROM holds \
         UNION ALL SELECT 'block ' || block || operations FROM audit_blocks \
         UNION ALL SELECT 'instrument ' || instrument_id || decimals FROM instruments ORDER BY 1";
    let before = rows.texts(all).await;

    // `free`: columns that are changed in the copied row, so it conflicts with the stored row in
    // one index only.
    let operation = |free: &[(&str, &str)]| copy("operations", OPERATION, free);
    let posting = |free: &[(&str, &str)]| copy("postings", POSTING, free);
    let id = ("operation_id", "'x' || operation_id");
    let key = ("idempotency_key", "'x' || idempotency_key");
    let reference = ("external_ref", "NULL");
    let reverses = ("reverses", "NULL");
    let place = ("place", "place + 1000");
    let ordinal = ("ordinal", "ordinal + 1000");
    let number = ("posting_no", "posting_no + 1000");
    let (no_operation, no_posting) = (
        "operations are never replaced",
        "postings are never replaced",
    );
    let meeting = [
        (operation(&[key, reference, reverses, place]), no_operation),
        (operation(&[id, reference, reverses, place]), no_operation),
        (
            operation(&[id, key, reverses, place]) + " WHERE external_ref IS NOT NULL",
            no_operation,
        ),
        (
            operation(&[id, key, reference, place]) + " WHERE reverses IS NOT NULL",
            no_operation,
        ),
        (operation(&[id, key, reference, reverses]), no_operation),
        (posting(&[number]), no_posting),
        (posting(&[ordinal]), no_posting),
        (
            "INTO holds SELECT * FROM holds".to_owned(),
            "holds are never replaced",
        ),
        (
            "INTO audit_blocks SELECT * FROM audit_blocks".to_owned(),
            "a sealed block follows the last one",
        ),
    ];
    let mut refusals: Vec<(String, &str)> = Vec::new();
    if is_sqlite {
        for (row, text) in meeting {
            refusals.push((format!("INSERT OR REPLACE {row}"), text));
            refusals.push((format!("REPLACE {row}"), text));
            refusals.push((format!("INSERT {row}"), text));
        }
        // The rowid is a separate key.
        let numbered = |row: String| {
            row.replacen(" (", " (rowid, ", 1)
                .replacen("SELECT ", "SELECT rowid, ", 1)
        };
        let free = operation(&[id, key, reference, reverses, place]);
        refusals.push((
            format!("INSERT OR REPLACE {}", numbered(free)),
            no_operation,
        ));
        for (sql, text) in [
            (
                "UPDATE OR REPLACE operations SET rowid = 1 WHERE rowid = 2",
                no_operation,
            ),
            (
                "UPDATE OR REPLACE operations SET oid = 1 WHERE rowid = 2",
                no_operation,
            ),
            (
                "UPDATE OR REPLACE postings SET _rowid_ = 1 WHERE rowid = 2",
                "postings never change",
            ),
            (
                "UPDATE OR REPLACE holds SET hold_id = 'x'",
                "holds are never replaced",
            ),
            (
                "UPDATE OR REPLACE holds SET rowid = 9",
                "holds are never replaced",
            ),
            (
                "INSERT OR REPLACE INTO instruments VALUES ('CFA-RUB', 3)",
                "decimals of an instrument never change",
            ),
        ] {
            refusals.push((sql.to_owned(), text));
        }
    } else {
        for (table, key, change, text) in [
            (
                "postings",
                "operation_id, ordinal",
                "amount = 1",
                "postings never change",
            ),
            (
                "postings",
                "debit_subaccount_id, debit_version",
                "amount = 1",
                "postings never change",
            ),
            (
                "postings",
                "credit_subaccount_id, credit_version",
                "amount = 1",
                "postings never change",
            ),
            (
                "operations",
                "operation_id",
                "user_id = 'x'",
                "terms of an operation never change",
            ),
            (
                "operations",
                "idempotency_key, user_id, scope",
                "digest = 1",
                "terms of an operation never change",
            ),
            (
                "operations",
                "block, place",
                "place = 77",
                "a sealed operation stays in its block",
            ),
            (
                "audit_blocks",
                "block",
                "operations = 1",
                "a sealed block follows the last one",
            ),
            (
                "instruments",
                "instrument_id",
                "decimals = 9",
                "decimals of an instrument never change",
            ),
        ] {
            let sql = format!(
                "INSERT INTO {table} SELECT * FROM {table} ON CONFLICT ({key}) DO UPDATE SET {change}"
            );
            refusals.push((sql, text));
        }
    }
    for (sql, text) in refusals {
        let error = rows.tamper(&sql).await.expect_err(&sql).to_string();
        assert!(error.contains(text), "{sql}: {error}");
    }
    assert_eq!(rows.texts(all).await, before);
    rows.close().await;
    // Later writes work as before.
    world.fund("u1", RUB, "5").await;
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "15.00");
    world.assert_books_balance().await;
}

/// Converts the file of a ledger to the schema of an older release, which has no guards against
/// replacement and no links between postings.
async fn as_of_an_older_release(rows: &Rows) {
    let names = "SELECT name FROM sqlite_master WHERE type = 'trigger' \
         AND (name LIKE '%\\_replace\\_nothing' ESCAPE '\\' \
         OR name IN ('operations_keep_their_number', 'operations_take_a_free_place', 'holds_keep_their_names', \
         'sources_are_not_turned_back'))";
    let guards = rows.texts(names).await;
    assert_eq!(guards.len(), 8, "{guards:?}");
    for guard in guards {
        rows.tamper(&format!("DROP TRIGGER {guard}")).await.unwrap();
    }
    // All statements use one connection: another one would not see a dropped table at once.
    let statements = [
        "CREATE TABLE old (operation_id TEXT NOT NULL REFERENCES operations (operation_id), ordinal INTEGER NOT NULL, \
         posting_id TEXT NOT NULL, debit_subaccount_id TEXT NOT NULL REFERENCES sub_accounts (subaccount_id), \
         credit_subaccount_id TEXT NOT NULL REFERENCES sub_accounts (subaccount_id), instrument_id TEXT NOT NULL, \
         amount BIGINT NOT NULL, hold_id TEXT, unsettled INTEGER NOT NULL, debit_balance_after BIGINT NOT NULL, \
         debit_version BIGINT NOT NULL, credit_balance_after BIGINT NOT NULL, credit_version BIGINT NOT NULL, \
         created_at_us BIGINT NOT NULL, PRIMARY KEY (operation_id, ordinal))",
        "INSERT INTO old SELECT operation_id, ordinal, posting_id, debit_subaccount_id, credit_subaccount_id, \
         instrument_id, amount, hold_id, unsettled, debit_balance_after, debit_version, credit_balance_after, \
         credit_version, created_at_us FROM postings ORDER BY posting_no",
        "DROP TABLE postings",
        "ALTER TABLE old RENAME TO postings",
        "CREATE UNIQUE INDEX postings_by_debit ON postings (debit_subaccount_id, debit_version)",
        "CREATE UNIQUE INDEX postings_by_credit ON postings (credit_subaccount_id, credit_version)",
        "CREATE TRIGGER postings_never_change BEFORE UPDATE ON postings \
         BEGIN SELECT RAISE(ABORT, 'postings never change'); END",
        "ALTER TABLE sub_accounts DROP COLUMN last_posting",
        "DROP TABLE operations_of_users",
        "DROP TABLE operations_listed",
        "DROP TABLE audit_records",
        "CREATE INDEX operations_by_user ON operations (user_id, created_at_us)",
        "DROP INDEX holds_by_user",
        "DROP INDEX holds_active_by_time",
        "DROP INDEX holds_active_of_subaccount",
        "DROP INDEX holds_active_of_parent",
        "DROP INDEX accounts_by_time",
        "DROP INDEX sub_accounts_by_time",
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_schema SET sql = replace(sql, 'CHECK (kind >= 1)', 'CHECK (kind BETWEEN 1 AND 14)') \
         WHERE name = 'operations'",
        "PRAGMA writable_schema = RESET",
    ];
    rows.tamper(&statements.join(";")).await.unwrap();
    let sql = "DELETE FROM _sqlx_migrations WHERE version >= 3";
    assert_eq!(rows.tamper(sql).await.unwrap(), 6);
}

// rows: R197 R237
#[tokio::test]
async fn r197_operations_of_a_user_are_complete_indexed_or_not() {
    let world = World::new().await;
    for user in ["u1", "u2"] {
        world.fund(user, RUB, "1000").await;
    }
    // A full batch of the SQLite user index, and some more.
    let batch = async |round: usize, count: usize| {
        let operations = (0..count).map(|index| {
            let (user, from, to) = match index % 3 {
                0 => ("u2", "u2:CFA-RUB", "u1:CFA-RUB"),
                _ => ("u1", "u1:CFA-RUB", "u2:CFA-RUB"),
            };
            let key = format!("{round}-{index}");
            item(
                OperationType::Payment,
                user,
                &key,
                &[(from, to, "0.01", RUB)],
            )
        });
        let request = CreateOperationsRequest {
            context: write(&fresh()),
            operations: operations.collect(),
            ..Default::default()
        };
        let answer = world.client.clone().create_operations(request).await;
        let outcomes = answer.unwrap().into_inner().outcomes.into_iter();
        let made = outcomes.map(|outcome| outcome.operation.unwrap());
        let own = made.filter(|operation| operation.user_id == "u2");
        own.map(|operation| operation.operation_id)
            .collect::<Vec<_>>()
    };
    let mut made = Vec::new();
    for (round, count) in [9_000, 9_000, 300, 30].into_iter().enumerate() {
        world.clock.advance_us(1);
        made.extend(batch(round, count).await);
    }
    let world = &world;
    let list = async |r#type: OperationType| {
        let (mut found, mut token) = (Vec::new(), String::new());
        loop {
            let request = ListOperationsRequest {
                user_id: "u2".to_owned(),
                r#type: r#type as i32,
                pagination: Some(proto::common::v1::PaginationRequest {
                    page_size: 1_000,
                    page_token: token,
                }),
                ..Default::default()
            };
            let answer = world.client.clone().list_operations(request).await;
            let answer = answer.unwrap().into_inner();
            let ids = answer.operations.into_iter();
            found.extend(ids.map(|operation| operation.operation_id));
            token = answer.pagination.unwrap().next_page_token;
            if token.is_empty() {
                return found;
            }
        }
    };
    // Newest first, each once.
    made.reverse();
    assert_eq!(list(OperationType::Payment).await, made);
    assert_eq!(list(OperationType::Deposit).await.len(), 1);
    assert_eq!(list(OperationType::Unspecified).await.len(), made.len() + 1);
    assert_eq!(ledger::verify(&world.config()).await.unwrap().fault, None);
}

/// The part after INSERT of a statement that inserts a copy of every row. `changes` replaces the
/// values of columns.
fn copy(table: &str, columns: &str, changes: &[(&str, &str)]) -> String {
    let values = columns.split(',').map(str::trim).map(|column| {
        let value = changes.iter().find(|(name, _)| *name == column);
        value.map_or(column, |(_, value)| value)
    });
    let values = values.collect::<Vec<_>>().join(", ");
    format!("INTO {table} ({columns}) SELECT {values} FROM {table}")
}

fn reversal(key: &str, operation_id: &str) -> ReverseOperationRequest {
    ReverseOperationRequest {
        context: write(key),
        operation_id: operation_id.to_owned(),
        reason: "typed wrong".to_owned(),
    }
}

// rows: R216
#[tokio::test]
async fn r216_reversal_mirrors_the_postings_once() {
    let world = World::new().await;
    let original = world.fund("u1", RUB, "10").await;
    let answer = world
        .client
        .clone()
        .reverse_operation(reversal("r1", &original.operation_id))
        .await
        .unwrap()
        .into_inner();
    let reversing = answer.operation.unwrap();
    assert_eq!(
        reversing.reverses_operation_id.as_deref(),
        Some(original.operation_id.as_str())
    );
    assert_eq!(reversing.r#type(), OperationType::Deposit);
    assert_eq!(answer.postings[0].debit_subaccount_id, "u1:CFA-RUB");
    assert_eq!(
        answer.postings[0].credit_subaccount_id,
        "system:reserve:CFA-RUB"
    );
    assert_eq!(answer.postings[0].amount, amount(RUB, "10.00"));
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "0.00");
    let was = world
        .get_operation(&original.operation_id)
        .await
        .operation
        .unwrap();
    assert_eq!(was.status(), OperationStatus::Failed);
    assert_eq!(was.rejection_message.as_deref(), Some("typed wrong"));
    let again = world
        .client
        .clone()
        .reverse_operation(reversal("r1", &original.operation_id))
        .await
        .unwrap();
    assert!(is_replay(&again));
    assert_eq!(
        again.into_inner().operation.unwrap().operation_id,
        reversing.operation_id
    );
    let answer = world
        .client
        .clone()
        .reverse_operation(reversal("r2", &original.operation_id))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "ALREADY_REVERSED",
        "Operation is already reversed",
    );
    let answer = world
        .client
        .clone()
        .reverse_operation(reversal("r3", "nope"))
        .await;
    refused(
        answer,
        Code::NotFound,
        "OPERATION_NOT_FOUND",
        "Operation not found",
    );
    // A reversed final operation stays final. A reversal cannot debit money that is spent.
    let spent = world.fund("u1", RUB, "10").await;
    finalize(&world, &spent.operation_id, &tx_hash("a1"))
        .await
        .unwrap();
    let request = operation(
        OperationType::Payment,
        "u1",
        &fresh(),
        &[("u1:CFA-RUB", "u2:CFA-RUB", "4", RUB)],
    );
    world
        .client
        .clone()
        .create_operation(request)
        .await
        .unwrap();
    let answer = world
        .client
        .clone()
        .reverse_operation(reversal("r4", &spent.operation_id))
        .await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    world.fund("u1", RUB, "4").await;
    world
        .client
        .clone()
        .reverse_operation(reversal("r5", &spent.operation_id))
        .await
        .unwrap();
    let was = world
        .get_operation(&spent.operation_id)
        .await
        .operation
        .unwrap();
    assert_eq!(was.status(), OperationStatus::Finalized);
    world.assert_books_balance().await;
}

async fn finalize(
    world: &World,
    operation_id: &str,
    onchain_tx_hash: &str,
) -> Answer<FinalizeOperationResponse> {
    let request = FinalizeOperationRequest {
        context: write(&fresh()),
        operation_id: operation_id.to_owned(),
        onchain_tx_hash: onchain_tx_hash.to_owned(),
    };
    world.client.clone().finalize_operation(request).await
}

// rows: R216 R329
#[tokio::test]
async fn r216_only_services_end_operations_in_flight_to_the_chain() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let mut operator = world.as_caller("sandbox.operator");
    let mut approved = world.as_caller(testkit::APPROVED);
    let end = |id: &str| FinalizeOperationRequest {
        context: write(&fresh()),
        operation_id: id.to_owned(),
        onchain_tx_hash: String::new(),
    };
    let mut sent = Vec::new();
    for (key, sent_as) in [("k1", None), ("k2", Some("aa"))] {
        let mut request = operation(
            OperationType::TradeBuy,
            "u1",
            key,
            &[("u1:CFA-RUB", "u2:CFA-RUB", "10", RUB)],
        );
        request.postings[0].unsettled = true;
        let of = request.operation.as_mut().unwrap();
        of.awaits_chain = true;
        of.onchain_tx_hash = sent_as.map(tx_hash);
        let made = world.client.clone().create_operation(request).await;
        sent.push(made.unwrap().into_inner().operation.unwrap().operation_id);
    }
    let text = "Operation is in flight to the chain, only a service may end it";
    let precondition = Code::FailedPrecondition;
    for id in &sent {
        let answer = operator.finalize_operation(end(id)).await;
        refused(answer, precondition, "OPERATION_STATUS", text);
        // One person reverses nothing (D32), and two persons know no more of the chain than one.
        let reverse = || reversal(&format!("r-{id}"), id);
        let alone = operator.reverse_operation(reverse()).await;
        let needed = "This call needs an approval";
        refused(alone, precondition, "APPROVAL_REQUIRED", needed);
        // The refusal is bound to its key, with the same text.
        for _ in 0..2 {
            let asked = testkit::messages::approved(reverse());
            let answer = approved.reverse_operation(asked).await;
            refused(answer, precondition, "OPERATION_STATUS", text);
        }
    }
    assert_eq!(
        world.balance("u2:CFA-RUB").await,
        ["20.00", "0.00", "20.00", "0.00"]
    );
    // The service ends both operations. After that two persons may reverse the final one.
    finalize(&world, &sent[0], &tx_hash("bb")).await.unwrap();
    let undone = reversal("by-service", &sent[1]);
    world
        .client
        .clone()
        .reverse_operation(undone)
        .await
        .unwrap();
    operator.finalize_operation(end(&sent[0])).await.unwrap();
    let late = reversal("late", &sent[0]);
    let late = testkit::messages::approved(late);
    approved.reverse_operation(late).await.unwrap();
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "100.00");
    // Operations that do not await the chain are not restricted to services.
    let plain = world.fund("u3", RUB, "1").await;
    let plain = reversal("plain", &plain.operation_id);
    let plain = testkit::messages::approved(plain);
    approved.reverse_operation(plain).await.unwrap();
    world.assert_books_balance().await;
}

// rows: R216 R329
#[tokio::test]
async fn r216_a_person_makes_nothing_final_that_the_chain_confirms() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let mut operator = world.as_caller("sandbox.operator");
    let end = |id: &str, onchain_tx_hash: String| FinalizeOperationRequest {
        context: write(&fresh()),
        operation_id: id.to_owned(),
        onchain_tx_hash,
    };
    // Posted without awaiting the chain, as the CFA service does; its event makes them final.
    let text = "Operation is in flight to the chain, only a service may end it";
    for kind in [
        OperationType::Deposit,
        OperationType::P2pTransfer,
        OperationType::Issuance,
        OperationType::Redemption,
        OperationType::TradeBuy,
        OperationType::TradeSell,
    ] {
        let legs = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
        let made = { world.client.clone() }
            .create_operation(operation(kind, "u1", &fresh(), &legs))
            .await;
        let id = made.unwrap().into_inner().operation.unwrap().operation_id;
        for hash in [String::new(), tx_hash("invented")] {
            let answer = operator.finalize_operation(end(&id, hash)).await;
            refused(answer, Code::FailedPrecondition, "OPERATION_STATUS", text);
        }
        finalize(&world, &id, "").await.unwrap();
    }
    // A payment is never on chain: a person may make it final, but names no transaction.
    let legs = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
    let paid = operation(OperationType::Payment, "u1", &fresh(), &legs);
    let paid = { world.client.clone() }.create_operation(paid).await;
    let paid = paid.unwrap().into_inner().operation.unwrap().operation_id;
    let answer = operator
        .finalize_operation(end(&paid, tx_hash("invented")))
        .await;
    refused(
        answer,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
        "onchain_tx_hash: must be empty: the operation has no transaction on chain",
    );
    let answer = operator.finalize_operation(end(&paid, String::new())).await;
    let done = answer.unwrap().into_inner().operation.unwrap();
    assert_eq!(done.status(), OperationStatus::Finalized);
    assert_eq!(done.onchain_tx_hash, None);
    // A service names the transaction of an operation that awaits the chain.
    let mut awaited = operation(OperationType::TradeBuy, "u1", &fresh(), &legs);
    awaited.operation.as_mut().unwrap().awaits_chain = true;
    let awaited = { world.client.clone() }.create_operation(awaited).await;
    let awaited = awaited.unwrap().into_inner().operation.unwrap();
    refused(
        finalize(&world, &awaited.operation_id, "").await,
        Code::InvalidArgument,
        "INVALID_ARGUMENT",
        "onchain_tx_hash: must be given: the operation has a transaction on chain",
    );
    let hash = tx_hash("awaited");
    finalize(&world, &awaited.operation_id, &hash)
        .await
        .unwrap();
    let is = world.get_operation(&awaited.operation_id).await.operation;
    assert_eq!(is.unwrap().onchain_tx_hash, Some(hash));
    world.assert_books_balance().await;
}

// rows: R329 R220
#[tokio::test]
async fn d18_status_and_unsettled_until_final() {
    let world = World::new().await;
    let mut request = operation(
        OperationType::TradeSell,
        "u1",
        "t1:sell",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "7", RUB)],
    );
    request.operation.as_mut().unwrap().awaits_chain = true;
    request.postings[0].unsettled = true;
    let created = world
        .client
        .clone()
        .create_operation(request)
        .await
        .unwrap()
        .into_inner()
        .operation
        .unwrap();
    assert_eq!(created.status(), OperationStatus::Processing);
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["7.00", "0.00", "7.00", "0.00"]
    );
    let answer = world.open_hold("h1", new_hold("u1", RUB, "0.01")).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );
    let request = operation(
        OperationType::Payment,
        "u1",
        "p1",
        &[("u1:CFA-RUB", "u2:CFA-RUB", "0.01", RUB)],
    );
    let answer = world.client.clone().create_operation(request).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "INSUFFICIENT_BALANCE",
        "Insufficient balance",
    );

    // The digits of a hash may be written in either case.
    let upper = format!("0x{}", tx_hash("ab")[2..].to_ascii_uppercase());
    let answer = finalize(&world, &created.operation_id, &upper)
        .await
        .unwrap();
    assert!(!is_replay(&answer));
    let operation = answer.into_inner().operation.unwrap();
    assert_eq!(operation.status(), OperationStatus::Finalized);
    assert_eq!(operation.onchain_tx_hash, Some(tx_hash("ab")));
    assert!(operation.finalized_at.is_some());
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["7.00", "0.00", "0.00", "7.00"]
    );
    let again = finalize(&world, &created.operation_id, &tx_hash("ab"))
        .await
        .unwrap();
    assert!(is_replay(&again));
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["7.00", "0.00", "0.00", "7.00"]
    );
    let answer = finalize(&world, &created.operation_id, &tx_hash("cd")).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "OPERATION_STATUS",
        "Operation status does not allow this",
    );
    let answer = finalize(&world, "nope", &tx_hash("ab")).await;
    refused(
        answer,
        Code::NotFound,
        "OPERATION_NOT_FOUND",
        "Operation not found",
    );
}

// rows: R216
#[tokio::test]
async fn t21_bust_reverses_unsettled_credits() {
    let world = World::new().await;
    world.fund("u1", RUB, "3").await;
    let mut request = operation(
        OperationType::TradeSell,
        "u1",
        "t1:sell",
        &[("system:reserve:CFA-RUB", "u1:CFA-RUB", "7", RUB)],
    );
    request.postings[0].unsettled = true;
    let created = world
        .client
        .clone()
        .create_operation(request)
        .await
        .unwrap()
        .into_inner()
        .operation
        .unwrap();
    world.hold("u1", RUB, "3").await;
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["10.00", "3.00", "7.00", "0.00"]
    );
    world
        .client
        .clone()
        .reverse_operation(reversal("bust", &created.operation_id))
        .await
        .unwrap();
    assert_eq!(
        world.balance("u1:CFA-RUB").await,
        ["3.00", "3.00", "0.00", "0.00"]
    );
    let answer = finalize(&world, &created.operation_id, &tx_hash("ab")).await;
    refused(
        answer,
        Code::FailedPrecondition,
        "OPERATION_STATUS",
        "Operation status does not allow this",
    );
    world.assert_books_balance().await;
}

#[tokio::test]
async fn t16_units_of_an_instrument_go_to_its_own_reserve() {
    let world = World::new().await;
    let mut request = operation(
        OperationType::TradeBuy,
        "u1",
        "t1",
        &[("system:reserve:CFA-EQ", "u1:BOND-1", "5", BOND)],
    );
    request.instrument_scales = scale(BOND);
    let created = world
        .client
        .clone()
        .create_operation(request)
        .await
        .unwrap()
        .into_inner();
    assert_eq!(
        created.postings[0].debit_subaccount_id,
        "system:reserve:BOND-1"
    );
    assert_eq!(world.balance("system:reserve:BOND-1").await[0], "-5");
    assert_eq!(world.balance("system:reserve:CFA-EQ").await[0], "0");

    // The instrument `CFA-EQ` itself may have decimals; its first posting fixes their number.
    let mut request = operation(
        OperationType::Issuance,
        "u1",
        "i1",
        &[("system:reserve:CFA-EQ", "u1:CFA-EQ", "1.25", "CFA-EQ")],
    );
    request.instrument_scales = vec![InstrumentScale {
        instrument_id: "CFA-EQ".to_owned(),
        decimals: 4,
    }];
    world
        .client
        .clone()
        .create_operation(request)
        .await
        .unwrap();
    assert_eq!(world.balance("u1:CFA-EQ").await[0], "1.2500");
    assert_eq!(world.balance("system:reserve:CFA-EQ").await[0], "-1.2500");
    world.assert_books_balance().await;
}

// rows: R216 R333
#[tokio::test]
async fn r333_no_person_debits_or_holds_a_system_sub_account() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let legs = [("u1:CFA-RUB", "system:redemption:CFA-RUB", "40", RUB)];
    let collect = operation(OperationType::Redemption, "u1", "collect", &legs);
    let collected = world.client.clone().create_operation(collect).await;
    let collected = collected.unwrap().into_inner().operation.unwrap();
    let mut approved = world.as_caller(testkit::APPROVED);
    let text = "System sub-account cannot be frozen, closed, or debited by a person";
    for subaccount_id in [
        "system:reserve:CFA-RUB",
        "system:redemption:CFA-RUB",
        "system:fees:CFA-RUB",
    ] {
        let legs = [(subaccount_id, "u1:CFA-RUB", "1", RUB)];
        let paid = operation(OperationType::Payment, "u1", &fresh(), &legs);
        let paid = testkit::messages::approved(paid);
        refused(
            approved.create_operation(paid).await,
            Code::FailedPrecondition,
            "SYSTEM_SUB_ACCOUNT",
            text,
        );
        for token in ["sandbox.operator", "sandbox.operator+service"] {
            let hold = CreateHoldRequest {
                context: write(&fresh()),
                hold: Some(Hold {
                    subaccount_id: subaccount_id.to_owned(),
                    ..new_hold("u1", RUB, "1")
                }),
            };
            refused(
                world.as_caller(token).create_hold(hold).await,
                Code::FailedPrecondition,
                "SYSTEM_SUB_ACCOUNT",
                text,
            );
        }
    }
    let balance = world.balance("system:redemption:CFA-RUB").await;
    assert_eq!(balance, ["40.00", "0.00", "0.00", "40.00"]);
    // Two persons may credit one, and reverse what a service has posted.
    let legs = [("u1:CFA-RUB", "system:fees:CFA-RUB", "1", RUB)];
    let paid = operation(OperationType::Payment, "u1", &fresh(), &legs);
    let paid = testkit::messages::approved(paid);
    approved.create_operation(paid).await.unwrap();
    let undone = reversal("undone", &collected.operation_id);
    let undone = testkit::messages::approved(undone);
    approved.reverse_operation(undone).await.unwrap();
    assert_eq!(world.balance("u1:CFA-RUB").await[0], "99.00");
    world.assert_books_balance().await;
}
