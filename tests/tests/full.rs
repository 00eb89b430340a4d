//! The whole platform over a real Kafka broker, with its ledger on a real PostgreSQL, and on anvil
//! and geth. `cargo xtask full` runs it. It starts servers of its own, since it kills them.

#[path = "../services/server.rs"]
mod server;

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use events::{Delivery, Kafka, Log, topics};
use prost::Message;
use proto::market::v1::{OrderCancelledEvent, OrderPlacedEvent, TradeExecutedEvent};
use serde_json::{Value, json};
use tests::call::{AUDITOR, SERVICE, number, text};
use tests::process::{PATIENCE, Platform};
use tests::shared::run;
use tests::world::{User, amount, rub};
use tokio::sync::Mutex;
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

/// anvil and geth, with their chain ids and keys.
fn nodes() -> [(Server, &'static str, &'static str); 2] {
    [
        (Server::anvil(&[]), "31337", ANVIL_KEY),
        (Server::geth(&[]), "1337", GETH_KEY),
    ]
}

/// Writes the file of the operator's key; returns its path.
fn key_file(folder: &Path, key: &str) -> String {
    let file = folder.join("operator.key");
    std::fs::write(&file, key).expect("written");
    file.display().to_string()
}

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
        for (node, chain_id, key) in nodes() {
            let folder = tempfile::tempdir().expect("a folder");
            let file = key_file(folder.path(), key);
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

/// Makes a block every 200 ms, so that transactions become final. Clones are the same.
#[derive(Clone)]
struct Miner {
    url: String,
    http: reqwest::Client,
    is_geth: bool,
    /// Number of blocks. No block is made while it is locked.
    made: Arc<Mutex<u64>>,
}

impl Miner {
    fn start(node: &Server, is_geth: bool) -> Self {
        let miner = Self {
            url: node.address.clone(),
            http: tests::process::client(),
            is_geth,
            made: Arc::default(),
        };
        let running = miner.clone();
        tokio::spawn(async move {
            // Until the node ends.
            while running.mine().await.is_ok() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
        });
        miner
    }

    async fn ask(&self, method: &str, params: Value) -> Result<Value, reqwest::Error> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let answer = self.http.post(&self.url).json(&request).send().await?;
        let answer: Value = answer.json().await?;
        assert!(answer["error"].is_null(), "{method}: {answer}");
        Ok(answer["result"].clone())
    }

    async fn mine(&self) -> Result<(), reqwest::Error> {
        let mut made = self.made.lock().await;
        if self.is_geth {
            // geth makes a block per withdrawal.
            let withdrawal = json!([{
                "index": format!("{:#x}", *made), "validatorIndex": "0x1",
                "address": format!("0x{}", "22".repeat(20)), "amount": "0x1",
            }]);
            self.ask("dev_addWithdrawal", withdrawal).await?;
        } else {
            self.ask("anvil_mine", json!(["0x1"])).await?;
        }
        *made += 1;
        Ok(())
    }

    async fn head(&self) -> u64 {
        let head = self.ask("eth_blockNumber", json!([])).await;
        let head = head.expect("a node");
        let digits = head.as_str().and_then(|text| text.strip_prefix("0x"));
        u64::from_str_radix(digits.expect("a quantity"), 16).expect("a quantity")
    }

    /// Waits until the head has this number.
    async fn reaches(&self, number: u64) {
        let reached = async {
            while self.head().await < number {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let reached = tokio::time::timeout(PATIENCE, reached).await;
        reached.unwrap_or_else(|_| panic!("timed out: no block {number}"));
    }

    /// Removes the last blocks. New ones have other hashes.
    async fn remove_blocks(&self, count: u64) {
        let head = self.head().await;
        let removed = match self.is_geth {
            true => self.ask("debug_setHead", json!([format!("{:#x}", head - count)])),
            false => self.ask("anvil_rollback", json!([count])),
        };
        removed.await.expect("a node");
    }
}

/// Freezes or unfreezes a holder in the contract of an issue, of which the platform learns nothing:
/// transfers are posted, and their transactions revert. Waits until it is final.
async fn set_frozen(platform: &Platform, bond: &str, user: &User, is_frozen: bool) {
    let request = json!({ "instrumentId": bond });
    let issue = platform.ok(AUDITOR, "cfa.GetInstrument", request.clone());
    let token = text(&issue.await, "/instrument/smartContractAddress");
    let holders = platform.all(AUDITOR, "cfa.ListHolders", "holders", request);
    let holders = holders.await;
    let holder = holders.iter().find(|one| one["userId"] == json!(user.id));
    let address = text(holder.expect("a holder"), "/address");
    let (address, flag) = (&address[2..], u8::from(is_frozen));
    // `setAddressFrozen(address,bool)`.
    let data = format!("0xc69c09cf{address:0>64}{flag:064x}");
    let submit = json!({ "payload": { "to": token, "data": data } });
    let sent = platform.ok(SERVICE, "chain.SubmitTransaction", submit);
    let request = json!({ "txHash": text(&sent.await, "/txHash") });
    let is_final = |found: &Value| found["receipt"]["status"] == json!("RECEIPT_STATUS_SUCCESS");
    let name = "chain.GetTransactionReceipt";
    platform.until("the freeze", name, request, is_final).await;
}

/// Sends a transfer of `seller`, which reverts, and a redemption of `buyer`, each in a block of its
/// own, and replaces both blocks. Returns the ids of the operations.
async fn reorganise(
    platform: &Platform,
    miner: &Miner,
    (seller, transfer): (&User, &Value),
    (buyer, redeem): (&User, Value),
) -> [String; 2] {
    // A node may make a block after its answer; the platform reads blocks every 50 ms.
    const SETTLE: Duration = Duration::from_secs(1);
    let paused = miner.made.lock().await;
    tokio::time::sleep(SETTLE).await;
    let head = miner.head().await;
    let token = seller.token();
    let moved = platform.ok(&token, "cfa.TransferCfa", transfer.clone());
    let moved = moved.await;
    miner.reaches(head + 1).await;
    let redeemed = platform
        .ok(&buyer.token(), "cfa.RedeemCfaRub", redeem)
        .await;
    miner.reaches(head + 2).await;
    tokio::time::sleep(SETTLE).await;
    assert_eq!(miner.head().await, head + 2);
    miner.remove_blocks(2).await;
    drop(paused);
    [moved, redeemed].map(|answer| text(&answer, "/operation/operationId"))
}

/// Blocks are final after four others. The two last ones are replaced: they contain a reverted
/// transfer and the burn of a redemption, which the connector sends again.
// rows: R030 R064 R243
#[test]
fn r243_a_reorganisation_with_a_reverted_transaction_moves_money_and_units_once() {
    run(async {
        for (node, chain_id, key) in nodes() {
            let folder = tempfile::tempdir().expect("a folder");
            let file = key_file(folder.path(), key);
            let env = [
                ("PLATFORM_CHAIN__RPC_URL", node.address.as_str()),
                ("PLATFORM_CHAIN__CHAIN_ID", chain_id),
                ("PLATFORM_CHAIN__OPERATOR_KEY_FILE", file.as_str()),
                ("PLATFORM_CHAIN__POLL_INTERVAL_MS", "50"),
                ("PLATFORM_CHAIN__RESEND_INTERVAL_MS", "100"),
                ("PLATFORM_CHAIN__CONFIRMATIONS", "4"),
            ];
            let miner = Miner::start(&node, chain_id == "1337");
            let mut platform = Platform::start_with(&env).await;
            let (buyer, seller) = (platform.rich("1000.00").await, platform.trader().await);
            let bond = platform.bond().await;
            platform.issue(&bond, &seller, "3").await;
            let transfer = json!({
                "instrumentId": bond, "fromUserId": seller.id, "toUserId": buyer.id,
                "amount": amount(&bond, "1"),
            });
            let payout = uuid::Uuid::now_v7().to_string();
            let redeem = json!({ "userId": buyer.id, "payoutId": payout, "amount": rub("100.00") });
            set_frozen(&platform, &bond, &seller, true).await;
            let sent = reorganise(&platform, &miner, (&seller, &transfer), (&buyer, redeem));
            let [moved, redeemed] = sent.await;

            let reverted = platform.cfa_operation_is(&moved, "REJECTED").await;
            let why = json!("Blockchain transaction reverted");
            assert_eq!(reverted["rejectionMessage"], why);
            platform.balance_is(&seller.units(&bond), "3").await;
            platform.cfa_operation_is(&redeemed, "FINALIZED").await;
            platform.balance_is(&buyer.cash(), "900.00").await;
            let name = "blockchain_reorganisations_total";
            let undone = platform.metric(name, &[("depth", "unconfirmed")]).await;
            assert!(undone >= 1.0, "the platform saw no reorganisation");
            // The platform goes on.
            set_frozen(&platform, &bond, &seller, false).await;
            let token = seller.token();
            let moved = platform.ok(&token, "cfa.TransferCfa", transfer).await;
            let moved = text(&moved, "/operation/operationId");
            platform.cfa_operation_is(&moved, "FINALIZED").await;
            trade(&platform, &seller, &buyer, &bond).await;
            platform.settled(&bond, 1).await;
            platform.balance_is(&buyer.units(&bond), "2").await;
            platform.proof().await;
            platform.stop().await;
        }
    });
}
