//! Sends ledger balances to the sessions of their user: unnumbered messages, the latest value only.
//! Balances are conflated per sub-account before they reach the front, and again while a client
//! reads slowly. The front keeps unsent balances per user, not per session, and sends a bounded
//! number per round.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use types::{AssetIx, Minor, UserIx};
use wire::LedgerBalance;

use super::desk::FrontMessage;
use super::session::At;
use super::{Front, RESUME_BYTES, connection, fair_queue};
use crate::market::Market;

/// Pause between two rounds of [`run`]: a busy user's balances change thousands of times a second.
const PACE: Duration = Duration::from_millis(100);
/// Maximum balances per message to the front.
const BALANCES_PER_MESSAGE: usize = 64;
/// Maximum turns of a user's sessions in a round of the front, which may run on the hot thread.
const TURNS_PER_USER: usize = 8;

/// Balances that have changed since the last round, at most one per sub-account.
#[derive(Default)]
pub struct Balances {
    changed: Mutex<HashMap<(UserIx, AssetIx), LedgerBalance>>,
    has_changed: Notify,
}

impl Balances {
    /// Replaces the balance of a sub-account, in minor units of the asset, as of `time_ns` since
    /// 1970. Call it in the order of the ledger's events.
    pub fn note(&self, user: UserIx, asset: AssetIx, balance: Minor, time_ns: u64) {
        let balance = LedgerBalance {
            asset: asset.get(),
            balance_minor: balance.0,
            time_ns,
        };
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.insert((user, asset), balance);
        drop(changed);
        self.has_changed.notify_one();
    }

    /// Removes and returns all changed balances.
    fn drain(&self) -> Vec<(UserIx, LedgerBalance)> {
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = changed.drain();
        taken.map(|((user, _), balance)| (user, balance)).collect()
    }
}

/// Passes changed balances to the front until shutdown.
pub async fn run(market: Arc<Market>, shutdown: CancellationToken) {
    let forwarding = async {
        loop {
            market.balances.has_changed.notified().await;
            for some in market.balances.drain().chunks(BALANCES_PER_MESSAGE) {
                market
                    .front
                    .send(FrontMessage::Balances(some.to_vec()))
                    .await;
            }
            tokio::time::sleep(PACE).await;
        }
    };
    shutdown.run_until_cancelled(forwarding).await;
}

/// Balances of a user that some session has not been sent: the latest of each asset, in order of
/// change.
#[derive(Default)]
pub(super) struct Unsent {
    /// By change number.
    by_change: BTreeMap<u64, LedgerBalance>,
    /// Change number of each asset's balance.
    change_of: HashMap<u32, u64>,
    /// The last change number.
    newest: u64,
    turns: RoundRobin,
}

/// Round robin over a user's sessions.
#[derive(Default)]
struct RoundRobin {
    /// Number of turns so far. Modulo the number of sessions: the next session.
    at: usize,
    /// Number of turns since a balance was last sent.
    without_send: usize,
    /// Number of last turns whose sessions were up to date.
    up_to_date: usize,
}

/// What a session was sent in its turn.
enum TurnOutcome {
    Sent,
    NoSpace,
    UpToDate,
}

impl Unsent {
    /// Replaces the balance of an asset.
    fn put(&mut self, balance: LedgerBalance) {
        self.newest += 1;
        let before = self.change_of.insert(balance.asset, self.newest);
        if let Some(before) = before {
            self.by_change.remove(&before);
        }
        self.by_change.insert(self.newest, balance);
        self.turns.without_send = 0;
        self.turns.up_to_date = 0;
    }

    /// The first change after a change number, with its balance.
    fn after(&self, change: u64) -> Option<(u64, LedgerBalance)> {
        let mut later = self.by_change.range(change + 1..);
        later.next().map(|(change, balance)| (*change, *balance))
    }

    /// The last change number. A new login is sent later changes only.
    pub fn newest(&self) -> u64 {
        self.newest
    }

    /// Restarts the turns after a session was added or removed: its turn may be among the counted.
    pub fn restart(&mut self) {
        self.turns = RoundRobin::default();
    }

    /// Records a turn. False after a full cycle in which nothing was sent.
    fn note(&mut self, turn: TurnOutcome, sessions: usize) -> bool {
        let turns = &mut self.turns;
        turns.at += 1;
        (turns.without_send, turns.up_to_date) = match turn {
            TurnOutcome::Sent => (0, 0),
            TurnOutcome::NoSpace => (turns.without_send + 1, 0),
            TurnOutcome::UpToDate => (turns.without_send + 1, turns.up_to_date + 1),
        };
        turns.without_send <= sessions
    }

    /// True once every session is up to date. Then drops the balances.
    fn is_done(&mut self, sessions: usize) -> bool {
        let is_done = self.turns.up_to_date >= sessions;
        if is_done {
            self.clear();
        }
        is_done
    }

    fn clear(&mut self) {
        self.by_change.clear();
        self.change_of.clear();
    }
}

impl Front {
    /// Keeps balances for the sessions of their users. Drops those of users without sessions here.
    pub(super) fn on_balances(&mut self, balances: Vec<(UserIx, LedgerBalance)>) {
        for (user, balance) in balances {
            let row = self.state.sessions.users.get_mut(&user);
            let Some(row) = row.filter(|row| !row.sessions.is_empty()) else {
                continue;
            };
            if row.unsent.by_change.is_empty() {
                self.state.with_balances.push(user);
            }
            row.unsent.put(balance);
        }
    }

    /// Sends a bounded number of balances to clients with free space. True while another round may
    /// send more.
    pub(super) fn send_balances(&mut self, now: Instant) -> bool {
        let mut with_balances = std::mem::take(&mut self.state.with_balances);
        let may_send = with_balances.round(|user| self.send_balances_of(now, user));
        self.state.with_balances = with_balances;
        may_send
    }

    /// Runs the turn of a user: up to [`TURNS_PER_USER`] turns of its sessions. The user waits when
    /// none of them has space.
    fn send_balances_of(&mut self, now: Instant, user: UserIx) -> fair_queue::Turn {
        let sessions = self.state.sessions.user(user).sessions.len();
        let mut may_send = false;
        for nth in 1..=TURNS_PER_USER {
            let (may_send_more, is_done) = self.take_turn(now, user);
            if is_done {
                return fair_queue::Turn::Over;
            }
            may_send = may_send_more;
            if !may_send && nth >= sessions {
                break;
            }
        }
        match may_send {
            true => fair_queue::Turn::Sent,
            false => fair_queue::Turn::Waits,
        }
    }

    /// Runs the turn of one session of the user. Returns whether another session may be sent
    /// something, and whether all sessions are up to date.
    fn take_turn(&mut self, now: Instant, user: UserIx) -> (bool, bool) {
        let row = self.state.sessions.user(user);
        let sessions = row.sessions.len();
        if sessions == 0 {
            // All sessions were forgotten meanwhile.
            row.unsent.restart();
            row.unsent.clear();
            return (false, true);
        }
        let at = row.sessions[row.unsent.turns.at % sessions];
        let turn = self.send_balance(now, user, at);
        let unsent = &mut self.state.sessions.user(user).unsent;
        (unsent.note(turn, sessions), unsent.is_done(sessions))
    }

    fn send_balance(&mut self, now: Instant, user: UserIx, at: At) -> TurnOutcome {
        let session = self.state.sessions.get(at);
        let through = session.balances_through;
        let Some(owner) = session.owner else {
            return TurnOutcome::UpToDate;
        };
        let Some((change, balance)) = self.state.sessions.user(user).unsent.after(through) else {
            return TurnOutcome::UpToDate;
        };
        let link = self.endpoint.peek(owner.connection);
        if link.is_some_and(|link| link.waiting_bytes() >= RESUME_BYTES) {
            return TurnOutcome::NoSpace;
        }
        let Some(link) = self.endpoint.link(owner.connection) else {
            return TurnOutcome::UpToDate;
        };
        connection::send(link, now, owner.channel, &balance.into());
        self.state.sessions.row(at).balances_through = change;
        TurnOutcome::Sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_balance_of_each_sub_account_is_passed_on_once() {
        let balances = Balances::default();
        let (ann, bob) = (UserIx(1), UserIx(2));
        for minor in 1..=1_000_i64 {
            let at = minor.unsigned_abs();
            balances.note(ann, AssetIx::MONEY, Minor(minor), at);
            balances.note(bob, AssetIx::MONEY, Minor(-minor), at);
        }
        let mut taken = balances.drain();
        taken.sort_by_key(|(user, _)| *user);
        let of = |balance_minor| LedgerBalance {
            asset: 0,
            balance_minor,
            time_ns: 1_000,
        };
        assert_eq!(taken, [(ann, of(1_000)), (bob, of(-1_000))]);
        assert!(balances.drain().is_empty());
    }

    #[test]
    fn sessions_of_a_user_share_the_balances_and_each_is_sent_the_latest() {
        const SESSIONS: usize = 3;
        let mut unsent = Unsent::default();
        let balance = |asset, balance_minor| LedgerBalance {
            asset,
            balance_minor,
            time_ns: 1,
        };
        for minor in 0..1_000 {
            unsent.put(balance(u32::from(minor % 2 == 0), minor));
        }
        assert_eq!(unsent.by_change.len(), 2, "one of each asset");
        // The second session has no space at first, the third is not connected.
        let mut through = [0, 0];
        let mut sent = Vec::new();
        let mut turn_of = |unsent: &mut Unsent, has_space: bool| {
            let at = unsent.turns.at % SESSIONS;
            let next = (at < 2).then(|| unsent.after(through[at])).flatten();
            let turn = match next {
                None => TurnOutcome::UpToDate,
                Some(_) if at == 1 && !has_space => TurnOutcome::NoSpace,
                Some((change, balance)) => {
                    through[at] = change;
                    sent.push((at, balance.balance_minor));
                    TurnOutcome::Sent
                }
            };
            (unsent.note(turn, SESSIONS), unsent.is_done(SESSIONS))
        };
        let mut turns = 0;
        while turn_of(&mut unsent, false).0 {
            turns += 1;
        }
        assert!(turns < 20, "a session without space is no work");
        unsent.put(balance(1, 5_000));
        while !turn_of(&mut unsent, true).1 {
            turns += 1;
        }
        assert!(turns < 40 && unsent.by_change.is_empty() && unsent.change_of.is_empty());
        sent.sort_unstable();
        assert_eq!(sent, [(0, 998), (0, 999), (0, 5_000), (1, 999), (1, 5_000)]);
    }
}
