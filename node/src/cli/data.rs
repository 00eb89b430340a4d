//! `platform data accept`: writes the manifest of a data folder from its contents.

use clap::{ArgMatches, Command};

use crate::config::Config;
use crate::{manifest, platform};

/// The noun with its verb.
pub fn command() -> Command {
    Command::new("data")
        .about("The data folder and the manifest of its stores and keys")
        .subcommand_required(true)
        .subcommand(Command::new("accept").about(
            "Accept the folder's stores and keys as they are. Run it once on a folder of an older \
             version, and after an intended change of a key or of the configured stores",
        ))
}

/// Runs `platform data`. No platform may run on the folder.
///
/// # Errors
/// The folder is in use, has nothing to accept, or lacks a part.
pub fn run(_: &ArgMatches, config: &Config, json: bool) -> anyhow::Result<()> {
    anyhow::ensure!(
        config.data_dir.is_dir(),
        "data folder {} does not exist",
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
        ("created at the next start", &accepted.pending),
        ("changed key", &accepted.changed_keys),
        ("no longer used", &accepted.left_out),
    ];
    for (what, names) in lists {
        for name in names {
            println!("{what}: {name}");
        }
    }
    println!("{} was written.", accepted.manifest.display());
    if accepted.is_adopted {
        println!(
            "The folder had no manifest: the older version must have stopped with no open order and every trade final."
        );
    }
    Ok(())
}
