//! Recovery without a restart after a temporary fault: the bank is unavailable under traffic,
//! silent connections exhaust the file descriptors, or the chain stalls.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, text};
use tests::member::Terminal;
use tests::process::{LISTENERS, Platform};
use tests::relay::RelayedChain;
use tests::shared::run;
use tests::world::{User, rub};
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
