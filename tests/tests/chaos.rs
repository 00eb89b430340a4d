//! Clients receive exactly the journal's messages although server and clients are killed and the
//! network is bad. `cargo xtask chaos` runs the same test for longer.

use std::time::Duration;

use tests::chaos::{self, Plan};
use tests::shared::run;

/// A number from an environment variable.
fn env_number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name}={text} is not a number")),
    )
}

/// `CHAOS_SEED`, `CHAOS_KILLS` (kills of the server, and as many of clients) and `CHAOS_MINUTES`
/// (the time limit) override the defaults.
// rows: R343 R345
#[test]
fn r343_clients_receive_all_messages_under_chaos() {
    let seed = env_number("CHAOS_SEED").unwrap_or_else(|| tests::seed::seed(20_261_124));
    println!("CHAOS_SEED={seed}");
    let kills = env_number("CHAOS_KILLS").map_or(10, |kills| usize::try_from(kills).expect("few"));
    let mut plan = Plan::new(seed, kills);
    if let Some(minutes) = env_number("CHAOS_MINUTES") {
        plan.limit = Duration::from_secs(60 * minutes);
    }
    let summary = run(chaos::run(&plan));
    println!("{summary}");
    assert!(summary.client_kills == kills && summary.server_kills == kills);
    assert!(
        summary.messages > 0 && summary.orders > 0,
        "nothing was compared"
    );
}
