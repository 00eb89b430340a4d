//! Every committed seed of the fuzz target `commands`, and mutations of it that a seed decides. `WRITE_SEEDS=1` makes the seeds again.

#[path = "../../journal/fuzz/targets/check_commands.rs"]
mod check_commands;
mod desk;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use admission::{AmendRequest, CancelRequest, MassCancelRequest, OrderRef, Request};
use check_commands::check;
use desk::{Time, config, done, open_desk, start};
use journal::fault::MemoryStorage;
use journal::{FrameKind, walk};
use types::command::MassScope;
use types::{CancelReason, Id128, InstrumentIx, Lots, SessionIx, Side, TimeInForce, UserIx};

/// Mutations of each seed.
const MUTATIONS: u64 = 2_000;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../journal/fuzz/seeds/commands")
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        usize::try_from((z ^ (z >> 31)) % bound.max(1) as u64).expect("below a size")
    }
}

/// A payload of each kind of command and event that a small market makes.
async fn write_seeds() {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let handle = start(config(&time), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let session = desk.session(7, 0).await;
    let mut order = desk.order(0, Side::Buy, 10_000, 5);
    (order.session, order.client_seq) = (session, 1);
    let placed = done(&desk.port, Request::New(order)).await;
    let types::Command::New(new) = placed.command.command else {
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
    done(&desk.port, Request::CloseSession(session)).await;
    handle.stop();
    let mut found = BTreeMap::new();
    walk(&storage, |frame| {
        let name = match frame.kind {
            FrameKind::Command => {
                let command = sequencer::record::decode_command(frame)?.command;
                format!("command {command:?}")
            }
            FrameKind::Event => {
                let event = sequencer::record::decode_event(frame)?.event;
                format!("event {event:?}")
            }
        };
        let name = name.split('(').next().unwrap_or_default();
        found.insert(name.to_lowercase().replace(' ', "-"), frame.payload.clone());
        Ok(())
    })
    .expect("whole");
    for (name, payload) in found {
        std::fs::write(folder().join(name), payload).expect("written");
    }
}

// rows: R174
#[tokio::test]
async fn r174_no_bytes_confuse_the_decoding_of_commands_and_events() {
    if std::env::var_os("WRITE_SEEDS").is_some() {
        write_seeds().await;
    }
    let mut seeds: Vec<PathBuf> = std::fs::read_dir(folder())
        .expect("seeds")
        .map(|entry| entry.expect("entry").path())
        .collect();
    seeds.sort();
    assert!(seeds.len() >= 12, "{seeds:?}");
    for (number, seed) in seeds.iter().enumerate() {
        let bytes = std::fs::read(seed).expect("read");
        let name = seed.file_name().unwrap_or_default().to_string_lossy();
        let is_command = check(&bytes);
        assert!(
            is_command || !name.starts_with("command"),
            "{name} is no command any more: the journal's format has changed, and its version has not"
        );
        let mut random = Random(number as u64);
        for _ in 0..MUTATIONS {
            let mut mutated = bytes.clone();
            for _ in 0..=random.below(4) {
                let at = random.below(mutated.len());
                match random.below(4) {
                    0 => mutated.truncate(at),
                    1 => mutated.insert(at, random.below(256) as u8),
                    _ if mutated.is_empty() => {}
                    2 => mutated[at] = random.below(256) as u8,
                    _ => mutated[at] ^= 1 << random.below(8),
                }
            }
            check(&mutated);
        }
    }
}
