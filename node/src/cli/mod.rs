//! The command line: `platform run | demo | replay | load | proof | data | events | journal |
//! config` and others, and a noun for each area of the contract.

pub mod call;
mod contracts;
pub mod data;
pub mod events;
mod export;
pub mod journal;
pub mod ledger;
pub mod load;
pub mod output;
pub mod schema;
pub mod table;
mod units;

use sequencer::priority;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, bail};
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use clap_complete::Shell;

use crate::config::{Config, Listen, reachable};
use crate::platform::Platform;
use crate::{demo, proof, replay, run};
use call::Target;

/// Sandbox token whose roles may make every call of operators and auditors. It names no person, and
/// its role of a service does not count for calls that take two persons (`rpc/src/access.rs`).
const TOKEN_DEFAULT: &str =
    "sandbox.operator+treasury+compliance+market-supervisor+auditor+service";

/// Parses the command line and runs the command.
pub fn main() -> ExitCode {
    let matches = command().get_matches();
    // At least four workers. Services and sessions share the runtime, and a worker that waits for a
    // disk must not stop the others.
    let workers = std::thread::available_parallelism().map_or(4, |cores| cores.get().max(4));
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(workers)
        .on_thread_start(|| priority::lower(priority::SERVING))
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("error: cannot start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let done = runtime.block_on(dispatch(&matches));
    runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

pub fn command() -> Command {
    Command::new("platform")
        .about("Platform for digital financial assets: issue, trade, settle, prove")
        .version(env!("CARGO_PKG_VERSION"))
        .after_help("Without a command the platform runs.")
        .arg(global("json").long("json").action(ArgAction::SetTrue).help("Print results as JSON"))
        .arg(
            global("config")
                .long("config")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .env("PLATFORM_CONFIG")
                .help("TOML configuration file [default: platform.toml if there is one]"),
        )
        .arg(
            global("data-dir")
                .long("data-dir")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .help("Folder of all state [default: data]"),
        )
        .arg(
            global("url")
                .long("url")
                .value_name("URL")
                .env("PLATFORM_URL")
                .help("A running platform, for commands that call one [default: listen.all of the configuration]"),
        )
        .arg(
            global("token")
                .long("token")
                .value_name("TOKEN")
                .env("PLATFORM_TOKEN")
                .default_value(TOKEN_DEFAULT)
                .hide_default_value(true)
                .help("Bearer token [default: a sandbox token of an operator's desk]"),
        )
        .subcommand(Command::new("run").about("Run the platform: every service in one process"))
        .subcommand(Command::new("config").about("Print the configuration in force, secrets masked"))
        .subcommand(
            Command::new("demo")
                .about("Run the whole life cycle of an asset, from deposit to maturity, and check every step")
                .args(connect()),
        )
        .subcommand(replay_command())
        .subcommand(completions_command())
        .subcommand(proof_command())
        .subcommands([load::command(), data::command(), events::command(), journal::command(), contracts::command()])
        .subcommands(call::commands())
        .mut_subcommand("ledger", |ledger| ledger.subcommands(ledger::verbs()))
}

fn replay_command() -> Command {
    Command::new("replay")
        .about("Send real or synthetic order flow through the whole platform")
        .arg(
            Arg::new("lobster")
                .long("lobster")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .required_unless_present("synthetic")
                .conflicts_with("synthetic")
                .help("Message file in the LOBSTER format"),
        )
        .arg(
            Arg::new("synthetic")
                .long("synthetic")
                .value_name("SEED")
                .value_parser(value_parser!(u64))
                .help("Flow generated from this seed"),
        )
        .arg(
            Arg::new("rows")
                .long("rows")
                .value_name("COUNT")
                .value_parser(value_parser!(usize))
                .default_value("20000")
                .help("Rows of synthetic flow"),
        )
        .arg(
            Arg::new("speed")
                .long("speed")
                .value_name("FACTOR")
                .default_value("max")
                .help("Multiple of the recorded pace, or max: as fast as the throttles admit"),
        )
        .args(connect())
}

fn proof_command() -> Command {
    Command::new("proof")
        .about("Prove the balances of a running platform: chain = ledger = bank")
        .arg(
            Arg::new("full")
                .long("full")
                .action(ArgAction::SetTrue)
                .help("Also check every row of every store in the data folder of the settings"),
        )
        .arg(
            Arg::new("wait")
                .long("wait")
                .value_name("SECONDS")
                .value_parser(value_parser!(u64))
                .help(format!(
                    "Time that operations which await the chain have to become final [default: {}]",
                    ::proof::SETTLING_WAIT.as_secs()
                )),
        )
}

fn completions_command() -> Command {
    Command::new("completions")
        .about("Print a completion script for a shell")
        .arg(
            Arg::new("shell")
                .value_name("SHELL")
                .required(true)
                .value_parser(value_parser!(Shell))
                .help("Source the script, or put it where the shell looks for completions"),
        )
}

fn global(name: &'static str) -> Arg {
    Arg::new(name).global(true)
}

fn connect() -> [Arg; 2] {
    [
        Arg::new("connect")
            .long("connect")
            .action(ArgAction::SetTrue)
            .help(
                "Use the running platform, not a new one in a temporary folder [implied by --url and --trading]",
            ),
        Arg::new("trading")
            .long("trading")
            .value_name("ADDRESS")
            .value_parser(value_parser!(SocketAddr))
            .help("Trading gateway of the running platform (QUIC) [default: host of --url, port of listen.trading]"),
    ]
}

async fn dispatch(matches: &ArgMatches) -> anyhow::Result<()> {
    let json = matches.get_flag("json");
    let word = |name: &str| matches.get_one::<String>(name).cloned().unwrap_or_default();
    let config = || {
        Config::load(
            matches.get_one::<PathBuf>("config").map(PathBuf::as_path),
            matches.get_one::<PathBuf>("data-dir").map(PathBuf::as_path),
        )
    };
    let target = || {
        let url = match matches.get_one::<String>("url") {
            Some(url) => url.clone(),
            None => format!("http://{}", reachable(config()?.listen.all)),
        };
        Target::new(&url, &word("token"))
    };
    match matches.subcommand() {
        None | Some(("run", _)) => run::run(config()?, json).await,
        Some(("config", _)) => print_config(&config()?, json),
        Some(("demo", matches)) => {
            let parameters = |target, trading| demo::Demo {
                target,
                trading,
                json,
            };
            on_platform(matches, target()?, config()?, |target, trading| {
                demo::run(parameters(target, trading))
            })
            .await
        }
        Some(("replay", matches)) => {
            let (source, speed) = replay_options(matches)?;
            on_platform(matches, target()?, config()?, |target, trading| {
                replay::run(replay::Replay {
                    source,
                    speed,
                    target,
                    trading,
                    json,
                })
            })
            .await
        }
        Some(("journal", matches)) => {
            let config = config()?;
            tokio::task::block_in_place(|| journal::run(matches, &config, json))
        }
        Some(("load", matches)) => {
            let trading = reachable(config()?.listen.trading);
            load::run(matches, target()?, trading, json).await
        }
        Some(("proof", matches)) => proof::run(&target()?, config, matches, json).await,
        Some(("completions", matches)) => print_completions(matches),
        Some(("proto", matches)) => contracts::run(matches),
        Some(("data", matches)) => data::run(matches, &config()?, json).await,
        Some(("events", matches)) => events::run(matches, &config()?, json).await,
        Some(("ledger", matches)) => {
            let target = target()?;
            match ledger::run(&target, config, matches, json).await {
                Some(done) => done,
                None => call::run(&target, "ledger", matches, json)
                    .await
                    .context("unknown command")?,
            }
        }
        Some((noun, matches)) => match call::run(&target()?, noun, matches, json).await {
            Some(done) => done,
            None => bail!("unknown command `{noun}`"),
        },
    }
}

fn print_config(config: &Config, json: bool) -> anyhow::Result<()> {
    let shown = config.masked()?;
    if json {
        println!("{}", serde_json::to_string_pretty(&shown)?);
    } else {
        let text = toml::to_string(&shown).context("configuration")?;
        print!("{}", explained(&text));
    }
    Ok(())
}

/// The TOML text with a comment at each address whose port is chosen at the start.
fn explained(text: &str) -> String {
    let explained = |line: &str| match has_port_0(line) {
        true => format!("{line}  # 0: a free port is chosen at the start\n"),
        false => format!("{line}\n"),
    };
    text.lines().map(explained).collect()
}

/// True for a line `name = "address"` or `name = "url"` with port 0.
fn has_port_0(line: &str) -> bool {
    let value = line.split_once(" = ").map(|(_, value)| value);
    let text = value.and_then(|value| value.strip_prefix('"')?.strip_suffix('"'));
    text.is_some_and(|text| {
        let address = text.parse::<SocketAddr>();
        address.is_ok_and(|address| address.port() == 0)
            || reqwest::Url::parse(text).is_ok_and(|url| url.port() == Some(0))
    })
}

fn print_completions(matches: &ArgMatches) -> anyhow::Result<()> {
    let shell: &Shell = matches.get_one("shell").context("a shell")?;
    clap_complete::generate(*shell, &mut command(), "platform", &mut std::io::stdout());
    Ok(())
}

/// Source and speed of `replay`. The speed is a multiple of the recorded pace; `None`: as fast as
/// the throttles admit.
fn replay_options(matches: &ArgMatches) -> anyhow::Result<(replay::Source, Option<f64>)> {
    let source = match matches.get_one::<PathBuf>("lobster") {
        Some(path) => replay::Source::Lobster(path.clone()),
        None => replay::Source::Synthetic {
            seed: matches.get_one("synthetic").copied().unwrap_or_default(),
            rows: matches.get_one("rows").copied().unwrap_or_default(),
        },
    };
    let speed = match matches.get_one::<String>("speed").map(String::as_str) {
        None | Some("max") => None,
        Some(text) => match text.parse::<f64>() {
            Ok(speed) if speed >= 1.0 && speed.is_finite() => Some(speed),
            _ => bail!("--speed {text}: expected a factor of at least 1, or max"),
        },
    };
    Ok((source, speed))
}

/// True if the caller asks for the running platform or gives its address on the command line.
fn is_for_running(matches: &ArgMatches) -> bool {
    let is_given = |name| matches.value_source(name) == Some(ValueSource::CommandLine);
    matches.get_flag("connect") || is_given("url") || is_given("trading")
}

/// The address of `port` at the host of `url`.
fn at_host_of(url: &str, port: u16) -> anyhow::Result<SocketAddr> {
    let uri: http::Uri = url.parse().with_context(|| format!("--url {url}"))?;
    let host = uri
        .host()
        .with_context(|| format!("--url {url}: no host"))?;
    // An IPv6 address is in brackets.
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let mut found = (host, port)
        .to_socket_addrs()
        .with_context(|| format!("--url {url}: the host has no address; give --trading"))?;
    found
        .next()
        .with_context(|| format!("--url {url}: the host has no address; give --trading"))
}

/// Runs `play` against the running platform, or against a new platform in a temporary folder.
async fn on_platform<F>(
    matches: &ArgMatches,
    target: Target,
    mut config: Config,
    play: impl FnOnce(Target, SocketAddr) -> F,
) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    if is_for_running(matches) {
        let given = matches.get_one::<SocketAddr>("trading").copied();
        let trading = match given {
            Some(address) => address,
            None => at_host_of(&target.url, config.listen.trading.port())?,
        };
        return play(target, trading).await;
    }
    let folder = tempfile::tempdir().context("a temporary folder")?;
    config.data_dir = folder.path().to_path_buf();
    // The issuers of the demonstration sign with the sandbox's authority.
    config.cfa.signature_command.clear();
    config.listen = Listen::on_free_ports();
    config.log.filter = "warn".to_owned();
    run::init_log(&config)?;
    let platform = Platform::start(config.with_derived_settings()).await?;
    let target = Target::new(
        &format!("http://{}", platform.addresses().all),
        &target.token,
    )?;
    let played = play(target, platform.addresses().trading).await;
    let stopped = platform.stop().await;
    played.and(stopped)
}

#[cfg(test)]
mod tests {
    // rows: R350
    #[test]
    fn r350_an_address_on_the_command_line_asks_for_the_running_platform() {
        let is_for_running = |words: &str| {
            let words = format!("platform {words}");
            let matches = super::command().try_get_matches_from(words.split_whitespace());
            let matches = matches.unwrap();
            super::is_for_running(matches.subcommand().unwrap().1)
        };
        for words in ["demo", "replay --synthetic 1"] {
            assert!(!is_for_running(words), "{words}");
            for address in [
                "--connect",
                "--url http://[::1]:8080",
                "--trading 127.0.0.1:8090",
            ] {
                assert!(
                    is_for_running(&format!("{words} {address}")),
                    "{words} {address}"
                );
            }
            let before = format!("--url http://127.0.0.1:8080 {words}");
            assert!(is_for_running(&before), "{before}");
        }
    }

    // rows: R350
    #[test]
    fn r350_the_trading_gateway_is_looked_for_at_the_host_of_the_url() {
        let at = |url| {
            super::at_host_of(url, 8090)
                .map(|address| address.to_string())
                .ok()
        };
        assert_eq!(
            at("http://192.0.2.7:8080"),
            Some("192.0.2.7:8090".to_owned())
        );
        assert_eq!(at("http://[::1]:8080/"), Some("[::1]:8090".to_owned()));
        assert_eq!(at("/only/a/path"), None);
    }

    // rows: R350
    #[test]
    fn r350_a_port_that_is_chosen_at_the_start_is_explained() {
        let mut config = super::Config {
            listen: super::Listen::on_free_ports(),
            ..super::Config::default()
        };
        config.listen.ledger = "127.0.0.1:8081".parse().expect("an address");
        let config = config.with_derived_settings();
        let shown = config.masked().expect("shown");
        let text = super::explained(&toml::to_string(&shown).expect("TOML"));
        let comment = "  # 0: a free port is chosen at the start";
        for line in [
            "all = \"127.0.0.1:0\"",
            "quic_listen = \"127.0.0.1:0\"",
            "webhook_url = \"http://127.0.0.1:0/webhook\"",
        ] {
            let line = format!("{line}{comment}");
            assert!(text.lines().any(|found| found == line), "{line}\n{text}");
        }
        assert!(text.contains("ledger = \"127.0.0.1:8081\"\n"), "{text}");
        let read: toml::Table = toml::from_str(&text).expect("still TOML");
        assert_eq!(read, shown);
    }

    // rows: R350
    #[test]
    fn r350_every_option_has_a_help_text() {
        fn check(command: &clap::Command, path: &str) {
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{path} --{}", arg.get_id());
            }
            for verb in command.get_subcommands() {
                check(verb, &format!("{path} {}", verb.get_name()));
            }
        }
        let mut command = super::command();
        command.build();
        check(&command, "platform");
    }

    // rows: R350
    #[test]
    fn r350_every_command_has_a_help_text() {
        fn check(command: &clap::Command, path: &str) {
            let about = command.get_about().map(ToString::to_string);
            let about = about.unwrap_or_default();
            assert!(!about.is_empty(), "{path} has no help text");
            assert!(!about.starts_with("Call dfa"), "{path}: {about}");
            assert!(!about.contains("  "), "{path}: {about}");
            // The help of a method without a comment is its name. A noun may be one word.
            let is_sentence = about.contains(' ');
            assert!(is_sentence || command.has_subcommands(), "{path}: {about}");
            for verb in command.get_subcommands() {
                check(verb, &format!("{path} {}", verb.get_name()));
            }
        }
        let mut command = super::command();
        command.build();
        check(&command, "platform");
    }

    // rows: R350
    #[test]
    fn r350_every_command_is_well_formed() {
        super::command().debug_assert();
    }
}
