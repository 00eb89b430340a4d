//! The service's metrics, scraped before and after each operation (specification 1.6).

use std::process::Stdio;

use proto::cfa::v1 as pb;
use proto::common::v1::{OperationStatus, PaymentStatus};

use crate::redeem::{finalize, redeem};
use crate::world::*;

const ALONE: &str = "CFA_METRICS_ALONE";

pub type Labels = &'static [(&'static str, &'static str)];

/// Values of `/metrics` at one time.
pub struct Scrape(String);

impl Scrape {
    pub async fn of(url: &str) -> Self {
        let answer = reqwest::get(format!("{url}/metrics")).await;
        let answer = answer.expect("answered").error_for_status().expect("200");
        Self(answer.text().await.expect("text"))
    }

    /// The series with exactly these labels; 0 if it does not exist yet.
    pub fn value(&self, name: &str, labels: Labels) -> f64 {
        let labels = labels.iter();
        let labels: Vec<String> = labels
            .map(|(key, value)| format!("{key}=\"{value}\""))
            .collect();
        let series = |line: &str| -> Option<f64> {
            let (series, value) = line.rsplit_once(' ')?;
            let (of, listed) = match series.split_once('{') {
                Some((of, listed)) => (of, listed.strip_suffix('}')?),
                None => (series, ""),
            };
            let mut listed: Vec<&str> = listed.split(',').filter(|one| !one.is_empty()).collect();
            let mut wanted: Vec<&str> = labels.iter().map(String::as_str).collect();
            listed.sort_unstable();
            wanted.sort_unstable();
            (of == name && listed == wanted).then(|| value.parse().expect("a number"))
        };
        self.0.lines().find_map(series).unwrap_or_default()
    }
}

/// How much a series must grow.
type Growth = (&'static str, Labels, f64);

async fn assert_growth(url: &str, before: &Scrape, growths: &[Growth]) {
    let after = Scrape::of(url).await;
    for (name, labels, by) in growths {
        let grown = after.value(name, labels) - before.value(name, labels);
        assert!((grown - by).abs() < 1e-9, "{name} {labels:?}: {grown}");
    }
}

/// The request for a payment of alice, which is paid.
fn issue(world: &World, payment_id: &str) -> pb::IssueCfaRubRequest {
    world.double.paid(payment_id, "alice", "100.00");
    pb::IssueCfaRubRequest {
        context: context(&key()),
        user_id: "alice".into(),
        amount: roubles("100.00"),
        payment_id: payment_id.into(),
    }
}

const ISSUANCES: &str = "cfa_issuances_total";
const REDEMPTIONS: &str = "cfa_redemptions_total";
const REQUESTS: &str = "redemptions_total";
const TRANSACTIONS: &str = "blockchain_transactions_total";
const SUBMITTED: Labels = &[("status", "SUBMITTED")];
const SUCCESS: Labels = &[("status", "SUCCESS")];
const REVERTED: Labels = &[("status", "REVERTED")];
const ISSUED: Labels = &[("type", "IssueCfaRub"), ("status", "FINALIZED")];
const NOT_ISSUED: Labels = &[("type", "IssueCfaRub"), ("status", "REJECTED")];
const PAID: Labels = &[("type", "RedeemCfaRub"), ("status", "FINALIZED")];
const NOT_PAID: Labels = &[("type", "RedeemCfaRub"), ("status", "FAILED")];
const REQUESTED: Labels = &[("type", "RedeemCfaRub"), ("status", "ONCHAIN_SUBMITTED")];

async fn issuance(world: &mut World, url: &str) {
    let before = Scrape::of(url).await;
    world.deposit("alice", "100.00").await;
    let issued: [Growth; 6] = [
        (ISSUANCES, ISSUED, 1.0),
        ("issuance_duration_seconds_count", &[], 1.0),
        ("issuance_duration_seconds_bucket", &[("le", "+Inf")], 1.0),
        // The mint, and the allow-list transaction of the user.
        (TRANSACTIONS, SUBMITTED, 2.0),
        (TRANSACTIONS, SUCCESS, 2.0),
        (TRANSACTIONS, REVERTED, 0.0),
    ];
    assert_growth(url, &before, &issued).await;
    let sum = "issuance_duration_seconds_sum";
    let after = Scrape::of(url).await;
    assert!(after.value(sum, &[]) > before.value(sum, &[]));
}

async fn refused_issuance(world: &mut World, url: &str) {
    let before = Scrape::of(url).await;
    world
        .double
        .with(|state| state.limit_refusal = Some("Daily limit".into()));
    let request = issue(world, "refused");
    let rejected = world.cfa.issue_cfa_rub(request).await;
    let rejected = rejected.expect("a result").into_inner().operation;
    assert_eq!(
        rejected.expect("operation").status(),
        OperationStatus::Rejected
    );
    world.double.with(|state| state.limit_refusal = None);
    let refused: [Growth; 4] = [
        (ISSUANCES, NOT_ISSUED, 1.0),
        (ISSUANCES, ISSUED, 0.0),
        ("issuance_duration_seconds_count", &[], 1.0),
        (TRANSACTIONS, SUBMITTED, 0.0),
    ];
    assert_growth(url, &before, &refused).await;
}

async fn reverted_issuance(world: &mut World, url: &str) {
    let before = Scrape::of(url).await;
    call_contract(world, "CFA-RUB", "pause()").await;
    let request = issue(world, "reverted");
    let reverted = world.cfa.issue_cfa_rub(request).await;
    let reverted = reverted.expect("sent").into_inner().operation;
    world.settle(&reverted.expect("operation")).await;
    call_contract(world, "CFA-RUB", "unpause()").await;
    let reverted: [Growth; 4] = [
        (ISSUANCES, NOT_ISSUED, 1.0),
        (TRANSACTIONS, SUBMITTED, 3.0),
        (TRANSACTIONS, REVERTED, 1.0),
        (TRANSACTIONS, SUCCESS, 2.0),
    ];
    assert_growth(url, &before, &reverted).await;
}

async fn redemptions(world: &mut World, url: &str) {
    let before = Scrape::of(url).await;
    for (payout_id, answer) in [
        ("payout-1", PaymentStatus::Success),
        ("payout-2", PaymentStatus::Failed),
    ] {
        let operation = redeem(world, "10.00", payout_id).await;
        world.settle(&operation).await;
        world.double.payout_becomes(payout_id, answer);
        let ended = finalize(world, payout_id).await;
        assert_eq!(ended.is_ok(), answer == PaymentStatus::Success);
    }
    let redeemed: [Growth; 7] = [
        (REDEMPTIONS, PAID, 1.0),
        (REDEMPTIONS, NOT_PAID, 1.0),
        // Requests, by the status of the operation that the call returned.
        (REQUESTS, REQUESTED, 2.0),
        (REQUESTS, PAID, 0.0),
        ("redemption_duration_seconds_count", &[], 2.0),
        ("redemption_duration_seconds_bucket", &[("le", "+Inf")], 2.0),
        // A mint-back is not an issuance.
        (ISSUANCES, ISSUED, 0.0),
    ];
    assert_growth(url, &before, &redeemed).await;
    let sum = "redemption_duration_seconds_sum";
    let after = Scrape::of(url).await;
    assert!(after.value(sum, &[]) > before.value(sum, &[]));
}

async fn transfers(world: &mut World, url: &str) {
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "5").await;
    let before = Scrape::of(url).await;
    let request = |units: &str| pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: "alice".into(),
        to_user_id: "bob".into(),
        amount: amount("BOND-1", units),
        ..Default::default()
    };
    let sent = world.transfer(request("2")).await.expect("sent");
    world.settle(&sent).await;
    let refused = world.transfer(request("9")).await;
    refused.expect_err("too many");
    let transfers = "cfa_transfers_total";
    let moved: [Growth; 2] = [
        (transfers, &[("instrument_id", "BOND-1")], 1.0),
        (transfers, &[("instrument_id", "CFA-RUB")], 0.0),
    ];
    assert_growth(url, &before, &moved).await;
}

/// The child process that is scraped. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_counts_its_operations() {
    if std::env::var(ALONE).is_err() {
        return;
    }
    // Before anything is counted, as in the platform.
    rpc::metrics_init();
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let url = world.listen().await;
    issuance(&mut world, &url).await;
    refused_issuance(&mut world, &url).await;
    reverted_issuance(&mut world, &url).await;
    redemptions(&mut world, &url).await;
    transfers(&mut world, &url).await;
    world.stop().await;
}

/// Runs one test of this program in a process of its own, which has the environment variable.
pub async fn alone(test: &str, variable: &str) {
    let child = tokio::process::Command::new(std::env::current_exe().expect("program"))
        .args([test, "--exact", "--nocapture"])
        .env(variable, "1")
        .stdin(Stdio::null())
        .kill_on_drop(true)
        .output();
    let ended = tokio::time::timeout(2 * testkit::PATIENCE, child).await;
    let output = ended.expect("ends in time").expect("started");
    let text = [&*output.stdout, &*output.stderr].map(String::from_utf8_lossy);
    assert!(output.status.success(), "{}{}", text[0], text[1]);
    assert!(text[0].contains("1 passed"), "{}", text[0]);
}

/// Runs in a child process: metrics are process-wide, and other tests issue and redeem too.
// rows: R263 R264 R265 R266 R267 R268 R269
#[tokio::test]
async fn r263_each_operation_moves_its_metrics_and_no_other() {
    alone("metrics::child_counts_its_operations", ALONE).await;
}
