//! Human-readable figures of a chaos run.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::judge::{Journal, Restart};
use super::key;
use super::trader::Trader;
use crate::udp_proxy::Counts;

/// Figures of one run.
#[derive(Debug, Default)]
pub struct Summary {
    pub server_kills: usize,
    pub client_kills: usize,
    /// Numbered messages compared with the journal.
    pub messages: usize,
    pub orders: usize,
    pub records: u64,
    pub cancels: u64,
    pub cancelled_orders: u64,
    pub returns: u64,
    pub smallest: Option<Duration>,
    pub largest: Option<Duration>,
    /// Client deaths after which the running server ended the session because of silence.
    pub silent_ends: usize,
    /// Longest time from such a death to the end of the session in the journal.
    pub noticed: Option<Duration>,
    pub resumes: u64,
    pub restarts: u64,
    pub resent_requests: u64,
    pub refusals_lost: u64,
    pub datagrams: Counts,
    pub troubles: BTreeMap<String, u64>,
    pub elapsed: Duration,
}

impl Summary {
    pub(super) fn of(
        restarts: &[Restart],
        traders: &[Trader],
        journal: &Journal,
        elapsed: Duration,
    ) -> Self {
        let mut summary = Self {
            server_kills: restarts.len(),
            records: journal.records,
            cancels: journal.cancels,
            cancelled_orders: journal.cancelled_orders,
            returns: journal.returns,
            smallest: journal.smallest,
            largest: journal.largest,
            elapsed,
            ..Self::default()
        };
        for trader in traders {
            summary.client_kills += trader.deaths.len();
            summary.resumes += trader.resumes;
            summary.restarts += trader.restarts;
            summary.resent_requests += trader.resent_requests;
            summary.refusals_lost += trader.refusals_lost;
            summary.datagrams += trader.proxy.counts();
            for session in &trader.sessions {
                summary.messages += session.messages.len();
                summary.orders += session.orders();
            }
            for (what, count) in &trader.troubles {
                *summary.troubles.entry(what.clone()).or_default() += count;
            }
            let name = &trader.sessions[0].name;
            let ends = journal.ends.get(&key(trader, name));
            for death in &trader.deaths {
                let is_its = |end: &&u64| death.at_ns <= **end && **end <= death.back_ns;
                let end = ends.and_then(|ends| ends.iter().find(is_its));
                let has_restarted = |end: &&u64| {
                    let mut spawned = restarts.iter().map(|restart| restart.spawned_ns);
                    spawned.any(|spawned| death.at_ns < spawned && spawned <= **end)
                };
                let end = end.filter(|end| !has_restarted(end));
                let noticed = end.map(|end| Duration::from_nanos(end - death.at_ns));
                summary.silent_ends += usize::from(noticed.is_some());
                summary.noticed = summary.noticed.max(noticed);
            }
        }
        summary
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = |time: Option<Duration>| format!("{:.3?}", time.unwrap_or_default());
        writeln!(
            f,
            "kills: {} of the server, {} of clients, in {:.0?}",
            self.server_kills, self.client_kills, self.elapsed
        )?;
        writeln!(
            f,
            "messages compared with the journal: {} ({} orders acknowledged, {} records)",
            self.messages, self.orders, self.records
        )?;
        writeln!(
            f,
            "cancel-on-disconnect: {} checked, of {} orders, from {} to {} after the session's end",
            self.cancels,
            self.cancelled_orders,
            time(self.smallest),
            time(self.largest)
        )?;
        writeln!(
            f,
            "sessions with open orders that returned within the grace: {}",
            self.returns
        )?;
        writeln!(
            f,
            "sessions ended by a client's silence: {}, at most {} after its death",
            self.silent_ends,
            time(self.noticed)
        )?;
        writeln!(
            f,
            "resumes: {}, new logins: {}, requests sent again: {}, refusals lost: {}",
            self.resumes, self.restarts, self.resent_requests, self.refusals_lost
        )?;
        let datagrams = self.datagrams;
        writeln!(
            f,
            "datagrams: {}; dropped {}, delayed {}, reordered {}, duplicated {}",
            datagrams.received,
            datagrams.dropped,
            datagrams.delayed,
            datagrams.reordered,
            datagrams.duplicated
        )?;
        writeln!(
            f,
            "  dropped while blocked {}, dropped for lack of room {}",
            datagrams.blocked, datagrams.overflowed
        )?;
        write!(f, "troubles of the clients: {:?}", self.troubles)
    }
}
