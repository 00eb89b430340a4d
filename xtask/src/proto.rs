//! Compatibility check of the contracts: `buf lint` and `buf breaking` against
//! `proto/baseline.binpb` (D01, R017). Only `baseline` changes the image.

use std::path::Path;

use clap::Subcommand;

use crate::shell;

#[derive(Subcommand)]
pub enum Chore {
    /// Lint the schemas and reject changes that break a client of the committed image.
    Check,
    /// Rewrite the image; rejects a breaking change unless `--breaking` is given.
    Baseline {
        #[arg(long)]
        breaking: bool,
    },
}

pub fn run(chore: Chore) -> anyhow::Result<()> {
    let dir = shell::root().join("proto");
    shell::npm_tools(&dir)?;
    match chore {
        Chore::Check => {
            buf(&dir, &dir, &["lint", "."])?;
            check_breaking(&dir, &dir)
        }
        Chore::Baseline { breaking } => {
            if !breaking {
                check_breaking(&dir, &dir)?;
            }
            buf(&dir, &dir, &["build", "-o", "baseline.binpb"])
        }
    }
}

/// Compares the schemas below `schemas` with the committed image of `tools`.
pub fn check_breaking(tools: &Path, schemas: &Path) -> anyhow::Result<()> {
    let image = tools.join("baseline.binpb");
    let image = image.to_string_lossy();
    buf(tools, schemas, &["breaking", ".", "--against", &image])
}

fn buf(tools: &Path, schemas: &Path, args: &[&str]) -> anyhow::Result<()> {
    let program = tools.join("node_modules/.bin/buf");
    shell::run(schemas, &program.to_string_lossy(), args)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copy(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).expect("folder");
        for entry in std::fs::read_dir(from).expect("readable") {
            let path = entry.expect("entry").path();
            let target = to.join(path.file_name().expect("named"));
            if path.is_dir() {
                copy(&path, &target);
            } else {
                std::fs::copy(&path, &target).expect("copy");
            }
        }
    }

    // rows: R017
    #[test]
    fn r017_a_removed_field_fails_the_check() {
        let tools = shell::root().join("proto");
        shell::npm_tools(&tools).expect("npm tools");
        check_breaking(&tools, &tools)
            .expect("the committed schemas are compatible with the image");

        let scratch = tempfile::tempdir().expect("scratch folder");
        copy(&tools.join("dfa"), &scratch.path().join("dfa"));
        std::fs::copy(tools.join("buf.yaml"), scratch.path().join("buf.yaml")).expect("copy");
        check_breaking(&tools, scratch.path()).expect("an exact copy passes");

        let file = scratch.path().join("dfa/market/v1/market.proto");
        let text = std::fs::read_to_string(&file).expect("schema");
        let cut = text.replacen("  dfa.common.v1.Decimal price = 7;\n", "", 1);
        assert_ne!(text, cut, "the field to remove is there");
        std::fs::write(&file, cut).expect("write");
        check_breaking(&tools, scratch.path()).expect_err("a removed field is a breaking change");
    }
}
