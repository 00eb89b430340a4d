//! The platform is killed at each step of the sagas of an issue: the end of its placement, the
//! payment of a coupon, and the move of its holders to a new token; and at those of a trading hold.
//! Each saga ends once, and the proof of balances passes.
//!
//! `sagas` kills at the steps of the activation of an issue and of its redemption.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tests::Platform;
use tests::call::{AUDITOR, OPERATOR, SERVICE, context_with_key, number, staff, text};
use tests::kill::{asked, killed_at};
use tests::process::PATIENCE;
use tests::relay::RelayedChain;
use tests::shared::run;
use tests::world::{User, amount, rub};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

const DAY_S: i64 = 24 * 3_600;
/// Period of the placements: time to register all of them and to subscribe, on a loaded machine.
const PERIOD_S: i64 = 30;
/// Steps of a placement whose units are allotted.
const ALLOTMENT: [&str; 8] = [
    "cfa.placement_decided",
    "cfa.placement_mint_posted",
    "cfa.placement_minted",
    "cfa.placement_part_recorded",
    "cfa.placement_part_posted",
    "cfa.placement_part_exchanged",
    "cfa.placement_part_final",
    "cfa.placement_paid",
];
/// Steps of a coupon after its snapshot: the funding, then the part with all holders.
const COUPON: [&str; 6] = [
    "cfa.redemption_submitted",
    "cfa.redemption_step",
    "cfa.part_posted",
    "cfa.redemption_submitted:2",
    "cfa.redemption_step:2",
    "cfa.part_ended",
];
const UPDATE: &str = "cfa.UpdateInstrument";
/// Soon after a start, a hold that the journal does not know is taken for one without a call.
const SWEPT_SOON: [(&str, &str); 2] = [
    ("PLATFORM_MARKET__ORPHAN_HOLD_AGE_MS", "1000"),
    ("PLATFORM_MARKET__SWEEP_INTERVAL_MS", "200"),
];

/// The time in `seconds`; negative: that long ago.
fn in_seconds(seconds: i64) -> String {
    let at = OffsetDateTime::from_unix_timestamp(tests::bank::now_s() + seconds);
    at.expect("a time").format(&Rfc3339).expect("a text")
}

/// The request that gives an issue this status, stated without its prefix.
fn with_status(bond: &str, status: &str) -> Value {
    json!({ "instrumentId": bond, "status": format!("INSTRUMENT_STATUS_{status}") })
}

/// Registers and activates an issue of two units, which are placed for at least `minimum` roubles.
async fn placed(platform: &Platform, closes_at: &str, minimum: &str) -> String {
    let fields = json!({
        "issueLimit": { "value": "2" },
        "placement": {
            "opensAt": in_seconds(-60), "closesAt": closes_at,
            "minimumSum": { "value": minimum }, "allotment": "ALLOTMENT_RULE_PRO_RATA",
        },
    });
    let (bond, issuer) = platform.draft(fields).await;
    platform.activate(&bond, &issuer).await;
    let active = json!("INSTRUMENT_STATUS_ACTIVE");
    let request = json!({ "instrumentId": bond });
    platform
        .until("the issue", "cfa.GetInstrument", request, |answer| {
            answer["instrument"]["status"] == active
        })
        .await;
    bond
}

/// A subscription to units at 1000.00. Repeats have the same key.
fn subscription(bond: &str, user: &User, units: u32) -> Value {
    json!({
        "context": context_with_key(&uuid::Uuid::now_v7().to_string()),
        "instrumentId": bond, "investorId": user.id,
        "amount": amount(bond, &units.to_string()),
        "payment": amount("CFA-RUB", &format!("{units}000.00")),
    })
}

/// Subscribes, and repeats the call until the payment is held.
async fn subscribed(platform: &Platform, user: &User, request: &Value) {
    let active = json!("SUBSCRIPTION_STATUS_ACTIVE");
    let (token, deadline) = (user.token(), Instant::now() + PATIENCE);
    loop {
        let answer = platform.ok(&token, "cfa.Subscribe", request.clone()).await;
        if answer["subscription"]["status"] == active {
            return;
        }
        assert!(Instant::now() < deadline, "{answer}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Waits until the placement of an issue has this status, given without its prefix; returns it.
async fn placement_is(platform: &Platform, bond: &str, status: &str) -> Value {
    let wanted = json!(format!("PLACEMENT_STATUS_{status}"));
    let request = json!({ "instrumentId": bond });
    let what = format!("the placement to be {status}");
    let found = platform
        .until(&what, "cfa.GetInstrument", request, |answer| {
            answer["instrument"]["placement"]["status"] == wanted
        })
        .await;
    found["instrument"]["placement"].clone()
}

/// Waits until a user has this money, in roubles, of which a part is available.
async fn has_money(platform: &Platform, user: &User, balance: u32, available: u32) {
    let wanted = [balance, available].map(|money| number(&json!(format!("{money}.00"))));
    let request = json!({ "subaccountId": user.cash() });
    let what = format!("{} to have {balance}, available {available}", user.id);
    platform
        .until(&what, "ledger.GetBalance", request, |answer| {
            [number(&answer["balance"]), number(&answer["available"])] == wanted
        })
        .await;
}

/// Kills the platform at each step of the end of a placement that does not reach its minimum. Other
/// placements may end at the same time if their issues are halted.
async fn fails_once(platform: &mut Platform, bond: &str) {
    platform.stop().await;
    for place in [
        "cfa.placement_closing",
        "cfa.placement_decided",
        "cfa.placement_released",
        "cfa.offer_limits_ended",
    ] {
        // It aborts before or after it is ready.
        platform
            .start_refused_with(&[("PLATFORM_CRASH_AT", place)])
            .await;
    }
    platform.restart().await;
    let failed = placement_is(platform, bond, "FAILED").await;
    assert_eq!(number(&failed["raised"]), number(&Value::Null), "{failed}");
}

#[test]
fn f34_a_placement_killed_at_any_step_ends_once() {
    run(async {
        let mut platform = Platform::start().await;
        let alice = platform.rich("20000.00").await;
        let bob = platform.rich("10000.00").await;
        let closes_at = in_seconds(PERIOD_S);
        let failing = placed(&platform, &closes_at, "2000.00").await;
        let request = subscription(&failing, &alice, 1);
        let (place, name) = ("cfa.subscription_reserved", "cfa.Subscribe");
        killed_at(&mut platform, place, &alice.token(), name, request.clone()).await;
        subscribed(&platform, &alice, &request).await;
        let mut bonds = Vec::new();
        for _ in ALLOTMENT {
            let bond = placed(&platform, &closes_at, "1000.00").await;
            subscribed(&platform, &alice, &subscription(&bond, &alice, 2)).await;
            subscribed(&platform, &bob, &subscription(&bond, &bob, 1)).await;
            // A halted issue is not allotted, so that each one ends in its own round.
            let halt = with_status(&bond, "HALTED");
            platform.ok(SERVICE, UPDATE, halt).await;
            bonds.push(bond);
        }
        fails_once(&mut platform, &failing).await;
        has_money(&platform, &alice, 20_000, 4_000).await;
        platform.proof().await;

        for ((place, bond), done) in ALLOTMENT.into_iter().zip(&bonds).zip(1..) {
            let resume = with_status(bond, "ACTIVE");
            killed_at(&mut platform, place, SERVICE, UPDATE, resume).await;
            let placement = placement_is(&platform, bond, "PLACED").await;
            let raised = number(&placement["raised"]);
            assert_eq!(raised, number(&json!("2000.00")), "{place}");
            platform.balance_is(&alice.units(bond), "1").await;
            platform.balance_is(&bob.units(bond), "1").await;
            let paid = 1_000 * done;
            has_money(&platform, &alice, 20_000 - paid, 4_000 + paid).await;
            has_money(&platform, &bob, 10_000 - paid, 2_000).await;
            let issuer = platform.issuer(bond).await;
            platform.balance_is(&issuer.cash(), "2000.00").await;
            platform.proof().await;
        }
        platform.stop().await;
    });
}

/// Kopecks as roubles.
fn roubles(minor: u32) -> String {
    format!("{}.{:02}", minor / 100, minor % 100)
}

/// Waits until the coupon of an issue is paid.
async fn is_paid(platform: &Platform, bond: &str) {
    let paid = json!("COUPON_STATUS_PAID");
    let request = json!({ "instrumentId": bond });
    platform
        .until("the coupon", "cfa.ListCoupons", request, |answer| {
            answer["coupons"][0]["status"] == paid
        })
        .await;
}

/// A platform that is stopped, with `count` issues of which two users have two units and one. Each
/// has a coupon whose day is over, and of which no snapshot is recorded.
async fn with_due_coupons(count: usize) -> (RelayedChain, Platform, [User; 2], Vec<String>) {
    let (chain, mut platform) = RelayedChain::start().await;
    chain.turn_back(4 * DAY_S.unsigned_abs());
    let pays_at = in_seconds(-2 * DAY_S);
    // The next sweep records the coupons. It must not come before the issues have holders.
    platform.stop().await;
    let mut env = chain.env("").to_vec();
    env.push(("PLATFORM_CFA__SWEEP_INTERVAL_MS", "3600000"));
    platform.restart_with(&env).await;
    let users = [platform.trader().await, platform.trader().await];
    let mut bonds = Vec::new();
    for _ in 0..count {
        let coupon = json!({ "paysAt": pays_at, "amount": { "value": "35.505" } });
        let bond = platform.instrument(json!({ "coupons": [coupon] })).await;
        platform.issue(&bond, &users[0], "2").await;
        platform.issue(&bond, &users[1], "1").await;
        bonds.push(bond);
    }
    platform.stop().await;
    (chain, platform, users, bonds)
}

// rows: R100
#[test]
fn r100_a_coupon_by_the_calendar_killed_at_any_step_pays_each_holder_once() {
    run(async {
        let (chain, mut platform, [alice, bob], bonds) = with_due_coupons(1 + COUPON.len()).await;
        // No issuer has money, so that each coupon is paid in its own round.
        let recorded = chain.env("cfa.coupon_recorded");
        platform.start_refused_with(&recorded).await;
        platform.restart_with(&chain.env("")).await;
        let places = [None].into_iter().chain(COUPON.map(Some));
        for ((place, bond), round) in places.zip(&bonds).zip(1..) {
            let issuer = platform.issuer(bond).await;
            let intent = platform.intent(&issuer, "200.00").await;
            if let Some(place) = place {
                let pay = json!({ "qrPayload": text(&intent, "/qrPayload") });
                platform.stop().await;
                platform.restart_with(&chain.env(place)).await;
                asked(&platform, OPERATOR, "sandbox.Pay", pay).await;
                platform.aborted().await;
                platform.restart_with(&chain.env("")).await;
            } else {
                platform.pay(&intent).await;
            }
            is_paid(&platform, bond).await;
            // Rounded half up per holder.
            for (user, minor, units) in [(&alice, 7_101, "2"), (&bob, 3_551, "1")] {
                let cash = roubles(minor * round);
                platform.balance_is(&user.cash(), &cash).await;
                platform.balance_is(&user.units(bond), units).await;
            }
            platform.balance_is(&issuer.cash(), "93.48").await;
            platform.proof().await;
        }
        platform.stop().await;
    });
}

/// Address of the token of an issue.
async fn token_of(platform: &Platform, bond: &str) -> String {
    let request = json!({ "instrumentId": bond });
    let found = platform.ok(AUDITOR, "cfa.GetInstrument", request).await;
    text(&found, "/instrument/smartContractAddress")
}

#[test]
fn a_move_of_all_holders_killed_at_any_step_ends_once() {
    // One part, and nine other transactions.
    let steps = (1..=10).map(|time| format!("cfa.move_step:{time}"));
    let others = [
        "cfa.move_submitted:2",
        "cfa.move_submitted:7",
        "cfa.move_listed",
        "cfa.move_ended",
    ];
    run(async {
        let mut platform = Platform::start().await;
        let (alice, bob) = (platform.trader().await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &alice, "3").await;
        platform.issue(&bond, &bob, "2").await;
        let halt = with_status(&bond, "HALTED");
        platform.ok(SERVICE, UPDATE, halt).await;
        let request = json!({ "instrumentId": bond });
        let done = json!("HOLDER_MOVE_STATUS_DONE");
        for place in steps.chain(others.map(str::to_owned)) {
            let old = token_of(&platform, &bond).await;
            let ask = json!({ "instrumentId": bond, "reason": place });
            let decision = platform.requested("cfa.MoveHolders", &ask).await;
            let (boris, name) = (staff("boris"), "approvals.Approve");
            killed_at(&mut platform, &place, &boris, name, decision.clone()).await;
            platform.executed(&decision).await;
            let request = request.clone();
            let moved = platform
                .until(&place, "cfa.GetHolderMove", request, |answer| {
                    answer["holderMove"]["status"] == done
                })
                .await;
            let moved = &moved["holderMove"];
            let new = token_of(&platform, &bond).await;
            assert_eq!(moved["reason"], json!(place), "{moved}");
            assert_eq!(moved["oldContractAddress"], json!(old), "{moved}");
            assert_eq!(moved["newContractAddress"], json!(new), "{moved}");
            assert_eq!(moved["partsDone"], json!("1"), "{moved}");
            platform.balance_is(&alice.units(&bond), "3").await;
            platform.balance_is(&bob.units(&bond), "2").await;
            platform.proof().await;
        }
        platform.stop().await;
    });
}

/// Kills the platform at a step of a call of a user, and waits until ledger and market agree on the
/// money that is held for trading. There is no repeat of the call.
async fn held_after(
    platform: &mut Platform,
    user: &User,
    place: &str,
    (name, request): (&str, Value),
    held: &str,
) {
    platform.stop().await;
    platform.restart_with(&[("PLATFORM_CRASH_AT", place)]).await;
    asked(platform, &user.token(), name, request).await;
    platform.aborted().await;
    platform.restart_with(&SWEPT_SOON).await;
    let wanted = number(&json!(held));
    let what = format!("{held} to be held for trading after {place}");
    let request = json!({ "userId": user.id });
    platform
        .until(&what, "market.ListTradingHolds", request, |answer| {
            let mut holds = answer["tradingHolds"].as_array().into_iter().flatten();
            let open = holds.find(|hold| hold["status"] == json!("TRADING_HOLD_STATUS_OPEN"));
            number(open.map_or(&Value::Null, |hold| &hold["undrawn"])) == wanted
        })
        .await;
    let request = json!({ "subaccountId": user.cash() });
    platform
        .until(&what, "ledger.GetBalance", request, |answer| {
            number(&answer["held"]) == wanted
        })
        .await;
    platform.proof().await;
}

/// A redemption of money. Repeats have the same key.
fn redemption(user: &User, roubles: &str) -> Value {
    let payout = uuid::Uuid::now_v7().to_string();
    json!({
        "context": context_with_key(&payout), "userId": user.id, "payoutId": payout,
        "amount": rub(roubles),
    })
}

// rows: R087 R160
#[test]
fn money_held_for_trading_is_held_or_withdrawn_once_whatever_step_is_killed() {
    run(async {
        let place = ("PLATFORM_CRASH_AT", "cfa.limits_ended");
        let mut platform = Platform::start_with(&[place]).await;
        let user = platform.trader().await;
        let intent = platform.intent(&user, "1000.00").await;
        let pay = json!({ "qrPayload": text(&intent, "/qrPayload") });
        asked(&platform, OPERATOR, "sandbox.Pay", pay).await;
        platform.aborted().await;
        platform.restart().await;
        has_money(&platform, &user, 1_000, 1_000).await;

        let open = json!({
            "userId": user.id, "instrumentId": "CFA-RUB", "amount": { "value": "600.00" },
        });
        let call = ("market.OpenTradingHold", open);
        let place = "market.trading_hold_opened";
        held_after(&mut platform, &user, place, call, "600.00").await;
        let request = json!({ "userId": user.id });
        let holds = platform.all(AUDITOR, "market.ListTradingHolds", "tradingHolds", request);
        let hold = text(&holds.await[0], "/holdId");
        for (place, held) in [
            ("market.hold_grown", "800.00"),
            ("market.hold_taken", "500.00"),
        ] {
            let adjust = json!({ "holdId": hold, "undrawn": { "value": held } });
            let call = ("market.AdjustTradingHold", adjust);
            held_after(&mut platform, &user, place, call, held).await;
        }
        has_money(&platform, &user, 1_000, 500).await;

        // The trading hold covers 200.00 of it.
        let redeem = redemption(&user, "700.00");
        let (place, name) = ("cfa.gated", "cfa.RedeemCfaRub");
        killed_at(&mut platform, place, &user.token(), name, redeem).await;
        has_money(&platform, &user, 300, 0).await;
        platform.proof().await;
        let call = ("market.CloseTradingHold", json!({ "holdId": hold }));
        held_after(&mut platform, &user, "market.hold_taken", call, "0.00").await;
        let redeem = redemption(&user, "300.00");
        platform.ok(&user.token(), name, redeem).await;
        has_money(&platform, &user, 0, 0).await;
        platform.proof().await;
        platform.stop().await;
    });
}
