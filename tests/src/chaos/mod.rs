//! Chaos: kills and restarts the real binary and its clients, on a network that drops, delays,
//! reorders and duplicates datagrams. At the end it compares each client's numbered messages with
//! the journal's, byte for byte.
//!
//! | file | what |
//! |---|---|
//! | `trader` | a client under chaos |
//! | `session` | one session of a trader: its requests, and its record |
//! | `judge` | the journal read offline: messages, and times of cancels on disconnect |
//! | `summary` | figures of a run |
//!
//! The seed determines the order of the kills, the requests and the fates of datagrams, but not the
//! timing.

pub mod judge;
pub mod session;
pub mod summary;
pub mod trader;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use client::{Connection, LoginOptions, Trust};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use types::{Id128, derived};
use wire::{SettlementProgress, TradingHoldChanged};

use self::judge::{Journal, Restart, Terms, encoded};
pub use self::summary::Summary;
use self::trader::{Instruction, Trader};
use crate::Platform;
use crate::flow::Random;
use crate::process::PATIENCE;
use crate::udp_proxy::{Faults, Proxy};

/// Heartbeat interval of the server, and grace of cancel-on-disconnect.
pub const GRACE: Duration = Duration::from_secs(1);
/// Settings of the platform. The window is small, so that resumes need the journal.
const SETTINGS: [(&str, &str); 4] = [
    ("PLATFORM_MARKET__HEARTBEAT_MS", "1000"),
    ("PLATFORM_TRADING__GRACE_MS", "1000"),
    ("PLATFORM_MARKET__WINDOW_MESSAGES_MAX", "256"),
    ("PLATFORM_SNAPSHOTS__EVERY_SECONDS", "5"),
];
/// Numbered messages that all clients together receive between most kills.
const MESSAGES_BETWEEN: u64 = 30;

/// Parameters of a run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub seed: u64,
    pub server_kills: usize,
    pub client_kills: usize,
    pub traders: usize,
    /// Interval of each client's requests.
    pub pace: Duration,
    pub faults: Faults,
    /// Longest delay of a cancel on disconnect after the grace.
    pub late: Duration,
    /// Time limit for all kills.
    pub limit: Duration,
}

impl Plan {
    /// As many kills of the server as of clients.
    pub fn new(seed: u64, kills: usize) -> Self {
        Self {
            seed,
            server_kills: kills,
            client_kills: kills,
            traders: 3,
            pace: Duration::from_millis(10),
            faults: Faults {
                drop_ppm: 20_000,
                delay_ppm: 50_000,
                delay_max: Duration::from_millis(40),
                reorder_ppm: 20_000,
                duplicate_ppm: 20_000,
            },
            late: Duration::from_millis(500),
            limit: Duration::from_secs(40 * 60),
        }
    }
}

/// Nanoseconds since 1970, like the journal's times.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.expect("after 1970").as_nanos()).expect("before 2554")
}

/// A running client, with the channel of its instructions.
struct Running {
    instructions: mpsc::Sender<Instruction>,
    progress: Arc<AtomicU64>,
    task: JoinHandle<Trader>,
}

/// Runs the plan on a new platform.
///
/// # Panics
/// If a client's messages differ from the journal's, or the run found another violation. The
/// message contains the seed.
pub async fn run(plan: &Plan) -> Summary {
    let begun = Instant::now();
    let mut platform = Platform::start_with(&SETTINGS).await;
    let running = start_traders(&platform, plan).await;
    let restarts = run_kills(plan, &mut platform, &running).await;
    let mut traders = Vec::new();
    for client in &running {
        // The join below reports a client that has panicked.
        let _ = client.instructions.send(Instruction::Finish).await;
    }
    for client in running {
        traders.push(client.task.await.expect("the client finishes"));
    }
    let health = platform.get("market", "/health", "").await;
    assert_eq!(
        health,
        (200, json!({ "status": "ok" })),
        "health of the market"
    );
    platform.proof().await;
    platform.stop().await;

    let (dir, late) = (platform.data_dir().join("journal"), plan.late);
    let read = tokio::task::spawn_blocking(move || {
        let terms = Terms { grace: GRACE, late };
        let journal = judge::read(&dir, &restarts, terms);
        (journal, restarts)
    });
    let (journal, restarts) = read.await.expect("reading the journal finishes");
    let mut violations = journal.violations.clone();
    for trader in &traders {
        violations.extend(compare(trader, &journal));
    }
    platform.restart_with(&SETTINGS).await;
    for trader in &traders {
        violations.extend(resend_differences(&platform, trader).await);
    }
    platform.stop().await;
    let summary = Summary::of(&restarts, &traders, &journal, begun.elapsed());
    assert!(
        violations.is_empty(),
        "CHAOS_SEED={}: {violations:#?}\n{summary}",
        plan.seed
    );
    summary
}

/// Creates members with money and units, and starts a client for each.
async fn start_traders(platform: &Platform, plan: &Plan) -> Vec<Running> {
    let bond = platform.bond().await;
    let mut running = Vec::new();
    for number in 0..plan.traders as u64 {
        let user = platform.trader().await;
        for limit in ["DEPOSIT", "TRADING"] {
            platform.set_limit(&user, limit, "10000000000.00").await;
        }
        platform.deposit(&user, "20000000.00").await;
        platform.trading_hold(&user, "CFA-RUB", "20000000.00").await;
        platform.issue(&bond, &user, "200000").await;
        platform.trading_hold(&user, &bond, "200000").await;
        let server = platform.address("trading");
        let proxy = Proxy::start(server, plan.faults, plan.seed.wrapping_add(number)).await;
        let trader = Trader::new(number, user, &bond, proxy, plan.seed).paced(plan.pace);
        let (instructions, receiver) = mpsc::channel(4);
        running.push(Running {
            instructions,
            progress: trader.progress(),
            task: tokio::spawn(trader.run(receiver)),
        });
    }
    running
}

/// Makes the kills in a seeded order, each after a seeded delay and most after
/// [`MESSAGES_BETWEEN`] messages. Returns the restarts of the server.
async fn run_kills(plan: &Plan, platform: &mut Platform, running: &[Running]) -> Vec<Restart> {
    let begun = Instant::now();
    let mut random = Random::new(plan.seed);
    let mut kills = vec![true; plan.server_kills];
    kills.resize(plan.server_kills + plan.client_kills, false);
    for at in (1..kills.len()).rev() {
        let other = random.below(at as u64 + 1);
        kills.swap(at, usize::try_from(other).expect("small"));
    }
    let mut restarts = Vec::new();
    for (done, is_server) in kills.into_iter().enumerate() {
        assert!(
            begun.elapsed() < plan.limit,
            "only {done} kills in {:?}",
            plan.limit
        );
        // Most kills hit trading clients; the others hit a start, a login or a resume.
        if random.below(4) > 0 {
            until_messages(running, MESSAGES_BETWEEN).await;
        }
        tokio::time::sleep(Duration::from_millis(random.below(800))).await;
        if is_server {
            platform.kill().await;
            tokio::time::sleep(Duration::from_millis(random.below(300))).await;
            let spawned_ns = now_ns();
            platform.restart_with(&SETTINGS).await;
            restarts.push(Restart {
                spawned_ns,
                ready_ns: now_ns(),
            });
        } else {
            let at = usize::try_from(random.below(running.len() as u64)).expect("small");
            // The client returns within the grace, after heartbeat timeout and grace, or between.
            let away = match random.below(3) {
                0 => 50 + random.below(600),
                1 => 3_000 + random.below(1_500),
                _ => 500 + random.below(3_000),
            };
            let away = Duration::from_millis(away);
            let instruction = Instruction::Die {
                is_process: random.below(2) == 0,
                away,
            };
            let sent = running[at].instructions.send(instruction).await;
            assert!(sent.is_ok(), "a client ended early");
            // During half of the absences no kill follows: the server detects the silence.
            if random.below(2) == 0 {
                tokio::time::sleep(away).await;
            }
        }
    }
    until_messages(running, MESSAGES_BETWEEN).await;
    restarts
}

/// Waits until the clients together have received `messages` more.
async fn until_messages(running: &[Running], messages: u64) {
    let total = || -> u64 {
        let of = |client: &Running| client.progress.load(Relaxed);
        running.iter().map(of).sum()
    };
    let (before, deadline) = (total(), Instant::now() + PATIENCE);
    while total() < before + messages {
        let is_ended = running.iter().any(|client| client.task.is_finished());
        assert!(!is_ended, "a client ended early");
        assert!(Instant::now() < deadline, "timed out waiting for messages");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Compares a client's messages with the journal's; returns the client's violations and the
/// differences.
fn compare(trader: &Trader, journal: &Journal) -> Vec<String> {
    let mut violations = trader.violations.clone();
    for session in &trader.sessions {
        let nothing = Vec::new();
        let expected = journal.messages.get(&key(trader, &session.name));
        violations.extend(difference(
            &format!(
                "{} of {}: the client and the journal",
                session.name, trader.user.id
            ),
            &session.messages,
            up_to_end(expected.unwrap_or(&nothing), session.messages.len()),
        ));
    }
    violations
}

/// Drops the messages that funding and settlement created after the client's last one.
fn up_to_end(messages: &[Bytes], received: usize) -> &[Bytes] {
    let Some((had, after)) = messages.split_at_checked(received) else {
        return messages;
    };
    let is_money = |message: &Bytes| {
        // The type is the third byte of a message.
        let kinds = [TradingHoldChanged::KIND, SettlementProgress::KIND];
        kinds.contains(&message[2])
    };
    match after.iter().all(is_money) {
        true => had,
        false => messages,
    }
}

fn key(trader: &Trader, session: &str) -> Id128 {
    derived::session_key(&trader.user.id, session)
}

/// Describes where the lists of messages differ; `None` if they are equal.
fn difference(what: &str, left: &[Bytes], right: &[Bytes]) -> Option<String> {
    let same = left
        .iter()
        .zip(right)
        .take_while(|(left, right)| left == right);
    let same = same.count();
    (same < left.len().max(right.len())).then(|| {
        let (left, right) = (left.len(), right.len());
        format!("{what} differ after {same} messages ({left} and {right})")
    })
}

/// Logs in from number 1 without the proxy, after a restart, and compares the resent messages with
/// the client's. All of them come from the journal, since the windows are empty.
async fn resend_differences(platform: &Platform, trader: &Trader) -> Vec<String> {
    let (connection, mut reports) =
        Connection::connect(platform.address("trading"), Trust::Loopback)
            .await
            .expect("a connection");
    let mut resent = vec![Vec::new(); trader.sessions.len()];
    for (channel, session) in (0u16..).zip(&trader.sessions) {
        let options = LoginOptions::new(&trader.user.token(), &session.name);
        let login = connection.login(channel, options).await;
        login.expect("a login from number 1");
    }
    let lacks = |resent: &[Vec<Bytes>]| {
        let both = resent.iter().zip(&trader.sessions);
        both.into_iter()
            .any(|(resent, session)| resent.len() < session.messages.len())
    };
    while lacks(&resent) {
        let report = tokio::time::timeout(PATIENCE, reports.recv()).await;
        let report = report.expect("in time").expect("the connection is open");
        let report = report.expect("a report");
        if report.sequence > 0 {
            let bytes = encoded(&report.message, report.sequence);
            resent[usize::from(report.channel)].push(bytes);
        }
    }
    let mut violations = Vec::new();
    for (session, resent) in trader.sessions.iter().zip(&resent) {
        let what = format!(
            "{} of {}: the client and a resend",
            session.name, trader.user.id
        );
        let resent = up_to_end(resent, session.messages.len());
        violations.extend(difference(&what, &session.messages, resent));
    }
    violations
}
