//! Audit records of what callers set in the market (D34).

use std::path::Path;

use proto::audit::v1::AuditRecord;
use proto::common::v1::PaginationRequest;
use proto::market::v1::*;
use sqlx::{Connection, SqliteConnection, sqlite::SqliteConnectOptions};
use tonic::Code;
use types::{Id128, derived};

use crate::world::*;

/// Records, newest first, read in pages of two.
async fn records(world: &World, actor: &str, object_id: &str) -> Vec<AuditRecord> {
    let mut auditor = world.as_caller("sandbox.auditor");
    let (mut records, mut page_token) = (Vec::new(), String::new());
    loop {
        let ask = ListAuditRecordsRequest {
            context: None,
            actor: actor.into(),
            object_id: object_id.into(),
            pagination: Some(PaginationRequest {
                page_size: 2,
                page_token,
            }),
        };
        let page = auditor.list_audit_records(ask).await.unwrap().into_inner();
        assert!(page.records.len() <= 2);
        records.extend(page.records);
        page_token = page.pagination.unwrap().next_page_token;
        if page_token.is_empty() {
            return records;
        }
    }
}

async fn store(folder: &Path) -> SqliteConnection {
    let file = folder.join("gateway/acts.db");
    let options = SqliteConnectOptions::new().filename(file);
    SqliteConnection::connect_with(&options).await.unwrap()
}

/// Stores an act as a crash before its record leaves it.
async fn leave(db: &mut SqliteConnection, key_hash: Id128, at_us: i64, reason: &str) {
    sqlx::query(
        "INSERT INTO acts (key_hash, at_us, actor, action, object_id, before, after, reason, \
         request_id, correlation_id) \
         VALUES ($1, $2, 'vera', 'orders.cancelled', 'ann', '', 'CANCELLED', $3, '', '')",
    )
    .bind(key_hash.to_string())
    .bind(at_us)
    .bind(reason)
    .execute(db)
    .await
    .unwrap();
}

/// Each act, made twice with one key.
async fn act_twice(world: &World) {
    let mut supervisor = world.as_caller("sandbox.market-supervisor.vera");
    for _ in 0..2 {
        let halt = SetTradingPhaseRequest {
            context: context("phase"),
            instrument_id: BOND.into(),
            phase: TradingPhase::Halt.into(),
            reason: "a rumour".into(),
        };
        supervisor.set_trading_phase(halt).await.unwrap();
        let engage = SetKillSwitchRequest {
            context: context("kill"),
            user_id: "ann".into(),
            engaged: true,
            reason: "a drill".into(),
        };
        supervisor.set_kill_switch(engage).await.unwrap();
        let cancel = MassCancelRequest {
            context: context("cancel"),
            user_id: "ann".into(),
            ..Default::default()
        };
        supervisor.mass_cancel(cancel).await.unwrap();
        let group = SetMemberGroupRequest {
            context: context("group"),
            user_id: "ann".into(),
            group: 7,
            reason: "a firm".into(),
        };
        world.approved().set_member_group(group).await.unwrap();
        let bounds = SetMemberBoundsRequest {
            context: context("bounds"),
            group: 7,
            reason: "as agreed".into(),
            ..Default::default()
        };
        world.approved().set_member_bounds(bounds).await.unwrap();
    }
}

// rows: R215
#[tokio::test(flavor = "multi_thread")]
async fn d34_each_act_leaves_one_record_and_an_altered_one_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.place(buy("ann", "1", "1")).await.unwrap();
    act_twice(&world).await;
    // A cancel of the own orders is no act on others, and a refused call none at all.
    let own = MassCancelRequest {
        context: context("own"),
        ..Default::default()
    };
    world.trader("ann").mass_cancel(own).await.unwrap();
    let refused = SetTradingPhaseRequest {
        context: context("refused"),
        instrument_id: BOND.into(),
        phase: TradingPhase::Open.into(),
        reason: "alone".into(),
    };
    let mut supervisor = world.as_caller("sandbox.market-supervisor.vera");
    let alone = supervisor.set_trading_phase(refused).await.unwrap_err();
    assert_eq!(alone.code(), Code::FailedPrecondition);

    let all = records(&world, "", "").await;
    let mut seen: Vec<_> = all
        .iter()
        .map(|record| (&*record.action, &*record.object_id, &*record.reason))
        .collect();
    seen.reverse();
    assert_eq!(
        seen,
        [
            ("phase.set", BOND, "a rumour"),
            ("kill_switch.set", "ann", "a drill"),
            ("orders.cancelled", "ann", ""),
            ("group.set", "ann", "a firm"),
            ("bounds.set", "group 7", "as agreed"),
        ]
    );
    for pair in all.windows(2) {
        assert_eq!(pair[0].previous_hash, pair[1].hash);
    }
    let phase = &all[4];
    assert_eq!((&*phase.before, &*phase.after), ("OPEN", "HALT"));
    assert_eq!(phase.actor, "vera");
    assert_eq!(records(&world, "vera", "").await, all[2..]);
    assert_eq!(records(&world, "vera", "ann").await, all[2..4]);
    let mut trader = world.trader("ann");
    let foreign = trader.list_audit_records(ListAuditRecordsRequest::default());
    assert_eq!(foreign.await.unwrap_err().code(), Code::PermissionDenied);

    // Repeats add nothing after a restart either.
    let world = world.restart(Settings::default()).await;
    act_twice(&world).await;
    assert_eq!(records(&world, "", "").await, all);
    world.stop().await;
    let config = gateway::GatewayConfig {
        data_dir: folder.path().join("gateway"),
        ..Default::default()
    };
    let verified = gateway::verify_audit(&config).await.unwrap();
    assert_eq!((verified.records, verified.broken), (5, None));
    assert_eq!(verified.head, all[0].hash);
    let mut store = store(folder.path()).await;
    for statement in [
        "DROP TRIGGER audit_records_never_change",
        "UPDATE audit_records SET actor = 'x' WHERE sequence = 2",
    ] {
        sqlx::query(statement).execute(&mut store).await.unwrap();
    }
    store.close().await.unwrap();
    let verified = gateway::verify_audit(&config).await.unwrap();
    assert_eq!(verified.broken.map(|broken| broken.sequence), Some(2));
}

fn is_repeat<T>(answer: &tonic::Response<T>) -> bool {
    answer.metadata().contains_key("idempotent-replayed")
}

/// A repeat that asks for something else was answered with that, although it does nothing.
// rows: R341
#[tokio::test(flavor = "multi_thread")]
async fn d50_a_used_key_with_another_setting_gets_what_the_first_call_set() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.place(buy("ann", "1", "1")).await.unwrap();
    let mut supervisor = world.as_caller("sandbox.market-supervisor.vera");
    for (phase, is_again) in [(TradingPhase::Halt, false), (TradingPhase::Open, true)] {
        let request = SetTradingPhaseRequest {
            context: context("k1"),
            instrument_id: BOND.into(),
            phase: phase.into(),
            reason: "a rumour".into(),
        };
        let answer = supervisor.set_trading_phase(request).await.unwrap();
        assert_eq!(is_repeat(&answer), is_again);
        assert_eq!(answer.get_ref().phase(), TradingPhase::Halt);
        assert_eq!(answer.get_ref().instrument_id, BOND);
    }
    let mut approved = world.approved();
    for (user_id, engaged) in [("ann", true), ("", false)] {
        let request = SetKillSwitchRequest {
            context: context("k1"),
            user_id: user_id.into(),
            engaged,
            reason: "a drill".into(),
        };
        let answer = approved.set_kill_switch(request).await.unwrap();
        assert_eq!(is_repeat(&answer), !engaged);
        let expected = SetKillSwitchResponse {
            user_id: "ann".into(),
            engaged: true,
            cancelled: 1,
        };
        assert_eq!(answer.into_inner(), expected);
    }
    assert_eq!(world.status().await.killed_user_ids, ["ann"]);
    for (group, is_again) in [(7, false), (8, true)] {
        let request = SetMemberGroupRequest {
            context: context("k1"),
            user_id: "ann".into(),
            group,
            reason: "a firm".into(),
        };
        let answer = approved.set_member_group(request).await.unwrap();
        assert_eq!(is_repeat(&answer), is_again);
        assert_eq!(answer.get_ref().group, 7);
    }
    let bounds = OrderBounds {
        open_orders_per_user: 10,
        open_orders_per_instrument: 5,
        lots_per_order: 100,
        value_per_order: decimal("100.50"),
        ..OrderBounds::default()
    };
    let mut first = None;
    for bounds in [Some(bounds), None] {
        let request = SetMemberBoundsRequest {
            context: context("k1"),
            group: 7,
            bounds,
            reason: "as agreed".into(),
            ..Default::default()
        };
        let answer = approved.set_member_bounds(request).await.unwrap();
        assert_eq!(is_repeat(&answer), first.is_some());
        let set = answer.into_inner().bounds.expect("bounds");
        assert_eq!(set.lots_per_order, 100);
        assert_eq!(*first.get_or_insert(set.clone()), set);
    }
    world.stop().await;
}

/// After a crash between a command and its record: the journal decides.
#[tokio::test(flavor = "multi_thread")]
async fn d34_an_interrupted_act_is_recorded_if_the_journal_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.sweep_interval_ms = 20;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "1000", "0").await;
    // No record is written for it, but its key is in the journal.
    let own = MassCancelRequest {
        context: context("done"),
        ..Default::default()
    };
    world.trader("ann").mass_cancel(own).await.unwrap();
    let mut db = store(folder.path()).await;
    for key in ["done", "never"] {
        let key_hash = derived::key_hash("MassCancel", "ann", key);
        leave(&mut db, key_hash, 1, key).await;
    }
    until_true("both are resolved", async || {
        let sql = "SELECT COUNT(*) FROM acts WHERE recorded = 0";
        let pending: i64 = sqlx::query_scalar(sql).fetch_one(&mut db).await.unwrap();
        pending == 0
    })
    .await;
    let kept: i64 = sqlx::query_scalar("SELECT COUNT(*) FROM acts")
        .fetch_one(&mut db)
        .await
        .unwrap();
    assert_eq!(kept, 1);
    db.close().await.unwrap();
    let found = records(&world, "", "").await;
    let reasons: Vec<_> = found.iter().map(|record| &*record.reason).collect();
    assert_eq!(reasons, ["done"]);
    world.stop().await;
}

/// A stored act that never reached the journal is not recorded in place of the act that did.
#[tokio::test(flavor = "multi_thread")]
async fn d34_a_record_is_of_the_call_that_acted() {
    let folder = tempfile::tempdir().unwrap();
    let world = World::new(folder.path()).await;
    let mut db = store(folder.path()).await;
    let key_hash = derived::key_hash("SetTradingPhase", "vera", "phase");
    leave(&mut db, key_hash, i64::MAX, "never made").await;
    db.close().await.unwrap();
    let mut supervisor = world.as_caller("sandbox.market-supervisor.vera");
    for _ in 0..2 {
        let halt = SetTradingPhaseRequest {
            context: context("phase"),
            instrument_id: BOND.into(),
            phase: TradingPhase::Halt.into(),
            reason: "a rumour".into(),
        };
        supervisor.set_trading_phase(halt).await.unwrap();
    }
    let found = records(&world, "", "").await;
    let seen: Vec<_> = found
        .iter()
        .map(|record| (&*record.action, &*record.reason))
        .collect();
    assert_eq!(seen, [("phase.set", "a rumour")]);
    world.stop().await;
}

/// A call that reduces risk does not wait for the store; its record follows.
#[tokio::test(flavor = "multi_thread")]
async fn d34_a_locked_store_delays_no_kill_switch_and_no_halt_and_refuses_other_acts() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.read_wait_ms = 1_000;
    settings.gateway.sweep_interval_ms = 20;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "1000", "0").await;
    let mut lock = store(folder.path()).await;
    sqlx::query("BEGIN IMMEDIATE")
        .execute(&mut lock)
        .await
        .unwrap();
    let group = SetMemberGroupRequest {
        context: context("group"),
        user_id: "ann".into(),
        group: 7,
        reason: "a firm".into(),
    };
    let waits = world.approved().set_member_group(group).await;
    assert_eq!(waits.unwrap_err().code(), Code::Unavailable);
    let engage = SetKillSwitchRequest {
        context: context("kill"),
        user_id: "ann".into(),
        engaged: true,
        reason: "a drill".into(),
    };
    let mut operator = world.operator();
    operator.set_kill_switch(engage).await.unwrap();
    assert_eq!(world.status().await.killed_user_ids, ["ann"]);
    let halt = SetTradingPhaseRequest {
        context: context("halt"),
        instrument_id: BOND.into(),
        phase: TradingPhase::Halt.into(),
        reason: "a drill".into(),
    };
    operator.set_trading_phase(halt).await.unwrap();
    sqlx::query("ROLLBACK").execute(&mut lock).await.unwrap();
    lock.close().await.unwrap();
    until_true("the records are written", async || {
        let records = records(&world, "", "").await;
        records
            .iter()
            .map(|record| &*record.action)
            .eq(["phase.set", "kill_switch.set"])
    })
    .await;
    world.stop().await;
}
