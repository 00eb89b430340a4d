//! Search for trading holds that may be closed.

use std::collections::HashMap;

use admission::Admission;
use replica::{Hold, Session, State};
use types::command::BlockCause;
use types::{HoldIx, SessionIx, UserIx};

/// Rows after which a page ends: bounds the duration of one replica read. A page contains all holds
/// of its last user, and may exceed this.
const PAGE_ROWS: usize = 1_024;

/// Search for trading holds without open orders that may be closed (`design.md` 4): those of users
/// blocked by identity, and those of users whose last session ended before a given time, unless
/// the hold was used since. Holds of users that never had a session stay: such users manage them by
/// RPC.
///
/// Reads pages of sessions, then pages of users with their open holds. Each row is read once. The
/// check of one hold reads the hold and the sessions of its user.
pub struct AbandonedHolds {
    before_ns: u64,
    /// By user: true if all its sessions, forgotten ones included, had ended before `before_ns`.
    has_left: HashMap<UserIx, bool>,
    /// Next session to read; `None` after the last one.
    session: Option<SessionIx>,
    /// Next user to read.
    user: UserIx,
    /// Rows read so far, those of checks included.
    rows: usize,
}

impl AbandonedHolds {
    /// A search for holds that were abandoned before this time.
    pub fn before(before_ns: u64) -> Self {
        Self {
            before_ns,
            has_left: HashMap::new(),
            session: Some(SessionIx(0)),
            user: UserIx(0),
            rows: 0,
        }
    }

    /// Reads the next page. Returns the abandoned holds on it; `None` after the last page.
    pub fn next_page(&mut self, state: &State) -> Option<Vec<HoldIx>> {
        let end = self.rows + PAGE_ROWS;
        if let Some(first) = self.session {
            self.session = self.read_sessions(state, first, end);
            return Some(Vec::new());
        }
        let admission = state.core().admission();
        admission.user(self.user)?;
        let mut found = Vec::new();
        while self.rows < end && admission.user(self.user).is_some() {
            let user = self.user;
            self.user = UserIx(user.0 + 1);
            self.rows += 1;
            let is_blocked = is_blocked(admission, user);
            if !is_blocked && self.has_left.get(&user) != Some(&true) {
                continue;
            }
            for hold in admission.trading_holds(user) {
                self.rows += 1;
                let row = state.hold(hold);
                if row.is_some_and(|row| self.is_idle(&row, is_blocked)) {
                    found.push(hold);
                }
            }
        }
        Some(found)
    }

    /// True if a hold that the search has found is still abandoned: its user may be back since.
    pub fn is_abandoned(&mut self, state: &State, hold: HoldIx) -> bool {
        self.rows += 1;
        let Some(hold) = state.hold(hold) else {
            return false;
        };
        let is_blocked = is_blocked(state.core().admission(), hold.user);
        self.is_idle(&hold, is_blocked) && (is_blocked || self.is_away(state, hold.user))
    }

    /// Reads sessions from `first` on until `end` rows are read. Returns the next session; `None`
    /// after the last one.
    fn read_sessions(&mut self, state: &State, first: SessionIx, end: usize) -> Option<SessionIx> {
        let mut next = first;
        while self.rows < end {
            let session = state.session(next)?;
            self.rows += 1;
            let has_ended = self.has_ended(&session);
            *self.has_left.entry(session.user).or_insert(true) &= has_ended;
            next = SessionIx(next.0 + 1);
        }
        Some(next)
    }

    fn has_ended(&self, session: &Session) -> bool {
        !session.open && session.changed_ns < self.before_ns
    }

    fn is_idle(&self, hold: &Hold, is_blocked: bool) -> bool {
        let is_unused = is_blocked || hold.used_ns < self.before_ns;
        !hold.closed && hold.open_orders == 0 && is_unused
    }

    /// True if the user had left when its sessions were read, and none was opened since.
    fn is_away(&mut self, state: &State, user: UserIx) -> bool {
        if self.has_left.get(&user) != Some(&true) {
            return false;
        }
        let sessions = state.core().admission().sessions_of(user);
        self.rows += sessions.len();
        let mut sessions = sessions.iter().filter_map(|ix| state.session(*ix));
        sessions.all(|session| self.has_ended(&session))
    }
}

fn is_blocked(admission: &Admission, user: UserIx) -> bool {
    let row = admission.user(user);
    row.is_some_and(|row| row.blocks.has(BlockCause::Identity))
}

#[cfg(test)]
mod tests {
    use admission::AdmissionConfig;
    use sequencer::Record;
    use types::command::{
        BindUser, BlockUser, CloseSession, Command, ForgetSession, Fund, OpenSession,
    };
    use types::{AssetIx, Envelope, HoldKind, Id128, Minor, NodeId, StpGroup, UserId};

    use super::*;

    /// Applies a command at a time.
    fn apply(state: &mut State, time_ns: u64, command: Command) {
        let command = Envelope {
            sequence: state.sequence().next(),
            time_ns,
            command,
            received_ns: time_ns,
        };
        let events = Vec::new();
        state.apply(&Record { command, events }).unwrap();
    }

    fn open_session(state: &mut State, time_ns: u64, session: u32, user: u32) {
        let user = UserIx(user);
        let command = OpenSession {
            session: SessionIx(session),
            user,
            stp_group: StpGroup::of_user(user),
            cancel_on_disconnect: false,
            key: Id128::from_u128(u128::from(session) + 1),
        };
        apply(state, time_ns, Command::OpenSession(command));
    }

    fn close_session(state: &mut State, time_ns: u64, session: u32) {
        let command = CloseSession {
            session: SessionIx(session),
            keep_orders: false,
        };
        apply(state, time_ns, Command::CloseSession(command));
    }

    /// A state with users that have a trading hold each, all at time 1.
    fn users(count: u32) -> State {
        let mut state = State::new(NodeId::new(1).unwrap(), AdmissionConfig::default());
        for at in 0..count {
            let user = UserIx(at);
            let id = UserId::new(&format!("user-{at}")).unwrap();
            apply(&mut state, 1, Command::BindUser(BindUser { user, id }));
            let fund = Fund {
                hold: HoldIx(at),
                kind: HoldKind::Trading,
                user,
                asset: AssetIx::MONEY,
                amount_minor: Minor(100),
                funding_seq: 1,
                hold_id: Id128::from_u128(u128::from(at) + 1),
                key_hash: Id128::NONE,
            };
            apply(&mut state, 1, Command::Fund(fund));
        }
        state
    }

    /// All holds that a search finds, and the number of its pages.
    fn find(search: &mut AbandonedHolds, state: &State) -> (Vec<HoldIx>, usize) {
        let (mut found, mut pages) = (Vec::new(), 0);
        loop {
            let before = search.rows;
            let Some(page) = search.next_page(state) else {
                return (found, pages);
            };
            // A page may exceed its rows by the only hold of its last user.
            assert!(search.rows - before <= PAGE_ROWS + 1, "a page is bounded");
            found.extend(page);
            pages += 1;
        }
    }

    /// 10,000 members leave. A search that read all sessions and holds for each hold would read
    /// 200 million rows.
    #[test]
    fn a_search_and_the_checks_of_its_holds_read_each_row_twice_at_most() {
        const USERS: usize = 10_000;
        let count = u32::try_from(USERS).unwrap();
        let mut state = users(count);
        for at in 0..count {
            open_session(&mut state, 1, at, at);
            close_session(&mut state, 1, at);
        }
        let mut search = AbandonedHolds::before(2);
        let (found, pages) = find(&mut search, &state);
        assert_eq!(found, (0..count).map(HoldIx).collect::<Vec<_>>());
        // A session, a user and a hold of each.
        assert_eq!(search.rows, 3 * USERS);
        assert!(pages <= 3 * USERS / PAGE_ROWS + 2, "{pages}");
        for hold in found {
            assert!(search.is_abandoned(&state, hold));
        }
        assert_eq!(
            search.rows,
            5 * USERS,
            "each check reads a hold and a session"
        );
    }

    #[test]
    fn holds_of_users_with_a_session_or_a_recent_use_stay() {
        let mut state = users(7);
        // User 0 never had a session. That of user 3 is forgotten. User 6 has two sessions.
        for (session, user) in [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 6)] {
            open_session(&mut state, 1, session, user);
        }
        for session in [1, 2, 3, 5] {
            close_session(&mut state, 1, session);
        }
        let session = SessionIx(2);
        let forget = Command::ForgetSession(ForgetSession { session });
        apply(&mut state, 1, forget);
        let (user, cause) = (UserIx(5), BlockCause::Identity);
        let block = Command::BlockUser(BlockUser { user, cause });
        apply(&mut state, 1, block);
        let mut search = AbandonedHolds::before(2);
        let (found, _) = find(&mut search, &state);
        // Of users 2, 3 and 4, who have left, and of user 5, who is blocked.
        assert_eq!(found, [2, 3, 4, 5].map(HoldIx));
        // User 2 is back, by a new session, before its hold is closed. User 4 has left again.
        open_session(&mut state, 3, 7, 2);
        open_session(&mut state, 3, 3, 4);
        close_session(&mut state, 3, 3);
        let still = found
            .into_iter()
            .filter(|hold| search.is_abandoned(&state, *hold));
        assert_eq!(still.collect::<Vec<_>>(), [3, 5].map(HoldIx));
    }
}
