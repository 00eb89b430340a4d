//! The audit chain and `verify`: a sound ledger passes, and the fault of each tampering is named.

use ledger::{Fault, LedgerConfig, StoreUrl, Verified, verify};
use proto::{audit::v1::AuditRecord, common::v1::OperationType, ledger::v1::*};
use sqlx::{AssertSqlSafe, Connection, Row, SqliteConnection, sqlite::SqliteConnectOptions};
use tempfile::TempDir;

use crate::{
    harness::*,
    rows::{Database, Rows},
};

/// A copy of a ledger's rows without the guards of the database.
struct Copy {
    folder: TempDir,
    database: Database,
}

impl Copy {
    fn config(&self) -> LedgerConfig {
        LedgerConfig {
            data_dir: self.folder.path().to_owned(),
            url: StoreUrl::new(self.database.url.clone()),
            ..LedgerConfig::default()
        }
    }
}

/// Copies the ledger and executes these statements on the copy.
async fn copy(world: &World, statements: &[&str]) -> Copy {
    let copy = Copy {
        folder: TempDir::new().unwrap(),
        database: Database::fresh().await,
    };
    if copy.database.url.is_empty() {
        copy_file(world, &copy.folder).await;
    } else {
        copy_schema(world, &copy.database).await;
    }
    let rows = Rows::open(&copy.database, copy.folder.path()).await;
    for sql in statements {
        let done = rows.tamper(sql).await.unwrap();
        assert!(done > 0, "{sql}");
    }
    rows.close().await;
    copy
}

async fn copy_file(world: &World, to: &TempDir) {
    let open = async |folder: &std::path::Path| {
        let options = SqliteConnectOptions::new().filename(folder.join("ledger.sqlite"));
        SqliteConnection::connect_with(&options).await.unwrap()
    };
    let mut db = open(&world.config().data_dir).await;
    sqlx::query("VACUUM INTO $1")
        .bind(to.path().join("ledger.sqlite").to_str().unwrap())
        .execute(&mut db)
        .await
        .unwrap();
    let mut db = open(to.path()).await;
    let guards = sqlx::query("SELECT name FROM sqlite_master WHERE type = 'trigger'");
    for guard in guards.fetch_all(&mut db).await.unwrap() {
        let drop = format!("DROP TRIGGER {}", guard.get::<String, _>(0));
        sqlx::query(AssertSqlSafe(drop))
            .execute(&mut db)
            .await
            .unwrap();
    }
    db.close().await.unwrap();
}

/// Copies rows without their constraints.
async fn copy_schema(world: &World, to: &Database) {
    let Rows::Postgres(pool) = world.rows().await else {
        unreachable!("copied from the same store")
    };
    let tables: Vec<String> =
        sqlx::query_scalar("SELECT tablename::text FROM pg_tables WHERE schemaname = $1")
            .bind(&world.database.schema)
            .fetch_all(&pool)
            .await
            .unwrap();
    for table in tables {
        let (from, to) = (&world.database.schema, &to.schema);
        let sql = format!("CREATE TABLE {to}.{table} AS TABLE {from}.{table}");
        sqlx::query(AssertSqlSafe(sql))
            .execute(&pool)
            .await
            .unwrap();
    }
    pool.close().await;
}

async fn tampered(world: &World, statements: &[&str]) -> Fault {
    let copy = copy(world, statements).await;
    let found = verify(&copy.config()).await.unwrap();
    found.fault.expect("a fault is found")
}

struct Story {
    world: World,
    /// Two payments of one batch, from one sub-account.
    twins: [OperationOutcome; 2],
    hold_id: String,
}

/// Blocks 1 and 2: deposits; 3: two payments; 4 and 5: parts of a hold; 6: a reversal.
async fn story() -> Story {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    world.fund("u2", RUB, "100").await;
    let pay = |key: &str, value: &str| {
        let legs = [
            ("u1:CFA-RUB", "shop:CFA-RUB", value, RUB),
            ("u1:CFA-RUB", "system:fees:CFA-RUB", "0.10", RUB),
        ];
        item(OperationType::Payment, "u1", key, &legs)
    };
    let batch = CreateOperationsRequest {
        context: write("twins"),
        operations: vec![pay("first", "10"), pay("second", "20")],
        ..Default::default()
    };
    let answer = world.client.clone().create_operations(batch).await;
    let twins = answer.unwrap().into_inner().outcomes.try_into().unwrap();
    let mut held = new_hold("u2", RUB, "50");
    held.destination_subaccount_id = Some("shop:CFA-RUB".to_owned());
    let hold = world.open_hold(&fresh(), held).await.unwrap();
    let hold_id = hold.into_inner().hold.unwrap().hold_id;
    for part in ["5", "6"] {
        let answer = world.consume(&fresh(), &hold_id, amount(RUB, part)).await;
        answer.unwrap();
    }
    let twin: &[OperationOutcome; 2] = &twins;
    let reverse = ReverseOperationRequest {
        context: write("reverse"),
        operation_id: twin[1].operation.as_ref().unwrap().operation_id.clone(),
        reason: "test".to_owned(),
    };
    world
        .client
        .clone()
        .reverse_operation(reverse)
        .await
        .unwrap();
    Story {
        world,
        twins,
        hold_id,
    }
}

fn operation_of(outcome: &OperationOutcome) -> String {
    outcome.operation.as_ref().unwrap().operation_id.clone()
}

// rows: R215
#[tokio::test]
async fn r215_a_sound_ledger_verifies_also_beside_a_running_node() {
    let story = story().await;
    let found = verify(&story.world.config()).await.unwrap();
    assert_eq!(found.fault, None);
    let Verified {
        blocks,
        operations,
        postings,
        holds,
        ..
    } = found;
    assert_eq!((blocks, operations, postings, holds), (6, 7, 10, 1));
    // The chain continues after a restart. A copy without a running ledger verifies too.
    let world = story.world.restart().await;
    world.fund("u3", RUB, "1").await;
    let after = verify(&world.config()).await.unwrap();
    assert_eq!((after.fault, after.blocks), (None, 7));
    assert_ne!(after.head, found.head);
    let still = copy(&world, &[]).await;
    assert_eq!(verify(&still.config()).await.unwrap().head, after.head);
}

// rows: R215
#[tokio::test]
async fn r215_a_changed_amount_and_a_missing_posting_are_named() {
    let story = story().await;
    let twin = &story.twins[1];
    for posting in &twin.postings {
        let id = &posting.posting_id;
        let change = format!("UPDATE postings SET amount = amount + 1 WHERE posting_id = '{id}'");
        let fault = tampered(&story.world, &[&change]).await;
        assert_eq!(
            (fault.block, fault.posting_id.as_ref()),
            (Some(3), Some(id)),
            "{fault}"
        );
        assert!(fault.differs.starts_with("previous balance"), "{fault}");
        let remove = format!("DELETE FROM postings WHERE posting_id = '{id}'");
        let fault = tampered(&story.world, &[&remove]).await;
        assert_eq!(fault.block, Some(3), "{fault}");
        let is_first = id == &twin.postings[0].posting_id;
        let expected = if is_first {
            (Some(operation_of(twin)), "posting of ordinal")
        } else {
            (None, "number of postings")
        };
        assert_eq!(
            (fault.operation_id.clone(), fault.differs.as_str()),
            expected,
            "{fault}"
        );
    }
    let own = operation_of(twin);
    let gone = format!("DELETE FROM postings WHERE operation_id = '{own}'");
    let fault = tampered(&story.world, &[&gone]).await;
    assert_eq!((fault.block, fault.operation_id), (Some(3), Some(own)));
}

// rows: R215
#[tokio::test]
async fn r215_changed_terms_and_changed_order_are_named() {
    let story = story().await;
    let [first, second] = [operation_of(&story.twins[0]), operation_of(&story.twins[1])];
    let terms = format!("UPDATE operations SET user_id = 'u9' WHERE operation_id = '{first}'");
    let fault = tampered(&story.world, &[&terms]).await;
    assert_eq!(fault.block, Some(3));
    assert!(fault.differs.starts_with("hash"), "{fault}");
    let [away, forward, back] = [(&first, -1), (&second, 0), (&first, 1)].map(|(id, place)| {
        format!("UPDATE operations SET place = {place} WHERE operation_id = '{id}'")
    });
    let fault = tampered(&story.world, &[&away, &forward, &back]).await;
    assert_eq!(
        (fault.block, fault.operation_id.as_ref()),
        (Some(3), Some(&second))
    );
    assert_eq!(fault.differs, "version", "{fault}");
    let ordinals = [(0, 9), (1, 0), (9, 1)].map(|(from, to)| {
        format!(
            "UPDATE postings SET ordinal = {to} WHERE operation_id = '{first}' AND ordinal = {from}"
        )
    });
    let fault = tampered(&story.world, &ordinals.each_ref().map(String::as_str)).await;
    assert_eq!((fault.block, fault.operation_id), (Some(3), Some(first)));
}

// rows: R215
#[tokio::test]
async fn r215_a_removed_or_rewritten_block_is_named() {
    let story = story().await;
    let at = async |sql: &str| tampered(&story.world, &[sql]).await;
    let fault = at("DELETE FROM audit_blocks WHERE block = 2").await;
    assert_eq!((fault.block, fault.differs.as_str()), (Some(2), "block"));
    let fault = at("DELETE FROM audit_blocks WHERE block >= 0").await;
    assert_eq!((fault.block, fault.differs.as_str()), (Some(0), "block"));
    // Without the last block its operation is outside the chain.
    let fault = at("DELETE FROM audit_blocks WHERE block = 6").await;
    assert_eq!(
        (fault.block, fault.differs.as_str()),
        (Some(6), "sealed block")
    );
    let fault = at("UPDATE audit_blocks SET hash = zeroblob(32) WHERE block = 4").await;
    assert_eq!(fault.block, Some(4));
    assert!(fault.differs.starts_with("hash"), "{fault}");
    let fault = at("UPDATE audit_blocks SET previous_hash = zeroblob(32) WHERE block = 4").await;
    assert_eq!(
        (fault.block, fault.differs.as_str()),
        (Some(4), "previous hash")
    );
    let fault = at("UPDATE audit_blocks SET sealed_at_us = sealed_at_us + 1 WHERE block = 5").await;
    assert_eq!(fault.block, Some(5));
    let fault = at("UPDATE audit_blocks SET operations = 3 WHERE block = 3").await;
    assert_eq!(
        (fault.block, fault.differs.as_str()),
        (Some(3), "number of operations")
    );
    let fault = at("UPDATE operations SET block = NULL WHERE block = 5").await;
    assert_eq!(
        (fault.block, fault.differs.as_str()),
        (Some(5), "number of operations")
    );
}

// rows: R215 R237
#[tokio::test]
async fn r215_changed_balances_and_holds_are_named() {
    let story = story().await;
    let of = async |sql: &str| tampered(&story.world, &[sql]).await;
    for column in ["balance", "held", "unsettled", "version"] {
        let sql = format!(
            "UPDATE sub_accounts SET {column} = {column} + 1 WHERE subaccount_id = 'u2:CFA-RUB'"
        );
        let fault = of(&sql).await;
        assert_eq!(
            fault.subaccount_id.as_deref(),
            Some("u2:CFA-RUB"),
            "{fault}"
        );
        assert_eq!(fault.differs, column);
    }
    let fault = of("DELETE FROM sub_accounts WHERE subaccount_id = 'u2:CFA-RUB'").await;
    assert_eq!(
        (fault.differs.as_str(), fault.expected.as_str()),
        ("referenced row", "u2:CFA-RUB")
    );
    let hold = |change: &str| {
        format!(
            "UPDATE holds SET {change} WHERE hold_id = '{}'",
            story.hold_id
        )
    };
    for (change, differs) in [
        (
            "consumed = consumed - 1, released = released + 1",
            "consumed (sum of the postings that name the hold)",
        ),
        (
            "amount = amount + 1",
            "remaining + split off + consumed + released",
        ),
        ("user_id = 'u1'", "terms of the hold"),
        ("parent_hold_id = hold_id", "terms of the hold"),
    ] {
        let fault = of(&hold(change)).await;
        assert_eq!(fault.hold_id.as_ref(), Some(&story.hold_id), "{fault}");
        assert_eq!(fault.differs, differs);
    }
    // A changed balance that is consistent within its posting breaks the chain of its sub-account.
    let fault = of(
        "UPDATE postings SET credit_balance_after = credit_balance_after + 100 \
         WHERE credit_subaccount_id = 'u1:CFA-RUB' AND credit_version = 1",
    )
    .await;
    assert_eq!(
        (fault.block, fault.subaccount_id.as_deref()),
        (Some(1), Some("u1:CFA-RUB"))
    );
}

/// The chain seals what never changes. What changes is compared within the rows.
// rows: R215
#[tokio::test]
async fn r215_a_changed_state_of_an_operation_is_named() {
    let story = story().await;
    let [first, second] = [operation_of(&story.twins[0]), operation_of(&story.twins[1])];
    let mut client = story.world.client.clone();
    let end = FinalizeOperationRequest {
        context: write("end"),
        operation_id: first.clone(),
        ..Default::default()
    };
    client.finalize_operation(end).await.unwrap();
    assert_eq!(verify(&story.world.config()).await.unwrap().fault, None);
    // The flag of the chain step is sealed.
    let flag = format!("UPDATE operations SET awaits_chain = TRUE WHERE operation_id = '{first}'");
    assert_eq!(tampered(&story.world, &[&flag]).await.block, Some(3));
    // Either side of a reversal may be named.
    let reversal = "reversed and reversing operation";
    for (of, change, differs) in [
        (&first, "status = 10", "status and time of finality"),
        (&first, "status = 5", "status and time of finality"),
        (
            &first,
            "finalized_at_us = 1",
            "time of finality before the creation",
        ),
        (&first, "status = 8", "status that no operation has"),
        (&second, "status = 10", "status and reversing operation"),
        (&second, "status = 10, reversed_by = NULL", reversal),
        (&second, "reversed_by = operation_id", reversal),
    ] {
        let sql = format!("UPDATE operations SET {change} WHERE operation_id = '{of}'");
        let fault = tampered(&story.world, &[&sql]).await;
        assert_eq!(fault.differs, differs, "{fault}");
        if differs != reversal {
            assert_eq!(fault.operation_id.as_ref(), Some(of), "{fault}");
        }
    }
}

/// Every audit record, newest first, in pages of two.
async fn records(world: &World, actor: &str, object_id: &str) -> Vec<AuditRecord> {
    let mut auditor = world.as_caller("sandbox.auditor");
    let (mut found, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = ListAuditRecordsRequest {
            actor: actor.to_owned(),
            object_id: object_id.to_owned(),
            pagination: Some(proto::common::v1::PaginationRequest {
                page_size: 2,
                page_token,
            }),
            ..Default::default()
        };
        let page = auditor.list_audit_records(request).await.unwrap();
        let page = page.into_inner();
        found.extend(page.records);
        page_token = page.pagination.unwrap().next_page_token;
        if page_token.is_empty() {
            return found;
        }
    }
}

/// What persons do, beside what services do, which has no record.
async fn staff_acts(world: &World) -> String {
    let mut compliance = world.as_caller("sandbox.compliance");
    let freeze = |key: &str, status: SubAccountStatus| SetSubAccountStatusRequest {
        context: write(key),
        subaccount_id: "u1:CFA-RUB".to_owned(),
        status: status.into(),
        reason: "letter 7".to_owned(),
    };
    let frozen = freeze("freeze", SubAccountStatus::Frozen);
    for _ in 0..2 {
        // The repeat is answered from the store.
        let done = compliance.set_sub_account_status(frozen.clone()).await;
        done.unwrap();
    }
    let mut service = world.client.clone();
    let thaw = freeze("thaw", SubAccountStatus::Active);
    service.set_sub_account_status(thaw).await.unwrap();
    let limit = SetVelocityLimitRequest {
        context: write("limit"),
        limit: Some(VelocityLimit {
            limit_id: "daily".to_owned(),
            instrument_id: RUB.to_owned(),
            side: PostingSide::Debit.into(),
            window_seconds: 60,
            amount: amount(RUB, "900").unwrap().amount,
            ..Default::default()
        }),
        reason: "test".to_owned(),
    };
    compliance.set_velocity_limit(limit).await.unwrap();
    let mut operator = world.as_caller("sandbox.operator");
    let legs = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
    let paid = operation(OperationType::Payment, "u1", "by-hand", &legs);
    // One person moves no money (D32).
    let alone = operator.create_operation(paid.clone()).await.unwrap_err();
    assert_eq!(alone.message(), "This call needs an approval");
    let mut approved = world.as_caller(testkit::APPROVED);
    let paid = testkit::messages::approved(paid);
    let paid = approved.create_operation(paid).await.unwrap();
    let paid = paid.into_inner().operation.unwrap().operation_id;
    let poor = [("u1:CFA-RUB", "u2:CFA-RUB", "100000", RUB)];
    let poor = operation(OperationType::Payment, "u1", "poor", &poor);
    let poor = testkit::messages::approved(poor);
    approved.create_operation(poor).await.unwrap_err();
    let end = FinalizeOperationRequest {
        context: write("end"),
        operation_id: paid.clone(),
        ..Default::default()
    };
    operator.finalize_operation(end).await.unwrap();
    paid
}

// rows: R215 R339
#[tokio::test]
async fn r215_what_persons_do_is_recorded_once_in_a_chain_and_listed() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    let paid = staff_acts(&world).await;
    let all = records(&world, "", "").await;
    let seen: Vec<_> = all
        .iter()
        .rev()
        .map(|one| {
            let change = (one.before.as_str(), one.after.as_str());
            (one.action.as_str(), one.object_id.as_str(), change)
        })
        .collect();
    let limit = "every user, any account, debits at most 900.00 CFA-RUB in 60 s, all types";
    assert_eq!(
        seen,
        [
            ("subaccount.status", "u1:CFA-RUB", ("ACTIVE", "FROZEN")),
            ("subaccount.status", "u1:CFA-RUB", ("FROZEN", "ACTIVE")),
            ("limit.set", "daily", ("", limit)),
            ("operation.created", paid.as_str(), ("", "PAYMENT SETTLED")),
            (
                "operation.finalized",
                paid.as_str(),
                ("SETTLED", "FINALIZED")
            ),
        ]
    );
    let first = all.last().unwrap();
    assert_eq!((first.sequence, first.reason.as_str()), (1, "letter 7"));
    assert_eq!(first.previous_hash, "0".repeat(64));
    assert!(!first.actor.is_empty() && !first.request_id.is_empty());
    assert_eq!(first.correlation_id, "corr-freeze");
    assert!(
        all.windows(2)
            .all(|two| two[0].previous_hash == two[1].hash)
    );
    assert_eq!(records(&world, "", &paid).await, all[..2]);
    let of_compliance = records(&world, &first.actor, "").await;
    let sequences: Vec<_> = of_compliance.iter().map(|one| one.sequence).collect();
    assert_eq!(sequences, [3, 1]);
    // The chain continues after a restart.
    let world = world.restart().await;
    let verified = verify(&world.config()).await.unwrap();
    assert_eq!((verified.fault, verified.audit_records), (None, 5));
    staff_acts_after_restart(&world).await;
}

// rows: R215 R333
#[tokio::test]
async fn d34_an_approved_reversal_is_recorded_with_both_persons_and_one_of_a_service_is_not() {
    let world = World::new().await;
    let reverse = |key: &str, id: &str| ReverseOperationRequest {
        context: write(key),
        operation_id: id.to_owned(),
        reason: "paid twice".to_owned(),
    };
    let by_service = world.fund("u1", RUB, "100").await.operation_id;
    let undone = reverse("r1", &by_service);
    world
        .client
        .clone()
        .reverse_operation(undone)
        .await
        .unwrap();
    let by_two = world.fund("u1", RUB, "50").await.operation_id;
    let mut approved = world.as_caller(testkit::APPROVED);
    for _ in 0..2 {
        let undone = testkit::messages::approved(reverse("r2", &by_two));
        approved.reverse_operation(undone).await.unwrap();
    }
    let all = records(&world, "", "").await;
    assert_eq!(all.len(), 1, "{all:?}");
    assert_eq!(all[0].actor, testkit::messages::APPROVED_SUBJECT);
    assert_eq!(all[0].action, "operation.reversed");
    assert_eq!(
        (&all[0].object_id, all[0].reason.as_str()),
        (&by_two, "paid twice")
    );
    assert_eq!(verify(&world.config()).await.unwrap().fault, None);
}

async fn staff_acts_after_restart(world: &World) {
    let mut approved = world.as_caller(testkit::APPROVED);
    let legs = [("u1:CFA-RUB", "u2:CFA-RUB", "1", RUB)];
    let paid = operation(OperationType::Payment, "u1", "later", &legs);
    let paid = testkit::messages::approved(paid);
    approved.create_operation(paid).await.unwrap();
    let all = records(world, "", "").await;
    assert_eq!(all[0].sequence, 6);
    assert_eq!(all[0].previous_hash, all[1].hash);
    assert_eq!(verify(&world.config()).await.unwrap().fault, None);
}

// rows: R215
#[tokio::test]
async fn r215_a_changed_audit_record_is_named() {
    let world = World::new().await;
    world.fund("u1", RUB, "100").await;
    staff_acts(&world).await;
    for column in [
        "actor",
        "action",
        "object_id",
        "before",
        "after",
        "reason",
        "request_id",
        "correlation_id",
    ] {
        let sql = format!("UPDATE audit_records SET {column} = 'x' WHERE sequence = 3");
        let fault = tampered(&world, &[&sql]).await;
        assert_eq!(fault.audit_record, Some(3), "{fault}");
        assert!(fault.differs.starts_with("hash"), "{fault}");
    }
    for (sql, at, differs) in [
        (
            "UPDATE audit_records SET at_us = at_us + 1 WHERE sequence = 2",
            2,
            "hash (the record was changed)",
        ),
        (
            "UPDATE audit_records SET hash = zeroblob(32) WHERE sequence = 2",
            2,
            "hash (the record was changed)",
        ),
        (
            "UPDATE audit_records SET previous_hash = zeroblob(32) WHERE sequence = 2",
            2,
            "previous hash",
        ),
        (
            "DELETE FROM audit_records WHERE sequence = 4",
            4,
            "audit record",
        ),
    ] {
        let fault = tampered(&world, &[sql]).await;
        assert_eq!(
            (fault.audit_record, fault.differs.as_str()),
            (Some(at), differs),
            "{fault}"
        );
    }
    let rows = world.rows().await;
    for (sql, text) in [
        (
            "UPDATE audit_records SET actor = 'x'",
            "audit records never change",
        ),
        (
            "DELETE FROM audit_records",
            "audit records are never deleted",
        ),
        (
            "INSERT INTO audit_records VALUES (9, 0, '', '', '', '', '', '', '', '', zeroblob(32), zeroblob(32))",
            "an audit record follows the last one",
        ),
    ] {
        let error = rows.tamper(sql).await.unwrap_err();
        assert!(error.to_string().contains(text), "{sql}: {error}");
    }
    rows.close().await;
}

/// SQLite only: there statements follow links between postings, and operations of users have their
/// own index.
// rows: R215 R194
#[tokio::test]
async fn r215_a_wrong_link_and_a_missing_list_entry_are_named() {
    let story = story().await;
    if !story.world.database.url.is_empty() {
        return;
    }
    let of = async |sql: &str| tampered(&story.world, &[sql]).await;
    let second = &story.twins[1].postings[0];
    for side in ["debit", "credit"] {
        for link in ["0", "1", "posting_no"] {
            let fault = of(&format!(
                "UPDATE postings SET {side}_previous = {link} WHERE posting_id = '{}'",
                second.posting_id
            ))
            .await;
            assert_eq!(fault.differs, "linked posting", "{fault}");
            assert_eq!(fault.posting_id.as_ref(), Some(&second.posting_id));
            let subaccount_id = match side {
                "debit" => &second.debit_subaccount_id,
                _ => &second.credit_subaccount_id,
            };
            assert_eq!(fault.subaccount_id.as_ref(), Some(subaccount_id));
        }
    }
    for last in ["0", "1", "99"] {
        let fault = of(&format!(
            "UPDATE sub_accounts SET last_posting = {last} WHERE subaccount_id = 'u2:CFA-RUB'"
        ))
        .await;
        assert_eq!(fault.differs, "linked posting", "{fault}");
        assert_eq!(fault.subaccount_id.as_deref(), Some("u2:CFA-RUB"));
    }
    let own = operation_of(&story.twins[0]);
    let listed = format!(
        "INSERT INTO operations_of_users SELECT user_id, created_at_us, operation_id FROM operations \
         WHERE operation_id = '{own}'"
    );
    let strange = format!(
        "INSERT INTO operations_of_users SELECT 'u2', created_at_us, operation_id FROM operations \
         WHERE operation_id = '{own}'"
    );
    for sql in [
        "UPDATE operations_listed SET through_block = 3",
        "DELETE FROM operations_listed",
        &listed,
        &strange,
    ] {
        let fault = of(sql).await;
        assert_eq!(fault.differs, "list of operations", "{fault}");
        assert!(fault.operation_id.is_some(), "{fault}");
    }
    // A list omits operations of other users. A statement with a wrong link fails instead of being
    // too short.
    let copy = copy(
        &story.world,
        &[
            &strange,
            "UPDATE postings SET debit_previous = 0 WHERE debit_previous <> 0",
        ],
    )
    .await;
    let world = World::in_folder(copy.folder).await;
    let of_u2 = ListOperationsRequest {
        user_id: "u2".to_owned(),
        ..Default::default()
    };
    let answer = world.client.clone().list_operations(of_u2).await.unwrap();
    let found = answer.into_inner().operations;
    assert!(found.iter().all(|operation| operation.user_id == "u2"));
    let statement = GetStatementRequest {
        subaccount_id: "u1:CFA-RUB".to_owned(),
        ..Default::default()
    };
    let answer = world.client.clone().get_statement(statement).await;
    assert_eq!(answer.unwrap_err().code(), tonic::Code::Internal);
}

// rows: R215
#[tokio::test]
async fn r215_the_database_refuses_to_change_the_chain() {
    let story = story().await;
    let rows = story.world.rows().await;
    for (sql, text) in [
        (
            "UPDATE audit_blocks SET operations = 9",
            "sealed blocks never change",
        ),
        (
            "DELETE FROM audit_blocks",
            "sealed blocks are never deleted",
        ),
        (
            "UPDATE operations SET block = 1",
            "a sealed operation stays in its block",
        ),
        (
            "UPDATE operations SET place = 7",
            "a sealed operation stays in its block",
        ),
        (
            "INSERT INTO audit_blocks VALUES (8, zeroblob(32), zeroblob(32), 0, 0, 9000000000000000)",
            "a sealed block follows the last one",
        ),
        (
            "INSERT INTO audit_blocks VALUES (7, zeroblob(32), zeroblob(32), 0, 0, 9000000000000000)",
            "a sealed block follows the last one",
        ),
    ] {
        let error = rows.tamper(sql).await.unwrap_err();
        assert!(error.to_string().contains(text), "{sql}: {error}");
    }
}

// rows: R215
#[tokio::test]
async fn r215_a_ledger_without_its_chain_does_not_open() {
    let story = story().await;
    let unsealed = [
        "UPDATE operations SET block = NULL, place = NULL",
        "DELETE FROM audit_blocks WHERE block > 0",
    ];
    let copy = copy(&story.world, &unsealed).await;
    assert!(verify(&copy.config()).await.unwrap().fault.is_some());
    let log = events::Embedded::open(copy.folder.path().join("other-log"));
    let unknown = rpc::Channel::local(&rpc::LocalSlot::new(), "sandbox.service");
    let deps = ledger::LedgerDeps::new(std::sync::Arc::new(log.await.unwrap()), unknown);
    let config = copy.config();
    let stop = tokio_util::sync::CancellationToken::new();
    let error = ledger::start(config, deps, stop)
        .await
        .err()
        .expect("refused");
    assert!(error.to_string().contains("chain of blocks"), "{error}");
}

// rows: R215
#[tokio::test]
async fn r215_verify_fails_without_a_ledger() {
    let nothing = Copy {
        folder: TempDir::new().unwrap(),
        database: Database::fresh().await,
    };
    let error = async || verify(&nothing.config()).await.unwrap_err().to_string();
    if !nothing.database.url.is_empty() {
        assert!(error().await.contains("does not exist"));
        return;
    }
    let folder = nothing.folder.path();
    assert_eq!(
        error().await,
        format!("there is no ledger in {}", folder.display())
    );
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), 0);
    std::fs::write(folder.join("ledger.sqlite"), "no database at all").unwrap();
    let error = error().await;
    assert!(error.contains("not a database"), "{error}");
}

// rows: R215
#[tokio::test]
async fn r215_the_head_of_the_chains_is_that_of_the_last_block_and_record() {
    let Story { world, .. } = story().await;
    let mut auditor = world.as_caller("sandbox.auditor");
    let head = auditor.get_chain_head(GetChainHeadRequest::default());
    let head = head.await.unwrap().into_inner();
    let verified = verify(&world.config()).await.unwrap();
    assert_eq!((head.block, &head.hash), (verified.blocks, &verified.head));
    assert_eq!(head.record, verified.audit_records);
    let mut heads = ledger::Heads::open(&world.config()).await.unwrap();
    assert_eq!(heads.block_hash(head.block).await.unwrap(), Some(head.hash));
    assert_eq!(heads.block_hash(head.block + 1).await.unwrap(), None);
    if head.record > 0 {
        let hash = heads.record_hash(head.record).await.unwrap();
        assert_eq!(hash, Some(head.record_hash));
    }
    heads.close().await.unwrap();
}
