//! Only the statements in `ALLOWED` scan a table of the market's store. The cost of all others does
//! not grow with the rows.
//!
//! The test places, cancels and lists orders, trades, and updates positions. Then it explains every
//! statement that ran, on the same database.
//!
//! A separate test binary, because the record of statements is process-wide.

#[path = "../boundary/doubles.rs"]
#[allow(dead_code)]
mod doubles;
#[path = "../boundary/world.rs"]
#[allow(dead_code)]
mod world;

use prost::Message;
use proto::cfa::v1::CfaIssuedEvent;
use proto::market::v1::*;
use testkit::plans::{self, Allowed};

use crate::world::*;

const ALLOWED: [Allowed; 2] = [
    Allowed {
        statement: "WHERE o.sequence < ? AND o.status =",
        reason: "ListOrders by status without a user: operators only, rare",
    },
    Allowed {
        statement: "FROM _sqlx_migrations",
        reason: "one row per migration, read at the start",
    },
];

async fn trade(world: &mut World) {
    world.user("ann", "1000", "100").await;
    world.user("bob", "10000", "0").await;
    let resting = world.place(sell("ann", "100", "10")).await.unwrap();
    let with_id = Order {
        client_order_id: "mine".into(),
        ..buy("bob", "100", "4")
    };
    // The second call replays the stored answer.
    for _ in 0..2 {
        let placed = world.place_with("bob", "once", with_id.clone()).await;
        assert_eq!(placed.unwrap().status(), OrderStatus::Filled);
    }
    world.cancel("ann", &resting.order_id).await.unwrap();
    world.settled().await;
}

async fn lists(world: &World) {
    let mut operator = world.operator();
    for user_id in ["", "bob"] {
        for instrument_id in ["", BOND] {
            for status in [OrderStatus::Unspecified, OrderStatus::Filled] {
                let request = ListOrdersRequest {
                    user_id: user_id.into(),
                    instrument_id: instrument_id.into(),
                    status: status.into(),
                    ..Default::default()
                };
                let listed = operator.list_orders(request).await.unwrap();
                assert!(!listed.into_inner().orders.is_empty());
            }
            let request = ListTradesRequest {
                user_id: user_id.into(),
                instrument_id: instrument_id.into(),
                ..Default::default()
            };
            let listed = operator.list_trades(request).await.unwrap();
            let trades = listed.into_inner().trades;
            assert_eq!(trades.len(), 1);
            let request = GetTradeRequest {
                context: None,
                trade_id: trades[0].trade_id.clone(),
            };
            operator.get_trade(request).await.unwrap();
        }
    }
}

/// Publishes a CfaIssuedEvent as the CFA service does, and waits until the market has stored the
/// position.
async fn issue(world: &World) {
    let issued = CfaIssuedEvent {
        context: context("i"),
        operation_id: unique(),
        instrument_id: BOND.into(),
        holder_id: "ann".into(),
        amount: Some(proto::common::v1::MonetaryAmount {
            currency_code: BOND.into(),
            amount: decimal("10"),
        }),
        ..Default::default()
    };
    let name = "dfa.cfa.v1.CfaIssuedEvent";
    publish(
        world,
        events::topics::CFA,
        "k",
        name,
        issued.encode_to_vec(),
    )
    .await;
    until_true("the position is stored", async || {
        world.position("ann").await == "10"
    })
    .await;
}

/// Acts with their repeats, one that is refused, and their records.
async fn acts(world: &World) {
    let mut supervisor = world.as_caller("sandbox.market-supervisor.vera");
    let mut set = async |key: &str, phase: TradingPhase| {
        let request = SetTradingPhaseRequest {
            context: context(key),
            instrument_id: BOND.into(),
            phase: phase.into(),
            reason: "test".into(),
        };
        supervisor.set_trading_phase(request).await.is_ok()
    };
    for _ in 0..2 {
        assert!(set("halt", TradingPhase::Halt).await);
    }
    assert!(!set("open", TradingPhase::Open).await);
    let mut auditor = world.as_caller("sandbox.auditor");
    for (actor, object_id) in [("", ""), ("vera", ""), ("", BOND), ("vera", BOND)] {
        let request = ListAuditRecordsRequest {
            actor: actor.into(),
            object_id: object_id.into(),
            ..Default::default()
        };
        let listed = auditor.list_audit_records(request).await.unwrap();
        assert_eq!(listed.into_inner().records.len(), 1);
    }
    // The oldest acts without a record are read at each interval.
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_scans_a_table() {
    plans::record();
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::default();
    settings.gateway.sweep_interval_ms = 50;
    let mut world = World::with(folder.path(), settings).await;
    trade(&mut world).await;
    lists(&world).await;
    issue(&world).await;
    acts(&world).await;
    world.stop().await;
    let config = gateway::GatewayConfig {
        data_dir: folder.path().join("gateway"),
        ..gateway::GatewayConfig::default()
    };
    let verified = gateway::verify_history(&config, &folder.path().join("journal")).await;
    assert_eq!(verified.unwrap().findings, Vec::<String>::new());

    let stores = ["market.db", "acts.db"].map(|file| folder.path().join("gateway").join(file));
    let explained = plans::explain(&[&stores[0], &stores[1]]).await;
    explained.assert_no_scans(&ALLOWED);
    explained.assert_explained(&[
        "FROM orders o INDEXED BY orders_by_user",
        "FROM orders o INDEXED BY orders_by_instrument",
        "i.instrument = o.instrument LEFT JOIN client_order_ids",
        "WHERE o.sequence < ? ORDER BY o.sequence DESC",
        "WHERE o.sequence IN (?, ?, ?)",
        "FROM trades p INDEXED BY trades_by_buyer",
        "FROM trades p INDEXED BY trades_by_seller",
        "FROM trades p INDEXED BY trades_by_instrument",
        "FROM trades p WHERE p.id < ? ORDER BY p.id DESC",
        "WHERE t.id IN (?, ?, ?)",
        "INSERT INTO orders",
        "UPDATE orders SET",
        "INSERT INTO trades",
        "INSERT INTO answers",
        "INSERT INTO users",
        "INSERT INTO instruments",
        "FROM answers a LEFT JOIN orders o",
        "FROM json_each($1) k CROSS JOIN requests r",
        "DELETE FROM requests WHERE rowid IN",
        "INSERT INTO client_order_ids",
        "UPDATE projection SET sequence",
        "FROM positions WHERE user_id =",
        "FROM listed WHERE instrument_id =",
        "SELECT sequence FROM orders WHERE sequence > $1 AND sequence <= $2",
        "WHERE o.sequence IN (SELECT value FROM json_each($1))",
        "WHERE t.id > $1 AND t.id <= $2",
        "FROM json_each($1) k CROSS JOIN answers a",
        "SELECT COUNT(*) FROM orders WHERE sequence > $1",
        "SELECT COUNT(*) FROM trades WHERE id <= $1",
        "FROM users u WHERE u.user > $1",
        "FROM instruments i WHERE i.instrument > $1",
        "INSERT INTO inbox",
        "FROM outbox WHERE position >",
        "UPDATE feed SET sequence",
        "INSERT INTO acts",
        "SELECT recorded, object_id, after FROM acts WHERE key_hash =",
        "UPDATE acts SET recorded = 1 WHERE key_hash =",
        "DELETE FROM acts WHERE key_hash =",
        "FROM acts INDEXED BY acts_pending",
        "FROM audit_records WHERE sequence = (SELECT MAX(sequence) FROM audit_records)",
        "INSERT INTO audit_records",
        "FROM audit_records WHERE sequence < ? ORDER BY sequence",
        "FROM audit_records WHERE sequence < ? AND object_id =",
        "FROM audit_records WHERE sequence < ? AND actor =",
    ]);
}
