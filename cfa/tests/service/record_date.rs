//! The holder list at a past time, and the record date of a redemption (R099).

use proto::cfa::v1 as pb;
use proto::common::v1::OperationStatus;

use crate::world::*;

const DAY_S: i64 = 24 * 3_600;

fn now_s() -> i64 {
    cfa::Clock::System.now_us() / 1_000_000
}

/// The last second of the Moscow day that contains `time_s`.
fn day_end_s(time_s: i64) -> i64 {
    let offset_s = 3 * 3_600;
    (time_s + offset_s).div_euclid(DAY_S) * DAY_S + DAY_S - offset_s - 1
}

fn rows(holders: &[(&str, &str)]) -> Vec<(String, String)> {
    let owned = |(user, units): &(&str, &str)| ((*user).to_owned(), (*units).to_owned());
    holders.iter().map(owned).collect()
}

async fn transfer(world: &mut World, from: &str, to: &str, units: &str) {
    let request = pb::TransferCfaRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        from_user_id: from.into(),
        to_user_id: to.into(),
        amount: amount("BOND-1", units),
        ..Default::default()
    };
    let sent = world.transfer(request).await.expect("sent");
    let done = world.settle(&sent).await;
    assert_eq!(done.status(), OperationStatus::Finalized);
}

// rows: R099 R326
#[tokio::test(flavor = "multi_thread")]
async fn r099_later_trades_do_not_change_the_holders_at_a_time() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.issue("BOND-1", "bob", "3").await;
    let at_first = rows(&[("alice", "2"), ("bob", "3")]);
    assert_eq!(world.holders("BOND-1").await, at_first);
    // Sets the history so far back by four days.
    let past = "UPDATE holding_history SET time_us = time_us - 345600000000";
    alter_store(folder.path(), past).await;
    follow_history(folder.path()).await;
    let cut_off_s = now_s() - DAY_S;
    assert_eq!(world.holders_at("BOND-1", Some(cut_off_s)).await, at_first);

    transfer(&mut world, "alice", "carol", "2").await;
    transfer(&mut world, "bob", "carol", "1").await;
    world.issue("BOND-1", "dave", "4").await;
    let now = rows(&[("bob", "2"), ("carol", "3"), ("dave", "4")]);
    assert_eq!(world.holders("BOND-1").await, now);
    let request = pb::ListHoldersRequest {
        instrument_id: "BOND-1".into(),
        as_of: Some(prost_types::Timestamp {
            seconds: world.clock.now_us() / 1_000_000 + 1,
            nanos: 0,
        }),
        ..Default::default()
    };
    let future = world.cfa.list_holders(request).await.expect_err("future");
    assert_eq!(future.message(), "as_of: must not be in the future");
    assert_eq!(world.holders_at("BOND-1", Some(cut_off_s)).await, at_first);
    let before_s = Some(now_s() - 5 * DAY_S);
    assert_eq!(world.holders_at("BOND-1", before_s).await, []);
    let request = pb::ListHoldersRequest {
        instrument_id: "BOND-1".into(),
        as_of: Some(prost_types::Timestamp {
            seconds: cut_off_s,
            nanos: 0,
        }),
        ..Default::default()
    };
    let listed = world.cfa.list_holders(request).await.expect("listed");
    for holder in listed.into_inner().holders {
        let share = match holder.user_id.as_str() {
            "alice" => "40.000000",
            _ => "60.000000",
        };
        assert_eq!(holder.share_percent, decimal(share), "of that time");
        assert_eq!(holder.locked, None, "unknown for a past time");
    }
    // Page by page the same holders, without those of later and with those who have sold since.
    let (mut paged, mut page_token) = (Vec::new(), String::new());
    loop {
        let request = pb::ListHoldersRequest {
            instrument_id: "BOND-1".into(),
            as_of: Some(prost_types::Timestamp {
                seconds: cut_off_s,
                nanos: 0,
            }),
            pagination: Some(proto::common::v1::PaginationRequest {
                page_size: 1,
                page_token,
            }),
            ..Default::default()
        };
        let page = world.cfa.list_holders(request).await.expect("listed");
        let page = page.into_inner();
        assert!(page.holders.len() <= 1);
        paged.extend(page.holders.into_iter().map(|holder| holder.user_id));
        page_token = page.pagination.unwrap_or_default().next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    paged.sort();
    assert_eq!(paged, ["alice", "bob"]);
    world.stop().await;
}

// rows: R099
#[tokio::test(flavor = "multi_thread")]
async fn r099_the_snapshot_of_a_redemption_is_taken_at_the_end_of_the_record_day() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.turn_back_us(3 * DAY_S * 1_000_000);
    let matures_at = world.clock.now_us() / 1_000_000 + 60;
    let register = world.register(|request| {
        request.matures_at = Some(prost_types::Timestamp {
            seconds: matures_at,
            nanos: 0,
        });
    });
    register.await.expect("registered");
    world.issue("BOND-1", "alice", "2").await;
    world.issue("BOND-1", "bob", "3").await;
    world.deposit("issuer", "5000.00").await;
    assert_eq!(world.holders("BOND-1").await.len(), 2);
    // Alice got her units in the last second of the record day, Bob one second later.
    let day_end_s = day_end_s(matures_at);
    for (user, time_s) in [("alice", day_end_s), ("bob", day_end_s + 1)] {
        let moved = "UPDATE holding_history SET time_us = CAST(? AS INTEGER) WHERE address = ?";
        let address = chain::Address::of_user(user).to_string();
        let time_us = (time_s * 1_000_000).to_string();
        alter_store_by(folder.path(), moved, &[&time_us, &address]).await;
    }
    follow_history(folder.path()).await;
    world.turn_back_us(0);
    world.resume_operations().await;
    let request = pb::GetRedemptionRequest {
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let found = world.cfa.get_redemption(request).await.expect("recorded");
    let redemption = found.into_inner().redemption.expect("redemption");
    let owed: Vec<_> = redemption
        .payments
        .iter()
        .map(|payment| (payment.user_id.as_str(), payment.amount.clone()))
        .collect();
    assert_eq!(owed, [("alice", amount("CFA-RUB", "2000.00"))]);
    assert_eq!(redemption.total, amount("CFA-RUB", "2000.00"));
    assert_eq!(
        redemption.record_date.map(|date| date.seconds),
        Some(matures_at)
    );
    assert_eq!(
        (
            world.tokens("CFA-RUB", "alice").await,
            world.tokens("CFA-RUB", "bob").await
        ),
        (2_000_00, 0)
    );
    let at_the_end = world.holders_at("BOND-1", Some(day_end_s)).await;
    assert_eq!(at_the_end, rows(&[("alice", "2")]));
    let after = world.holders_at("BOND-1", Some(day_end_s + 1)).await;
    assert_eq!(after, rows(&[("alice", "2"), ("bob", "3")]));
    world.stop().await;
}
