//! `platform load`: the flags of the load generator.

use std::net::SocketAddr;
use std::path::PathBuf;

use anyhow::Context;
use clap::builder::ValueParser;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use client::Trust;

use super::call::Target;
use crate::load::{self, Load, Profile};

/// The command.
pub fn command() -> Command {
    let number = || value_parser!(u64).range(1..);
    let small = || value_parser!(u16).range(1..=64);
    let path = || value_parser!(PathBuf);
    Command::new("load")
        .about("Send open-loop order flow to a running platform and print the latency of its answers")
        .after_help(
            "Requests are due by a schedule, and latencies count from when a request was due. Members \
             are created and funded over the public calls. Ctrl-C ends the load with the figures so far.",
        )
        .args([
            flag("rate", "N", number(), "1000", "Requests per second over all sessions"),
            flag("seconds", "N", number(), "10", "Duration of the load"),
            flag("members", "N", small(), "8", "Number of members; one half buys, the other sells"),
            flag("sessions", "N", small(), "1", "Sessions per member; at most 64 in total"),
            flag("window", "N", number(), "256", "Maximum unanswered requests per session"),
            flag("seed", "N", value_parser!(u64), "1", "Seed of the requests"),
            flag(
                "profile",
                "SHARES",
                ValueParser::new(str::parse::<Profile>),
                "47,38,8,7",
                "Percentages of resting orders, cancels, amends, immediate-or-cancel orders",
            ),
            option("trading", "ADDRESS", value_parser!(SocketAddr))
                .help("Trading gateway of the platform (QUIC) [default: listen.trading of the configuration]")
                .visible_alias("address"),
            option("fingerprint", "SHA256", value_parser!(String))
                .help("Certificate of the trading gateway; required if it runs on another machine"),
            Arg::new("spin")
                .long("spin")
                .action(ArgAction::SetTrue)
                .help("Use the spinning client, which occupies a core; the other one sends every millisecond"),
            option("report", "FILE", path()).help("Write the results to a JSON file"),
            option("hdr", "DIR", path())
                .help("Write accepted.hgrm and durable.hgrm, microseconds by percentile"),
            option("plot", "FILE", path()).help("Draw the percentiles as SVG"),
        ])
}

fn option(name: &'static str, value: &'static str, parser: impl Into<ValueParser>) -> Arg {
    Arg::new(name)
        .long(name)
        .value_name(value)
        .value_parser(parser.into())
}

fn flag(
    name: &'static str,
    value: &'static str,
    parser: impl Into<ValueParser>,
    default: &'static str,
    help: &'static str,
) -> Arg {
    option(name, value, parser)
        .default_value(default)
        .help(help)
}

/// Sends the load described by the flags, by default to the trading gateway at `trading`.
///
/// # Errors
/// Inconsistent flags; otherwise as [`load::run`].
pub async fn run(
    matches: &ArgMatches,
    target: Target,
    trading: SocketAddr,
    json: bool,
) -> anyhow::Result<()> {
    let number = |name: &str| matches.get_one::<u64>(name).copied().context("a default");
    let small = |name: &str| matches.get_one::<u16>(name).copied().context("a default");
    let path = |name: &str| matches.get_one::<PathBuf>(name).cloned();
    let trust = match matches.get_one::<String>("fingerprint") {
        Some(text) => text.parse::<Trust>().context("--fingerprint")?,
        None => Trust::Loopback,
    };
    let given = matches.get_one::<SocketAddr>("trading").copied();
    load::run(Load {
        rate: number("rate")?,
        seconds: number("seconds")?,
        members: small("members")?,
        sessions: small("sessions")?,
        window: usize::try_from(number("window")?)?,
        seed: number("seed")?,
        profile: matches.get_one("profile").copied().unwrap_or_default(),
        spins: matches.get_flag("spin"),
        trading: given.unwrap_or(trading),
        trust,
        target,
        report: path("report"),
        hdr: path("hdr"),
        plot: path("plot"),
        json,
    })
    .await
}
