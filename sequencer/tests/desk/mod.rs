//! A small market for tests: one or more instruments, two funded users.
//!
//! The test controls its clock and cuts the power of its disk.
#![allow(dead_code)] // each test file uses some of it

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use admission::{FundRequest, NewRequest, Request, SessionRequest};
use journal::fault::MemoryStorage;
use sequencer::{Backlog, Config, Port, Record, SequencerHandle};
use service_kit::clock::{Disciplined, Source};
use types::{
    AssetIx, Command, Event, HoldKind, Id128, InstrumentId, InstrumentIx, InstrumentParams,
    InstrumentSpec, Lots, Minor, SessionIx, Side, Ticks, UserId, UserIx,
};

pub const START_NS: u64 = 1_700_000_000_000_000_000;
/// Time limit far above any expected duration: reaching it means a hang.
pub const HANG: Duration = Duration::from_secs(60);

/// A machine's clocks, which only the test moves.
#[derive(Clone, Default)]
pub struct Machine {
    passed_ns: Arc<AtomicU64>,
    /// Error of the machine's real time.
    wrong_ns: Arc<AtomicI64>,
}

impl Source for Machine {
    fn monotonic_ns(&self) -> u64 {
        self.passed_ns.load(Ordering::SeqCst)
    }

    fn realtime_ns(&self) -> u64 {
        let wrong_ns = self.wrong_ns.load(Ordering::SeqCst);
        (START_NS + self.monotonic_ns()).saturating_add_signed(wrong_ns)
    }

    fn is_synchronised(&self) -> bool {
        true
    }
}

/// Time of a process on such a machine.
#[derive(Clone)]
pub struct Time {
    machine: Machine,
    clock: Arc<Disciplined>,
}

impl Time {
    pub fn new() -> Self {
        Self::on(Machine::default())
    }

    fn on(machine: Machine) -> Self {
        let clock = Arc::new(Disciplined::new(machine.clone()));
        Self { machine, clock }
    }

    /// Time of the next process on the machine.
    pub fn of_next_process(&self) -> Self {
        Self::on(self.machine.clone())
    }

    pub fn advance_ms(&self, ms: u64) {
        self.advance_ns(ms * 1_000_000);
    }

    pub fn advance_ns(&self, ns: u64) {
        self.machine.passed_ns.fetch_add(ns, Ordering::SeqCst);
    }

    /// Sets the error of the machine's real time and makes the clock detect it.
    pub fn set_wrong_by(&self, ns: i64) {
        self.machine.wrong_ns.store(ns, Ordering::SeqCst);
        self.clock.observe();
    }
}

pub fn config(time: &Time) -> Config {
    let mut config = Config::new(std::path::Path::new("unused"));
    config.clock = time.clock.clone();
    config.segment_bytes = 256 << 10;
    config.spin_us = 20;
    // More threads than this machine may have cores.
    config.engine_threads_max = 16;
    config
}

pub fn start(config: Config, storage: &Arc<MemoryStorage>) -> SequencerHandle {
    SequencerHandle::start_on(
        config,
        Arc::new(Backlog::default()),
        Arc::new(storage.clone()),
    )
    .expect("starts")
}

pub struct Desk {
    pub port: Port,
    pub users: [UserIx; 2],
    pub instruments: Vec<InstrumentIx>,
}

/// Waits for `what`, at most [`HANG`].
pub async fn in_time<T>(what: &str, waiting: impl Future<Output = T>) -> T {
    let waited = tokio::time::timeout(HANG, waiting).await;
    waited.unwrap_or_else(|_| panic!("not within {HANG:?}: {what}"))
}

pub async fn done(port: &Port, request: Request) -> Record {
    in_time("an answer", port.call(request))
        .await
        .expect("accepted")
}

/// Lists the instrument `BOND-<at>`.
pub async fn list(port: &Port, at: usize) -> InstrumentIx {
    let spec = InstrumentSpec::new(&InstrumentParams {
        band_high: Ticks(10_000_000),
        ..InstrumentParams::new(InstrumentId::new(&format!("BOND-{at}")).expect("id"))
    });
    let spec = spec.expect("a consistent instrument");
    match done(port, Request::SetInstrument(spec))
        .await
        .command
        .command
    {
        Command::SetInstrument(set) => set.spec.ix,
        other => panic!("{other:?}"),
    }
}

pub async fn open_desk(port: Port, instruments: usize) -> Desk {
    let mut desk = Desk {
        port: port.clone(),
        users: [UserIx::NONE; 2],
        instruments: Vec::new(),
    };
    for at in 0..instruments {
        desk.instruments.push(list(&port, at).await);
    }
    for (at, name) in ["alice", "bob"].into_iter().enumerate() {
        let bind = Request::BindUser(UserId::new(name).expect("id"));
        desk.users[at] = match done(&port, bind).await.command.command {
            Command::BindUser(bind) => bind.user,
            other => panic!("{other:?}"),
        };
        let assets = desk.instruments.iter().map(|ix| AssetIx::units(*ix));
        for (number, asset) in std::iter::once(AssetIx::MONEY).chain(assets).enumerate() {
            let fund = FundRequest {
                hold_id: Id128::from_u128(1 + at as u128 * 1_000 + number as u128),
                kind: HoldKind::Trading,
                user: desk.users[at],
                asset,
                amount_minor: Minor(100_000_000_000),
                funding_seq: 1,
                key_hash: Id128::NONE,
            };
            done(&port, Request::Fund(fund)).await;
        }
    }
    desk
}

impl Desk {
    pub fn order(&self, user: usize, side: Side, price: i64, quantity: u64) -> NewRequest {
        let (instrument, user) = (self.instruments[0], self.users[user]);
        NewRequest {
            limit_checked: true,
            ..NewRequest::limit(instrument, user, side, Ticks(price), Lots(quantity))
        }
    }

    pub async fn session(&self, key: u128, user: usize) -> SessionIx {
        let open = Request::OpenSession(SessionRequest {
            key: Id128::from_u128(key),
            user: self.users[user],
            stp_group: None,
            cancel_on_disconnect: true,
        });
        match done(&self.port, open).await.command.command {
            Command::OpenSession(open) => open.session,
            other => panic!("{other:?}"),
        }
    }
}

pub fn trades(record: &Record) -> usize {
    record
        .events
        .iter()
        .filter(|event| matches!(event.event, Event::Trade(_)))
        .count()
}
