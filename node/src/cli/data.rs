//! `platform data accept`: the manifest of a data folder, written from what is in it.

use clap::{ArgMatches, Command};

use crate::config::Config;
use crate::{manifest, platform};

/// The noun with its verb.
pub fn command() -> Command {
    Command::new("data")
        .about("The data folder: which stores and keys belong to it")
        .subcommand_required(true)
        .subcommand(Command::new("accept").about(
            "Take the stores and keys of the folder as they are: once for a folder of an older version, and after a key or the stores of the configuration were changed on purpose",
        ))
}

/// Does what `data` was asked. No platform may run on the folder.
///
/// # Errors
/// The folder is in use, has nothing to accept, or a part of it is missing.
pub fn run(_: &ArgMatches, config: &Config, json: bool) -> anyhow::Result<()> {
    anyhow::ensure!(
        config.data_dir.is_dir(),
        "data folder {}: there is none",
        config.data_dir.display()
    );
    let _lock = platform::lock_folder(&config.data_dir)?;
    let accepted = manifest::accept(config)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&accepted)?);
        return Ok(());
    }
    let lists = [
        ("accepted", &accepted.parts),
        ("made by the next start", &accepted.pending),
        ("changed key", &accepted.changed_keys),
        ("left out", &accepted.left_out),
    ];
    for (what, names) in lists {
        for name in names {
            println!("{what}: {name}");
        }
    }
    println!("{} is written.", accepted.manifest.display());
    if accepted.is_adopted {
        println!(
            "Made by an older version: it must have been stopped with no open order and with every trade final."
        );
    }
    Ok(())
}
