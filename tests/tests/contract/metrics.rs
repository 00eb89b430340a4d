//! The metrics of every service, scraped from each port after traffic.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::json;
use tests::Platform;
use tests::process::PATIENCE;
use tests::shared::run;

use self::exposition::{Family, families};

#[path = "../../../rpc/tests/common/exposition.rs"]
mod exposition;

type Families = BTreeMap<String, Family>;

/// Of a port: a method of its service, and metrics of that service with their types.
const PORTS: [(&str, &str, &[(&str, &str)]); 7] = [
    ("all", "ledger.GetAccount", &[]),
    (
        "ledger",
        "ledger.GetTrialBalance",
        &[
            ("ledger_operations_total", "counter"),
            ("ledger_postings_total", "counter"),
            ("ledger_holds_total", "gauge"),
            ("ledger_operation_duration_seconds", "histogram"),
        ],
    ),
    (
        "cfa",
        "cfa.ListInstruments",
        &[
            ("cfa_issuances_total", "counter"),
            ("issuance_duration_seconds", "histogram"),
        ],
    ),
    (
        "payments",
        "payments.ListPayouts",
        &[
            ("payment_intents_created_total", "counter"),
            ("payment_webhooks_received_total", "counter"),
            ("payment_processing_duration_seconds", "histogram"),
        ],
    ),
    (
        "market",
        "market.GetMarketStatus",
        &[
            ("orders_placed_total", "counter"),
            ("order_book_depth", "gauge"),
            ("trades_executed_total", "counter"),
            ("trade_execution_duration_seconds", "histogram"),
        ],
    ),
    ("identity", "identity.ListUsers", &[]),
    (
        "chain",
        "chain.GetBlock",
        &[("blockchain_transactions_total", "counter")],
    ),
];

async fn scrape(platform: &Platform, listener: &str) -> Families {
    let url = format!("{}/metrics", platform.url(listener));
    let answer = tests::process::client().get(url).send().await;
    let answer = answer.expect("an answer");
    assert_eq!(answer.status().as_u16(), 200, "{listener}");
    assert_eq!(
        answer.headers()["content-type"],
        "text/plain; version=0.0.4; charset=utf-8",
        "{listener}"
    );
    let text = answer.text().await.expect("text");
    families(&text).unwrap_or_else(|wrong| panic!("{listener}: {wrong}\n{text}"))
}

/// Sum of the samples of a metric; of a histogram, the count of its records and their sum.
fn recorded(families: &Families, name: &str, kind: &str) -> Vec<f64> {
    let Some(family) = families.get(name) else {
        return vec![0.0];
    };
    assert_eq!(family.kind, kind, "{name}");
    let parts: &[&str] = match kind {
        "histogram" => &["_count", "_sum"],
        _ => &[""],
    };
    let sum = |part: &&str| {
        let series = format!("{name}{part}");
        let own = family.samples.iter().filter(|(sample, _)| {
            let rest = sample.strip_prefix(series.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
        });
        own.map(|(_, value)| *value).sum::<f64>()
    };
    parts.iter().map(sum).collect()
}

/// A deposit, an issue, a trade, and an order that stays in the book with its hold.
async fn traffic(platform: &Platform) {
    let (buyer, seller) = (platform.rich("1000.00").await, platform.trader().await);
    let bond = platform.bond().await;
    platform.issue(&bond, &seller, "1").await;
    platform.place(&seller, &bond, "SELL", "10.00", "1").await;
    platform.place(&buyer, &bond, "BUY", "10.00", "2").await;
    platform.settled(&bond, 1).await;
}

/// Waits until the service's metrics have records. The depth of books is set at intervals.
async fn until_recorded(platform: &Platform, listener: &str, metrics: &[(&str, &str)]) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let now = scrape(platform, listener).await;
        let is_recorded = |(name, kind): &&(&str, &str)| {
            let recorded = recorded(&now, name, kind);
            recorded.iter().all(|value| *value > 0.0)
        };
        let missing: Vec<_> = metrics.iter().filter(|one| !is_recorded(one)).collect();
        if missing.is_empty() {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "timed out: {listener} has no {missing:?}"
        );
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

// rows: R262
#[test]
fn r262_every_port_serves_its_services_metrics_as_prometheus_text() {
    run(async {
        // Own platform: the calls below are counted exactly.
        let mut platform = Platform::start().await;
        traffic(&platform).await;
        for (at, (listener, method, metrics)) in (1_u8..).zip(PORTS) {
            until_recorded(&platform, listener, metrics).await;
            let path = format!("/{}", tests::path_of(method));
            let calls = format!(r#"rpc_requests_total{{method="{path}",code="unauthenticated"}}"#);
            let counted = |families: &Families| {
                let family = &families["rpc_requests_total"];
                assert_eq!(family.kind, "counter");
                family.samples.get(&calls).copied().unwrap_or(0.0)
            };
            let before = counted(&scrape(&platform, listener).await);
            // No service calls without a credential. The number differs per port.
            for _ in 0..at {
                let call = tests::process::client()
                    .post(format!("{}{path}", platform.url(listener)))
                    .json(&json!({}));
                let refused = call.send().await.expect("an answer");
                assert_eq!(refused.status().as_u16(), 401, "{path}");
            }
            let after = counted(&scrape(&platform, listener).await);
            assert_eq!(after - before, f64::from(at), "{calls} on {listener}");
        }
        platform.stop().await;
    });
}
