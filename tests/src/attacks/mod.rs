//! Load attacks: one member or stranger floods the exchange next to an honest member, whose service
//! must not suffer. `docs/attacks.md` lists all attacks, including these.
//!
//! An attack sends as many packets per second as its control: a member that sends orders and
//! cancels within its rates. A run checks the honest member's latency and gaps against those next
//! to the control, the outcome of the attack, and the platform's resident memory afterwards. The
//! memory after a control run is checked too, so that growth by ordinary orders is found.
//!
//! | file | what |
//! |---|---|
//! | `honest` | the honest member |
//! | `line` | a member's connection without the client's rules |
//! | `sessions` | attacks over trading sessions, and the control |
//! | `resumes` | sessions that resume from messages older than their windows |
//! | `strangers` | attacks without credentials |
//! | `reads` | reads over the RPC port |
//! | `stalls` | times at which the machine does not run a core |
//! | `verdict` | figures of an attack, and violated bounds |
//!
//! A run shorter than [`LONG`] checks only outcome and memory; it prints the latencies.

mod honest;
mod line;
mod reads;
mod resumes;
mod sessions;
mod stalls;
mod strangers;
mod verdict;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use client::{Connection, LoginOptions, Trust};
use serde_json::json;

use self::honest::{Figures, Honest};
use self::resumes::Resumes;
use self::sessions::{Flood, Logins, Requests, SlowConsumer, Unread};
use self::strangers::{Datagrams, Idle};
pub use self::verdict::Verdict;
use crate::Platform;
use crate::member::{instrument_of, limit};
use crate::process::PATIENCE;
use crate::world::User;

/// Shortest run whose latencies are checked.
pub const LONG: Duration = Duration::from_secs(30);
/// Time that the platform has after a run to release memory.
const MEMORY_RELEASE_MAX: Duration = Duration::from_secs(60);
/// In a long plan, time without a change of the memory after which it counts as released.
const MEMORY_STEADY: Duration = Duration::from_secs(10);
/// Smallest change of the resident memory, in bytes, that counts as one.
const MEMORY_CHANGE_MIN: u64 = 1 << 20;
/// Bytes of the ledger's cache of 32,768 holds. An order that rests for a second has its own hold.
const LEDGER_CACHE: u64 = 64 << 20;
/// As [`LEDGER_CACHE`], with freed pages that the allocator has not returned.
const CONTROL_CACHES: u64 = 2 * LEDGER_CACHE;
/// Resting orders of the market maker, of one lot each.
const RESTING: u64 = 10_000;
/// Units of the attacker that sells: enough for several of its orders at a time.
const UNITS: &str = "200000";
/// Interval of sending: a tick sends all packets due since the last one.
const TICK: Duration = Duration::from_micros(250);
/// Most packets per tick. Packets due beyond it are skipped.
const PACKETS_PER_TICK_MAX: u64 = 100;

/// Kind of attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Control,
    MassCancels,
    BadPrices,
    UnknownCancels,
    Repeats,
    Resumes,
    Windows,
    FillOrKill,
    Logins,
    Handshakes,
    Garbage,
    SlowConsumer,
    UnreadAnswers,
    Idle,
    OrderSlots,
    Reads,
}

impl Kind {
    pub const ATTACKS: [Self; 15] = [
        Self::MassCancels,
        Self::BadPrices,
        Self::UnknownCancels,
        Self::Repeats,
        Self::Resumes,
        Self::Windows,
        Self::FillOrKill,
        Self::Logins,
        Self::Handshakes,
        Self::Garbage,
        Self::SlowConsumer,
        Self::UnreadAnswers,
        Self::Idle,
        Self::OrderSlots,
        Self::Reads,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::MassCancels => "mass-cancels",
            Self::BadPrices => "bad-prices",
            Self::UnknownCancels => "unknown-cancels",
            Self::Repeats => "repeats",
            Self::Resumes => "resumes",
            Self::Windows => "windows",
            Self::FillOrKill => "fill-or-kill",
            Self::Logins => "logins",
            Self::Handshakes => "handshakes",
            Self::Garbage => "garbage",
            Self::SlowConsumer => "slow-consumer",
            Self::UnreadAnswers => "unread-answers",
            Self::Idle => "idle",
            Self::OrderSlots => "order-slots",
            Self::Reads => "reads",
        }
    }

    /// Prepares an attack: logs in if needed, and sends what must precede the first packet.
    fn begin(self, target: &Target) -> Box<dyn Attack> {
        let flood = |requests| -> Box<dyn Attack> { Box::new(Flood::begin(target, requests)) };
        match self {
            Self::Control => flood(Requests::Ordinary),
            Self::MassCancels => flood(Requests::MassCancels),
            Self::BadPrices => flood(Requests::BadPrices),
            Self::UnknownCancels => flood(Requests::UnknownCancels),
            Self::Repeats => flood(Requests::Repeats),
            Self::Windows => flood(Requests::Windows),
            Self::FillOrKill => flood(Requests::FillOrKill),
            Self::OrderSlots => flood(Requests::Orders),
            Self::Resumes => Box::new(Resumes::begin(target)),
            Self::Logins => Box::new(Logins::begin(target)),
            Self::Handshakes => Box::new(Datagrams::handshakes(target)),
            Self::Garbage => Box::new(Datagrams::garbage(target)),
            Self::SlowConsumer => Box::new(SlowConsumer::begin(target, Unread::Reports)),
            Self::UnreadAnswers => Box::new(SlowConsumer::begin(target, Unread::Answers)),
            Self::Idle => Box::new(Idle::begin(target)),
            Self::Reads => Box::new(reads::Reads::begin(target)),
        }
    }
}

/// One attack. One thread makes all calls.
trait Attack: Send {
    /// Sends one packet.
    fn packet(&mut self, number: u64);

    /// Receives answers; called after each tick.
    fn poll(&mut self);

    /// Cleans up and returns the outcome.
    fn finish(self: Box<Self>) -> Outcome;
}

/// Outcome of an attack: figures as text, and violated expectations.
struct Outcome {
    summary: String,
    violations: Vec<String>,
}

/// Target of an attack.
#[derive(Clone)]
struct Target {
    trading: SocketAddr,
    rpc: SocketAddr,
    /// Token of the attacker.
    token: String,
    instrument: u32,
    instrument_id: String,
}

/// Attacks to run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub attacks: Vec<Kind>,
    pub duration: Duration,
    pub packets_per_s: u64,
    /// Runs per attack. In a long plan each further run is preceded by a control run.
    pub runs: usize,
}

impl Plan {
    fn is_long(&self) -> bool {
        self.duration >= LONG
    }
}

/// A platform with an honest member, a book and a control.
struct Stage {
    platform: Platform,
    bond: String,
    instrument: u32,
    honest: User,
    control: User,
}

/// Runs the plan and prints each verdict. A long plan starts a platform per attack, a short one
/// uses one platform for all.
///
/// # Panics
/// If a platform does not start, or the honest member cannot log in.
pub async fn run(plan: &Plan) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    let mut shared = None;
    let mut control = Vec::new();
    for &kind in &plan.attacks {
        let mut stage = match shared.take() {
            Some(stage) => stage,
            None => {
                let stage = Stage::new().await;
                control.clear();
                verdicts.push(stage.first_control(plan, &mut control).await);
                stage
            }
        };
        let verdict = stage.judge(kind, plan, &mut control).await;
        println!("{verdict}");
        verdicts.push(verdict);
        if plan.is_long() {
            stage.platform.stop().await;
        } else {
            shared = Some(stage);
        }
    }
    verdicts
}

impl Stage {
    async fn new() -> Self {
        let platform = Platform::start().await;
        let bond = platform.bond().await;
        let honest = member(&platform, true).await;
        let control = member(&platform, true).await;
        let maker = member(&platform, true).await;
        let instrument = fill_book(&platform, &maker, &bond).await;
        Self {
            platform,
            bond,
            instrument,
            honest,
            control,
        }
    }

    /// Makes the runs of an attack. In a long plan a control run precedes each run but the first.
    async fn judge(&mut self, kind: Kind, plan: &Plan, control: &mut Vec<Figures>) -> Verdict {
        let attacker = member(&self.platform, false).await;
        if kind == Kind::FillOrKill {
            // This attacker sells, so it needs units.
            self.platform.issue(&self.bond, &attacker, UNITS).await;
            self.platform
                .trading_hold(&attacker, &self.bond, UNITS)
                .await;
        }
        let mut verdict = Verdict::new(kind.name(), plan.is_long());
        if kind == Kind::OrderSlots && !plan.is_long() {
            verdict.caches_bytes = LEDGER_CACHE;
        }
        // In a long plan the run before has had its time to release memory.
        verdict.resident_bytes.push(self.resident_bytes());
        for run in 0..plan.runs {
            if run > 0 && plan.is_long() {
                self.control(plan, control, &mut verdict).await;
                let bytes = self.released_memory(plan, &verdict).await;
                verdict.add_control_memory(bytes);
            }
            let (figures, outcome) = self.measure(kind, plan, &attacker).await;
            verdict.add(figures, &outcome);
            if matches!(kind, Kind::SlowConsumer | Kind::UnreadAnswers) {
                self.until_no_orders(&attacker).await;
            }
            self.check_login(&mut verdict).await;
            let bytes = self.released_memory(plan, &verdict).await;
            verdict.resident_bytes.push(bytes);
        }
        let health = self.platform.get("market", "/health", "").await;
        if health != (200, json!({ "status": "ok" })) {
            verdict.violations.push(format!("health: {health:?}"));
        }
        verdict.compare(control);
        verdict
    }

    /// Makes the first control run of a platform; prints and returns its verdict. Its orders fill
    /// the platform's caches once.
    async fn first_control(&self, plan: &Plan, control: &mut Vec<Figures>) -> Verdict {
        let mut verdict = Verdict::new(Kind::Control.name(), false);
        verdict.caches_bytes = CONTROL_CACHES;
        verdict.resident_bytes.push(self.resident_bytes());
        self.control(plan, control, &mut verdict).await;
        let bytes = self.released_memory(plan, &verdict).await;
        verdict.resident_bytes.push(bytes);
        verdict.compare(control);
        println!("{verdict}");
        verdict
    }

    /// Makes one control run.
    async fn control(&self, plan: &Plan, control: &mut Vec<Figures>, verdict: &mut Verdict) {
        let (figures, outcome) = self.measure(Kind::Control, plan, &self.control).await;
        verdict.note("control", &outcome);
        control.push(figures);
    }

    /// Makes one run: the attack and the honest member at the same time.
    async fn measure(&self, kind: Kind, plan: &Plan, attacker: &User) -> (Figures, Outcome) {
        let target = Target {
            trading: self.platform.address("trading"),
            rpc: self.platform.address("market"),
            token: attacker.token(),
            instrument: self.instrument,
            instrument_id: self.bond.clone(),
        };
        let (server, token) = (target.trading, self.honest.token());
        let (bond, duration, rate) = (self.bond.clone(), plan.duration, plan.packets_per_s);
        let both = tokio::task::spawn_blocking(move || {
            let mut attack = kind.begin(&target);
            let honest = Honest::login(server, &token, &bond);
            let honest = std::thread::spawn(move || honest.trade(duration));
            drive(&mut *attack, rate, duration);
            let figures = honest.join().expect("the honest member's thread finishes");
            let mut outcome = attack.finish();
            outcome
                .violations
                .extend(figures.violations.iter().cloned());
            (figures, outcome)
        });
        both.await.expect("the attack finishes")
    }

    /// Waits until the platform's resident memory is within its bound, in a long plan also until it
    /// no longer changes, and returns it. After a minute it is returned as it is.
    async fn released_memory(&self, plan: &Plan, verdict: &Verdict) -> u64 {
        let begun = Instant::now();
        let (mut steady_bytes, mut steady_since) = (self.resident_bytes(), begun);
        loop {
            let bytes = self.resident_bytes();
            if bytes.abs_diff(steady_bytes) >= MEMORY_CHANGE_MIN {
                (steady_bytes, steady_since) = (bytes, Instant::now());
            }
            let is_steady = !plan.is_long() || steady_since.elapsed() >= MEMORY_STEADY;
            let is_released = is_steady && verdict.allows_memory(bytes);
            if is_released || begun.elapsed() >= MEMORY_RELEASE_MAX {
                return bytes;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    }

    /// Waits until cancel-on-disconnect has ended the open orders of a disconnected attacker.
    async fn until_no_orders(&self, user: &User) {
        let request = json!({ "userId": user.id, "status": "ORDER_STATUS_OPEN" });
        self.platform
            .until(
                "cancel-on-disconnect",
                "market.ListOrders",
                request,
                |answer| answer["orders"].as_array().is_none_or(Vec::is_empty),
            )
            .await;
    }

    /// Checks that a new connection can log in within 5 s.
    async fn check_login(&self, verdict: &mut Verdict) {
        let begun = Instant::now();
        let (server, token) = (self.platform.address("trading"), self.honest.token());
        let connected = Connection::connect(server, Trust::Loopback).await;
        let login = match connected {
            Ok((connection, _reports)) => {
                let options = LoginOptions::new(&token, "check");
                connection.login(0, options).await.map(|_| ())
            }
            Err(error) => Err(error),
        };
        let took = begun.elapsed();
        if let Err(error) = login {
            verdict
                .violations
                .push(format!("login after the attack failed: {error}"));
        } else if took > Duration::from_secs(5) {
            verdict
                .violations
                .push(format!("login after the attack took {took:?}"));
        }
    }

    /// Resident memory of the platform, in bytes.
    fn resident_bytes(&self) -> u64 {
        let path = format!("/proc/{}/status", self.platform.pid());
        let status = std::fs::read_to_string(path).expect("the platform runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        kib.expect("VmRSS in kB").parse::<u64>().expect("a number") << 10
    }
}

/// Creates a user with money to trade. `trades_all_day` raises its bounds of open orders.
async fn member(platform: &Platform, trades_all_day: bool) -> User {
    let user = platform.trader().await;
    for limit in ["DEPOSIT", "TRADING"] {
        platform.set_limit(&user, limit, "1000000000000.00").await;
    }
    platform.deposit(&user, "1000000.00").await;
    platform.trading_hold(&user, "CFA-RUB", "900000.00").await;
    if trades_all_day {
        let request = json!({ "userId": user.id, "reason": "trades all day", "bounds": {
            "openOrdersPerUser": 65_536, "openOrdersPerInstrument": 16_384 } });
        platform.approved("market.SetMemberBounds", request).await;
    }
    user
}

/// Places [`RESTING`] orders over a thousand levels. Returns the protocol's number of the
/// instrument.
async fn fill_book(platform: &Platform, maker: &User, bond: &str) -> u32 {
    let (server, token) = (platform.address("trading"), maker.token());
    let (connection, mut reports) = Connection::connect(server, Trust::Loopback)
        .await
        .expect("a connection");
    let login = connection
        .login(0, LoginOptions::new(&token, "maker"))
        .await;
    login.expect("the maker logs in");
    let instrument = instrument_of(&connection, bond);
    let mut acknowledged = 0;
    for id in 1..=RESTING {
        let ticks = 101 + i64::try_from(id % 1_000).expect("small");
        let order = limit(id, instrument, types::Side::Buy, ticks, 1);
        connection.send(0, order).await.expect("sent");
        // Stays within the rate.
        if id.is_multiple_of(100) {
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }
    while acknowledged < RESTING {
        let report = tokio::time::timeout(PATIENCE, reports.recv()).await;
        let report = report.expect("in time").expect("the connection is open");
        let report = report.expect("a report");
        match report.message {
            wire::ServerMessage::OrderAck(_) => acknowledged += 1,
            wire::ServerMessage::Rejected(m) => {
                panic!("an order of the maker was rejected: {}", m.reason.as_str())
            }
            _ => {}
        }
    }
    instrument
}

/// Sends packets at `rate` per second for `duration`.
fn drive(attack: &mut dyn Attack, rate: u64, duration: Duration) {
    let begun = Instant::now();
    let (mut number, mut skipped) = (0, 0);
    while begun.elapsed() < duration {
        let due = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX) * rate / 1_000_000;
        skipped += (due - skipped - number).saturating_sub(PACKETS_PER_TICK_MAX);
        while number < due - skipped {
            attack.packet(number);
            number += 1;
        }
        attack.poll();
        std::thread::sleep(TICK);
    }
}
