//! Compatibility check of the contracts: `buf lint` and `buf breaking` against the image
//! `proto/baseline.binpb` (D01, R017). Only the task `baseline` changes the image.

use std::path::Path;

use clap::Subcommand;

use crate::shell;

#[derive(Subcommand)]
pub enum Task {
    /// Lint the schemas and reject changes that break a client of the committed image.
    Check,
    /// Rewrite the image; rejects a breaking change unless `--breaking` is given.
    Baseline {
        #[arg(long)]
        breaking: bool,
    },
}

pub fn run(task: Task) -> anyhow::Result<()> {
    let dir = shell::root().join("proto");
    shell::npm_tools(&dir)?;
    match task {
        Task::Check => {
            buf(&dir, &["lint", "."])?;
            check_breaking(&dir)
        }
        Task::Baseline { breaking } => {
            if !breaking {
                check_breaking(&dir)?;
            }
            buf(&dir, &["build", "-o", "baseline.binpb"])
        }
    }
}

fn check_breaking(dir: &Path) -> anyhow::Result<()> {
    buf(dir, &["breaking", ".", "--against", "baseline.binpb"])
}

fn buf(dir: &Path, args: &[&str]) -> anyhow::Result<()> {
    let program = dir.join("node_modules/.bin/buf");
    shell::run(dir, &program.to_string_lossy(), args)
}
