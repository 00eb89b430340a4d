//! `platform data accept`: writes the manifest of a data folder from its contents. `platform data
//! check`: the full check of `platform proof --full`, without a running platform. `platform data
//! accept-rows`: ends findings of that check in rows with seals.

use anyhow::Context;
use clap::{ArgMatches, Command};
use events::seal::{self, Altered};
use serde::Serialize;

use crate::config::Config;
use crate::{check, manifest, platform};

/// The noun with its verb.
pub fn command() -> Command {
    Command::new("data")
        .about("The data folder and the manifest of its stores and keys")
        .subcommand_required(true)
        .subcommand(Command::new("accept").about(
            "Accept the folder's stores and keys as they are. Run it once on a folder of an older \
             version, and after an intended change of a key or of the configured stores",
        ))
        .subcommand(Command::new("check").about(
            "Check every row of every store, as `proof --full` does, with or without a running platform",
        ))
        .subcommand(Command::new("accept-rows").about(
            "Accept altered rows that `data check` names in the rows of a store, and a lost key of its \
             seals: the next start seals all rows of these stores as they are, with a new key",
        ))
}

/// Runs `platform data`.
///
/// # Errors
/// `accept`, `accept-rows`: the folder is in use. `accept`: there is nothing to accept, or a part
/// is missing. `check`: the folder has no manifest, a store cannot be read, or has altered rows.
pub async fn run(matches: &ArgMatches, config: &Config, json: bool) -> anyhow::Result<()> {
    anyhow::ensure!(
        config.data_dir.is_dir(),
        "data folder {} does not exist",
        config.data_dir.display()
    );
    match matches.subcommand_name() {
        Some("check") => check_rows(config, json).await,
        Some("accept-rows") => accept_rows(config, json).await,
        _ => accept(config, json),
    }
}

async fn check_rows(config: &Config, json: bool) -> anyhow::Result<()> {
    let checked = check::full(config).await?;
    if json {
        println!("{}", serde_json::to_string_pretty(&checked)?);
    } else {
        print!("{checked}");
    }
    checked.result()
}

/// A finding that is accepted.
#[derive(Serialize)]
struct AcceptedRow {
    store: &'static str,
    #[serde(flatten)]
    row: Altered,
}

/// No platform may run on the folder.
async fn accept_rows(config: &Config, json: bool) -> anyhow::Result<()> {
    let _lock = platform::lock_folder(&config.data_dir)?;
    let mut accepted = Vec::new();
    for store in check::sealed_stores(config) {
        if !store.path.is_file() {
            continue;
        }
        let rows = seal::accept(&store).await;
        let rows = rows.with_context(|| format!("rows of {}", store.path.display()))?;
        // After each store: its key is gone.
        manifest::renew_seal_keys(config)?;
        accepted.extend(rows.into_iter().map(|row| AcceptedRow {
            store: store.name,
            row,
        }));
    }
    if json {
        println!("{}", serde_json::to_string_pretty(&accepted)?);
        return Ok(());
    }
    for AcceptedRow { store, row } in &accepted {
        println!("accepted: {store}: {row}");
    }
    match accepted.is_empty() {
        true => println!("There is nothing to accept."),
        false => println!("The next start seals all rows of these stores."),
    }
    Ok(())
}

/// No platform may run on the folder.
fn accept(config: &Config, json: bool) -> anyhow::Result<()> {
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
