//! The platform recovers from a full disk: once there is space, orders and deposits work without a
//! restart. Below the reserve of free space the market refuses new orders.
//!
//! Each test mounts a file system for the data folder, which needs root. If the mount is refused,
//! the test fails with its message. `cargo xtask full` runs these tests.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, text};
use tests::member::Terminal;
use tests::process::{PATIENCE, Platform};
use tests::shared::run;
use tests::world::{User, limit_order, rub};
use types::Side;
use wire::ServerMessage;

const VOLUME_BYTES: &str = "256M";
/// Time limit of complete recovery once the disk has space.
const RECOVERY: Duration = Duration::from_secs(10);
/// Size of a journal segment, which a few hundred orders fill.
const SEGMENT_BYTES: &str = "1048576";

/// A file system at `<folder>/data`. A watchdog shell unmounts it once its pipe is closed, by the
/// drop of the value or the end of this process.
struct Volume {
    folder: PathBuf,
    watchdog: Child,
}

impl Volume {
    fn tmpfs() -> Self {
        let size = format!("size={VOLUME_BYTES}");
        Self::mount(|_| {
            vec![
                "-t".into(),
                "tmpfs".into(),
                "-o".into(),
                size,
                "tmpfs".into(),
            ]
        })
    }

    fn ext4() -> Self {
        Self::mount(|folder| {
            let image = folder.join("volume.img").display().to_string();
            run_program("truncate", &["-s", VOLUME_BYTES, &image]);
            // Without blocks reserved for root, root gets "no space" like any other user.
            run_program("mkfs.ext4", &["-q", "-F", "-m", "0", &image]);
            vec![
                "-t".into(),
                "ext4".into(),
                "-o".into(),
                "loop".into(),
                image,
            ]
        })
    }

    fn mount(options: impl FnOnce(&Path) -> Vec<String>) -> Self {
        let folder = tempfile::Builder::new().prefix("platform-disk-").tempdir();
        let folder = folder.expect("a temporary folder").keep();
        let data = folder.join("data");
        std::fs::create_dir(&data).expect("made");
        let options = options(&folder);
        let watchdog = Command::new("sh")
            .args(["-c", r#"cat >/dev/null; umount -l "$1""#, "watchdog"])
            .arg(&data)
            .stdin(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell");
        let mut args: Vec<&str> = options.iter().map(String::as_str).collect();
        let place = data.display().to_string();
        args.push(&place);
        run_program("mount", &args);
        Self { folder, watchdog }
    }

    /// Uses all space, down to the last block.
    fn fill(&self) {
        let file = File::options()
            .create(true)
            .append(true)
            .open(self.filler());
        let mut file = file.expect("a file");
        for bytes in [1 << 20, 1 << 12] {
            let zeros = vec![0; bytes];
            while file
                .write_all(&zeros)
                .and_then(|()| file.sync_data())
                .is_ok()
            {}
        }
    }

    /// Uses space until `left` bytes are free.
    fn fill_to(&self, left: u64) {
        let place = self.folder.join("data").display().to_string();
        let output = Command::new("df")
            .args(["--output=avail", "-B1", &place])
            .output();
        let text = String::from_utf8(output.expect("df").stdout).expect("UTF-8");
        let free = text
            .lines()
            .nth(1)
            .and_then(|line| line.trim().parse::<u64>().ok());
        let bytes = free
            .expect("a number")
            .checked_sub(left)
            .expect("more is free");
        let zeros = vec![0; usize::try_from(bytes).expect("fits memory")];
        std::fs::write(self.filler(), zeros).expect("there is room");
    }

    fn free(&self) {
        std::fs::remove_file(self.filler()).expect("removed");
    }

    fn filler(&self) -> PathBuf {
        self.folder.join("data/filler")
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        drop(self.watchdog.stdin.take());
        let _ = self.watchdog.wait();
    }
}

/// Runs a program to its end.
fn run_program(program: &str, args: &[&str]) {
    let output = Command::new(program).args(args).output();
    let output = output.unwrap_or_else(|error| panic!("{program} cannot be started: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "this test mounts file systems, and `{program} {}` was refused: {stderr}",
        args.join(" ")
    );
}

/// Two members that trade with each other. The buyer also has a session.
struct Market<'a> {
    platform: &'a Platform,
    bond: String,
    buyer: User,
    seller: User,
    terminal: Terminal,
    sent: u64,
    acknowledged: u64,
}

impl<'a> Market<'a> {
    async fn open(platform: &'a Platform) -> Self {
        let bond = platform.bond().await;
        let (buyer, seller) = (platform.trader().await, platform.trader().await);
        for (user, limit) in [
            (&buyer, "DEPOSIT"),
            (&buyer, "TRADING"),
            (&seller, "TRADING"),
        ] {
            platform.set_limit(user, limit, "1000000000.00").await;
        }
        platform.deposit(&buyer, "5000000.00").await;
        platform.trading_hold(&buyer, "CFA-RUB", "4000000.00").await;
        platform.issue(&bond, &seller, "5000").await;
        platform.trading_hold(&seller, &bond, "5000").await;
        let terminal = Terminal::open(platform, &buyer, &bond).await;
        Self {
            platform,
            bond,
            buyer,
            seller,
            terminal,
            sent: 0,
            acknowledged: 0,
        }
    }

    /// Places an order in the session; true if it is durable within the given time.
    async fn order(&mut self, within: Duration) -> bool {
        self.sent += 1;
        let id = self.sent;
        self.terminal.place(id, Side::Buy, 1_000, 1).await;
        let answer = self
            .terminal
            .expect("an answer to an order", |message| match message {
                ServerMessage::OrderAck(ack) if ack.client_order_id == id => Some(true),
                ServerMessage::Rejected(no) if no.client_order_id == id => Some(false),
                _ => None,
            });
        let answer = tokio::time::timeout(within, answer).await.unwrap_or(false);
        self.acknowledged += u64::from(answer);
        answer
    }

    /// Places both sides of a trade; true if both orders were accepted.
    async fn trade(&mut self) -> bool {
        for (user, side) in [(&self.seller, "SELL"), (&self.buyer, "BUY")] {
            let order = json!({ "order": limit_order(user, &self.bond, side, "90.00", "1") });
            let token = user.token();
            let call = self.platform.call(&token, "market.PlaceOrder", order);
            match tokio::time::timeout(Duration::from_secs(5), call).await {
                Ok(Ok(_)) => {}
                _ => return false,
            }
        }
        true
    }

    /// Requests a payment and pays it; returns the payment id if both calls succeed.
    async fn deposit(&self) -> Option<String> {
        let intent = json!({ "userId": self.buyer.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub("10.00") });
        let token = self.buyer.token();
        let made = self
            .platform
            .call(&token, "payments.CreatePaymentIntent", intent);
        let made = made.await.ok()?;
        let pay = json!({ "qrPayload": text(&made, "/intent/qrPayload") });
        let paid = self.platform.call(OPERATOR, "sandbox.Pay", pay).await;
        paid.ok().map(|_| text(&made, "/intent/paymentId"))
    }

    async fn is_issued(&self, payment: &str) -> bool {
        let request = json!({ "userId": self.buyer.id, "externalRef": payment });
        let listed = self
            .platform
            .call(AUDITOR, "cfa.ListOperations", request)
            .await;
        listed.is_ok_and(|listed| {
            listed.pointer("/operations/0/status") == Some(&json!("OPERATION_STATUS_FINALIZED"))
        })
    }

    /// Asserts that orders, trades, deposits and health work within [`RECOVERY`].
    async fn assert_recovers(&mut self) {
        let begun = Instant::now();
        let late = |what: &str, last: &Value| {
            let after = begun.elapsed();
            assert!(
                after < RECOVERY,
                "not within {after:?} of free space: {what}; last answer {last}"
            );
        };
        while !self.order(Duration::from_secs(1)).await {
            let (_, health) = self.platform.get("all", "/health", "").await;
            late("an order of the session is accepted", &health);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let order = begun.elapsed();
        while !self.trade().await {
            late("orders by HTTP are accepted", &Value::Null);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let traded = begun.elapsed();
        let payment = loop {
            if let Some(payment) = self.deposit().await {
                break payment;
            }
            late("a payment is accepted", &Value::Null);
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        while !self.is_issued(&payment).await {
            late("a deposit is issued", &Value::Null);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let issued = begun.elapsed();
        loop {
            let (status, health) = self.platform.get("all", "/health", "").await;
            if status == 200 {
                break;
            }
            late("health is ok", &health);
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        println!(
            "recovered after: order {order:?}, trade {traded:?}, deposit {issued:?}, health {:?}",
            begun.elapsed()
        );
    }

    /// Sends traffic until `/health` fails with a text that `accepts` accepts; returns the text.
    async fn until_failing(&mut self, accepts: impl Fn(&str) -> bool) -> String {
        let deadline = Instant::now() + PATIENCE;
        loop {
            for _ in 0..20 {
                self.order(Duration::from_millis(200)).await;
            }
            let _ = self.trade().await;
            let _ = self.deposit().await;
            let (status, health) = self.platform.get("all", "/health", "").await;
            if status == 503 && accepts(&health.to_string()) {
                return health.to_string();
            }
            assert!(
                Instant::now() < deadline,
                "unexpected health: {status} {health}"
            );
        }
    }
}

/// Fills the volume under traffic and frees it, twice: until any health part fails, and until the
/// journal lacks room for its next segment.
async fn scenario(volume: Volume) {
    // A reserve would stop new orders before the stores run out of space.
    let env = [
        ("PLATFORM_JOURNAL__SEGMENT_BYTES", SEGMENT_BYTES),
        ("PLATFORM_DISK__RESERVE_MIB", "0"),
    ];
    let mut platform = Platform::start_in(volume.folder.clone(), &env).await;
    let (bond, orders) = {
        let mut market = Market::open(&platform).await;
        assert!(market.order(PATIENCE).await && market.trade().await);

        volume.fill();
        let health = market.until_failing(|_| true).await;
        println!("full: {health}");
        volume.free();
        market.assert_recovers().await;

        volume.fill();
        let names_segment = |health: &str| health.contains("next segment");
        let health = market.until_failing(names_segment).await;
        println!("full at the roll: {health}");
        assert!(
            !market.order(Duration::from_secs(2)).await,
            "an order was accepted on a full disk"
        );
        volume.free();
        market.assert_recovers().await;
        (market.bond, market.acknowledged)
    };
    // Acknowledged orders exist and the proof passes, before and after a restart.
    for _ in 0..2 {
        let request = json!({ "instrumentId": bond });
        let listed = platform
            .all(AUDITOR, "market.ListOrders", "orders", request.clone())
            .await;
        assert!(
            listed.len() as u64 >= orders,
            "{} of {orders}",
            listed.len()
        );
        platform
            .until(
                "all trades to be settled",
                "market.ListTrades",
                request,
                |answer| {
                    let trades = answer["trades"].as_array().cloned().unwrap_or_default();
                    trades.iter().all(tests::world::is_settled)
                },
            )
            .await;
        platform.proof().await;
        platform.stop().await;
        platform.restart_with(&env).await;
    }
    platform.stop().await;
}

/// Below the disk's reserve new orders are refused, and cancels and deposits succeed. With free
/// space orders succeed again.
async fn low_scenario(volume: Volume) {
    let env = [
        ("PLATFORM_JOURNAL__SEGMENT_BYTES", SEGMENT_BYTES),
        ("PLATFORM_DISK__RESERVE_MIB", "128"),
    ];
    let mut platform = Platform::start_in(volume.folder.clone(), &env).await;
    let mut market = Market::open(&platform).await;
    assert!(market.order(PATIENCE).await);
    let token = market.buyer.token();
    let order = json!({ "order": limit_order(&market.buyer, &market.bond, "BUY", "1.00", "1") });
    let resting = platform
        .ok(&token, "market.PlaceOrder", order.clone())
        .await;

    // Enough for the write-ahead logs, which grow until they reach their final sizes.
    volume.fill_to(110 << 20);
    let low = |health: &str| health.contains("the disk of data is low");
    market.until_failing(low).await;
    let accepted = market.order(Duration::from_secs(2)).await;
    assert!(!accepted, "an order was accepted");
    let refused = platform.call(&token, "market.PlaceOrder", order).await;
    assert_eq!(refused.expect_err("refused").reason, "DISK_LOW");
    let cancel = json!({ "orderId": text(&resting, "/order/orderId") });
    platform.ok(&token, "market.CancelOrder", cancel).await;
    let payment = market.deposit().await.expect("a payment is accepted");
    let deadline = Instant::now() + PATIENCE;
    while !market.is_issued(&payment).await {
        assert!(
            Instant::now() < deadline,
            "timed out: the deposit is not issued"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    volume.free();
    market.assert_recovers().await;
    drop(market);
    platform.stop().await;
}

#[test]
fn a_low_disk_refuses_new_orders_and_takes_cancels_and_deposits() {
    run(low_scenario(Volume::tmpfs()));
}

#[test]
fn orders_and_deposits_resume_10_s_after_a_full_tmpfs() {
    run(scenario(Volume::tmpfs()));
}

#[test]
fn orders_and_deposits_resume_10_s_after_a_full_ext4() {
    run(scenario(Volume::ext4()));
}
