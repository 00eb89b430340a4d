//! Cost of a command on the hot thread. One thread submits requests, polls the pipeline and reads
//! reports, so nothing waits for another core. Only the polls are timed.
//!
//! Instruction counts: `valgrind --tool=callgrind --toggle-collect='*InlineNode::poll*'`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use sequencer::{Commit, InlineNode, Reply, Report, RingPort, Submission, SubmitError};
use types::Sequence;

use crate::load::Load;

/// Requests submitted before each poll.
pub const BATCHES: [usize; 3] = [1, 8, 64];
/// Maximum number of accepted commands that are not durable.
const UNDURABLE_MAX: u64 = 20_000;
/// Maximum wait for the answers of a batch. The journal's writer may delay a poll.
const ANSWER_WAIT_MAX: Duration = Duration::from_secs(10);

/// Cost per command at one batch size.
#[derive(Clone, Copy, Debug)]
pub struct Cost {
    /// Requests per poll.
    pub batch: usize,
    pub ns_per_command: f64,
}

impl Cost {
    /// Capacity of a hot thread that does nothing else, in million commands per second.
    pub fn capacity_m(&self) -> f64 {
        1e3 / self.ns_per_command
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "batch": self.batch,
            "ns_per_command": self.ns_per_command,
            "capacity_per_s": 1e9 / self.ns_per_command,
        })
    }
}

/// Runs `commands` of the load once for each batch size of [`BATCHES`].
///
/// # Errors
/// The node rejects the load or stops.
pub fn run(
    mut node: InlineNode,
    instruments: usize,
    seed: u64,
    commands: usize,
) -> anyhow::Result<Vec<Cost>> {
    let port = node.port();
    let mut ring = port.rings(1_024, Arc::default())?;
    let cell = std::cell::RefCell::new(&mut node);
    let mut load = Load::open_by(
        |request| {
            let (reply, mut answer) = tokio::sync::oneshot::channel();
            port.submit(request, Reply::Oneshot(reply))?;
            while cell.borrow_mut().poll() {}
            answer.try_recv().unwrap_or(Err(SubmitError::Stopping))
        },
        &mut ring,
        || while cell.borrow_mut().poll() {},
        instruments,
        seed,
    )
    .map_err(|error| anyhow::anyhow!("cannot open the load: {error}"))?;
    let commit = node.commit();
    while node.poll() {}
    let mut costs = Vec::new();
    let clock = clock_cost();
    for batch in BATCHES {
        // Warm-up, not counted.
        let commit = commit.as_ref();
        run_batches(
            &mut node,
            &mut ring,
            &mut load,
            commit,
            batch,
            commands / 10,
        )?;
        let (elapsed, polls) =
            run_batches(&mut node, &mut ring, &mut load, commit, batch, commands)?;
        let net = elapsed.saturating_sub(clock * u32::try_from(polls).unwrap_or(u32::MAX));
        costs.push(Cost {
            batch,
            ns_per_command: net.as_secs_f64() * 1e9 / commands as f64,
        });
    }
    Ok(costs)
}

/// Cost of reading the clock twice.
fn clock_cost() -> Duration {
    let mut least = Duration::MAX;
    for _ in 0..1_000 {
        let start = Instant::now();
        least = least.min(start.elapsed());
    }
    least
}

/// Runs the commands in batches. Returns the time spent in polls and the number of polls.
fn run_batches(
    node: &mut InlineNode,
    ring: &mut RingPort,
    load: &mut Load,
    commit: Option<&Commit>,
    batch: usize,
    commands: usize,
) -> anyhow::Result<(Duration, usize)> {
    let (mut elapsed, mut polls) = (Duration::ZERO, 0);
    let mut last = Sequence::ZERO;
    let mut sent = 0;
    while sent < commands {
        for tag in 0..batch {
            let request = load.next_request();
            load.set_tag(&request, tag as u64);
            ring.submit(Submission::default(), &request)?;
        }
        sent += batch;
        let mut answered = 0;
        let begun = Instant::now();
        while answered < batch {
            let start = Instant::now();
            node.poll();
            elapsed += start.elapsed();
            polls += 1;
            answered += read_reports(ring, load, &mut last)?;
            anyhow::ensure!(
                begun.elapsed() < ANSWER_WAIT_MAX,
                "timed out waiting for the node's answers"
            );
        }
        // Waits for the disk outside the timed polls, so that no poll finds a full journal buffer.
        while commit.is_some_and(|at| last.get() > at.position().get() + UNDURABLE_MAX) {
            // Without work it hands over what it has kept.
            node.poll();
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    Ok((elapsed, polls))
}

/// Reads the reports of a poll. Returns the number of answers.
fn read_reports(
    ring: &mut RingPort,
    load: &mut Load,
    last: &mut Sequence,
) -> anyhow::Result<usize> {
    let mut answered = 0;
    let mut is_rejected = false;
    ring.poll(|report| match report {
        Report::SessionMessage(stamp, message) => {
            *last = stamp.sequence;
            answered += usize::from(load.on_report(message).is_some());
        }
        _ => is_rejected = true,
    })?;
    anyhow::ensure!(!is_rejected, "the node rejected a request of the load");
    Ok(answered)
}
