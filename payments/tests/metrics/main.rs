//! Metrics of the gateway, scraped from its port before and after.
//!
//! A separate test binary whose tests run one at a time, because the recorder is process-wide.

#[path = "../gateway/world.rs"]
#[allow(dead_code, reason = "each test target uses its part")]
mod world;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use proto::{
    common::v1::PaymentStatus,
    payments::v1::{self as wire, PaymentMethod},
};
use tokio::sync::{Mutex, MutexGuard};

use crate::world::{
    ALICE, World, ctx, ctx_with, intent_ask, payment_notice, rub, transfer_notice, until,
    valid_account,
};

const METHODS: [(PaymentMethod, &str); 3] = [
    (PaymentMethod::SbpQr, "SBP_QR"),
    (PaymentMethod::SbpC2b, "SBP_C2B"),
    (PaymentMethod::BankTransfer, "BANK_TRANSFER"),
];

/// Locks out the other tests; the caller holds the guard until its world has stopped.
async fn exclusive() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::const_new(());
    world::in_time("the lock of the tests", LOCK.lock()).await
}

/// A scrape of the port.
struct Scrape {
    /// By name and labels, as written.
    samples: BTreeMap<String, f64>,
    types: BTreeMap<String, String>,
}

impl Scrape {
    async fn of(world: &World) -> Scrape {
        let (status, body) = world.get("/metrics").await;
        assert_eq!(status, 200);
        let (mut samples, mut types) = (BTreeMap::new(), BTreeMap::new());
        for line in body.as_str().unwrap().lines() {
            if let Some(kind) = line.strip_prefix("# TYPE ") {
                let (name, kind) = kind.split_once(' ').unwrap();
                types.insert(name.to_owned(), kind.to_owned());
            } else if let Some((series, value)) = line.rsplit_once(' ')
                && !line.starts_with('#')
            {
                samples.insert(series.to_owned(), value.parse().unwrap());
            }
        }
        Scrape { samples, types }
    }

    /// A series that was never recorded is zero.
    fn value(&self, series: &str) -> f64 {
        self.samples.get(series).copied().unwrap_or(0.0)
    }

    /// Growth of the series of `name` since `before`; series that did not grow are left out.
    fn growth(&self, before: &Scrape, name: &str) -> BTreeMap<String, f64> {
        let of_name = |series: &str| series == name || series.starts_with(&format!("{name}{{"));
        let series = self.samples.keys().filter(|series| of_name(series));
        series
            .map(|series| (series.clone(), self.value(series) - before.value(series)))
            .filter(|(_, growth)| *growth != 0.0)
            .collect()
    }
}

fn series<const N: usize>(of: [(&str, f64); N]) -> BTreeMap<String, f64> {
    of.map(|(name, value)| (name.to_owned(), value)).into()
}

// rows: R270
#[tokio::test]
async fn r270_payment_intents_created_total_counts_by_method() {
    let _turn = exclusive().await;
    let world = World::start().await;
    let before = Scrape::of(&world).await;
    for (times, (method, _)) in (1..).zip(METHODS) {
        for _ in 0..times {
            world.create_intent("5.00", method).await;
        }
    }
    // A repeated key and a refusal create nothing.
    let mut ask = intent_ask(ALICE, "5.00", PaymentMethod::SbpQr);
    ask.context = ctx_with("once");
    for _ in 0..2 {
        let created = world.payments().create_payment_intent(ask.clone()).await;
        created.unwrap();
    }
    let over = intent_ask(ALICE, "600000.01", PaymentMethod::SbpQr);
    let refused = world.payments().create_payment_intent(over).await;
    refused.unwrap_err();

    let name = "payment_intents_created_total";
    let after = Scrape::of(&world).await;
    assert_eq!(
        after.growth(&before, name),
        series([
            (r#"payment_intents_created_total{method="SBP_QR"}"#, 2.0),
            (r#"payment_intents_created_total{method="SBP_C2B"}"#, 2.0),
            (
                r#"payment_intents_created_total{method="BANK_TRANSFER"}"#,
                3.0
            ),
        ])
    );
    assert_eq!(after.types[name], "counter");
    world.stop().await;
}

// rows: R271
#[tokio::test]
async fn r271_payment_webhooks_received_total_counts_by_status() {
    let _turn = exclusive().await;
    let world = World::start().await;
    let intent = world.qr("5.00").await;
    let notice = |status: &str| payment_notice(&intent.payment_id, status, "5.00");
    let before = Scrape::of(&world).await;
    for (index, status) in [
        "PENDING", "FAILED", "FAILED", "EXPIRED", "SUCCESS", "SUCCESS",
    ]
    .into_iter()
    .enumerate()
    {
        let (webhook_id, notice) = (format!("w{index}"), notice(status));
        let (answer, _) = world.post_webhook(&webhook_id, &notice).await;
        assert_eq!(answer, 200, "{status}");
    }
    let forged = notice("SUCCESS");
    let (answer, _) = world.post_signed("w9", 1, "v1,AAAA", &forged).await;
    assert_eq!(answer, 401);
    assert_eq!(world.post_webhook("w8", "{}").await.0, 400);
    // The transfer of a payout is reported by the same webhook.
    let transfer = transfer_notice("t1", "none", "FAILED", "1.00");
    assert_eq!(world.post_webhook("w7", &transfer).await.0, 404);

    let name = "payment_webhooks_received_total";
    let after = Scrape::of(&world).await;
    let of = |status: &str| format!(r#"{name}{{status="{status}"}}"#);
    let expected = [
        ("PENDING", 1.0),
        ("FAILED", 3.0),
        ("EXPIRED", 1.0),
        ("SUCCESS", 2.0),
        ("INVALID_SIGNATURE", 1.0),
        ("MALFORMED", 1.0),
    ];
    let expected = expected.map(|(status, count)| (of(status), count));
    assert_eq!(after.growth(&before, name), expected.into());
    assert_eq!(after.types[name], "counter");
    world.stop().await;
}

// rows: R272
#[tokio::test]
async fn r272_payment_processing_duration_seconds_is_a_histogram_by_method() {
    let _turn = exclusive().await;
    let world = World::start().await;
    let before = Scrape::of(&world).await;
    let began = Instant::now();
    // How long each method's payment takes.
    let delay = |method: PaymentMethod| Duration::from_millis(100 * method as u64);
    for (method, label) in METHODS {
        let intent = world.create_intent("5.00", method).await;
        let id = intent.payment_id.as_str();
        // Only the first success ends the processing.
        for (webhook_id, status) in [("1", "FAILED"), ("2", "SUCCESS"), ("3", "SUCCESS")] {
            if webhook_id == "2" {
                tokio::time::sleep(delay(method)).await;
            }
            let notice = payment_notice(id, status, "5.00");
            let webhook_id = format!("{label}-{webhook_id}");
            let (answer, _) = world.post_webhook(&webhook_id, &notice).await;
            assert_eq!(answer, 200, "{label} {status}");
        }
    }
    let elapsed_s = began.elapsed().as_secs_f64();

    let name = "payment_processing_duration_seconds";
    let after = Scrape::of(&world).await;
    assert_eq!(after.types[name], "histogram");
    for (method, label) in METHODS {
        let grown = |series: String| after.value(&series) - before.value(&series);
        let labels = format!(r#"method="{label}""#);
        assert_eq!(grown(format!("{name}_count{{{labels}}}")), 1.0, "{label}");
        let last = format!(r#"{name}_bucket{{{labels},le="+Inf"}}"#);
        assert_eq!(grown(last), 1.0, "{label}");
        // Seconds, not another unit: no processing is shorter than its delay, or longer than all of
        // them together. The clock of the service has whole microseconds and may be slewed, by less
        // than 1%.
        let sum_s = grown(format!("{name}_sum{{{labels}}}"));
        let least_s = delay(method).as_secs_f64() * 0.99;
        assert!(
            (least_s..elapsed_s + 1.0).contains(&sum_s),
            "{label}: {sum_s}"
        );
    }
    world.stop().await;
}

// rows: R273
#[tokio::test]
async fn r273_reconciliation_duration_seconds_is_a_histogram_of_reconciliations() {
    let _turn = exclusive().await;
    let world = World::start().await;
    let before = Scrape::of(&world).await;
    let delay = Duration::from_millis(300);
    *world.cfa.supply_delay.lock().unwrap() = delay;
    let began = Instant::now();
    let ask = wire::ReconcileRequest {
        context: ctx(),
        business_date: None,
    };
    // The repeated key returns the stored report.
    for _ in 0..2 {
        world.payments().reconcile(ask.clone()).await.unwrap();
    }
    let elapsed_s = began.elapsed().as_secs_f64();

    let name = "reconciliation_duration_seconds";
    let after = Scrape::of(&world).await;
    let grown = |suffix: &str| {
        let series = format!("{name}{suffix}");
        after.value(&series) - before.value(&series)
    };
    assert_eq!(after.types[name], "histogram");
    assert_eq!(grown("_count"), 1.0);
    assert_eq!(grown(r#"_bucket{le="+Inf"}"#), 1.0);
    let sum_s = grown("_sum");
    let expected = delay.as_secs_f64()..=elapsed_s;
    assert!(expected.contains(&sum_s), "{sum_s} s, {expected:?}");
    assert_eq!(
        after.growth(&before, "reconciliations_total"),
        series([(r#"reconciliations_total{result="balanced"}"#, 1.0)])
    );
    world.stop().await;
}

/// Waits until a series has such a value.
async fn becomes(world: &World, series: &str, is_such: impl Fn(f64) -> bool) -> Scrape {
    until(async || {
        let scrape = Scrape::of(world).await;
        is_such(scrape.value(series)).then_some(scrape)
    })
    .await
}

// rows: R133
#[tokio::test]
async fn r133_an_unexplained_difference_is_a_gauge_with_its_age() {
    const OPEN: &str = "payments_bank_difference_open";
    const AGE: &str = "payments_bank_difference_age_seconds";
    let _turn = exclusive().await;
    let world = World::start().await;
    world.fund("100.00").await;
    assert!(!world.reconcile().await.balanced, "the supply is 0");
    let first = becomes(&world, OPEN, |open| open == 1.0).await.value(AGE);
    becomes(&world, AGE, |age| age > first).await;
    world.cfa.set_supply("100.00", 2);
    assert!(world.reconcile().await.balanced);
    becomes(&world, OPEN, |open| open == 0.0).await;
    let last = becomes(&world, AGE, |age| age == 0.0).await;
    assert_eq!(last.value(AGE), 0.0);
    assert_eq!((&*last.types[OPEN], &*last.types[AGE]), ("gauge", "gauge"));
    world.stop().await;
}

#[tokio::test]
async fn reused_keys_are_counted_by_call() {
    let _turn = exclusive().await;
    let world = World::start().await;
    let before = Scrape::of(&world).await;
    for amount in ["5.00", "6.00"] {
        let mut ask = intent_ask(ALICE, amount, PaymentMethod::SbpQr);
        ask.context = ctx_with("k1");
        world.payments().create_payment_intent(ask).await.unwrap();
    }
    world.set_account(ALICE, &valid_account()).await;
    for payout_id in ["po-1", "po-2", "po-3"] {
        let ask = wire::InitiatePayoutRequest {
            context: ctx_with("k1"),
            payout: Some(wire::PayoutRequest {
                payout_id: payout_id.into(),
                user_id: ALICE.into(),
                amount: rub("10.00"),
                bank_account: valid_account(),
            }),
        };
        world.services().initiate_payout(ask).await.unwrap();
    }
    let after = Scrape::of(&world).await;
    assert_eq!(
        after.growth(&before, "idempotency_mismatches_total"),
        series([
            (
                r#"idempotency_mismatches_total{call="CreatePaymentIntent"}"#,
                1.0
            ),
            (
                r#"idempotency_mismatches_total{call="InitiatePayout"}"#,
                2.0
            ),
        ])
    );
    let listed = world
        .payments()
        .list_payouts(wire::ListPayoutsRequest {
            status: PaymentStatus::Pending as i32,
            ..Default::default()
        })
        .await
        .unwrap();
    assert_eq!(listed.into_inner().payouts.len(), 1);
    world.stop().await;
}
