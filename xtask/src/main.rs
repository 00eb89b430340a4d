//! Tasks of the workspace: `cargo xtask <task>`. CI runs the same commands.

mod attacks;
mod bench;
mod chaos;
mod contracts;
mod data_directory;
mod demo;
mod deny;
mod dist;
mod files;
mod full;
mod fuzz;
mod harness;
mod maturity;
mod miri;
mod platform;
mod powerloss;
mod proto;
mod rows;
mod sagas;
mod seeds;
mod shell;
mod syscalls;
mod tidy;

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// Tasks of the platform's workspace.
#[derive(Parser)]
#[command(name = "xtask")]
struct Args {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// The contracts: lint them, compare them with the committed image, update the image.
    Proto {
        #[command(subcommand)]
        task: proto::Task,
    },
    /// The Solidity contracts: recompile and compare with, or replace, the committed artifacts.
    Contracts {
        /// Write the artifacts instead of comparing.
        #[arg(long)]
        write: bool,
    },
    /// A data folder for later versions to open, `tests/data/NAME.tar.gz`. Needs `tar` and GNU
    /// `date`. A change of a store's format brings a migration, and the folder of an issue is made
    /// once, at its end.
    DataDirectory {
        /// `stores-` and lower-case letters, digits or `-`.
        name: String,
    },
    /// Licences, banned crates, sources and known vulnerabilities of all dependencies
    /// (`deny.toml`). Installs the tool it needs.
    Deny {
        /// Fail if the database of vulnerabilities is unreachable, instead of skipping it.
        #[arg(long)]
        advisories: bool,
    },
    /// The release build as the README starts it, the demonstration, and the tests of both on that
    /// binary.
    Demo,
    /// Release archive in `target/dist`: stripped binary, completions, documents, table of crates.
    /// Needs `strip` and `tar`.
    Dist,
    /// The tests that need services or file systems. Needs root, and the programs that `--help`
    /// names.
    ///
    /// Must be in PATH: go, node, npm, python3 with venv, java (17 or later), mvn, mount,
    /// mkfs.ext4, flock, setpriv, setsid, timeout.
    ///
    /// Installs with apt-get if it is missing: PostgreSQL. Downloads into the checkout: Kafka
    /// (Maven), the conformance suite, grpcurl, code generators and geth (Go), buf, anvil and the
    /// TypeScript client's packages (npm), the Python client's packages (pip).
    ///
    /// Starts and stops: a Kafka broker, a PostgreSQL server and nodes of chains on the loopback.
    Full,
    /// Fuzz targets of the decoders under libFuzzer. Needs a C++ compiler, which it does not
    /// install.
    Fuzz {
        /// Seconds per target.
        #[arg(long, default_value_t = 600)]
        seconds: u64,
        /// Run only this target; may be repeated.
        #[arg(long)]
        target: Vec<String>,
    },
    /// Conformance cases and scenarios of the public matching-engine benchmark harness
    /// (flash1-dev/matching-engine-benchmark). Needs a built checkout of it.
    Harness {
        /// The checkout, with harness and baselines built as its README describes.
        #[arg(long, value_name = "DIR")]
        source: PathBuf,
        /// Core of the matching thread.
        #[arg(long, default_value_t = 0)]
        matcher_core: u32,
        /// Core of the thread that drains the reports.
        #[arg(long, default_value_t = 1)]
        drainer_core: u32,
    },
    /// The book's rules under Miri; needs a nightly toolchain with that component.
    Miri,
    /// System calls of the hot thread under load, counted by strace.
    Syscalls {
        /// Commands to count over.
        #[arg(long, default_value_t = 10_000_000)]
        commands: u64,
    },
    /// Journal and embedded event log on a disk that loses power: nothing reported durable is lost.
    /// A counter-check without the sync must lose data.
    Powerloss {
        /// Number of seeds, from 0.
        #[arg(long, default_value_t = 10_000)]
        seeds: u64,
    },
    /// The seeded tests with fresh seeds. Each seed is printed before its run.
    Seeds {
        /// Minutes after which no further seed starts.
        #[arg(long, default_value_t = 30)]
        minutes: u64,
        /// Repeat this seed instead.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Kills server and clients on a bad network: every client's messages must match the journal.
    Chaos {
        /// Seed of the kills, the requests and the network; default: the current time.
        #[arg(long)]
        seed: Option<u64>,
        /// Kills of the server, and as many of clients.
        #[arg(long, default_value_t = 100)]
        kills: usize,
        /// Time limit in minutes.
        #[arg(long, default_value_t = 40)]
        minutes: u64,
    },
    /// Load attacks next to an honest member. Checks the member's latency against a control run,
    /// the memory, and the outcome of the attack. `docs/attacks.md` lists the attacks.
    Attacks {
        /// Seconds per run. Below 30 s latencies are printed and not checked.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Packets per second of attack and control.
        #[arg(long, default_value_t = 20_000)]
        packets: u64,
        /// Runs of each attack and of its control.
        #[arg(long, default_value_t = 3)]
        runs: usize,
        /// Run only this attack; may be repeated.
        #[arg(long, value_name = "NAME")]
        only: Vec<String>,
    },
    /// Kills the platform at each step of the sagas of an issue (placement, coupon, move of
    /// holders) and takes the proof of balances after each.
    Sagas,
    /// Redeems an issue with a tenth of the holders at its maturity, then one with all, on a
    /// release platform. Every 20th holder has an open sell order. Checks every payment and runs
    /// `platform proof --full`; prints holders/s of both, their ratio, and rows/s of the check.
    Maturity {
        /// Holders of the larger issue, at least 10.
        #[arg(long, default_value_t = 10_000)]
        holders: usize,
        /// Seed of the holders' numbers of units.
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Time limit in minutes, without the builds.
        #[arg(long, default_value_t = 30)]
        minutes: u64,
    },
    /// Comparisons that take several interleaved runs of a benchmark.
    Bench {
        #[command(subcommand)]
        task: bench::Task,
    },
    /// Dependency rules and conventions of the sources; exceptions are listed in `xtask/tidy.txt`.
    Tidy {
        /// Lower or remove the exceptions that allow more than was found.
        #[arg(long)]
        shrink: bool,
    },
    /// Rows of the specification's checklist with and without a test that names them, and rows
    /// whose only test names more than ten.
    Rows {
        /// Print JSON.
        #[arg(long)]
        json: bool,
        /// Exit with 1 unless every row given here (`R001`, `R310-R318`) has a test. With
        /// `--results` the test must have passed.
        #[arg(long, value_delimiter = ',')]
        require: Vec<String>,
        /// Output of the test runs. A row counts only if one of its tests passed and none failed.
        #[arg(long)]
        results: Option<PathBuf>,
    },
}

fn main() -> anyhow::Result<()> {
    match Args::parse().task {
        Task::Proto { task } => proto::run(task),
        Task::Attacks {
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
        Task::Bench { task } => bench::run(task),
        Task::Chaos {
            seed,
            kills,
            minutes,
        } => chaos::run(seed, kills, minutes),
        Task::Contracts { write } => contracts::run(write),
        Task::DataDirectory { name } => data_directory::run(&name),
        Task::Deny { advisories } => deny::run(advisories),
        Task::Demo => demo::run(),
        Task::Dist => dist::run(),
        Task::Full => full::run(),
        Task::Sagas => sagas::run(),
        Task::Fuzz { seconds, target } => fuzz::run(seconds, &target),
        Task::Harness {
            source,
            matcher_core,
            drainer_core,
        } => harness::run(&source, matcher_core, drainer_core),
        Task::Maturity {
            holders,
            seed,
            minutes,
        } => maturity::run(holders, seed, minutes),
        Task::Miri => miri::run(),
        Task::Seeds { minutes, seed } => seeds::run(minutes, seed),
        Task::Powerloss { seeds } => powerloss::run(seeds),
        Task::Syscalls { commands } => syscalls::run(commands),
        Task::Tidy { shrink } => tidy::run(shrink),
        Task::Rows {
            json,
            require,
            results,
        } => rows::run(json, &require, results.as_deref()),
    }
}
