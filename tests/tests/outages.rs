//! Recovery without a restart after a temporary fault: the bank is unavailable under traffic,
//! silent connections exhaust the file descriptors, or the chain stalls, also while a court freezes
//! units of matched trades.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, number, text};
use tests::member::Terminal;
use tests::process::{LISTENERS, Platform};
use tests::relay::RelayedChain;
use tests::shared::run;
use tests::world::{User, amount, rub};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use types::Side;

/// Time limit of complete recovery after a fault.
const RECOVERY: Duration = Duration::from_secs(15);

// rows: R087 R127
#[test]
fn r127_payments_recover_within_15_s_of_a_bank_outage() {
    run(async {
        let platform = Platform::start().await;
        let user = platform.trader().await;
        platform.set_limit(&user, "DEPOSIT", "1000000.00").await;
        let fault = |fault: &str| json!({ "fault": fault });
        let intent = || json!({ "userId": user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub("10.00") });
        let away = fault("BANK_FAULT_UNAVAILABLE");
        platform.ok(OPERATOR, "sandbox.SetFault", away).await;
        let away_until = Instant::now() + Duration::from_secs(6);
        while Instant::now() < away_until {
            let called = platform
                .call(&user.token(), "payments.CreatePaymentIntent", intent())
                .await;
            assert!(
                called.is_err(),
                "a payment was accepted without the bank: {called:?}"
            );
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let back = fault("BANK_FAULT_NONE");
        platform.ok(OPERATOR, "sandbox.SetFault", back).await;
        let deadline = Instant::now() + RECOVERY;
        let made = loop {
            match platform
                .call(&user.token(), "payments.CreatePaymentIntent", intent())
                .await
            {
                Ok(made) => break made,
                Err(refusal) => assert!(Instant::now() < deadline, "still refused: {refusal:?}"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        assert!(!text(&made, "/intent/qrPayload").is_empty());
        until_healthy(&platform, deadline).await;
        platform.deposit(&user, "25.00").await;
    });
}

// rows: R340
#[test]
fn r340_silent_connections_up_to_a_descriptor_limit_of_1024_stop_nothing() {
    run(silent_connections(1_024, 1_100));
}

// rows: R340
#[test]
fn r340_silent_connections_up_to_a_descriptor_limit_of_4096_stop_nothing() {
    run(silent_connections(4_096, 5_000));
}

/// Opens `count` silent connections within 20 s to a platform with `descriptors` file descriptors.
/// Asserts that orders are served meanwhile, and that all works afterwards.
async fn silent_connections(descriptors: u64, count: u32) {
    const OPENING: Duration = Duration::from_secs(20);
    let platform = Platform::start_with_descriptors(descriptors).await;
    let bond = platform.bond().await;
    let user = platform.rich("100000.00").await;
    platform.set_limit(&user, "TRADING", "1000000000.00").await;
    platform.trading_hold(&user, "CFA-RUB", "50000.00").await;
    let mut terminal = Terminal::open(&platform, &user, &bond).await;
    honest_connections(&platform, 500).await;

    let ports: Vec<_> = LISTENERS
        .into_iter()
        .filter(|name| !matches!(*name, "bank" | "chain_rpc" | "trading"))
        .map(|name| platform.address(name))
        .collect();
    let attack = tokio::spawn(async move {
        let started = Instant::now();
        let mut silent = Vec::new();
        for number in 0..count {
            let due = OPENING * number / count;
            tokio::time::sleep(due.saturating_sub(started.elapsed())).await;
            let port = ports[number as usize % ports.len()];
            // A refused connection takes no descriptor of the platform.
            if let Ok(Ok(stream)) =
                tokio::time::timeout(Duration::from_secs(1), TcpStream::connect(port)).await
            {
                silent.push(stream);
            }
        }
        silent
    });
    let mut placed = 0;
    // At least 20 orders, also on a slow machine: the task keeps the connections open until then.
    while !attack.is_finished() || placed < 20 {
        placed += 1;
        terminal.acknowledged(placed, Side::Buy, 9_000, 1).await;
        platform.place(&user, &bond, "BUY", "89.00", "1").await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let silent = attack.await.expect("the attack finishes");
    println!(
        "{} connections accepted by the system, {placed} orders on each protocol",
        silent.len()
    );
    drop(silent);

    let deadline = Instant::now() + RECOVERY;
    until_healthy(&platform, deadline).await;
    honest_connections(&platform, 500).await;
    assert_recovered(&platform, &mut terminal, &user, &bond, placed).await;
}

/// Asserts that new connections, reads, orders and deposits work.
async fn assert_recovered(
    platform: &Platform,
    terminal: &mut Terminal,
    user: &User,
    bond: &str,
    placed: u64,
) {
    terminal.acknowledged(placed + 1, Side::Buy, 9_000, 1).await;
    let fresh = tests::process::client();
    for listener in [
        "all",
        "ledger",
        "cfa",
        "payments",
        "market",
        "identity",
        "approvals",
        "chain",
    ] {
        let health = fresh.get(format!("{}/health", platform.url(listener)));
        let answer = health.send().await.expect("a new connection");
        assert_eq!(answer.status().as_u16(), 200, "{listener}");
    }
    let open = json!({ "userId": user.id, "instrumentId": bond });
    let orders = platform.ok(AUDITOR, "market.ListOrders", open).await;
    assert!(!orders["orders"].as_array().is_none_or(Vec::is_empty));
    platform.rich("10.00").await;
}

/// Opens `count` connections from one address; each makes a call and stays open until the last is
/// answered.
async fn honest_connections(platform: &Platform, count: usize) {
    let address = platform.address("all");
    let mut open = Vec::new();
    for number in 0..count {
        let mut stream = TcpStream::connect(address).await.expect("a connection");
        stream
            .write_all(b"GET /livez HTTP/1.1\r\nhost: platform\r\n\r\n")
            .await
            .unwrap_or_else(|error| panic!("connection {number}: {error}"));
        let mut answer = [0; 12];
        tokio::time::timeout(RECOVERY, stream.read_exact(&mut answer))
            .await
            .unwrap_or_else(|_| panic!("connection {number} of {count} is not answered"))
            .unwrap_or_else(|error| panic!("connection {number} of {count}: {error}"));
        assert_eq!(&answer, b"HTTP/1.1 200", "connection {number}");
        open.push(stream);
    }
}

/// Waits until `/health` is ok, at most until `deadline`.
async fn until_healthy(platform: &Platform, deadline: Instant) {
    let http = tests::process::client();
    loop {
        let asked = http
            .get(format!("{}/health", platform.url("all")))
            .send()
            .await;
        let health = match asked {
            Ok(answer) => answer.json::<Value>().await.unwrap_or_default(),
            Err(error) => json!(error.to_string()),
        };
        if health["status"] == json!("ok") {
            return;
        }
        assert!(Instant::now() < deadline, "unexpected health: {health}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// How long the chain stalls.
const STALL: Duration = Duration::from_secs(60);

/// While the chain stalls, trades are matched, deposits are paid, a redemption is asked for and a
/// party is blocked. All of it ends once the chain goes on.
// rows: R047 R064 R186
#[test]
fn r064_a_chain_that_stalls_for_a_minute_delays_everything_and_loses_nothing() {
    run(async {
        let (chain, platform) = RelayedChain::start().await;
        let (seller, buyer) = (platform.trader().await, platform.rich("1000.00").await);
        let (saver, bond) = (platform.rich("100.00").await, platform.bond().await);
        platform.issue(&bond, &seller, "10").await;
        let intent = platform.intent(&saver, "50.00").await;

        chain.stall(true);
        let stalled = Instant::now();
        platform.place(&seller, &bond, "SELL", "100.00", "4").await;
        platform.place(&buyer, &bond, "BUY", "100.00", "4").await;
        platform.pay(&intent).await;
        let payout = uuid::Uuid::now_v7().to_string();
        let redeem = json!({
            "userId": saver.id, "payoutId": payout, "amount": rub("30.00"),
            "context": tests::call::context_with_key(&payout),
        });
        // The call may be answered by its deadline: it goes on without its caller.
        let name = "cfa.RedeemCfaRub";
        let asked = platform.call(&saver.token(), name, redeem.clone()).await;
        if let Err(refusal) = asked {
            assert!(!refusal.is_fault(), "{refusal:?}");
        }
        let block = json!({ "userId": buyer.id, "reason": "a drill" });
        platform
            .ok("sandbox.compliance", "identity.BlockUser", block)
            .await;
        tokio::time::sleep(STALL.saturating_sub(stalled.elapsed())).await;
        let request = json!({ "instrumentId": bond });
        let trades = platform.all(AUDITOR, "market.ListTrades", "trades", request);
        let trades = trades.await;
        assert_eq!(trades.len(), 1);
        assert!(!tests::world::is_settled(&trades[0]), "{trades:?}");
        // Proceeds and units of a trade that is not final are not available.
        let early = json!({
            "userId": seller.id, "payoutId": uuid::Uuid::now_v7().to_string(),
            "amount": rub("400.00"),
        });
        let early = platform.refused(&seller.token(), name, early).await;
        assert_eq!(early.message, "Insufficient balance", "{early:?}");

        chain.stall(false);
        platform.settled(&bond, 1).await;
        platform.balance_is(&seller.cash(), "400.00").await;
        let redeemed = platform.ok(&saver.token(), name, redeem).await;
        let id = text(&redeemed, "/operation/operationId");
        platform.cfa_operation_is(&id, "FINALIZED").await;
        platform.balance_is(&saver.cash(), "120.00").await;
        until_healthy(&platform, Instant::now() + RECOVERY).await;
        platform.proof().await;
    });
}

/// Settlement seals no batch before its third trade, which therefore chooses the moment.
const THIRD_TRADE_SEALS: [(&str, &str); 3] = [
    ("PLATFORM_SETTLEMENT__BATCH_TRADES_MAX", "3"),
    ("PLATFORM_SETTLEMENT__LINGER_MS", "600000"),
    ("PLATFORM_SETTLEMENT__WAIT_MS", "600000"),
];

/// Sells units of each of these sellers to the buyer, at 100.00.
async fn sell(platform: &Platform, bond: &str, buyer: &User, sellers: &[&User], units: &str) {
    for seller in sellers {
        platform.place(seller, bond, "SELL", "100.00", units).await;
        platform.place(buyer, bond, "BUY", "100.00", units).await;
    }
}

/// A court freezes units of a holder; `None`: all, also later ones. The call may be answered by its
/// deadline while the chain stalls: the freeze goes on.
async fn freeze(platform: &Platform, bond: &str, holder: &User, units: Option<&str>) {
    let mut request = json!({
        "instrumentId": bond, "holderId": holder.id, "basis": "ENFORCEMENT_BASIS_COURT",
        "document": "Decision 2-17/2026",
    });
    if let Some(units) = units {
        request["amount"] = amount(bond, units);
    }
    let name = "cfa.FreezeUnits";
    let asked = platform.call("sandbox.compliance", name, request).await;
    if let Err(refusal) = asked {
        assert!(!refusal.is_fault(), "{refusal:?}");
    }
}

/// Waits until the only freeze of a holder has this status, given without its prefix.
async fn freeze_is(platform: &Platform, holder: &User, status: &str) {
    let wanted = json!(format!("ENFORCEMENT_STATUS_{status}"));
    let what = format!("the freeze to be {status}");
    let request = json!({ "holderId": holder.id });
    platform
        .until(&what, "cfa.ListEnforcementActs", request, |answer| {
            answer.pointer("/acts/0/status") == Some(&wanted)
        })
        .await;
}

/// Waits until a sub-account has this balance and this available amount.
async fn has(platform: &Platform, subaccount: &str, balance: &str, available: &str) {
    let what = format!("{subaccount} to have {balance}, {available} of it available");
    let (balance, available) = (number(&json!(balance)), number(&json!(available)));
    let request = json!({ "subaccountId": subaccount });
    platform
        .until(&what, "ledger.GetBalance", request, |answer| {
            number(&answer["balance"]) == balance && number(&answer["available"]) == available
        })
        .await;
}

/// The trades of an issue, once none is pending.
async fn ended_trades(platform: &Platform, bond: &str, count: usize) -> Vec<Value> {
    let pending = json!("SETTLEMENT_STATUS_PENDING");
    let is_pending = |trade: &Value| trade["settlementStatus"] == pending;
    let request = json!({ "instrumentId": bond });
    let listed = platform
        .until(
            "the trades to end",
            "market.ListTrades",
            request,
            |answer| {
                let trades = answer["trades"].as_array();
                trades.is_some_and(|all| all.len() == count && !all.iter().any(is_pending))
            },
        )
        .await;
    listed["trades"].as_array().cloned().unwrap_or_default()
}

/// A court freezes units of two sellers between match and settlement, while the chain stalls. The
/// freeze of all units busts the trade, through a case. The other covers the available units: those
/// of the trade are in a hold, and it settles.
// rows: R186
#[test]
fn r186_a_court_freeze_after_the_match_busts_the_trade_and_spares_held_units() {
    run(async {
        let (chain, mut platform) = RelayedChain::start().await;
        platform.stop().await;
        let env = [&chain.env("")[..], &THIRD_TRADE_SEALS[..]].concat();
        platform.restart_with(&env).await;
        let (whole, part) = (platform.trader().await, platform.trader().await);
        let (last, buyer) = (platform.trader().await, platform.rich("2000.00").await);
        let bond = platform.bond().await;
        for seller in [&whole, &part, &last] {
            platform.issue(&bond, seller, "10").await;
        }

        chain.stall(true);
        sell(&platform, &bond, &buyer, &[&whole, &part], "4").await;
        freeze(&platform, &bond, &whole, None).await;
        freeze(&platform, &bond, &part, Some("6")).await;
        freeze_is(&platform, &whole, "PENDING").await;
        freeze_is(&platform, &part, "PENDING").await;
        // The ledger has frozen, before the trades are posted.
        let request = json!({ "subaccountId": whole.units(&bond) });
        let frozen = platform.ok(AUDITOR, "ledger.GetSubAccount", request).await;
        let status = text(&frozen, "/subaccount/status");
        assert_eq!(status, "SUB_ACCOUNT_STATUS_FROZEN");
        has(&platform, &part.units(&bond), "10", "0").await;
        chain.stall(false);
        freeze_is(&platform, &whole, "ACTIVE").await;
        freeze_is(&platform, &part, "ACTIVE").await;

        sell(&platform, &bond, &buyer, &[&last], "1").await;
        let trades = ended_trades(&platform, &bond, 3).await;
        let is_whole = |trade: &&Value| trade["sellerId"] == json!(whole.id);
        let (bust, settled): (Vec<_>, Vec<_>) = trades.iter().partition(is_whole);
        let all_settled = settled.into_iter().all(tests::world::is_settled);
        assert!(all_settled && bust.len() == 1, "{trades:?}");
        let status = text(bust[0], "/settlementStatus");
        assert_eq!(status, "SETTLEMENT_STATUS_FAILED");
        let cases = platform.all(AUDITOR, "settlement.ListCases", "cases", json!({}));
        let cases = cases.await;
        assert_eq!(cases.len(), 1, "{cases:?}");
        assert_eq!(cases[0]["tradeId"], bust[0]["tradeId"]);
        assert_eq!(text(&cases[0], "/state"), "CASE_STATE_OPEN");
        assert_units_and_money(&platform, &bond, [&whole, &part, &last, &buyer]).await;
        platform.proof().await;
    });
}

/// Asserts that the bust trade took nothing and the others settled.
async fn assert_units_and_money(
    platform: &Platform,
    bond: &str,
    [whole, part, last, buyer]: [&User; 4],
) {
    has(platform, &whole.units(bond), "10", "10").await;
    has(platform, &part.units(bond), "6", "0").await;
    has(platform, &last.units(bond), "9", "9").await;
    has(platform, &buyer.units(bond), "5", "5").await;
    assert_eq!(platform.balance(&whole.cash()).await, number(&Value::Null));
    has(platform, &part.cash(), "400.00", "400.00").await;
    has(platform, &last.cash(), "100.00", "100.00").await;
}
