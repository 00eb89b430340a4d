//! Two issues are redeemed at their maturity, one with ten times the holders of the other. Every
//! 20th holder has an open sell order for all units. Prints both rates, their ratio, and the rows
//! per second of the full check of all stores. Asserts outcomes, and no times.
//!
//! `cargo xtask maturity` runs it on a release build.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tests::Platform;
use tests::bank::now_s;
use tests::call::{AUDITOR, number, text};
use tests::flow::Random;
use tests::shared::run;
use tests::world::{User, amount};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Calls in flight.
const CALLS: usize = 32;
/// Holders per line of progress.
const HOLDERS_PER_LINE: usize = 1_000;
/// Time between two lines of progress of a wait.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// Of this many holders, one has an open order.
const HOLDERS_PER_ORDER: usize = 20;
/// Price of the orders, in roubles. There are no bids.
const PRICE: &str = "2.00";
/// Maximum of a holder's units.
const UNITS_MAX: u64 = 9;
/// Nominal of a unit, in kopecks.
const NOMINAL_MINOR: u64 = 101;
/// Time from the registration of an issue to its maturity: this, and a time per holder.
const ISSUE_S: i64 = 30;
/// Time per holder of the smaller issue, in seconds. That of the larger one is measured.
const HOLDER_S: f64 = 0.05;

/// A user with units of one issue.
struct Holder {
    user: User,
    units: u64,
}

/// Figures of one issue.
struct Figures {
    holders: usize,
    /// From the registration until all holders have their units and orders, per holder.
    prepared_s_per_holder: f64,
    /// From the maturity until the redemption is recorded.
    recorded_s: f64,
    /// From the maturity until the redemption is final.
    finalized_s: f64,
}

impl Figures {
    fn holders_per_s(&self) -> f64 {
        self.holders as f64 / self.finalized_s
    }
}

/// Kopecks as roubles.
fn roubles(minor: u64) -> String {
    format!("{}.{:02}", minor / 100, minor % 100)
}

/// New users with their numbers of units.
async fn new_holders(platform: &Platform, count: usize, random: &mut Random) -> Vec<Holder> {
    let units: Vec<u64> = (0..count).map(|_| 1 + random.below(UNITS_MAX)).collect();
    let made = stream::iter(units).map(|units| async move {
        let user = platform.trader().await;
        Holder { user, units }
    });
    made.buffered(CALLS).collect().await
}

/// Registers and activates an issue and gives its issuer the money for its redemption.
async fn funded_issue(platform: &Platform, matures_at: OffsetDateTime, units: u64) -> String {
    let matures_at = matures_at.format(&Rfc3339).expect("a text");
    let fields = json!({
        "maturesAt": matures_at, "nominal": { "value": roubles(NOMINAL_MINOR) },
        "issueLimit": { "value": units.to_string() },
    });
    let bond = platform.instrument(fields).await;
    let issuer = platform.issuer(&bond).await;
    let due = roubles(units * NOMINAL_MINOR);
    platform.set_limit(&issuer, "DEPOSIT", &due).await;
    platform.deposit(&issuer, &due).await;
    bond
}

/// Issues the units of all holders and waits until they are available.
async fn give_units(platform: &Platform, bond: &str, holders: &[Holder], units: u64) {
    let issuer = platform.issuer_of(bond).await;
    let (begun, mut done) = (Instant::now(), 0);
    for part in holders.chunks(HOLDERS_PER_LINE) {
        stream::iter(part)
            .for_each_concurrent(CALLS, |holder| issue_to(platform, &issuer, bond, holder))
            .await;
        done += part.len();
        let (count, per_s) = (holders.len(), done as f64 / begun.elapsed().as_secs_f64());
        println!("issued to {done} of {count} holders, {per_s:.0} holders/s");
    }
    let (all, none) = (number(&json!(units.to_string())), number(&Value::Null));
    loop {
        let found = sums(platform, bond).await;
        let unsettled = number(&found["unsettled"]);
        if number(&found["circulating"]) == all && unsettled == none {
            return;
        }
        println!("{unsettled} of {units} units await the chain");
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

async fn issue_to(platform: &Platform, issuer: &str, bond: &str, holder: &Holder) {
    let request = json!({
        "instrumentId": bond, "investorId": holder.user.id, "bookbuildingId": "maturity",
        "amount": amount(bond, &holder.units.to_string()),
    });
    let answer = platform.ok(issuer, "cfa.IssueInvestmentCfa", request).await;
    let rejected = json!("OPERATION_STATUS_REJECTED");
    assert_ne!(answer["operation"]["status"], rejected, "{answer}");
}

/// Places an order of a holder to sell all units.
async fn offer_units(platform: &Platform, bond: &str, holder: &Holder) {
    let (user, units) = (&holder.user, holder.units.to_string());
    let order = platform.place(user, bond, "SELL", PRICE, &units).await;
    assert_eq!(order["status"], json!("ORDER_STATUS_OPEN"), "{order}");
}

/// The sums of an issue over all sub-accounts of the ledger.
async fn sums(platform: &Platform, bond: &str) -> Value {
    let request = json!({ "instrumentId": bond });
    let answer = platform.ok(AUDITOR, "ledger.GetTrialBalance", request);
    answer.await["lines"][0].clone()
}

/// Waits until the redemption of an issue is final; returns it.
async fn redeemed(platform: &Platform, bond: &str) -> Value {
    let request = json!({ "instrumentId": bond, "pagination": { "pageSize": 1 } });
    let finalized = json!("REDEMPTION_STATUS_FINALIZED");
    let failed = json!("REDEMPTION_STATUS_FAILED");
    let mut line_at = Instant::now() + LINE_INTERVAL;
    loop {
        let read = platform.call(AUDITOR, "cfa.GetRedemption", request.clone());
        let redemption = match read.await {
            Ok(answer) => answer["redemption"].clone(),
            Err(refusal) => {
                assert!(!refusal.is_fault(), "{refusal:?}");
                Value::Null
            }
        };
        if redemption["status"] == finalized {
            return redemption;
        }
        assert_ne!(redemption["status"], failed, "{redemption}");
        if Instant::now() >= line_at {
            let status = redemption["status"].as_str().unwrap_or("not started");
            let left = number(&sums(platform, bond).await["circulating"]);
            println!("redemption: {status}, {left} units left");
            line_at = Instant::now() + LINE_INTERVAL;
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Sub-accounts of an instrument by id.
async fn subaccounts(platform: &Platform, instrument: &str) -> HashMap<String, Value> {
    let request = json!({ "instrumentId": instrument });
    let name = "ledger.ListSubAccounts";
    let rows = platform.all(AUDITOR, name, "subaccounts", request).await;
    let by_id = |row: Value| (text(&row, "/subaccountId"), row);
    rows.into_iter().map(by_id).collect()
}

/// Asserts that each holder has the exact payment, that no unit is left in ledger and contract, and
/// that all orders are cancelled. The issuer has no money left.
async fn assert_redeemed(platform: &Platform, bond: &str, holders: &[Holder]) {
    let none = number(&Value::Null);
    let money = subaccounts(platform, "CFA-RUB").await;
    for holder in holders {
        let due = number(&json!(roubles(holder.units * NOMINAL_MINOR)));
        let paid = &money[&holder.user.cash()];
        let found = [number(&paid["balance"]), number(&paid["available"])];
        assert_eq!(found, [due, due], "{paid}");
    }
    let issuer = platform.issuer(bond).await;
    let left = &money[&issuer.cash()];
    assert_eq!(number(&left["balance"]), none, "{left}");

    let units = subaccounts(platform, bond).await;
    for holder in holders {
        assert!(units.contains_key(&holder.user.units(bond)));
    }
    for row in units.values() {
        for field in ["balance", "held", "unsettled"] {
            assert_eq!(number(&row[field]), none, "{row}");
        }
    }
    let request = json!({ "instrumentId": bond });
    let supply = platform.ok(AUDITOR, "cfa.GetSupply", request.clone()).await;
    assert_eq!(number(&supply["totalSupply"]), none, "{supply}");
    let issue = platform.ok(AUDITOR, "cfa.GetInstrument", request.clone());
    let issue = issue.await;
    let status = &issue["instrument"]["status"];
    assert_eq!(*status, json!("INSTRUMENT_STATUS_REDEEMED"), "{issue}");

    let orders = platform.all(AUDITOR, "market.ListOrders", "orders", request);
    let orders = orders.await;
    assert_eq!(orders.len(), holders.len().div_ceil(HOLDERS_PER_ORDER));
    let matured = json!("INSTRUMENT_MATURED");
    for order in &orders {
        assert_eq!(order["status"], json!("ORDER_STATUS_CANCELLED"), "{order}");
        assert_eq!(order["cancelReason"], matured, "{order}");
    }
}

/// Redeems a new issue at its maturity. `holder_s`: time per holder from registration to maturity.
async fn mature(platform: &Platform, count: usize, holder_s: f64, random: &mut Random) -> Figures {
    println!("an issue with {count} holders");
    let holders = new_holders(platform, count, random).await;
    let units: u64 = holders.iter().map(|holder| holder.units).sum();
    let begun = Instant::now();
    let matures_s = now_s() + ISSUE_S + (count as f64 * holder_s).ceil() as i64;
    let matures_at = OffsetDateTime::from_unix_timestamp(matures_s).expect("a time");
    let bond = funded_issue(platform, matures_at, units).await;
    give_units(platform, &bond, &holders, units).await;
    stream::iter(holders.iter().step_by(HOLDERS_PER_ORDER))
        .for_each_concurrent(CALLS, |holder| offer_units(platform, &bond, holder))
        .await;
    let prepared_s = begun.elapsed().as_secs_f64();
    let left_s = matures_s - now_s();
    println!("holders and orders are ready after {prepared_s:.0} s, maturity is in {left_s} s");
    assert!(left_s > 0, "the issue matured before they were ready");

    let redemption = redeemed(platform, &bond).await;
    let after_maturity_s = |field: &str| {
        let at = OffsetDateTime::parse(&text(&redemption, field), &Rfc3339);
        (at.expect("a time") - matures_at).as_seconds_f64()
    };
    assert_redeemed(platform, &bond, &holders).await;
    Figures {
        holders: count,
        prepared_s_per_holder: prepared_s / count as f64,
        recorded_s: after_maturity_s("/createdAt"),
        finalized_s: after_maturity_s("/finalizedAt"),
    }
}

/// Redeems an issue with a tenth of the holders, then one with all, and checks every row.
async fn compare(platform: &Platform, count: usize, random: &mut Random) {
    let tenth = mature(platform, count / 10, HOLDER_S, random).await;
    // Twice the measured time.
    let holder_s = 2.0 * tenth.prepared_s_per_holder;
    let all = mature(platform, count, holder_s, random).await;
    for of in [&tenth, &all] {
        println!(
            "maturity of {} holders: recorded after {:.1} s, final after {:.1} s, {:.0} holders/s",
            of.holders,
            of.recorded_s,
            of.finalized_s,
            of.holders_per_s()
        );
    }
    let ratio = all.holders_per_s() / tenth.holders_per_s();
    println!("ratio of the rates: {ratio:.2} (in linear time at least 0.8)");
    let checked = platform.full_proof().await.success().json();
    assert_eq!(checked["ok"], json!(true), "{checked}");
    let check = &checked["check"];
    println!(
        "platform proof --full: ok, {} rows in {} ms, {} rows/s",
        check["rows"], check["elapsed_ms"], check["rows_per_s"]
    );
}

/// A number from an environment variable.
fn env_number(name: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(name) else {
        return default;
    };
    text.parse()
        .unwrap_or_else(|_| panic!("{name}={text} is not a number"))
}

/// `MATURITY_HOLDERS` and `MATURITY_MINUTES` (the time limit) override the defaults.
// rows: R097 R102
#[test]
fn r102_all_holders_with_and_without_open_orders_are_paid_once_at_maturity() {
    let count = usize::try_from(env_number("MATURITY_HOLDERS", 10_000)).expect("few");
    assert!(count >= 10, "at least 10 holders, so that a tenth has one");
    let limit = Duration::from_secs(60 * env_number("MATURITY_MINUTES", 30));
    let mut random = Random::new(tests::seed::seed(1));
    run(async {
        let platform = Platform::start().await;
        let compared = compare(&platform, count, &mut random);
        let ended = tokio::time::timeout(limit, compared).await;
        assert!(ended.is_ok(), "not done within {limit:?}");
    });
}
