//! Long chaos runs on real processes; the ordinary suite runs ten kills of the server and ten of
//! clients.

use crate::shell;

/// Runs `tests/tests/chaos.rs` with `kills` kills of the server and as many of clients. The default
/// seed is the current time. The seed is printed first. It reproduces the order of the kills, the
/// requests, and the loss and delay of datagrams.
///
/// # Errors
/// A client received something that differs from the journal, or the kills took longer than
/// `minutes`.
pub fn run(seed: Option<u64>, kills: usize, minutes: u64) -> anyhow::Result<()> {
    let root = shell::root();
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let seed = seed.unwrap_or(since.as_secs());
    println!("seed {seed}");
    // Building the test `binary` of `node` builds the platform binary that the chaos test starts.
    let test = [
        "test",
        "--release",
        "--package",
        "node",
        "--package",
        "tests",
        "--test",
        "binary",
        "--test",
        "chaos",
        "--",
        "--nocapture",
    ];
    let settings = [
        ("CHAOS_SEED", seed.to_string()),
        ("CHAOS_KILLS", kills.to_string()),
        ("CHAOS_MINUTES", minutes.to_string()),
    ];
    let settings = settings
        .each_ref()
        .map(|(name, value)| (*name, value.as_str()));
    shell::run_with(&root, "cargo", &test, &settings)
}
