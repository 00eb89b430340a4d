//! Logged-in sessions that only send heartbeats. A separate thread polls them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::Context;
use client::spinning::Connection;
use client::{LoginOptions, Trust};

/// Channels per connection.
const CHANNELS: usize = 64;
/// Pause between two polls of the connections, far below the heartbeat interval.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Idle sessions and the thread that polls them.
pub struct Idle {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<anyhow::Result<()>>,
}

impl Idle {
    /// Logs in `count` sessions of the users in turn.
    ///
    /// # Errors
    /// A connection or a login fails.
    pub fn start(
        trading: SocketAddr,
        trust: &Trust,
        users: &[String],
        count: usize,
    ) -> anyhow::Result<Self> {
        let mut connections = Vec::new();
        for first in (0..count).step_by(CHANNELS) {
            let mut connection = Connection::connect(trading, trust)?;
            for session in first..count.min(first + CHANNELS) {
                let token = format!("sandbox.trader.{}", users[session % users.len()]);
                let options = LoginOptions::new(&token, &format!("idle-{session}"));
                connection.login(u16::try_from(session - first)?, options)?;
            }
            connections.push(connection);
        }
        let stop = Arc::new(AtomicBool::new(false));
        let is_stopped = stop.clone();
        let thread = std::thread::spawn(move || poll_until(&mut connections, &is_stopped));
        Ok(Self { stop, thread })
    }

    /// Closes the connections.
    ///
    /// # Errors
    /// A connection was lost while it was idle.
    pub fn stop(self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        let ended = self.thread.join();
        ended.map_err(|_| anyhow::anyhow!("the idle sessions' thread panicked"))?
    }
}

fn poll_until(connections: &mut [Connection], stop: &AtomicBool) -> anyhow::Result<()> {
    while !stop.load(Ordering::Relaxed) {
        for connection in connections.iter_mut() {
            connection.poll().context("polling an idle session")?;
            while connection.recv().is_some() {}
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(())
}
