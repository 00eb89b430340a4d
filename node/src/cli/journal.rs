//! `platform journal ls | verify | dump | replay | snapshot`: reads the trading path's journal in
//! place.
//!
//! No platform has to run. While one runs, the journal's end may look damaged, except to
//! `dump --follow`, and `snapshot` is not needed: the platform writes its own.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use sequencer::Record;
use sequencer::inspect::Folder;
use serde::Serialize;
use types::{NodeId, Sequence};

use crate::config::Config;

/// Pause of `dump --follow` at the journal's end.
const FOLLOW_PAUSE: Duration = Duration::from_millis(50);

/// The noun with its verbs.
pub fn command() -> Command {
    let until = || {
        number("until")
            .long("until")
            .help("Last command [default: the journal's last]")
    };
    Command::new("journal")
        .about("The journal of the trading path: list, check, print, replay, snapshot")
        .subcommand_required(true)
        .arg(
            Arg::new("dir")
                .long("dir")
                .value_name("DIR")
                .global(true)
                .value_parser(value_parser!(PathBuf))
                .help("Folder of the journal [default: journal in the data folder]"),
        )
        .subcommand(Command::new("ls").about("List segments and snapshots"))
        .subcommand(
            Command::new("verify").about("Check every record, recompute every event and compare"),
        )
        .subcommand(
            Command::new("dump")
                .about("Print commands with their events; with --json one object per line")
                .arg(
                    number("from")
                        .long("from")
                        .help("First command [default: the journal's first]"),
                )
                .arg(until())
                .arg(
                    Arg::new("follow")
                        .long("follow")
                        .short('f')
                        .action(ArgAction::SetTrue)
                        .help("Continue with the durable records of a running platform"),
                ),
        )
        .subcommand(
            Command::new("replay")
                .about("Print the books and the state hash after a command")
                .arg(until()),
        )
        .subcommand(
            Command::new("snapshot")
                .about("Write a snapshot of the state after a command, for a faster start")
                .arg(until()),
        )
}

fn number(name: &'static str) -> Arg {
    Arg::new(name)
        .value_name("SEQ")
        .value_parser(value_parser!(u64).range(1..))
}

/// Runs `platform journal` on the configured folder, or on the one of `--dir`.
///
/// # Errors
/// The journal cannot be read or fails the check.
pub fn run(matches: &ArgMatches, config: &Config, json: bool) -> anyhow::Result<()> {
    let Some((verb, matches)) = matches.subcommand() else {
        bail!("journal: missing verb");
    };
    let given = matches.get_one::<PathBuf>("dir");
    let dir = given.map_or_else(|| config.journal_dir(), PathBuf::clone);
    let folder = Folder::new(&dir);
    let sequence = |name: &str| matches.get_one::<u64>(name).copied();
    let until = || sequence("until").map(Sequence);
    let done = match verb {
        "ls" => print(&folder.list()?, json),
        "verify" => folder
            .verify()
            .map_err(Into::into)
            .and_then(|verified| print(&verified, json)),
        "replay" => folder
            .state(until())
            .map_err(Into::into)
            .and_then(|state| print(&state, json)),
        "snapshot" => {
            let node = NodeId::new(config.market.node).context("node number")?;
            replica::snapshot(&folder, node, until())
                .map_err(Into::into)
                .and_then(|written| print(&written, json))
        }
        _ => {
            let until = sequence("until").unwrap_or(u64::MAX);
            let follows = matches.get_flag("follow");
            dump(&folder, sequence("from"), until, follows, json)
        }
    };
    done.with_context(|| format!("journal in {}", dir.display()))
}

fn print(value: &(impl Serialize + Display), json: bool) -> anyhow::Result<()> {
    if json {
        println!("{}", serde_json::to_string_pretty(value)?);
    } else {
        print!("{value}");
    }
    Ok(())
}

fn dump(
    folder: &Folder,
    from: Option<u64>,
    until: u64,
    follows: bool,
    json: bool,
) -> anyhow::Result<()> {
    // The journal may be truncated.
    let from = from.map_or_else(|| folder.first(), Ok)?;
    let out = RefCell::new(BufWriter::new(io::stdout().lock()));
    let is_closed = Cell::new(false);
    let closed = |error: &io::Error| {
        is_closed.set(is_closed.get() || error.kind() == io::ErrorKind::BrokenPipe);
    };
    let show = |record: Record| {
        let mut out = out.borrow_mut();
        let written = if json {
            serde_json::to_writer(&mut *out, &record)
                .map_err(io::Error::from)
                .and_then(|()| writeln!(out))
        } else {
            write!(out, "{record}")
        };
        written.map_err(|error| {
            closed(&error);
            error.to_string()
        })
    };
    let dumped = if follows {
        let wait = || {
            let flushed = out.borrow_mut().flush();
            std::thread::sleep(FOLLOW_PAUSE);
            flushed.inspect_err(closed).is_ok()
        };
        folder.follow(from..=until, show, wait)
    } else {
        folder.dump(from..=until, show).map(drop)
    };
    // The reader of the output has closed it, as `head` does: this is no error.
    if is_closed.get() {
        return Ok(());
    }
    dumped?;
    match out.into_inner().flush() {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        flushed => Ok(flushed?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R350
    #[test]
    fn r350_the_verbs_of_the_journal_work_on_a_folder_and_fail_on_none() {
        let folder = tempfile::tempdir().expect("folder");
        let config = Config {
            data_dir: folder.path().to_path_buf(),
            ..Config::default()
        };
        let dir = config.journal_dir();
        let ask = |words: &[&str]| {
            let words = std::iter::once("journal").chain(words.iter().copied());
            let matches = command().try_get_matches_from(words).expect("well formed");
            run(&matches, &config, true)
        };
        for verb in ["ls", "verify", "dump", "replay", "snapshot"] {
            let error = format!("{:#}", ask(&[verb]).expect_err("no folder"));
            assert!(error.contains("No such file"), "{error}");
        }
        assert!(!dir.exists(), "reading creates nothing");
        let config = sequencer::Config::new(&dir);
        let backlog = std::sync::Arc::default();
        sequencer::SequencerHandle::start(config, backlog)
            .expect("starts")
            .stop();
        for words in [
            &["ls"][..],
            &["verify"],
            &["dump"],
            &["dump", "--from", "1"],
            &["replay"],
            &["snapshot"],
        ] {
            ask(words).expect("an empty journal is valid");
        }
        assert!(ask(&["replay", "--until", "5"]).is_err());
        assert!(
            command()
                .try_get_matches_from(["journal", "replay", "--until", "0"])
                .is_err()
        );
    }
}
