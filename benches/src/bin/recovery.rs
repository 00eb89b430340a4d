//! Restart time of a node. Journals commands while the replica writes snapshots, restarts the node,
//! and replays the journal from its first record. Live node, restarted node and replay must have
//! the same state hash.
//!
//! The files have just been written, so the system's page cache contains them. A cold start
//! additionally reads snapshot and journal from the disk.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use admission::Request;
use anyhow::{Context, ensure};
use benches::load::{Load, block_on};
use clap::Parser;
use replica::LiveReplica;
use sequencer::{
    Backlog, Bounds, Config, Port, Report, RingPort, SequencerHandle, SnapshotConfig, Submission,
    SubmitError, replay,
};
use types::{NodeId, Sequence};

/// Maximum number of requests in flight.
const WINDOW: usize = 4_096;
/// Maximum number of accepted commands that are not durable, below the bound of the journal's
/// buffer.
const UNDURABLE_MAX: u64 = 50_000;

const MIX: &str = "47 % new, 38 % cancel, 8 % amend, 7 % crossing IOC";
const CACHE: &str = "files in the system's cache";

/// Restart time of a node.
#[derive(Parser)]
struct Args {
    /// Commands in the journal.
    #[arg(long, default_value_t = 10_000_000)]
    commands: u64,
    /// Commands between two snapshots, and so the maximum that a restart replays.
    #[arg(long, default_value_t = 1_000_000)]
    every: u64,
    #[arg(long, default_value_t = 1)]
    instruments: usize,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Folder for the journal; default: the system's temporary folder.
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Skip the replay from the first record.
    #[arg(long)]
    no_replay: bool,
    /// Print one line of JSON.
    #[arg(long)]
    json: bool,
}

fn start(dir: &Path) -> anyhow::Result<SequencerHandle> {
    let backlog = Arc::new(Backlog::new(Bounds::NONE));
    Ok(SequencerHandle::start(Config::new(dir), backlog)?)
}

/// Sends the load as fast as the node accepts it until `commands` are durable.
fn fill(
    handle: &SequencerHandle,
    front: &mut RingPort,
    load: &mut Load,
    commands: u64,
) -> anyhow::Result<()> {
    let commit = handle.commit();
    let (mut sent, mut answered) = (0u64, 0u64);
    let mut last = Sequence::ZERO;
    let mut pending: Option<Request> = None;
    while last.get() < commands || answered < sent {
        let is_room = sent - answered < WINDOW as u64
            && last.get() < commands
            && last.get() - commit.position().get().min(last.get()) < UNDURABLE_MAX;
        if is_room {
            let request = pending.take().unwrap_or_else(|| load.next_request());
            load.set_tag(&request, sent);
            match front.submit(Submission::default(), &request) {
                Ok(()) => sent += 1,
                Err(SubmitError::Busy) => pending = Some(request),
                Err(other) => anyhow::bail!("the node stopped: {other}"),
            }
        }
        read_reports(front, load, &mut answered, &mut last)?;
    }
    block_on(commit.wait(last)).context("waiting for the journal")?;
    Ok(())
}

fn read_reports(
    front: &mut RingPort,
    load: &mut Load,
    answered: &mut u64,
    last: &mut Sequence,
) -> anyhow::Result<()> {
    front.poll(|report| match report {
        Report::SessionMessage(stamp, message) => {
            *last = stamp.sequence;
            *answered += u64::from(load.on_report(message).is_some());
        }
        _ => *answered += 1,
    })?;
    Ok(())
}

fn node_state(port: &Port) -> anyhow::Result<(Sequence, u64, usize)> {
    let inspected = block_on(port.inspect(|core| {
        (
            core.sequence(),
            core.state_hash(),
            core.admission().orders().count(),
        )
    }));
    inspected.map_err(|error| anyhow::anyhow!("the node stopped: {error}"))
}

/// Total size in bytes of the files with this extension in a folder.
fn total_bytes(dir: &Path, ending: &str) -> anyhow::Result<u64> {
    let mut sum = 0;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry
            .path()
            .extension()
            .is_some_and(|found| found == ending)
        {
            sum += entry.metadata()?.len();
        }
    }
    Ok(sum)
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let folder = match &args.dir {
        Some(dir) => tempfile::tempdir_in(dir)?,
        None => tempfile::tempdir()?,
    };
    let dir = folder.path().join("journal");

    let handle = start(&dir)?;
    let checkpoints = SnapshotConfig {
        every_commands: args.every,
        every: Duration::from_secs(86_400),
        ..SnapshotConfig::default()
    };
    let node = NodeId::new(1).context("node number")?;
    let replica = LiveReplica::start(node, handle.replica_parts(), Some(checkpoints))?;
    let mut front = handle.port().rings(WINDOW, Arc::default())?;
    let mut load = Load::open(&handle.port(), &mut front, args.instruments, args.seed)
        .map_err(|error| anyhow::anyhow!("cannot open the load: {error}"))?;
    let filling = Instant::now();
    fill(&handle, &mut front, &mut load, args.commands)?;
    let fill_s = filling.elapsed().as_secs_f64();
    load.close(&handle.port())
        .map_err(|error| anyhow::anyhow!("cannot close the sessions: {error}"))?;
    let (last, live, open) = node_state(&handle.port())?;
    block_on(handle.commit().wait(last)).context("waiting for the journal")?;

    // The replica lags after the load. Waits until the newest snapshot is at most `every` commands
    // old.
    let snapshots = journal::Snapshots::new(&dir.join("snapshots"));
    let wanted = last.get().saturating_sub(args.every);
    let waiting = Instant::now();
    let snapshot = loop {
        let newest = snapshots.sequences()?.last().copied().unwrap_or(0);
        if newest >= wanted {
            break newest;
        }
        ensure!(
            waiting.elapsed() < Duration::from_secs(300),
            "timed out: the newest snapshot is {newest}, expected {wanted} or later"
        );
        std::thread::sleep(Duration::from_millis(50));
    };
    let lag_s = waiting.elapsed().as_secs_f64();
    drop(replica);
    handle.stop();
    let journal_bytes = total_bytes(&dir, "log")?;
    let snapshot_bytes =
        total_bytes(&dir.join("snapshots"), "snap")? / snapshots.sequences()?.len().max(1) as u64;
    let snapshot = snapshots.sequences()?.last().copied().unwrap_or(snapshot);

    let starting = Instant::now();
    let restarted_node = start(&dir)?;
    let restart_s = starting.elapsed().as_secs_f64();
    let (recovered, restarted, _) = node_state(&restarted_node.port())?;
    restarted_node.stop();
    ensure!(
        (recovered, restarted) == (last, live),
        "restarted at {recovered:?} with {restarted:#x}, stopped at {last:?} with {live:#x}"
    );

    let mut replay_s = None;
    if !args.no_replay {
        let replaying = Instant::now();
        let core = replay(&dir, None)?;
        replay_s = Some(replaying.elapsed().as_secs_f64());
        ensure!(
            (core.sequence(), core.state_hash()) == (last, live),
            "the replay from the first record reached another state"
        );
    }
    let replayed = last.get() - snapshot;
    if args.json {
        println!(
            "{}",
            serde_json::json!({
                "load": {
                    "commands": last.get(),
                    "every": args.every,
                    "instruments": args.instruments,
                    "users": benches::load::USERS,
                    "mix": MIX,
                    "seed": args.seed,
                    "cache": CACHE,
                },
                "commands": last.get(),
                "open_orders": open,
                "fill_s": fill_s,
                "snapshot_lag_s": lag_s,
                "journal_bytes": journal_bytes,
                "snapshot_sequence": snapshot,
                "snapshot_bytes": snapshot_bytes,
                "restart_s": restart_s,
                "replayed": replayed,
                "replay_from_first_s": replay_s,
                "replay_per_s": replay_s.map(|seconds| last.get() as f64 / seconds),
                "state_hash": format!("{live:#x}"),
            })
        );
        return Ok(());
    }
    println!(
        "load: {} commands, {} instruments, {} users, {MIX}, seed {}, {CACHE}; \
        journalled in {fill_s:.1} s, {} open orders",
        last.get(),
        args.instruments,
        benches::load::USERS,
        args.seed,
        open
    );
    println!(
        "journal {:.2} GB; snapshot at {snapshot}, {:.1} MB, {lag_s:.1} s after the load",
        journal_bytes as f64 / 1e9,
        snapshot_bytes as f64 / 1e6
    );
    println!("restart: {restart_s:.2} s, with {replayed} commands replayed after the snapshot");
    if let Some(seconds) = replay_s {
        println!(
            "replay from the first record: {seconds:.2} s, {:.2} M commands/s",
            last.get() as f64 / seconds / 1e6
        );
    }
    println!("state hash of live, restarted and replayed node: {live:#x}");
    Ok(())
}
