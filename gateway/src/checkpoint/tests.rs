//! The state from any checkpoint and the records behind it is the state from the first record.

use std::path::Path;
use std::sync::Arc;

use admission::{CancelRequest, FundRequest, NewRequest, OrderRef, Request, SessionRequest};
use sequencer::{Backlog, Config, Record, SequencerHandle};
use types::{
    AssetIx, CancelReason, Command, FeeRate, Id128, InstrumentId, InstrumentIx, InstrumentParams,
    InstrumentSpec, Lots, Minor, NodeId, OrderType, Phase, PoolKind, Sequence, SessionIx, Side,
    StpMode, Ticks, TimeInForce, UserId, UserIx, VelocityRule,
};

use super::{folder, load, place_before};
use crate::fold::Fold;
use crate::numbered;
use crate::streams::Streams;

fn node() -> NodeId {
    NodeId::new(1).unwrap()
}

fn bond() -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        ix: InstrumentIx::NONE,
        id: InstrumentId::new("BOND-1").unwrap(),
        decimals: 0,
        tick_size: "0.01".parse().unwrap(),
        lot_size: "1".parse().unwrap(),
        fee_rate: FeeRate::TRADING,
        band_low: Ticks(1),
        band_high: Ticks(10_000_000),
        collar_ppm: 50_000,
        velocity: VelocityRule::OFF,
        phase: Phase::Open,
    })
    .unwrap()
}

/// Two users with a session each, and what they ask for.
fn requests() -> Vec<Request> {
    let mut requests = vec![Request::SetInstrument(bond())];
    for (at, name) in [(0, "ann"), (1, "bob")] {
        requests.push(Request::BindUser(UserId::new(name).unwrap()));
        for (number, asset) in [(0, AssetIx::MONEY), (1, AssetIx::units(InstrumentIx(0)))] {
            requests.push(Request::Fund(FundRequest {
                hold_id: Id128::from_u128(1 + at * 10 + number),
                kind: PoolKind::Trading,
                user: UserIx(at as u32),
                asset,
                amount_minor: Minor(1_000_000_000),
                funding_seq: 1,
                key_hash: Id128::NONE,
            }));
        }
        requests.push(Request::OpenSession(SessionRequest {
            key: Id128::from_u128(100 + at),
            user: UserIx(at as u32),
            stp_group: None,
            cancel_on_disconnect: false,
        }));
    }
    for at in 0..400u64 {
        let user = (at * 5 % 7 % 2) as u32;
        let client_seq = at + 1;
        requests.push(match at % 6 {
            5 => Request::Cancel(CancelRequest {
                order: OrderRef::Client(at - 1 - at % 3),
                user: UserIx(user),
                session: SessionIx(user),
                client_seq,
                reason: CancelReason::UserRequest,
                key_hash: Id128::NONE,
            }),
            _ => Request::New(NewRequest {
                instrument: InstrumentIx(0),
                user: UserIx(user),
                session: SessionIx(user),
                client_seq,
                client_order_id: at + 1,
                stp_group: None,
                stp: StpMode::CancelOldest,
                side: if at % 3 == 0 { Side::Buy } else { Side::Sell },
                order_type: OrderType::Limit,
                time_in_force: TimeInForce::Gtc,
                post_only: false,
                expire_at_ns: 0,
                price: Some(Ticks(1_000 + (at * 7 % 23) as i64)),
                quantity: Lots(1 + at % 9),
                pool: None,
                limit_checked: true,
                key_hash: Id128::NONE,
            }),
        });
    }
    requests.push(Request::CloseSession(SessionIx(1)));
    requests
}

/// The journal of a node that took them.
async fn records(dir: &Path) -> Vec<Record> {
    let mut config = Config::new(dir);
    config.sync = false;
    let handle = SequencerHandle::start(config, Arc::new(Backlog::default())).unwrap();
    let mut last = Sequence::ZERO;
    for request in requests() {
        if let Ok(record) = handle.port().call(request).await {
            last = record.command.sequence;
        }
    }
    handle.commit().wait(last).await.unwrap();
    let mut reader = handle.reader(Sequence::ZERO);
    let mut records = Vec::new();
    while let Some(record) = reader.try_next().unwrap() {
        records.push(record);
    }
    handle.stop();
    records
}

fn told(records: &[Record]) -> Streams {
    let streams = Streams::new(node());
    streams.apply(records, |_| {});
    streams
}

// rows: R343
#[tokio::test]
async fn r343_sessions_and_history_from_a_checkpoint_are_those_from_the_first_record() {
    let dir = tempfile::tempdir().unwrap();
    let records = records(&dir.path().join("journal")).await;
    assert!(records.len() > 300);
    let has_trades = |r: &Record| {
        r.events
            .iter()
            .any(|e| matches!(e.event, types::Event::Trade(_)))
    };
    assert!(records.iter().filter(|r| has_trades(r)).count() > 30);
    assert!(
        records
            .iter()
            .any(|r| matches!(r.command.command, Command::Cancel(_)))
    );
    let whole = told(&records).take().image();
    let end = Sequence(records.len() as u64);
    for at in (1..records.len()).step_by(23) {
        let data_dir = dir.path().join(at.to_string());
        let saved = told(&records[..at]).take();
        let sequence = saved.sequence();
        let bytes = saved.encode().unwrap();
        let snapshots = journal::Snapshots::new(&folder(&data_dir));
        snapshots.write(sequence.get(), &bytes).unwrap();

        let loaded = load(&data_dir, node(), end, end).unwrap();
        assert_eq!(loaded.streams.position(), sequence);
        loaded.streams.apply(&records[at..], |_| {});
        assert_eq!(loaded.streams.take().image(), whole, "checkpoint {at}");
        let (mut first, mut history, mut facts) = (Fold::new(node()), loaded.history, Vec::new());
        for record in &records {
            first.apply(&record.command, &record.events, &mut facts);
        }
        for record in &records[at..] {
            history.apply(&record.command, &record.events, &mut facts);
        }
        assert_eq!(history.image(), first.image(), "checkpoint {at}");

        // Rows that are not written yet are told from before them.
        let earlier = Sequence(sequence.get() - 1);
        let behind = load(&data_dir, node(), end, earlier).unwrap();
        assert_eq!(behind.history.sequence(), Sequence::ZERO);
        let error = load(&data_dir, node(), earlier, earlier)
            .map(|_| ())
            .unwrap_err();
        assert!(error.to_string().contains("ends at"), "{error}");
        // Of another node it is nothing.
        let other = load(&data_dir, NodeId::new(2).unwrap(), end, end).unwrap();
        assert_eq!(other.streams.position(), Sequence::ZERO);
    }
}

// The messages of a session from the newest place before a number: those that come behind it, under their numbers.
#[tokio::test]
async fn the_past_is_told_from_the_nearest_place_before_it() {
    let dir = tempfile::tempdir().unwrap();
    let records = records(&dir.path().join("journal")).await;
    let snapshots = journal::Snapshots::new(&folder(dir.path()));
    let places = [40, 120, 260];
    let session = SessionIx(0);
    let mut numbers = Vec::new();
    for at in places {
        let saved = told(&records[..at]).take();
        snapshots
            .write(at as u64, &saved.encode().unwrap())
            .unwrap();
        numbers.push(
            told(&records[..at])
                .session(Id128::from_u128(100))
                .unwrap()
                .1,
        );
    }
    for (after, expected) in [
        (0, 0),
        (numbers[0] - 1, 0),
        (numbers[0], 40),
        (numbers[1] + 1, 120),
        (u64::MAX, 260),
    ] {
        let place = place_before(dir.path(), node(), |told| told(session).0 <= after).unwrap();
        assert_eq!(place.fold.sequence(), Sequence(expected), "{after}");
        // From there on the numbers are those of all messages counted from the first.
        let count = |mut fold: Fold, mut number: u64| {
            let mut facts = Vec::new();
            for record in &records[fold.sequence().get() as usize..] {
                facts.clear();
                let cause = fold.apply(&record.command, &record.events, &mut facts);
                for fact in &facts {
                    numbered::messages(&cause, fact, |to, _| number += u64::from(to == session));
                }
            }
            number
        };
        let number = place.numbers.first().copied().unwrap_or(0);
        assert_eq!(count(place.fold, number), count(Fold::new(node()), 0));
    }
    // By the last request that was seen: session 0 had asked for nothing yet at the beginning.
    let place = place_before(dir.path(), node(), |told| told(session).1 < 1).unwrap();
    assert_eq!(place.fold.sequence(), Sequence::ZERO);
}
