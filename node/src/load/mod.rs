//! `platform load`: open-loop order flow against a running platform, with answer latencies.
//!
//! | file | contents |
//! |---|---|
//! | `plan` | generates the requests |
//! | `run` | schedule, unanswered requests, and the two clients that drive it |
//! | `tally` | counts and latencies |

mod plan;
mod run;
mod tally;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use client::{Connection, LoginOptions, Trust, spinning};
use latency::{hgrm, plot};
use serde_json::{Value, json};
use wire::InstrumentDefinition;

use crate::cli::call::Target;
use crate::demo::Scenario;
use crate::replay::members::{self, Member};
pub use plan::Profile;
use plan::{BAND, MONEY_PER_ORDER, Plan, UNITS_PER_ORDER};
use run::Run;
use tally::Tally;

/// Parameters of a load.
pub struct Load {
    /// Requests per second over all sessions.
    pub rate: u64,
    pub seconds: u64,
    pub members: u16,
    /// Sessions per member.
    pub sessions: u16,
    /// Maximum unanswered requests per session.
    pub window: usize,
    pub seed: u64,
    pub profile: Profile,
    /// Use the spinning client, which occupies a core.
    pub spins: bool,
    pub trading: SocketAddr,
    pub trust: Trust,
    pub target: Target,
    /// Output files: report, distributions, plot.
    pub report: Option<PathBuf>,
    pub hdr: Option<PathBuf>,
    pub plot: Option<PathBuf>,
    pub json: bool,
}

/// Creates and funds members, sends the load, writes and prints the results.
///
/// # Errors
/// Members cannot be funded, the connection is lost, or a file cannot be written. After a lost
/// connection the results so far are written.
pub async fn run(load: Load) -> anyhow::Result<()> {
    let channels = u64::from(load.members) * u64::from(load.sessions);
    anyhow::ensure!(
        load.members >= 2 && (2..=wire::CHANNELS_MAX as u64).contains(&channels),
        "the load needs at least 2 members and at most {} sessions in total: one connection carries all",
        wire::CHANNELS_MAX
    );
    let total = load.rate.checked_mul(load.seconds);
    let total = total.context("too many requests")?;
    if let Some(folder) = &load.hdr {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    let mut scenario = Scenario::new(load.target.clone(), load.json);
    let instrument = members::list(&mut scenario, "LOAD", "Load", BAND).await?;
    let needs = needs(load.members, total)?;
    let members = members::enter(&mut scenario, &instrument, &needs).await?;

    let interrupted = Arc::new(AtomicBool::new(false));
    let listening = tokio::spawn(interrupt(interrupted.clone()));
    let (tally, played) = play(&load, &instrument, &members, total, interrupted.clone()).await?;
    listening.abort();
    let report = report(
        &load,
        &instrument,
        &tally,
        interrupted.load(Ordering::Relaxed),
    );
    let written = write(&load, &report, &tally);
    if load.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{}", crate::cli::output::text(&report));
    }
    for note in tally.notes() {
        eprintln!("note: {note}");
    }
    played.and(written)
}

/// Amounts to block per member (kopecks, units): enough even if one member sent every request.
fn needs(members: u16, total: u64) -> anyhow::Result<Vec<(i64, u64)>> {
    let orders = i64::try_from(total).ok();
    let money = orders.and_then(|orders| orders.checked_mul(MONEY_PER_ORDER));
    let units = total.checked_mul(UNITS_PER_ORDER);
    let (money, units) = money.zip(units).context("too many requests")?;
    let need = |member: u16| match member % 2 {
        0 => (money, 0),
        _ => (0, units),
    };
    Ok((0..members).map(need).collect())
}

/// The first Ctrl-C ends the load with the results so far, the second one ends the process.
async fn interrupt(interrupted: Arc<AtomicBool>) {
    while tokio::signal::ctrl_c().await.is_ok() {
        if interrupted.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        eprintln!("interrupted: waiting for outstanding answers");
    }
}

/// Channel and login of every session.
fn logins(members: &[Member], sessions: u16) -> impl Iterator<Item = (u16, LoginOptions)> {
    let tokens = members
        .iter()
        .flat_map(move |member| (0..sessions).map(move |session| (&member.user, session)));
    (0..).zip(tokens).map(|(channel, (user, session))| {
        let token = format!("sandbox.trader.{user}");
        (
            channel,
            LoginOptions::new(&token, &format!("load-{session}")),
        )
    })
}

/// Sends the load; returns the tally, and the error if one ended the load early.
async fn play(
    load: &Load,
    instrument: &str,
    members: &[Member],
    total: u64,
    interrupted: Arc<AtomicBool>,
) -> anyhow::Result<(Tally, anyhow::Result<()>)> {
    let (rate, window, sessions) = (load.rate, load.window, load.sessions);
    let (seed, profile, count) = (load.seed, load.profile, load.members);
    let instrument = instrument.to_owned();
    let begin = move |definitions: Vec<InstrumentDefinition>| {
        let mut known = definitions.iter();
        let traded = known.find(|definition| definition.id.as_str() == instrument);
        let instrument = traded
            .context("the gateway does not know the instrument")?
            .instrument;
        let plan = Plan::new(seed, profile, instrument, count, sessions);
        anyhow::Ok(Run::new(plan, instrument, rate, total, window, interrupted))
    };
    if !load.spins {
        let (connection, mut reports) =
            Connection::connect(load.trading, load.trust.clone()).await?;
        for (channel, options) in logins(members, sessions) {
            connection.login(channel, options).await?;
        }
        let mut run = begin(connection.instruments())?;
        let played = run::drive(&mut run, &connection, &mut reports).await;
        return Ok((run.tally, played));
    }
    let (trading, trust) = (load.trading, load.trust.clone());
    let logins: Vec<_> = logins(members, sessions).collect();
    let spinning = move || {
        let mut connection = spinning::Connection::connect(trading, &trust)?;
        for (channel, options) in logins {
            connection.login(channel, options)?;
        }
        let mut run = begin(connection.instruments().copied().collect())?;
        let played = run::spin(&mut run, &mut connection);
        anyhow::Ok((run.tally, played))
    };
    tokio::task::spawn_blocking(spinning).await?
}

fn report(load: &Load, instrument: &str, tally: &Tally, is_interrupted: bool) -> Value {
    let mut report = json!({
        "instrument": instrument,
        "client": if load.spins { "spinning" } else { "async" },
        "rate_per_s": load.rate,
        "seconds": load.seconds,
        "members": load.members,
        "sessions": load.members * load.sessions,
        "window": load.window,
        "seed": load.seed,
        "profile": load.profile.to_string(),
        "interrupted": is_interrupted,
    });
    if let (Value::Object(report), Value::Object(results)) = (&mut report, tally.to_json()) {
        report.extend(results);
    }
    report
}

/// Writes the requested files.
fn write(load: &Load, report: &Value, tally: &Tally) -> anyhow::Result<()> {
    let put = |path: &Path, text: String| {
        std::fs::write(path, text).with_context(|| path.display().to_string())
    };
    if let Some(path) = &load.report {
        put(path, format!("{}\n", serde_json::to_string_pretty(report)?))?;
    }
    let times = [("accepted", &tally.accepted), ("durable", &tally.durable)];
    if let Some(folder) = &load.hdr {
        for (name, times) in times {
            put(
                &folder.join(format!("{name}.hgrm")),
                hgrm::text(times, 1_000.0),
            )?;
        }
    }
    if let Some(path) = &load.plot {
        let curves = times.map(|(name, times)| plot::Curve::new(name, times, 1_000.0));
        let title = format!(
            "Open loop, {} requests/s for {:.1} s, from due to answer",
            load.rate,
            tally.elapsed.as_secs_f64()
        );
        put(path, plot::svg(&title, "us", &curves))?;
    }
    Ok(())
}
