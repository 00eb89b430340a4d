//! Settlement of a running engine node: the market's commands pass through the real sequencer, and
//! settlement follows its replica.

mod world;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use admission::{FundRequest, NewRequest, Request};
use proto::common::v1::OperationType;
use proto::ledger::v1::HoldStatus;
use replica::{LiveReplica, Replica};
use sequencer::{Backlog, Config, Record, SequencerHandle};
use types::*;
use types::{HoldPart, order_hold};
use world::services::{Platform, config};
use world::{in_time, node, spec};

const PATIENCE: Duration = Duration::from_secs(60);

async fn call(sequencer: &SequencerHandle, request: Request) -> Record {
    let port = sequencer.port();
    in_time("an answer of the market", port.call(request))
        .await
        .unwrap_or_else(|refused| panic!("{request:?}: {refused:?}"))
}

fn order(user: u32, side: Side, price: i64, quantity: u64) -> Request {
    Request::New(NewRequest {
        instrument: InstrumentIx(0),
        user: UserIx(user),
        session: SessionIx::NONE,
        client_seq: 0,
        client_order_id: 0,
        stp_group: None,
        stp: StpMode::CancelNewest,
        side,
        order_type: OrderType::Limit,
        time_in_force: TimeInForce::Gtc,
        post_only: false,
        expire_at_ns: 0,
        price: Some(Ticks(price)),
        quantity: Lots(quantity),
        hold: None,
        limit_checked: true,
        key_hash: Id128::from_u128(u128::from(user) << 64 | u128::from(quantity)),
    })
}

/// Asserts that settlement journals that everything up to `last` is final, and then nothing more:
/// its own records cause no further ones and are no backlog.
async fn assert_idle(replica: &Replica, backlog: &Backlog, last: Sequence) {
    let idle = tokio::time::timeout(PATIENCE, async {
        while replica.settlement().finalized < last {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // Several report intervals without a new record, once all are reported.
        loop {
            let end = replica.assigned();
            tokio::time::sleep(Duration::from_millis(1_000)).await;
            let known = replica.settlement();
            let is_reported = (known.posted, known.finalized) == (end, end);
            if is_reported && replica.assigned() == end {
                break end;
            }
        }
    });
    let end = idle.await.expect("the journal becomes idle");
    assert!(end.get() - last.get() <= 20, "{last} to {end}");
    let known = replica.settlement();
    assert_eq!((known.posted, known.finalized), (end, end));
    let trades = replica.read(|state| state.core().trades());
    assert_eq!(known.trades_final, trades);
    let pending = || backlog.settlement_lag(replica.assigned());
    let settled = tokio::time::timeout(PATIENCE, async {
        while pending() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    settled.await.expect("no backlog");
    assert_eq!(replica.assigned(), end, "still idle");
}

// rows: R181 R151
#[tokio::test]
async fn r181_trades_of_a_running_node_are_settled_and_orders_get_their_holds() {
    let folder = tempfile::tempdir().unwrap();
    let backlog = Arc::new(Backlog::default());
    let journal = folder.path().join("journal");
    let shared = backlog.clone();
    let start = move || {
        let sequencer = SequencerHandle::start(Config::new(&journal), shared).unwrap();
        let live = LiveReplica::start(node(), sequencer.replica_parts(), None).unwrap();
        (sequencer, live)
    };
    let (sequencer, live) = tokio::task::spawn_blocking(start).await.unwrap();
    let replica = live.replica();
    let mut settings = config(folder.path());
    settings.wait_ms = 1_000;
    let journal = settlement::journal_port(sequencer.port());
    let shared = backlog.clone();
    let mut platform =
        Platform::over(folder.path(), settings, replica.clone(), shared, journal).await;
    for user in 0..2 {
        let id = UserId::new(&format!("user-{user}")).unwrap();
        call(&sequencer, Request::BindUser(id)).await;
    }
    let mut bond = spec(0, "0.01", "1", 0);
    bond.ix = InstrumentIx::NONE;
    let listed = call(&sequencer, Request::SetInstrument(bond)).await;
    let applied = replica.wait(listed.command.sequence);
    in_time("the instrument", applied).await.unwrap();
    for (user, asset) in [(0, AssetIx::MONEY), (1, AssetIx::units(InstrumentIx(0)))] {
        let fund = FundRequest {
            hold_id: Id128::from_u128(0xfeed + u128::from(user)),
            kind: HoldKind::Trading,
            user: UserIx(user),
            asset,
            amount_minor: Minor(1_000_000),
            funding_seq: 1,
            key_hash: Id128::NONE,
        };
        let command = Command::Fund(command::Fund {
            hold: HoldIx(user),
            kind: fund.kind,
            user: fund.user,
            asset,
            amount_minor: fund.amount_minor,
            funding_seq: 1,
            hold_id: fund.hold_id,
            key_hash: Id128::NONE,
        });
        platform.fund_one(replica.names(), &command).await;
        call(&sequencer, Request::Fund(fund)).await;
    }
    call(&sequencer, order(1, Side::Sell, 10_000, 10)).await;
    let bought = call(&sequencer, order(0, Side::Buy, 10_000, 4)).await;
    let settlement = &platform.settlement;
    tokio::time::timeout(PATIENCE, settlement.drained(bought.command.sequence))
        .await
        .unwrap_or_else(|_| panic!("not final: {:?}", settlement.stats()));
    let stats = settlement.stats();
    assert_eq!((stats.trades_settled, stats.trades_pending), (1, 0));
    // The lag of the one trade, in whole milliseconds, of which the histogram keeps two digits.
    let lag = stats.settlement_lag_ms;
    assert_eq!((lag.p50, lag.p99), (lag.max, lag.max));
    let since_ms = service_kit::clock::now_ns().saturating_sub(bought.command.time_ns) / 1_000_000;
    let possible = 1..=since_ms + since_ms / 50 + 2;
    assert!(possible.contains(&lag.max), "{lag:?}, {since_ms} ms");
    assert_eq!(backlog.pending_trades.load(Ordering::Relaxed), 0);
    let is_trade = |event: &&EventEnvelope| matches!(event.event, Event::Trade(_));
    let trade = bought.events.iter().find(is_trade).expect("a trade");
    let trade = trade.trade_uuid(node()).to_string();
    let (operation, postings) = platform.operation(&trade).await.expect("posted");
    assert_eq!(operation.r#type(), OperationType::TradeBuy);
    assert_eq!(postings.len(), 2);
    assert_eq!(platform.balance("user-0:BOND-0").await[3], "4");

    // An open order gets its holds even without new commands.
    let resting = call(&sequencer, order(0, Side::Buy, 9_000, 3)).await;
    let id = order_uuid(resting.command.time_ns, node(), resting.command.sequence);
    let settled = platform.settlement.settled(resting.command.sequence);
    tokio::time::timeout(PATIENCE, settled).await.unwrap();
    let hold = tokio::time::timeout(PATIENCE, async {
        loop {
            let request = proto::ledger::v1::GetHoldRequest {
                hold_id: order_hold(id, HoldPart::Main).to_string(),
                ..Default::default()
            };
            if let Ok(found) = platform.ledger.get_hold(request).await {
                break found.into_inner().hold.unwrap();
            }
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the hold appears");
    assert_eq!(hold.status(), HoldStatus::Active);
    assert_eq!(hold.amount.unwrap().amount.unwrap().value, "270.00");
    assert_eq!(hold.reason, format!("Order {id}"));
    assert_idle(&replica, &backlog, resting.command.sequence).await;
    platform.stop().await;
    let stop = move || {
        drop(live);
        sequencer.stop();
    };
    tokio::task::spawn_blocking(stop).await.unwrap();
}
