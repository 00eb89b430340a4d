//! Chores of the workspace, in Rust: `cargo xtask <chore>`. Everything here can be run by hand and
//! by CI with the same words.

mod attacks;
mod chaos;
mod contracts;
mod deny;
mod dist;
mod files;
mod full;
mod fuzz;
mod harness;
mod miri;
mod powerloss;
mod proto;
mod rows;
mod shell;
mod syscalls;
mod tidy;

use clap::{Parser, Subcommand};

/// Chores of the platform's workspace.
#[derive(Parser)]
#[command(name = "xtask")]
struct Args {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// The contracts: lint them, compare them with the committed image, renew the image.
    Proto {
        #[command(subcommand)]
        chore: proto::Chore,
    },
    /// The Solidity contracts: compile them again and compare with, or replace, the committed artifacts.
    Contracts {
        /// Write the artifacts instead of comparing.
        #[arg(long)]
        write: bool,
    },
    /// Licences, banned crates, sources and known vulnerabilities of all dependencies (`deny.toml`).
    /// Installs the tool it needs.
    Deny {
        /// Fail, and not only say so, when the database of vulnerabilities cannot be reached.
        #[arg(long)]
        advisories: bool,
    },
    /// Release archive in `target/dist`: stripped binary, completions, licence. Needs `strip` and `tar`.
    Dist,
    /// The tests that need services of their own: Connect conformance suite, Kafka. Installs and starts what they need.
    Full,
    /// The decoders' fuzz targets under libFuzzer. Needs a C++ compiler, which it does not install.
    Fuzz {
        /// Time for each target.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
        /// Only this one; may be repeated.
        #[arg(long)]
        target: Vec<String>,
    },
    /// Conformance cases and scenarios of the public matching-engine benchmark harness
    /// (flash1-dev/matching-engine-benchmark), whose built checkout the caller brings.
    Harness {
        /// The checkout, with harness and baselines built as its README says.
        #[arg(long, value_name = "DIR")]
        source: std::path::PathBuf,
        /// Core of the thread that matches.
        #[arg(long, default_value_t = 0)]
        matcher_core: u32,
        /// Core of the thread that takes the reports.
        #[arg(long, default_value_t = 1)]
        drainer_core: u32,
    },
    /// The book's rules under Miri; needs a nightly toolchain with that component.
    Miri,
    /// System calls of the hot thread under load, counted by strace.
    Syscalls {
        /// Commands over which they are counted.
        #[arg(long, default_value_t = 10_000_000)]
        commands: u64,
    },
    /// Journal and embedded event log on a disk that loses power: nothing reported durable is lost,
    /// and without the sync it would be.
    Powerloss {
        /// Lives' seeds, from 0.
        #[arg(long, default_value_t = 10_000)]
        seeds: u64,
    },
    /// Server and clients killed on a bad network: every client's messages are the journal's.
    Chaos {
        /// Of the kills, the requests and the network; unset, the time.
        #[arg(long)]
        seed: Option<u64>,
        /// Kills of the server, and as many of clients.
        #[arg(long, default_value_t = 100)]
        kills: usize,
        /// Within this time.
        #[arg(long, default_value_t = 40)]
        minutes: u64,
    },
    /// Load attacks beside an honest member: its latency against a control's, memory, and what became of
    /// the attack. `docs/attacks.md` lists them.
    Attacks {
        /// Of each run. Below 30 s latencies are printed and not judged.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Per second, of attack and control.
        #[arg(long, default_value_t = 20_000)]
        packets: u64,
        /// Of each attack and of its control.
        #[arg(long, default_value_t = 3)]
        runs: usize,
        /// Only this one; may be repeated.
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
    },
    /// Dependency rules and conventions of the sources; exceptions are listed in `xtask/tidy.txt`.
    Tidy {
        /// Lower or remove the exceptions that allow more than there is.
        #[arg(long)]
        shrink: bool,
    },
    /// Which rows of the specification's checklist have a test that names them, and which do not.
    Rows {
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// Exit with 1 unless every row given here (`R001`, `R310-R318`) has a test.
        #[arg(long, value_delimiter = ',')]
        require: Vec<String>,
    },
}

fn main() -> anyhow::Result<()> {
    match Args::parse().chore {
        Chore::Proto { chore } => proto::run(chore),
        Chore::Attacks {
            seconds,
            packets,
            runs,
            only,
        } => attacks::run(&attacks::Attacks {
            seconds,
            packets,
            runs,
            only,
        }),
        Chore::Chaos {
            seed,
            kills,
            minutes,
        } => chaos::run(seed, kills, minutes),
        Chore::Contracts { write } => contracts::run(write),
        Chore::Deny { advisories } => deny::run(advisories),
        Chore::Dist => dist::run(),
        Chore::Full => full::run(),
        Chore::Fuzz { seconds, target } => fuzz::run(seconds, &target),
        Chore::Harness {
            source,
            matcher_core,
            drainer_core,
        } => harness::run(&source, matcher_core, drainer_core),
        Chore::Miri => miri::run(),
        Chore::Powerloss { seeds } => powerloss::run(seeds),
        Chore::Syscalls { commands } => syscalls::run(commands),
        Chore::Tidy { shrink } => tidy::run(shrink),
        Chore::Rows { json, require } => rows::run(json, &require),
    }
}
