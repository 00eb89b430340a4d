//! `platform run`: starts the platform, prints its addresses, waits for a signal and stops it.

use std::time::Duration;

use anyhow::Context;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};

use crate::config::Config;
use crate::platform::Platform;

/// Starts logging: JSON lines on standard error.
pub fn init_log(config: &Config) -> anyhow::Result<()> {
    rpc::logging::init("platform", &config.log.filter, rpc::logging::Output::Stderr).context("log")
}

/// Runs until SIGINT or SIGTERM.
///
/// # Errors
/// The platform cannot start, or a part fails while running or stopping.
pub async fn run(config: Config, json: bool) -> anyhow::Result<()> {
    init_log(&config)?;
    let data_dir = config.data_dir.clone();
    // Registered before the first port answers: a supervisor may send a signal from then on.
    let mut interrupt = signal(SignalKind::interrupt()).context("SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("SIGTERM")?;
    let mut stopped = std::pin::pin!(async {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
    });
    let platform = tokio::select! {
        started = Platform::start(config) => started?,
        // The next start completes an interrupted one.
        () = &mut stopped => return Ok(()),
    };
    let addresses = platform.addresses();
    if json {
        println!(
            "{}",
            json!({ "ready": true, "data_dir": data_dir, "listen": addresses })
        );
    } else {
        println!(
            "The platform is ready. State is in {}.\n",
            data_dir.display()
        );
        for (name, what, address) in addresses.lines() {
            println!("  {name:<10} {address:<28} {what}");
        }
        println!(
            "\nTry `platform demo`, `platform --help`, or a curl line of the README. Ctrl-C stops."
        );
    }

    stopped.await;
    if !json {
        println!("\nStopping: no more orders are accepted; draining and flushing.");
    }
    tokio::time::timeout(Duration::from_secs(10), platform.stop())
        .await
        .context("the platform did not stop within 10 seconds")??;
    if !json {
        println!("Stopped.");
    }
    Ok(())
}
