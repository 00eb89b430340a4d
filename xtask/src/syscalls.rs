//! Counts the system calls of the hot thread under load. strace is attached to that thread alone
//! while the pipeline benchmark runs at a fixed rate. Without the journal there must be none. With
//! it only `futex` is allowed, which wakes the parked writer thread. The benchmark's hot thread
//! never parks: it spins longer than any pause of the load, so its own `futex` calls do not count.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, bail, ensure};

use crate::shell;

/// Requests per second.
const RATE: u64 = 1_000_000;
/// Spin time of the hot thread in microseconds, longer than any pause of the load.
const SPIN_US: &str = "10000000";
/// Time from the first request to the first counted one.
const WARM_UP: Duration = Duration::from_secs(3);

/// System call that the hot thread may make with a journal.
const ALLOWED: &str = "futex";

/// Counts over `commands` commands, without the journal and with it.
///
/// # Errors
/// The hot thread made a forbidden system call, or nothing could be counted.
pub fn run(commands: u64) -> anyhow::Result<()> {
    let root = shell::root();
    let script = root.join("tests/services/strace.sh");
    let strace = shell::output(&root, &script.to_string_lossy(), &[])?;
    let pipeline = shell::build_release("benches", "pipeline")?;
    let seconds = commands.div_ceil(RATE);
    for journal in [false, true] {
        let rate = RATE.to_string();
        let length = (seconds + 3 * WARM_UP.as_secs()).to_string();
        let mut args = vec!["--rate", &rate, "--warm-up", "0", "--seconds", &length];
        args.extend(["--spin-us", SPIN_US]);
        if !journal {
            args.push("--no-journal");
        }
        let mut child = Command::new(&pipeline)
            .args(&args)
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", pipeline.display()))?;
        let counted = count(&mut child, strace.trim(), seconds);
        let _ = child.kill();
        child.wait()?;
        let name = if journal {
            "with the journal"
        } else {
            "without the journal"
        };
        let table = counted?;
        let calls = calls(&table)?;
        if calls.is_empty() {
            println!("{name}: no system call of the hot thread in {seconds} s");
        } else {
            println!("{name}: system calls of the hot thread in {seconds} s\n{table}");
        }
        let is_allowed = |call: &&(String, u64)| !(journal && call.0 == ALLOWED);
        if let Some((call, count)) = calls.iter().find(is_allowed) {
            bail!("{name}: the hot thread called {call} {count} times");
        }
    }
    Ok(())
}

/// Names and counts in strace's table: `% time, seconds, usecs/call, calls, errors if any,
/// syscall`.
fn calls(table: &str) -> anyhow::Result<Vec<(String, u64)>> {
    let mut calls = Vec::new();
    for line in table.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let (Some(first), Some(name)) = (words.first(), words.last()) else {
            continue;
        };
        if *first == "%" || first.starts_with('-') || *name == "total" {
            continue;
        }
        let count = words.get(3).and_then(|count| count.parse().ok());
        let count = count.with_context(|| format!("unexpected line `{line}` in strace's table"))?;
        calls.push(((*name).to_owned(), count));
    }
    Ok(calls)
}

/// Waits for the load, attaches strace and returns its table; empty if there was no call.
fn count(child: &mut Child, strace: &str, seconds: u64) -> anyhow::Result<String> {
    let stdout = child.stdout.take().context("the benchmark has no output")?;
    let mut lines = BufReader::new(stdout).lines();
    loop {
        match lines.next().transpose()? {
            Some(line) if line == "running" => break,
            Some(_) => {}
            None => bail!("the benchmark ended before its load began"),
        }
    }
    std::thread::sleep(WARM_UP);
    let hot = hot_thread(child.id())?;
    let table = std::env::temp_dir().join(format!("syscalls-{hot}"));
    let attached = Command::new("timeout")
        .args(["--signal=INT", &seconds.to_string(), strace, "-c", "-o"])
        .arg(&table)
        .args(["-p", &hot.to_string()])
        .stderr(Stdio::null())
        .status()
        .context("cannot start `timeout`")?;
    // `timeout` ends strace, so these exit codes are expected.
    ensure!(
        matches!(attached.code(), Some(124 | 130))
            || attached.success()
            || attached.code().is_none(),
        "strace ended with {attached}"
    );
    ensure!(
        child.try_wait()?.is_none(),
        "the load ended before the count"
    );
    let text = std::fs::read_to_string(&table)?;
    std::fs::remove_file(&table)?;
    Ok(text)
}

fn hot_thread(process: u32) -> anyhow::Result<u32> {
    for entry in std::fs::read_dir(format!("/proc/{process}/task"))? {
        let path = entry?.path();
        if std::fs::read_to_string(path.join("comm"))?.trim() == "hot" {
            let name = path.file_name().context("task folder without a name")?;
            return Ok(name.to_string_lossy().parse()?);
        }
    }
    bail!("the benchmark has no hot thread")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_of_calls_is_read_with_and_without_errors() {
        let table = "\
% time     seconds  usecs/call     calls    errors syscall
------ ----------- ----------- --------- --------- ----------------
 99.00    0.100000           1    100000         7 futex
  1.00    0.000100           1       100           read
------ ----------- ----------- --------- --------- ----------------
100.00    0.100100           1    100100         7 total
";
        let expected = [("futex".to_owned(), 100_000), ("read".to_owned(), 100)];
        assert_eq!(calls(table).expect("read"), expected);
        assert!(calls("").expect("read").is_empty());
        assert!(calls("nonsense").is_err());
    }
}
