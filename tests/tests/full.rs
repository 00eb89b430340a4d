//! The whole platform over a real Kafka broker, with its ledger on a real PostgreSQL, and on anvil
//! and geth. `cargo xtask full` runs it. It starts servers of its own, since it kills them.

#[path = "../services/server.rs"]
mod server;

use std::collections::{BTreeSet, HashMap};

use events::{Delivery, Kafka, Log, topics};
use prost::Message;
use proto::market::v1::{OrderCancelledEvent, OrderPlacedEvent, TradeExecutedEvent};
use serde_json::json;
use tests::call::{AUDITOR, number, text};
use tests::process::{PATIENCE, Platform};
use tests::shared::run;
use tests::world::{User, rub};
use types::Decimal;

use crate::server::Server;

/// Events of the life of an asset, by topic and publishing service.
const EXPECTED: [(&str, &str, &[&str]); 6] = [
    (
        topics::CFA,
        "cfa",
        &[
            "InstrumentRegisteredEvent",
            "CfaIssuedEvent",
            "CfaTransferredEvent",
            "CfaRedeemedEvent",
        ],
    ),
    (
        topics::PAYMENTS,
        "payments",
        &[
            "PaymentIntentCreatedEvent",
            "FiatDepositedEvent",
            "PayoutConfirmedEvent",
        ],
    ),
    (
        topics::MARKET,
        "market",
        &[
            "OrderPlacedEvent",
            "TradeExecutedEvent",
            "OrderCancelledEvent",
        ],
    ),
    (
        topics::LEDGER,
        "ledger",
        &[
            "OperationCreatedEvent",
            "BalanceUpdatedEvent",
            "HoldCreatedEvent",
        ],
    ),
    (topics::IDENTITY, "identity", &["UserCreatedEvent"]),
    (topics::CHAIN, "chain", &["TransactionReceiptReadyEvent"]),
];

/// Keys of the accounts that the nodes fund in their genesis blocks. Both are public.
const ANVIL_KEY: &str = "0xac0974bec39a17e36ba4a6b4d238ff944bacb478cbed5efcae784d7bf4f2ff80";
const GETH_KEY: &str = "0xb71c71a67e1177ad4e901695e1b4b9ee17ae16c6668d313eac2f96dbcda3f291";

/// Sells one unit to the buyer.
async fn trade(platform: &Platform, seller: &User, buyer: &User, bond: &str) {
    platform.place(seller, bond, "SELL", "10.00", "1").await;
    platform.place(buyer, bond, "BUY", "10.00", "1").await;
}

/// Reads the topics until it has seen every event of [`EXPECTED`].
async fn read_topics(brokers: &str) {
    let kafka = Kafka::connect(brokers, &HashMap::new()).expect("a client");
    let group = format!("tests-{}", uuid::Uuid::now_v7());
    let all = kafka.subscribe(&group, &topics::ALL).await;
    let mut all = all.expect("a subscription");
    let mut missing: BTreeSet<(&str, &str, &str)> = BTreeSet::new();
    for (topic, source, names) in EXPECTED {
        missing.extend(names.iter().map(|name| (topic, source, *name)));
    }
    while !missing.is_empty() {
        let next = tokio::time::timeout(PATIENCE, all.next()).await;
        let next = next.unwrap_or_else(|_| panic!("timed out: no {missing:?} on the broker"));
        let event = next.expect("a record").record.event;
        let (name, source) = (event.short_type(), event.source.as_str());
        missing.retain(|expected| *expected != (event.topic.as_str(), source, name));
    }
}

/// Reads the market's topic until the event that an order was cancelled; returns the events of its
/// instrument, each at its first delivery.
async fn events_through_cancel(brokers: &str, instrument: &str, order_id: &str) -> Vec<Delivery> {
    let kafka = Kafka::connect(brokers, &HashMap::new()).expect("a client");
    let group = format!("tests-{}", uuid::Uuid::now_v7());
    let market = kafka.subscribe(&group, &[topics::MARKET]).await;
    let mut market = market.expect("a subscription");
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    loop {
        let next = tokio::time::timeout(PATIENCE, market.next()).await;
        let next = next.unwrap_or_else(|_| panic!("timed out after {found:?}"));
        let next = next.expect("a record");
        let event = &next.record.event;
        // A relay publishes again what an outage may have cut off.
        if event.key != instrument || !seen.insert(event.id) {
            continue;
        }
        let is_last = event.short_type() == "OrderCancelledEvent"
            && OrderCancelledEvent::decode(&*event.payload)
                .is_ok_and(|cancelled| cancelled.order_id == order_id);
        found.push(next);
        if is_last {
            return found;
        }
    }
}

/// Asserts that the events of an order are on one partition in the sequence in which they
/// happened: placed, two trades with the orders of `seller`, cancelled.
async fn order_is_in_sequence(brokers: &str, instrument: &str, order_id: &str, seller: &User) {
    let events = events_through_cancel(brokers, instrument, order_id).await;
    for pair in events.windows(2) {
        let (one, next) = (&pair[0].position, &pair[1].position);
        assert_eq!(one.partition, next.partition, "{events:?}");
        assert!(one.offset < next.offset, "{events:?}");
    }
    let names = events.iter().map(|delivery| {
        let event = &delivery.record.event;
        let payload = &*event.payload;
        match event.short_type() {
            "OrderPlacedEvent" => {
                let placed = OrderPlacedEvent::decode(payload).expect("an event");
                match placed.order_id == order_id {
                    true => "placed".to_owned(),
                    false => {
                        assert_eq!(placed.user_id, seller.id, "{placed:?}");
                        "other placed".to_owned()
                    }
                }
            }
            "TradeExecutedEvent" => {
                let trade = TradeExecutedEvent::decode(payload).expect("an event");
                assert_eq!(trade.seller_id, seller.id, "{trade:?}");
                format!("trade {}", trade.trade_number)
            }
            "OrderCancelledEvent" => "cancelled".to_owned(),
            other => panic!("{other} in {events:?}"),
        }
    });
    let expected = [
        "placed",
        "other placed",
        "trade 1",
        "other placed",
        "trade 2",
        "cancelled",
    ];
    assert_eq!(names.collect::<Vec<_>>(), expected);
}

/// Redeems roubles and checks the payout, the supply and the balance.
async fn redeem(platform: &Platform, user: &User, rubles: &str) {
    let supply = async || {
        let request = json!({ "instrumentId": "CFA-RUB" });
        let supply = platform.ok(AUDITOR, "cfa.GetSupply", request).await;
        number(&supply["totalSupply"])
    };
    let (before, balance) = (supply().await, platform.balance(&user.cash()).await);
    let payout = uuid::Uuid::now_v7().to_string();
    let request = json!({ "userId": user.id, "payoutId": payout, "amount": rub(rubles) });
    let token = user.token();
    let redeemed = platform.ok(&token, "cfa.RedeemCfaRub", request).await;
    let operation = text(&redeemed, "/operation/operationId");
    platform.cfa_operation_is(&operation, "FINALIZED").await;
    let request = json!({ "payoutId": payout });
    let what = format!("payout {payout} to be paid");
    let found = platform
        .until(&what, "payments.GetPayout", request, |found| {
            found["payout"]["status"] == json!("PAYMENT_STATUS_SUCCESS")
        })
        .await;
    let paid = &found["payout"];
    assert_eq!(paid["userId"], json!(user.id));
    assert_eq!(paid["amount"], rub(rubles));
    let minus = |from: Decimal| {
        from.checked_sub(number(&json!(rubles)))
            .expect("a difference")
    };
    assert_eq!(supply().await, minus(before));
    assert_eq!(platform.balance(&user.cash()).await, minus(balance));
}

// rows: R155 R213 R331 R238 R239 R240 R241 R242 R243
#[test]
fn r238_every_service_works_over_its_topic_and_a_ledger_on_postgresql_through_kills() {
    run(async {
        let (broker, database) = (Server::kafka(), Server::postgres());
        let env = [
            ("PLATFORM_EVENTS__KAFKA_BROKERS", broker.address.as_str()),
            ("PLATFORM_LEDGER__URL", database.address.as_str()),
        ];
        let mut platform = Platform::start_with(&env).await;
        let (buyer, seller) = (platform.rich("1000.00").await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &seller, "3").await;
        trade(&platform, &seller, &buyer, &bond).await;
        platform.settled(&bond, 1).await;

        // Platform, broker and database server are killed together.
        trade(&platform, &seller, &buyer, &bond).await;
        platform.kill().await;
        broker.kill();
        database.kill();
        broker.start_again();
        database.start_again();
        platform.restart_with(&env).await;
        platform.settled(&bond, 2).await;

        // An order that trades before and during the next outage.
        let traded = platform.bond().await;
        platform.issue(&traded, &seller, "2").await;
        let bid = platform.place(&buyer, &traded, "BUY", "10.00", "3").await;
        let bid = text(&bid, "/orderId");
        let offer = async || platform.place(&seller, &traded, "SELL", "10.00", "1").await;
        offer().await;

        // Without a broker calls are answered. Work that events trigger waits for the broker.
        broker.stop();
        trade(&platform, &seller, &buyer, &bond).await;
        offer().await;
        let order = platform.place(&buyer, &bond, "BUY", "9.00", "1").await;
        broker.start_again();
        platform.settled(&bond, 3).await;
        platform.settled(&traded, 2).await;
        let bought = platform.balance(&buyer.units(&bond)).await;
        assert_eq!(bought, Decimal::from(3));

        for order in [&text(&order, "/orderId"), &bid] {
            let cancel = json!({ "orderId": order });
            platform
                .ok(&buyer.token(), "market.CancelOrder", cancel)
                .await;
        }
        order_is_in_sequence(&broker.address, &traded, &bid, &seller).await;
        redeem(&platform, &buyer, "100.00").await;
        read_topics(&broker.address).await;
        platform.proof().await;

        // The platform stops cleanly while its broker is down.
        broker.stop();
        platform.stop().await;
    });
}

// rows: R186 R213
#[test]
fn r186_trades_matched_while_the_ledger_has_no_database_are_settled_once() {
    run(async {
        let database = Server::postgres();
        let env = [("PLATFORM_LEDGER__URL", database.address.as_str())];
        let mut platform = Platform::start_with(&env).await;
        let (buyer, seller) = (platform.rich("1000.00").await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &seller, "10").await;
        let other = platform.rich("10.00").await;
        // Orders that draw on trading holds need no answer of the ledger.
        platform.trading_hold(&buyer, "CFA-RUB", "500.00").await;
        platform.trading_hold(&seller, &bond, "10").await;
        trade(&platform, &seller, &buyer, &bond).await;
        database.kill();
        trade(&platform, &seller, &buyer, &bond).await;
        trade(&platform, &seller, &buyer, &bond).await;
        let hold = json!({
            "userId": other.id, "instrumentId": "CFA-RUB", "amount": { "value": "1.00" },
        });
        let name = "market.OpenTradingHold";
        let refused = platform.refused(&other.token(), name, hold).await;
        assert!(matches!(refused.http, 503 | 504), "{refused:?}");
        database.start_again();
        platform.settled(&bond, 3).await;
        let cash = platform.balance(&buyer.cash()).await;
        assert_eq!(cash, number(&json!("969.97")));
        let units = platform.balance(&seller.units(&bond)).await;
        assert_eq!(units, Decimal::from(7));
        platform.proof().await;
        platform.stop().await;
    });
}

// rows: R030
#[test]
fn r030_the_platform_runs_on_anvil_and_geth_and_waits_for_a_stopped_node() {
    run(async {
        for (node, chain_id, key) in [
            (Server::anvil(&[]), "31337", ANVIL_KEY),
            (Server::geth(&[]), "1337", GETH_KEY),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let file = folder.path().join("operator.key");
            std::fs::write(&file, key).expect("written");
            let file = file.display().to_string();
            let env = [
                ("PLATFORM_CHAIN__RPC_URL", node.address.as_str()),
                ("PLATFORM_CHAIN__CHAIN_ID", chain_id),
                ("PLATFORM_CHAIN__OPERATOR_KEY_FILE", file.as_str()),
                ("PLATFORM_CHAIN__POLL_INTERVAL_MS", "50"),
            ];
            let mut platform = Platform::start_with(&env).await;
            platform.cli(&["--json", "demo"]).await.success();
            let (buyer, seller) = (platform.rich("1000.00").await, platform.trader().await);
            let bond = platform.bond().await;
            platform.issue(&bond, &seller, "3").await;
            trade(&platform, &seller, &buyer, &bond).await;
            platform.settled(&bond, 1).await;
            // Orders match without the chain; their settlement waits for it.
            node.stop();
            trade(&platform, &seller, &buyer, &bond).await;
            node.start_again();
            platform.settled(&bond, 2).await;
            redeem(&platform, &buyer, "100.00").await;
            platform.proof().await;
            platform.stop().await;
        }
    });
}
