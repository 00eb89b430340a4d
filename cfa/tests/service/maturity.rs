//! Redemption of an issue with more holders than a part has, one of whom has an open order, and the
//! pages of its payments.

use proto::cfa::v1 as pb;
use proto::common::v1::PaginationRequest;
use proto::ledger::v1 as ledger;

use crate::world::*;

/// More than the holders of a part.
const HOLDERS: usize = 105;

async fn redemption(world: &mut World) -> pb::IssueRedemption {
    let request = pb::GetRedemptionRequest {
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let answer = world.cfa.get_redemption(request).await.expect("recorded");
    answer.into_inner().redemption.expect("redemption")
}

fn page_request(page_size: i32, page_token: &str) -> pb::GetRedemptionRequest {
    pb::GetRedemptionRequest {
        instrument_id: "BOND-1".into(),
        pagination: Some(PaginationRequest {
            page_size,
            page_token: page_token.to_owned(),
        }),
        ..Default::default()
    }
}

/// Users of the payments as the caller sees them, page by page, from a token on. Every page has the
/// same total.
async fn pages(
    world: &World,
    credential: &str,
    page_size: i32,
    mut page_token: String,
    total: &str,
) -> Vec<Vec<String>> {
    let mut caller = world.as_caller(credential);
    let mut pages = Vec::new();
    loop {
        let request = page_request(page_size, &page_token);
        let answer = caller.get_redemption(request).await.expect("recorded");
        let answer = answer.into_inner();
        let redemption = answer.redemption.expect("redemption");
        assert_eq!(redemption.total, amount("CFA-RUB", total));
        let users = redemption.payments.into_iter().map(|paid| paid.user_id);
        pages.push(users.collect());
        page_token = answer.pagination.expect("pagination").next_page_token;
        if page_token.is_empty() {
            return pages;
        }
    }
}

fn start() -> pb::StartRedemptionRequest {
    pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    }
}

// rows: R010 R098 R312
#[tokio::test(flavor = "multi_thread")]
async fn r010_the_payments_of_a_redemption_are_read_in_pages() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let holders = ["alice", "bob", "carol", "dave", "erin"];
    for holder in holders {
        world.issue("BOND-1", holder, "1").await;
    }
    // The issuer has no money: the payments are recorded, and none is made.
    let started = world.cfa.start_redemption(start()).await.expect("started");
    let started = started.into_inner();
    let recorded = started.redemption.expect("redemption");
    assert_eq!(recorded.payments.len(), holders.len());
    let pagination = started.pagination.expect("pagination");
    assert_eq!(pagination.next_page_token, "");

    let staff = "sandbox.operator";
    let paged = pages(&world, staff, 2, String::new(), "5000.00").await;
    assert_eq!(paged.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 1]);
    let users = recorded.payments.iter().map(|paid| paid.user_id.clone());
    assert_eq!(paged.concat(), users.collect::<Vec<_>>(), "the same order");
    // A holder sees the own payment, another investor none; the total is of all.
    for (investor, own) in [("dave", vec!["dave".to_owned()]), ("frank", vec![])] {
        let credential = format!("sandbox.investor.{investor}");
        let seen = pages(&world, &credential, 1, String::new(), "5000.00").await;
        assert_eq!(seen, [own], "{investor}");
    }

    let first = world.cfa.get_redemption(page_request(2, "")).await;
    let first = first.expect("recorded").into_inner();
    let token = first.pagination.expect("pagination").next_page_token;
    let foreign = "pagination.page_token: was given for other filters";
    let malformed = "pagination.page_token: is not a token of this service";
    let negative = "pagination.page_size: must not be negative";
    for (credential, size, token, why) in [
        ("sandbox.investor.dave", 2, token.as_str(), foreign),
        (staff, 2, "made up", malformed),
        (staff, -1, "", negative),
    ] {
        let mut caller = world.as_caller(credential);
        let refused = caller.get_redemption(page_request(size, token)).await;
        assert_eq!(refused.expect_err("refused").message(), why);
    }
    world.stop().await;
}

// rows: R098 R102
#[tokio::test(flavor = "multi_thread")]
async fn r102_every_holder_of_several_parts_is_paid_once_and_an_open_order_delays_its_own() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let register = world.register(|request| request.nominal = decimal("2"));
    register.await.expect("registered");
    for holder in 0..HOLDERS {
        world
            .issue("BOND-1", &format!("holder-{holder}"), "1")
            .await;
    }
    let total = format!("{}.00", 2 * HOLDERS);
    world.deposit("issuer", &total).await;
    let hold_id = uuid::Uuid::now_v7().to_string();
    let hold = ledger::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger::Hold {
            hold_id: hold_id.clone(),
            subaccount_id: "holder-7:BOND-1".into(),
            amount: amount("BOND-1", "1"),
            reason: "order".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(hold).await.expect("held");
    let started = world.cfa.start_redemption(start()).await.expect("started");
    let next = started.into_inner().pagination.expect("pagination");
    let waiting = redemption(&mut world).await;
    let status = waiting.status();
    assert_eq!(waiting.total, amount("CFA-RUB", &total));
    assert_eq!(waiting.payments.len(), 50, "the first page");
    let rest = pages(&world, "sandbox.operator", 0, next.next_page_token, &total).await;
    assert_eq!(rest.iter().map(Vec::len).collect::<Vec<_>>(), [50, 5]);
    let mut users = rest.concat();
    users.extend(waiting.payments.into_iter().map(|paid| paid.user_id));
    users.sort();
    users.dedup();
    assert_eq!(users.len(), HOLDERS, "each holder once");
    // The others are paid; this holder's order still holds the unit.
    assert_eq!(status, pb::RedemptionStatus::Submitted);
    assert_eq!(world.supply("BOND-1").await, "1");
    let release = ledger::ReleaseHoldRequest {
        context: context(&key()),
        hold_id,
        reason: "cancelled".into(),
    };
    world.ledger.release_hold(release).await.expect("released");
    world.resume_operations().await;
    let done = redemption(&mut world).await;
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    assert_eq!(world.supply("BOND-1").await, "0");
    for holder in [0, 7, HOLDERS - 1] {
        let account = format!("holder-{holder}:CFA-RUB");
        let paid = world.balance(&account).await;
        assert_eq!(paid.balance.to_string(), "2.00", "{account}");
    }
    world.stop().await;
}

/// A user id of 40 hexadecimal digits has the format of an address (T14).
// rows: R048 R098
#[tokio::test(flavor = "multi_thread")]
async fn r098_a_holder_whose_id_is_40_hex_digits_is_paid() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let holder = "00112233445566778899aabbccddeeff00112233";
    world.issue("BOND-1", holder, "2").await;
    world.deposit("issuer", "2000.00").await;
    world.cfa.start_redemption(start()).await.expect("started");
    world.resume_operations().await;
    let done = redemption(&mut world).await;
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    for (account, due) in [("CFA-RUB", "2000.00"), ("BOND-1", "0")] {
        let balance = world.balance(&format!("{holder}:{account}")).await;
        assert_eq!(balance.balance.to_string(), due, "{account}");
    }
    world.stop().await;
}
