//! Commands that end many orders of one member: which orders those are, and how they go on in slices, so that
//! the requests of others get in between (`design.md` 7).
//!
//! The command that begins, and each [`CancelSlice`], says up to which order it reaches: a replay ends the same
//! ones, whatever else had ended meanwhile.

use alloc::vec::Vec;
use core::slice;

use types::command::{CancelSlice, Listed, MassScope, SweepPlace};
use types::{
    CancelReason, Command, Id128, InstrumentIx, RejectReason, Sequence, SessionIx, Side, UserIx,
};

use crate::admission::Admission;
use crate::report::{ReportBody, ReportSink, Subject};
use crate::request::Reject;
use crate::state::{OpenOrder, Sweep};

/// Mass cancels of one member that may be under way in slices: with more the next one is told to come again.
const SWEEPS_OF_USER_MAX: usize = 4;

/// The orders that a command ends.
struct Wanted {
    scope: MassScope,
    /// Whose orders a group's are.
    user: UserIx,
    instrument: InstrumentIx,
    side: Option<Side>,
    after: SweepPlace,
    through: SweepPlace,
    /// Only orders of earlier commands.
    before: Sequence,
}

impl Wanted {
    fn takes(&self, order: &OpenOrder) -> bool {
        let is_of_group = match self.scope {
            MassScope::Group(group) => order.stp_group == group,
            _ => true,
        };
        is_of_group
            && (self.instrument.is_none() || order.instrument == self.instrument)
            && self.side.is_none_or(|side| order.side == side)
    }

    /// Where the place lies: before what is wanted, in it, or behind.
    fn is_behind(&self, place: SweepPlace) -> bool {
        place > self.through || place.sequence >= self.before
    }
}

/// What a walk over orders came to.
struct Walk {
    through: SweepPlace,
    walked: u64,
}

impl Admission {
    /// The orders that a sequenced command of [`types::Route::Listed`] ends, by instrument and slot; none of
    /// another command. Some may have ended already: their events are on the way.
    pub fn list(&self, command: &Command, listed: &mut Vec<Listed>) {
        listed.clear();
        if let Some(wanted) = self.wanted(command) {
            self.walk(&wanted, usize::MAX, listed);
        }
    }

    /// The same for a command that is not sequenced yet, which is shortened to the first `most` of its orders.
    /// Returns how many orders were looked at and are not among them.
    pub fn slice(&self, command: &mut Command, most: usize, listed: &mut Vec<Listed>) -> u64 {
        listed.clear();
        let Some(wanted) = self.wanted(command) else {
            return 0;
        };
        let Walk { through, walked } = self.walk(&wanted, most, listed);
        match command {
            Command::MassCancel(c) => {
                c.through = through;
                c.remaining = match through {
                    SweepPlace::END => 0,
                    _ => self.open_orders(&wanted) - listed.len() as u32,
                };
            }
            Command::SetKillSwitch(c) => c.through = through,
            Command::CancelSlice(c) => c.through = through,
            _ => {}
        }
        walked - listed.len() as u64
    }

    /// The command whose slices go on next, if any do.
    #[inline]
    pub fn next_sweep(&self) -> Option<Sequence> {
        let goes_on = |row: &&Sweep| row.after != SweepPlace::END;
        self.tables.sweeps.iter().find(goes_on).map(|row| row.of)
    }

    /// So many mass cancels of the member are under way that another one has to wait.
    pub fn has_sweeps_enough(&self, user: UserIx) -> bool {
        let mine = |row: &&Sweep| row.user == user && row.after != SweepPlace::END;
        !user.is_none() && self.tables.sweeps.iter().filter(mine).count() >= SWEEPS_OF_USER_MAX
    }

    /// The next slice of a command, as long as it is not shortened.
    pub(crate) fn admit_slice(&self, of: Sequence) -> Result<Command, Reject> {
        let row = self.tables.sweeps.iter().find(|row| row.of == of);
        let row = row.ok_or(RejectReason::DuplicateRequest)?;
        Ok(Command::CancelSlice(CancelSlice {
            of,
            after: row.after,
            through: SweepPlace::END,
            reason: row.reason,
            user: row.user,
            key_hash: row.key_hash,
        }))
    }

    /// Takes in a command that leaves orders to slices, or one of these.
    pub(crate) fn note_sweep(&mut self, command: &Command, sequence: Sequence) {
        match command {
            Command::CancelSlice(c) => {
                let row = self.tables.sweeps.iter_mut().find(|row| row.of == c.of);
                let row = row.expect("a slice continues a command");
                assert_eq!(row.after, c.after, "slices come without gap");
                row.after = c.through;
            }
            Command::MassCancel(c) if c.through != SweepPlace::END => {
                self.tables.sweeps.push(Sweep {
                    of: sequence,
                    scope: c.scope,
                    instrument: c.instrument,
                    side: c.side,
                    reason: c.reason,
                    user: c.user,
                    session: c.session,
                    key_hash: c.key_hash,
                    after: c.through,
                    count: 0,
                });
            }
            Command::SetKillSwitch(c) if c.through != SweepPlace::END => {
                self.tables.sweeps.push(Sweep {
                    of: sequence,
                    scope: MassScope::User(c.user),
                    instrument: InstrumentIx::NONE,
                    side: None,
                    reason: CancelReason::KillSwitch,
                    user: UserIx::NONE,
                    session: SessionIx::NONE,
                    key_hash: Id128::NONE,
                    after: c.through,
                    count: 0,
                });
            }
            _ => {}
        }
    }

    /// A command that ends many orders has ended `count`. The last slice makes the message that ends a
    /// session's own mass cancel.
    pub(crate) fn report_sweep(
        &mut self,
        command: &Command,
        sequence: Sequence,
        count: u32,
        to: &mut impl ReportSink,
    ) {
        let of = match command {
            Command::CancelSlice(c) => c.of,
            _ => sequence,
        };
        let Some(at) = self.tables.sweeps.iter().position(|row| row.of == of) else {
            return;
        };
        let row = &mut self.tables.sweeps[at];
        row.count += count;
        let is_last = command.goes_on_behind().is_none();
        if !is_last {
            return;
        }
        let row = self.tables.sweeps.remove(at);
        let body = ReportBody::MassCancelled {
            count: row.count,
            remaining: 0,
        };
        self.tell(Subject::session(row.session), row.instrument, 0, body, to);
    }

    fn wanted(&self, command: &Command) -> Option<Wanted> {
        let all = |scope, user| Wanted {
            scope,
            user,
            instrument: InstrumentIx::NONE,
            side: None,
            after: SweepPlace::START,
            through: SweepPlace::END,
            before: Sequence(u64::MAX),
        };
        match command {
            Command::MassCancel(c) if c.scope != MassScope::All => Some(Wanted {
                instrument: c.instrument,
                side: c.side,
                through: c.through,
                ..all(c.scope, c.user)
            }),
            Command::SetKillSwitch(c) if c.is_engaged && !c.user.is_none() => Some(Wanted {
                through: c.through,
                ..all(MassScope::User(c.user), c.user)
            }),
            Command::CancelSlice(c) => {
                let row = self.tables.sweeps.iter().find(|row| row.of == c.of);
                let row = row.expect("a slice continues a command");
                Some(Wanted {
                    instrument: row.instrument,
                    side: row.side,
                    after: c.after,
                    through: c.through,
                    before: row.of,
                    ..all(row.scope, row.user)
                })
            }
            _ => None,
        }
    }

    fn open_orders(&self, wanted: &Wanted) -> u32 {
        match wanted.scope {
            MassScope::Session(session) => self.session(session).map_or(0, |row| row.open_orders),
            MassScope::User(user) => self.user(user).map_or(0, |row| row.open_orders),
            _ => self.user(wanted.user).map_or(0, |row| row.open_orders),
        }
    }

    /// Lists what is wanted, `most` orders at most, oldest first in each session.
    fn walk(&self, wanted: &Wanted, most: usize, listed: &mut Vec<Listed>) -> Walk {
        let mut walk = Walk {
            through: SweepPlace::END,
            walked: 0,
        };
        // Without an order none of his sessions is looked at.
        if self.open_orders(wanted) == 0 {
            return walk;
        }
        let (user, sessions) = match &wanted.scope {
            MassScope::All => return walk,
            MassScope::Session(session) => (UserIx::NONE, slice::from_ref(session)),
            MassScope::User(user) => (*user, self.linked.sessions_of(*user)),
            // A group has one user's orders, and he alone asks for it.
            MassScope::Group(_) => (wanted.user, self.linked.sessions_of(wanted.user)),
        };
        let lists = sessions.iter().copied();
        let lists = lists.chain((!user.is_none()).then_some(SessionIx::NONE));
        let mut last = wanted.after;
        'walk: for session in lists.skip_while(|session| *session < wanted.after.session) {
            for slot in self.linked.of(user, session) {
                let order = self.tables.slots[slot as usize].order.as_ref();
                let order = order.expect("a list has open orders");
                let sequence = order.sequence;
                let place = SweepPlace { session, sequence };
                walk.walked += 1;
                if wanted.is_behind(place) {
                    break;
                }
                if place <= wanted.after || !wanted.takes(order) {
                    continue;
                }
                if listed.len() == most {
                    walk.through = last;
                    break 'walk;
                }
                last = place;
                listed.push(Listed {
                    instrument: order.instrument,
                    handle: order.handle,
                });
            }
        }
        listed.sort_unstable();
        walk
    }
}
