//! `platform proto descriptors | sources`: the contracts of this binary, for code generators.

use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use clap::{Arg, ArgMatches, Command, value_parser};

/// The noun with its verbs.
pub fn command() -> Command {
    Command::new("proto")
        .about("The contracts of this binary: descriptor set and sources")
        .subcommand_required(true)
        .subcommand(Command::new("descriptors").about(
            "Print every schema with its imports as a binary google.protobuf.FileDescriptorSet",
        ))
        .subcommand(
            Command::new("sources")
                .about("Write the .proto files and the buf configuration into a folder")
                .arg(
                    Arg::new("dir")
                        .value_name("DIR")
                        .required(true)
                        .value_parser(value_parser!(PathBuf))
                        .help("Created if missing; files of the same name are replaced"),
                ),
        )
}

/// Runs `platform proto`.
///
/// # Errors
/// Standard output is a terminal, or the folder cannot be written.
pub fn run(matches: &ArgMatches) -> anyhow::Result<()> {
    match matches.subcommand() {
        Some(("sources", matches)) => {
            let dir: &PathBuf = matches.get_one("dir").context("a folder")?;
            unpack(dir).with_context(|| format!("cannot write the contracts to {}", dir.display()))
        }
        _ => print(),
    }
}

fn print() -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    if out.is_terminal() {
        bail!(
            "the descriptor set is binary: redirect it, `platform proto descriptors > dfa.binpb`"
        );
    }
    out.write_all(proto::FILE_DESCRIPTOR_SET)?;
    Ok(out.flush()?)
}

fn unpack(dir: &Path) -> io::Result<()> {
    for (path, content) in proto::SOURCES {
        let file = dir.join(path);
        std::fs::create_dir_all(file.parent().unwrap_or(dir))?;
        std::fs::write(file, content)?;
    }
    Ok(())
}
