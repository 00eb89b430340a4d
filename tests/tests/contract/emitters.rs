//! Services that publish the events whose emitter the specification leaves open (D27), and the
//! events of an order's holds.

use proto::ledger::v1::{HoldCreatedEvent, HoldReleasedEvent};
use serde_json::json;
use tests::call::{number, text};
use tests::log::Events;
use tests::shared::{platform, run};
use tests::world::rub;
use types::Decimal;

// rows: R337
#[test]
fn r337_each_event_comes_from_the_service_whose_fact_it_is() {
    run(async {
        let platform = platform().await;
        let mut events = Events::open(platform).await;
        let (buyer, seller) = (platform.rich("1000.00").await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &seller, "3").await;
        platform.place(&seller, &bond, "SELL", "10.00", "3").await;
        let order = platform.place(&buyer, &bond, "BUY", "10.00", "5").await;
        platform.settled(&bond, 1).await;
        let cancel = json!({ "orderId": order["orderId"] });
        platform
            .ok(&buyer.token(), "market.CancelOrder", cancel)
            .await;
        let payout = uuid::Uuid::now_v7().to_string();
        let redeem = json!({ "userId": buyer.id, "payoutId": payout, "amount": rub("100.00") });
        platform
            .ok(&buyer.token(), "cfa.RedeemCfaRub", redeem)
            .await;
        let emitters = [
            ("InstrumentRegisteredEvent", "cfa"),
            ("CfaTransferredEvent", "cfa"),
            ("PayoutConfirmedEvent", "payments"),
            ("OrderCancelledEvent", "market"),
            ("BalanceUpdatedEvent", "ledger"),
            ("OperationStatusChangedEvent", "ledger"),
        ];
        let wanted: Vec<&str> = emitters.iter().map(|(name, _)| *name).collect();
        let order = text(&order, "/orderId");
        let about = [buyer.id.clone(), seller.id.clone(), bond, payout, order];
        let names = |event: &events::Event, id: &String| {
            let payload = String::from_utf8_lossy(&event.payload);
            payload.contains(id.as_str()) || event.subject.contains(id.as_str())
        };
        let seen = events
            .until(&wanted, |event| {
                event.type_name.ends_with("StatusChangedEvent")
                    || about.iter().any(|id| names(event, id))
            })
            .await;
        for (name, emitter) in emitters {
            for event in seen.iter().filter(|event| event.type_name.ends_with(name)) {
                assert_eq!(event.source, emitter, "{name}");
            }
        }
        events.close().await;
    });
}

/// The creation of a hold on a sub-account.
fn created(event: &events::Event, subaccount: &str) -> Option<HoldCreatedEvent> {
    let is_one = event.type_name.ends_with("HoldCreatedEvent");
    let made: HoldCreatedEvent =
        is_one.then(|| prost::Message::decode(&*event.payload).expect("an event"))?;
    (made.subaccount_id == subaccount).then_some(made)
}

fn is_release(event: &events::Event, hold_id: &str) -> bool {
    event.type_name.ends_with("HoldReleasedEvent") && {
        let ended: HoldReleasedEvent = prost::Message::decode(&*event.payload).expect("an event");
        ended.hold_id == hold_id
    }
}

// rows: R151 R152 R160
#[test]
fn r160_a_hold_is_told_once_when_it_is_made_and_once_when_it_ends() {
    run(async {
        let platform = platform().await;
        let mut events = Events::open(platform).await;
        let (buyer, seller) = (platform.rich("1000.00").await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &seller, "3").await;
        let bid = platform.place(&buyer, &bond, "BUY", "10.00", "5").await;
        let offer = platform.place(&seller, &bond, "SELL", "20.00", "3").await;
        for (user, order) in [(&buyer, &bid), (&seller, &offer)] {
            let cancel = json!({ "orderId": text(order, "/orderId") });
            platform
                .ok(&user.token(), "market.CancelOrder", cancel)
                .await;
        }
        platform.balance_is(&buyer.cash(), "1000.00").await;
        platform.balance_is(&seller.units(&bond), "3").await;
        let mut released = Vec::new();
        // Value and fee reserve of the buyer, quantity of the seller.
        for (subaccount, amount) in [(buyer.cash(), "50.05"), (seller.units(&bond), "3")] {
            let is_created = |event: &events::Event| created(event, &subaccount).is_some();
            let made = events.until(&["HoldCreatedEvent"], is_created).await;
            let own = created(&made[0], &subaccount).expect("as picked");
            let amount_of_event = own.amount.clone().and_then(|amount| amount.amount);
            assert_eq!(
                number(&json!({ "value": amount_of_event.expect("an amount").value })),
                amount.parse::<Decimal>().expect("a number")
            );
            let is_end = |event: &events::Event| is_release(event, &own.hold_id);
            events.until(&["HoldReleasedEvent"], is_end).await;
            released.push(own.hold_id.clone());
        }
        // A second release would be published before the hold of a later order.
        let fence = platform.place(&buyer, &bond, "BUY", "11.00", "1").await;
        let cancel = json!({ "orderId": text(&fence, "/orderId") });
        platform
            .ok(&buyer.token(), "market.CancelOrder", cancel)
            .await;
        let is_later = |event: &events::Event| {
            created(event, &buyer.cash()).is_some_and(|made| !released.contains(&made.hold_id))
        };
        let made = events.until(&["HoldCreatedEvent"], is_later).await;
        let later = created(&made[0], &buyer.cash()).expect("as picked").hold_id;
        let is_end = |event: &events::Event| is_release(event, &later);
        events.until(&["HoldReleasedEvent"], is_end).await;
        for hold_id in &released {
            let ends = events
                .seen
                .iter()
                .filter(|event| is_release(event, hold_id));
            assert_eq!(ends.count(), 1, "{hold_id} is released exactly once");
        }
        events.close().await;
    });
}
