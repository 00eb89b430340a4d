//! Settlement's trading state against the hot thread's admission: the same journal yields the same
//! money in every hold, also if requests overtake the reports of earlier ones.

mod world;

use std::collections::HashMap;
use std::sync::Arc;

use admission::{
    AmendRequest, CancelRequest, FundRequest, MassCancelRequest, NewRequest, OrderRef, Request,
};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use replica::State;
use sequencer::{Backlog, Config, Reply, SequencerHandle};
use settlement::batch::{Limits, Settler};
use settlement::trading_state::TradingState;
use types::command::MassScope;
use types::*;
use world::ledger::Ledger;
use world::{Record, USERS, bounds, node, spec};

fn random(rng: &mut SmallRng, key: u128) -> Request {
    let user = UserIx(rng.random_range(0..USERS));
    let key_hash = Id128::from_u128(key);
    let client_order_id = rng.random_range(1..25);
    let price = Some(Ticks(rng.random_range(95..=105)));
    let pick = rng.random_range(0..100);
    if pick < 50 {
        let order_type = if rng.random_range(0..8) == 0 {
            OrderType::Market
        } else {
            OrderType::Limit
        };
        let time_in_force = match (order_type, rng.random_range(0..6)) {
            (OrderType::Market, _) | (_, 0) => TimeInForce::Ioc,
            (_, 1) => TimeInForce::Fok,
            _ => TimeInForce::Gtc,
        };
        Request::New(NewRequest {
            instrument: InstrumentIx(rng.random_range(0..2)),
            user,
            session: SessionIx::NONE,
            client_seq: 0,
            client_order_id,
            stp_group: None,
            stp: [
                StpMode::CancelNewest,
                StpMode::CancelOldest,
                StpMode::CancelBoth,
                StpMode::Decrement,
            ][rng.random_range(0..4)],
            side: if rng.random() { Side::Buy } else { Side::Sell },
            order_type,
            time_in_force,
            post_only: false,
            expire_at_ns: 0,
            price: (order_type == OrderType::Limit).then_some(price).flatten(),
            quantity: Lots(rng.random_range(1..40)),
            hold: None,
            limit_checked: true,
            key_hash,
        })
    } else if pick < 65 {
        Request::Cancel(CancelRequest {
            order: OrderRef::Client(client_order_id),
            user,
            session: SessionIx::NONE,
            client_seq: 0,
            reason: CancelReason::UserRequest,
            key_hash,
        })
    } else if pick < 97 {
        Request::Amend(AmendRequest {
            order: OrderRef::Client(client_order_id),
            user,
            session: SessionIx::NONE,
            client_seq: 0,
            price,
            quantity: Some(Lots(rng.random_range(1..60))),
            new_client_order_id: 0,
            limit_checked: true,
            key_hash,
        })
    } else {
        Request::MassCancel(MassCancelRequest {
            scope: MassScope::User(user),
            instrument: InstrumentIx::NONE,
            side: None,
            reason: CancelReason::MassCancel,
            user,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash,
        })
    }
}

// rows: R180 R188
#[tokio::test]
async fn r188_the_copies_have_the_money_that_admission_has() {
    for seed in testkit::seed::seeds(0..4) {
        let mut rng = SmallRng::seed_from_u64(seed);
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::new(folder.path());
        config.sync = false;
        let sequencer = tokio::task::spawn_blocking(move || {
            SequencerHandle::start(config, Arc::new(Backlog::default()))
        })
        .await
        .unwrap()
        .unwrap();
        let port = sequencer.port();
        let mut setup = Vec::new();
        for user in 0..USERS {
            setup.push(Request::BindUser(
                UserId::new(&format!("user-{user}")).unwrap(),
            ));
        }
        for ix in 0..2 {
            let mut spec = spec(ix, "0.01", "1", 0);
            spec.ix = InstrumentIx::NONE;
            setup.push(Request::SetInstrument(spec));
        }
        for user in 0..USERS {
            for (n, asset) in [
                AssetIx::MONEY,
                AssetIx::units(InstrumentIx(0)),
                AssetIx::units(InstrumentIx(1)),
            ]
            .into_iter()
            .enumerate()
            {
                setup.push(Request::Fund(FundRequest {
                    hold_id: Id128::from_u128(0xfeed_0000 + u128::from(user * 3) + n as u128),
                    kind: HoldKind::Trading,
                    user: UserIx(user),
                    asset,
                    amount_minor: Minor(150_000),
                    funding_seq: 1,
                    key_hash: Id128::NONE,
                }));
            }
        }
        for request in setup {
            port.call(request).await.unwrap();
        }
        // Open loop: no request waits for the report of the previous one.
        for n in 0..3_000 {
            let request = random(&mut rng, u128::from(seed) << 64 | (n + 1));
            port.submit(request, Reply::None).unwrap();
        }
        let (last, trading_holds) = port
            .inspect(|core| {
                let admission = core.admission();
                let trading_holds: Vec<_> = (0..USERS * 3)
                    .map(|ix| *admission.hold(HoldIx(ix)).unwrap())
                    .collect();
                (core.sequence(), trading_holds)
            })
            .await
            .unwrap();
        sequencer.commit().wait(last).await.unwrap();

        let limits = Limits {
            trades: 20,
            weight: 300,
            linger_ns: 0,
            wait_ns: 300_000,
            ..Limits::default()
        };
        let mut state = State::new(node(), bounds());
        let trading_state = TradingState::of(&state, state.names().clone());
        let mut settler = Settler::new(
            node(),
            limits,
            trading_state,
            HashMap::new(),
            Sequence::ZERO,
            0,
        );
        let mut ledger = Ledger::default();
        let mut reader = sequencer.reader(Sequence::ZERO);
        let mut posted = 0;
        while settler.trading_state().position() < last {
            let record = reader.next().await.unwrap();
            let record = Record {
                applied: state.apply(&record).unwrap(),
                command: record.command,
                events: record.events,
            };
            let now_ns = record.command.time_ns;
            let seal = |settler: &mut Settler, ledger: &mut Ledger| {
                for batch in settler.seal(now_ns) {
                    assert_eq!(ledger.post(&batch), Ok(true));
                }
                ledger.check_against(settler.trading_state());
            };
            if !settler.has_room(&record.applied) {
                seal(&mut settler, &mut ledger);
            }
            settler.apply(&record.applied, now_ns);
            ledger.fund(settler.trading_state(), &record);
            if settler.is_due(now_ns, Some(now_ns), false) || rng.random_range(0..40) == 0 {
                seal(&mut settler, &mut ledger);
                posted += 1;
            }
        }
        assert!(
            posted > 10 && settler.trading_state().trades() > 300,
            "{posted} {}",
            settler.trading_state().trades()
        );
        for (ix, hold) in settler.trading_state().holds() {
            let twin = trading_holds[ix.index()];
            assert_eq!(hold.held, twin.undrawn + twin.reserved, "hold {ix}");
            let orders = settler
                .trading_state()
                .orders()
                .filter(|order| order.hold == ix);
            let reserved: Minor = orders.map(|order| order.reserved.total()).sum();
            assert_eq!(reserved, twin.reserved, "orders of hold {ix}");
        }
        tokio::task::spawn_blocking(move || sequencer.stop())
            .await
            .unwrap();
    }
}
