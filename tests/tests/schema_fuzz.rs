//! Mutated requests of every method of the contract: no fault of the platform, no accepted
//! nonsense, and afterwards the platform is healthy and its balances agree.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::Platform;
use tests::process::PATIENCE;
use tests::schema_fuzz::{PER_METHOD_MIN, Stage};
use tests::shared::run;
use tests::wire::{methods, pool};

/// Methods whose unmutated request is invalid: a valid batch of a service would be executed without
/// a trade in the ledger.
const INVALID_BASES: [&str; 1] = ["cfa.SettleTrades"];

// rows: R001 R339
#[test]
fn every_method_refuses_mutated_requests_without_a_fault() {
    run(async {
        // The fuzz calls as one user, one auditor and one service.
        let platform = Platform::start_with(&[("PLATFORM_CALLS__READS_PER_S", "0")]).await;
        let stage = Stage::prepare(&platform).await;
        let begun = Instant::now();
        let report = platform
            .fuzz_schema(&stage, tests::seed::seed(26_112_600))
            .await;
        let total: usize = report.sent.values().sum();
        println!(
            "{} methods, {total} requests, {} accepted, {:?}",
            report.sent.len(),
            report.accepted,
            begun.elapsed()
        );
        for (call, count) in &report.unavailable {
            println!("503 at first, {count} times: {call}");
        }
        assert_eq!(report.sent.len(), methods(&pool()).len());
        for (method, sent) in &report.sent {
            assert!(*sent >= PER_METHOD_MIN, "{method}: {sent} mutations");
        }
        let faults = report.faults;
        assert!(
            faults.is_empty(),
            "{} faults:\n{}",
            faults.len(),
            faults.join("\n")
        );
        let invalid: Vec<&str> = report
            .invalid_bases
            .iter()
            .filter_map(|base| base.split(':').next())
            .collect();
        assert_eq!(invalid, INVALID_BASES, "{:?}", report.invalid_bases);
        // Handlers were reached, not only the checks before them.
        assert!(report.accepted > total / 20, "{} accepted", report.accepted);
        until_healthy(&platform).await;
        platform.proof().await;
    });
}

/// Waits until `/health` is ok.
async fn until_healthy(platform: &Platform) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let (status, health) = platform.get("all", "/health", "").await;
        if (status, &health) == (200, &json!({ "status": "ok" })) {
            return;
        }
        assert!(Instant::now() < deadline, "unexpected health: {health}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

// rows: R325
#[test]
fn unknown_methods_and_services_are_answered_with_501() {
    run(async {
        let platform = tests::shared::platform().await;
        let unknown = methods(&pool())
            .into_iter()
            .map(|method| method.parent_service().full_name().to_owned())
            .map(|service| format!("{service}/NoSuchMethod"))
            .chain(["dfa.ledger.v9.LedgerService/GetBalance".to_owned()]);
        for path in std::collections::BTreeSet::from_iter(unknown) {
            for kind in ["application/json", "application/proto"] {
                let url = format!("{}/{path}", platform.url("all"));
                let called = tests::process::client()
                    .post(url)
                    .bearer_auth(tests::call::OPERATOR)
                    .header("content-type", kind)
                    .body("")
                    .send()
                    .await;
                let answer = called.expect("an answer");
                assert_eq!(answer.status().as_u16(), 501, "{path} {kind}");
                let body: Value = answer.json().await.expect("JSON");
                assert_eq!(body["code"], json!("unimplemented"), "{path} {kind}");
            }
        }
    });
}
