//! Chaos on real processes for long: the ordinary suite runs five kills of the server and of clients.

use crate::shell;

/// Runs `tests/tests/chaos.rs` with `kills` kills of the server and as many of clients. Without a
/// seed the time gives one; it is printed first and repeats the order of the kills, the requests and
/// the fate of datagrams.
///
/// # Errors
/// A client was told something else than the journal says, or the kills took longer than `minutes`.
pub fn run(seed: Option<u64>, kills: usize, minutes: u64) -> anyhow::Result<()> {
    let root = shell::root();
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let seed = seed.unwrap_or(since.as_secs());
    println!("seed {seed}");
    // A test of `node` brings the binary along, which the chaos starts.
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
