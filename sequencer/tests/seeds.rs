//! The committed seeds of the fuzz target `commands`: a payload of each kind of command and event.
//!
//! This version of the format reads them. `WRITE_SEEDS=1` writes them again. `fuzz/tests` runs the
//! target over them.

mod desk;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use admission::{
    AmendRequest, CancelAllAfterRequest, CancelRequest, FundRequest, MassCancelRequest, NewRequest,
    OrderRef, Request, moscow_day,
};
use desk::{Desk, Time, config, done, in_time, open_desk, start};
use journal::fault::MemoryStorage;
use journal::{Frame, FrameKind, Journal, visit_frames};
use sequencer::record::{decode_command, decode_event};
use types::command::{
    BlockCause, BoundsOf, Bust, Cancel, MassScope, MemberGroup, OrderBounds, SetBudget,
    SetMemberGroup, SetOrderBounds, TradeParty,
};
use types::event::CancelRejected;
use types::{
    AssetIx, CancelReason, Command, Envelope, Event, EventEnvelope, Handle, HoldIx, HoldKind,
    Id128, InstrumentIx, Lots, Minor, Phase, RejectReason, Sequence, SessionIx, Side, StpMode,
    Ticks, TimeInForce, UserIx,
};

/// Kinds of commands and of events.
const KINDS: usize = 26 + 10;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fuzz/seeds/commands")
}

/// Writes a payload of each kind of command and event that a small market makes.
async fn write_seeds() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(7, 0).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq) = (session, 1);
    let placed = done(&desk.port, Request::New(order)).await;
    let Command::New(new) = placed.command.command else {
        panic!("{placed:?}");
    };
    let order_of = OrderRef::Handle(new.handle);
    let amend = AmendRequest {
        order: order_of,
        user: desk.users[0],
        session,
        client_seq: 2,
        price: None,
        quantity: Some(Lots(4)),
        new_client_order_id: 0,
        limit_checked: true,
        key_hash: Id128::NONE,
    };
    done(&desk.port, Request::Amend(amend)).await;
    done(
        &desk.port,
        Request::New(desk.order(1, Side::Sell, 10_000, 1)),
    )
    .await;
    let cancel = CancelRequest {
        order: order_of,
        user: desk.users[0],
        session,
        client_seq: 3,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    };
    done(&desk.port, Request::Cancel(cancel)).await;
    (order.client_seq, order.quantity) = (4, Lots(1_000_000_000_000));
    done(&desk.port, Request::New(order)).await;
    let mut dated = desk.order(0, Side::Buy, 9_000, 5);
    dated.time_in_force = TimeInForce::Gtd;
    dated.expire_at_ns = desk::START_NS + 1_000_000_000;
    done(&desk.port, Request::New(dated)).await;
    time.advance_ms(2_000);
    let all = MassCancelRequest {
        scope: MassScope::All,
        instrument: InstrumentIx::NONE,
        side: None,
        reason: CancelReason::Operator,
        user: UserIx::NONE,
        session: SessionIx::NONE,
        client_seq: 0,
        key_hash: Id128::NONE,
    };
    done(&desk.port, Request::MassCancel(all)).await;
    let switch = CancelAllAfterRequest {
        user: desk.users[0],
        session,
        client_seq: 5,
        timeout_s: 600,
    };
    done(&desk.port, Request::CancelAllAfter(switch)).await;
    done(
        &desk.port,
        Request::CloseSession {
            session,
            epoch: None,
            keep_orders: false,
        },
    )
    .await;
    forget_session(&desk).await;
    rest_of_the_commands(&desk, &time).await;
    confirm_clock(&desk, &time).await;
    rest_of_the_events(&desk).await;
    handle.stop();
    let mut found = BTreeMap::new();
    let mut keep = |frame: &Frame| {
        let name = match frame.kind {
            FrameKind::Command => {
                let command = decode_command(frame)?.command;
                format!("command {command:?}")
            }
            FrameKind::Event => {
                let event = decode_event(frame)?.event;
                format!("event {event:?}")
            }
        };
        found.insert(kind_of(&name), frame.payload.clone());
        Ok(())
    };
    visit_frames(&storage, &mut keep).expect("whole");
    visit_frames(&late_cancel(), &mut keep).expect("whole");
    for (name, payload) in found {
        std::fs::write(folder().join(name), payload).expect("written");
    }
}

/// The name of a seed: `command Cancel(…)` becomes `command-cancel`.
fn kind_of(shown: &str) -> String {
    let name = shown.split('(').next().unwrap_or_default();
    name.to_lowercase().replace(' ', "-")
}

async fn forget_session(desk: &Desk) {
    let session = desk.session(8, 0).await;
    let close = Request::CloseSession {
        session,
        epoch: None,
        keep_orders: false,
    };
    let closed = done(&desk.port, close).await.command.sequence;
    // Its opening is the command before.
    let epoch = Sequence(closed.get() - 1);
    done(&desk.port, Request::ForgetSession { session, epoch }).await;
}

async fn rest_of_the_commands(desk: &Desk, time: &Time) {
    let (user, hold, key_hash) = (desk.users[0], HoldIx(0), Id128::NONE);
    let cause = BlockCause::Difference;
    for request in [
        Request::BlockUser { user, cause },
        Request::UnblockUser { user, cause },
        Request::Settled {
            posted: Sequence(2),
            finalized: Sequence(1),
            trades_final: 1,
        },
        Request::Bust(Bust {
            trade: Id128::from_u128(78),
            trade_number: 3,
            instrument: desk.instruments[0],
            buy: TradeParty {
                session: SessionIx(0),
                handle: Handle::from_engine_id(2 << 32 | 1),
                client_order_id: 7,
            },
            sell: TradeParty::NONE,
        }),
        Request::SetBudget(SetBudget {
            user,
            day: moscow_day(desk::START_NS),
            limit_minor: Minor(5_000_000),
            left_minor: Minor(4_000_000),
        }),
        Request::SetOrderBounds(SetOrderBounds {
            of: BoundsOf::User(user),
            bounds: Some(OrderBounds {
                per_user: 1_000,
                per_instrument: 500,
                lots_per_order: Lots(1_000_000),
                value_per_order: Minor(1_000_000_000),
                sessions: 5,
                session_rate: 100,
                user_rate: 200,
                ..OrderBounds::NONE
            }),
            key_hash,
        }),
        Request::SetMemberGroup(SetMemberGroup {
            user,
            group: MemberGroup(7),
            key_hash,
        }),
        Request::SetPhase {
            instrument: desk.instruments[0],
            phase: Phase::Halt,
            cancel_orders: false,
            lifts_halt: true,
            key_hash,
        },
        Request::SetPhase {
            instrument: desk.instruments[0],
            phase: Phase::Open,
            cancel_orders: false,
            lifts_halt: true,
            key_hash,
        },
        Request::SetKillSwitch {
            user,
            is_engaged: true,
            key_hash,
        },
        Request::SetKillSwitch {
            user,
            is_engaged: false,
            key_hash,
        },
        Request::Defund {
            hold,
            amount_minor: Minor(1),
            funding_seq: 2,
            key_hash,
        },
        Request::ExpireOrders(InstrumentIx::NONE),
    ] {
        done(&desk.port, request).await;
    }
    let other = Request::Fund(FundRequest {
        hold_id: Id128::from_u128(77),
        kind: HoldKind::Order,
        user,
        asset: AssetIx::MONEY,
        amount_minor: Minor(1),
        funding_seq: 1,
        key_hash,
    });
    let Command::Fund(fund) = done(&desk.port, other).await.command.command else {
        panic!("another command");
    };
    let close = Request::CloseHold {
        hold: fund.hold,
        funding_seq: 2,
        key_hash,
    };
    done(&desk.port, close).await;
    time.advance_ms(1);
}

/// The hot thread itself reports that the clock is suspect.
async fn confirm_clock(desk: &Desk, time: &Time) {
    time.set_wrong_by(86_400_000_000_000);
    let is_suspect = |core: &sequencer::Core| core.admission().clock().is_suspect();
    let waiting = async { while desk.port.inspect(is_suspect).await != Ok(true) {} };
    in_time("the hot thread checks the clock", waiting).await;
    let confirm = Request::ConfirmClock {
        offset_ns: 86_400_000_000_000,
        through_ns: 0,
        key_hash: Id128::NONE,
    };
    done(&desk.port, confirm).await;
}

async fn rest_of_the_events(desk: &Desk) {
    let ask = desk.order(1, Side::Sell, 10_000, 2);
    done(&desk.port, Request::New(ask)).await;
    // Takes it and rests the remainder; then a self-trade in which the resting order is reduced.
    let bid = desk.order(0, Side::Buy, 10_000, 5);
    done(&desk.port, Request::New(bid)).await;
    let own = NewRequest {
        stp: StpMode::Decrement,
        ..desk.order(0, Side::Sell, 10_000, 1)
    };
    done(&desk.port, Request::New(own)).await;
    let post_only = NewRequest {
        post_only: true,
        ..ask
    };
    done(&desk.port, Request::New(post_only)).await;
    let away = NewRequest {
        price: Some(Ticks(10_100)),
        ..post_only
    };
    let placed = done(&desk.port, Request::New(away)).await;
    let Command::New(new) = placed.command.command else {
        panic!("{placed:?}");
    };
    let amend = AmendRequest {
        order: OrderRef::Handle(new.handle),
        user: desk.users[1],
        session: SessionIx::NONE,
        client_seq: 0,
        price: ask.price,
        quantity: None,
        new_client_order_id: 0,
        limit_checked: true,
        key_hash: Id128::NONE,
    };
    done(&desk.port, Request::Amend(amend)).await;
}

/// The record of a cancel of an order that has just ended. It is built directly, since it takes a
/// race.
fn late_cancel() -> Arc<MemoryStorage> {
    let storage = Arc::new(MemoryStorage::default());
    let config = journal::Config::default();
    let journal = Journal::open(Arc::new(storage.clone()), config, |_| Ok(())).expect("opens");
    let handle = Handle {
        slot: 3,
        generation: 2,
    };
    let command = Envelope {
        sequence: Sequence(1),
        time_ns: desk::START_NS,
        received_ns: desk::START_NS,
        command: Command::Cancel(Cancel {
            handle,
            instrument: InstrumentIx(0),
            user: UserIx(0),
            session: SessionIx::NONE,
            reason: CancelReason::UserRequest,
            client_seq: 0,
            key_hash: Id128::NONE,
        }),
    };
    let rejected = EventEnvelope {
        sequence: Sequence(1),
        time_ns: desk::START_NS,
        number: 1,
        instrument: InstrumentIx(0),
        index: 0,
        event: Event::CancelRejected(CancelRejected {
            handle,
            reason: RejectReason::OrderNotOpen,
        }),
    };
    let mut appender = journal.appender();
    sequencer::record::append(&mut appender, &command, &[rejected]);
    appender.flush();
    journal.close();
    storage
}

fn frame(payload: Vec<u8>) -> Frame {
    Frame {
        kind: FrameKind::Command,
        unit_end: true,
        sequence: 1,
        time_ns: 1,
        durable: 0,
        crc: 0,
        prev: 0,
        payload,
    }
}

// rows: R174
#[tokio::test]
async fn r174_a_payload_of_each_kind_is_read_by_this_version_of_the_format() {
    if std::env::var_os("WRITE_SEEDS").is_some() {
        write_seeds().await;
    }
    let mut seeds: Vec<PathBuf> = std::fs::read_dir(folder())
        .expect("seeds")
        .map(|entry| entry.expect("entry").path())
        .collect();
    seeds.sort();
    let mut kinds = 0;
    for seed in &seeds {
        let bytes = std::fs::read(seed).expect("read");
        let name = seed.file_name().unwrap_or_default().to_string_lossy();
        // The folder may also have inputs that a fuzzer has found.
        if let Some((kind, _)) = name.split_once('-') {
            let frame = frame(bytes);
            let shown = match kind {
                "command" => {
                    decode_command(&frame).map(|found| format!("command {:?}", found.command))
                }
                _ => decode_event(&frame).map(|found| format!("event {:?}", found.event)),
            };
            assert_eq!(
                shown.as_deref().map(kind_of),
                Ok(name.to_string()),
                "the journal's format has changed, and its version has not"
            );
            kinds += 1;
        }
    }
    assert_eq!(kinds, KINDS);
}

/// Expiry commands of earlier versions have no maximum.
#[test]
fn an_expiry_of_an_earlier_version_cancels_all_that_are_due() {
    let mut payload = [0_u8; 20];
    payload[4] = 8;
    // The kind, then every instrument.
    payload[12] = 15;
    payload[16..].fill(0xff);
    let found = decode_command(&frame(payload.to_vec()))
        .expect("a command")
        .command;
    let expected = types::command::ExpireOrders {
        instrument: InstrumentIx::NONE,
        orders_max: 0,
    };
    assert_eq!(found, Command::ExpireOrders(expected));
}
