//! Commands that end many orders of one member: which orders they end, in which slices.
//!
//! Other members' requests run between two slices (`design.md` 7). The first command and each
//! [`CancelSlice`] carry the position of their last order, so that a replay ends the same orders.

use alloc::vec::Vec;
use core::slice;

use types::command::{CancelSlice, Listed, MassScope, SweepPosition};
use types::{CancelReason, Command, InstrumentIx, RejectReason, Sequence, SessionIx, Side, UserIx};

use crate::admission::Admission;
use crate::report::{ReportBody, ReportSink, Subject};
use crate::request::Reject;
use crate::state::{OpenOrder, Sweep};

/// Selects the orders that a command ends.
struct SweepFilter {
    scope: MassScope,
    /// Owner of the orders of a group.
    user: UserIx,
    instrument: InstrumentIx,
    side: Option<Side>,
    after: SweepPosition,
    through: SweepPosition,
    /// Only orders of earlier commands.
    before: Sequence,
    /// Slot of the last order up to `after` in the list of its session; `None`: start at the first.
    cursor: Option<u32>,
}

impl SweepFilter {
    fn selects(&self, order: &OpenOrder) -> bool {
        let is_of_group = match self.scope {
            MassScope::Group(group) => order.stp_group == group,
            _ => true,
        };
        is_of_group
            && (self.instrument.is_none() || order.instrument == self.instrument)
            && self.side.is_none_or(|side| order.side == side)
    }

    /// True when a position is past the selection.
    fn is_past(&self, position: SweepPosition) -> bool {
        position > self.through || position.sequence >= self.before
    }
}

/// Upper bounds of one slice.
#[derive(Clone, Copy, Debug)]
pub struct SliceBound {
    /// Orders that the slice ends.
    pub orders: usize,
    /// Orders that the slice inspects, selected or not.
    pub inspected: u64,
}

impl SliceBound {
    const NONE: Self = Self {
        orders: usize::MAX,
        inspected: u64::MAX,
    };
}

impl Sweep {
    /// False while its last slice is in flight.
    fn has_more_slices(&self) -> bool {
        self.position != SweepPosition::END
    }
}

/// Result of the scan for a slice.
struct SliceScan {
    through: SweepPosition,
    inspected: u64,
    /// Visited sessions without an open order.
    empty_sessions: u64,
}

impl Admission {
    /// Fills `listed` with the orders that a sequenced command of [`types::Route::Listed`] ends, by
    /// instrument and slot; with none for other commands. Some orders may have ended already, with
    /// their events in flight.
    pub fn list(&self, command: &Command, listed: &mut Vec<Listed>) {
        listed.clear();
        if let Some(filter) = self.filter(command) {
            self.scan_slice(&filter, SliceBound::NONE, listed);
        }
    }

    /// As [`Admission::list`] for a command that has no sequence yet. Shortens the command to one
    /// slice. Returns what was inspected in vain: the number of orders that were not selected and
    /// of sessions without an open order.
    pub fn slice(&self, command: &mut Command, bound: SliceBound, listed: &mut Vec<Listed>) -> u64 {
        listed.clear();
        let Some(filter) = self.filter(command) else {
            return 0;
        };
        let scan = self.scan_slice(&filter, bound, listed);
        let through = scan.through;
        match command {
            Command::MassCancel(c) => {
                c.through = through;
                c.remaining = match through {
                    SweepPosition::END => 0,
                    _ => self.open_orders_in(&filter.scope, filter.user) - listed.len() as u32,
                };
            }
            Command::SetKillSwitch(c) => c.through = through,
            Command::CancelSlice(c) => c.through = through,
            _ => {}
        }
        scan.inspected - listed.len() as u64 + scan.empty_sessions
    }

    /// Owner of the orders, and first command, of the sweep whose slice is next. Members alternate:
    /// `last` had the previous slice. The platform's sweeps of an owner precede the owner's own.
    #[inline]
    pub fn next_sweep(&self, last: UserIx) -> Option<(UserIx, Sequence)> {
        let unfinished = self
            .tables
            .sweeps
            .iter()
            .filter(|row| row.has_more_slices());
        let turns = unfinished.map(|row| {
            let owner = self.owner_of(row.scope, row.user);
            (owner <= last, owner, !row.user.is_none(), row.first_command)
        });
        turns
            .min()
            .map(|(_, owner, _, first_command)| (owner, first_command))
    }

    /// Mass cancels of the user that continue in slices.
    pub fn sweeps_of(&self, user: UserIx) -> usize {
        self.order_lists.sweeps_in_progress(user)
    }

    /// Commands of all members that continue in slices.
    pub fn sweeps(&self) -> usize {
        self.tables.sweeps.len()
    }

    /// True until the last slice of a command has ended its orders.
    pub fn is_sweeping(&self, first_command: Sequence) -> bool {
        self.sweep_at(first_command).is_some()
    }

    /// Index of a sweep; rows are in the order of their commands.
    fn sweep_at(&self, first_command: Sequence) -> Option<usize> {
        let found = self
            .tables
            .sweeps
            .binary_search_by_key(&first_command, |row| row.first_command);
        found.ok()
    }

    /// The rest of a sweep as one command, not shortened to a slice yet.
    pub(crate) fn admit_slice(&self, first_command: Sequence) -> Result<Command, Reject> {
        let at = self
            .sweep_at(first_command)
            .ok_or(RejectReason::DuplicateRequest)?;
        let row = &self.tables.sweeps[at];
        Ok(Command::CancelSlice(CancelSlice {
            of: first_command,
            after: row.position,
            through: SweepPosition::END,
            reason: row.reason,
            user: row.user,
            key_hash: row.key_hash,
        }))
    }

    /// Records a command that continues in slices, or one of its slices.
    pub(crate) fn note_sweep(&mut self, command: &Command, sequence: Sequence) {
        let Some(through) = command.next_slice_after() else {
            if let Command::CancelSlice(c) = command {
                self.advance(c, SweepPosition::END);
            }
            return;
        };
        let row = |scope, user, key_hash, reason| Sweep {
            first_command: sequence,
            scope,
            instrument: InstrumentIx::NONE,
            side: None,
            reason,
            user,
            session: SessionIx::NONE,
            key_hash,
            position: SweepPosition::START,
            count: 0,
        };
        let row = match command {
            Command::CancelSlice(c) => return self.advance(c, through),
            Command::MassCancel(c) => Sweep {
                instrument: c.instrument,
                side: c.side,
                session: c.session,
                ..row(c.scope, c.user, c.key_hash, c.reason)
            },
            Command::SetKillSwitch(c) => {
                let scope = MassScope::User(c.user);
                row(scope, UserIx::NONE, c.key_hash, CancelReason::KillSwitch)
            }
            _ => return,
        };
        self.tables.sweeps.push(row);
        self.order_lists.add_cursor(row.user);
        self.move_sweep(self.tables.sweeps.len() - 1, through);
    }

    fn advance(&mut self, slice: &CancelSlice, through: SweepPosition) {
        let at = self
            .sweep_at(slice.of)
            .expect("a slice continues a command");
        assert_eq!(
            self.tables.sweeps[at].position, slice.after,
            "slices come without gap"
        );
        self.move_sweep(at, through);
    }

    /// Moves a sweep to a position, and its cursor to the last order at or before it. The next
    /// slice does not inspect again the orders that the filter skipped.
    fn move_sweep(&mut self, at: usize, through: SweepPosition) {
        let row = &mut self.tables.sweeps[at];
        let after = core::mem::replace(&mut row.position, through);
        if through == SweepPosition::END {
            return;
        }
        let (scope, user) = (row.scope, row.user);
        let owner = self.owner_of(scope, user);
        let from = match after.session == through.session {
            true => self.order_lists.cursor(at),
            false => None,
        };
        let is_passed = |slot: &u32| self.sequence_at(*slot) <= through.sequence;
        let passed = self
            .order_lists
            .after(owner, through.session, from)
            .take_while(is_passed);
        let last = passed.last().or(from);
        self.order_lists.set_cursor(at, last);
    }

    /// Rebuilds the cursors, which are not part of the state, from the rows.
    pub(crate) fn restore_cursors(&mut self) {
        for at in 0..self.tables.sweeps.len() {
            self.order_lists.add_cursor(self.tables.sweeps[at].user);
            let after =
                core::mem::replace(&mut self.tables.sweeps[at].position, SweepPosition::START);
            self.move_sweep(at, after);
        }
    }

    fn sequence_at(&self, slot: u32) -> Sequence {
        let order = self.tables.slots[slot as usize].order.as_ref();
        order.expect("a list has open orders").sequence
    }

    /// Owner of the orders of a scope. A group belongs to one user, and only that user cancels
    /// through it.
    fn owner_of(&self, scope: MassScope, asking: UserIx) -> UserIx {
        match scope {
            MassScope::Session(session) => self.session(session).map_or(asking, |row| row.user),
            MassScope::User(user) => user,
            MassScope::Group(_) | MassScope::All => asking,
        }
    }

    /// Adds `count` ended orders to a sweep. The last slice numbers the message that completes a
    /// session's own mass cancel.
    pub(crate) fn report_sweep(
        &mut self,
        command: &Command,
        sequence: Sequence,
        count: u32,
        to: &mut impl ReportSink,
    ) {
        let first_command = match command {
            Command::CancelSlice(c) => c.of,
            _ => sequence,
        };
        let Some(at) = self.sweep_at(first_command) else {
            return;
        };
        let row = &mut self.tables.sweeps[at];
        row.count += count;
        let is_last = command.next_slice_after().is_none();
        if !is_last {
            return;
        }
        let row = self.tables.sweeps.remove(at);
        self.order_lists.remove_cursor(at, row.user);
        let body = ReportBody::MassCancelled {
            count: row.count,
            remaining: 0,
        };
        self.report_out_of_line(Subject::session(row.session), row.instrument, 0, body, to);
    }

    fn filter(&self, command: &Command) -> Option<SweepFilter> {
        let all = |scope, user| SweepFilter {
            scope,
            user,
            instrument: InstrumentIx::NONE,
            side: None,
            after: SweepPosition::START,
            through: SweepPosition::END,
            before: Sequence(u64::MAX),
            cursor: None,
        };
        match command {
            Command::MassCancel(c) if c.scope != MassScope::All => Some(SweepFilter {
                instrument: c.instrument,
                side: c.side,
                through: c.through,
                ..all(c.scope, c.user)
            }),
            Command::SetKillSwitch(c) if c.is_engaged && !c.user.is_none() => Some(SweepFilter {
                through: c.through,
                ..all(MassScope::User(c.user), c.user)
            }),
            Command::CancelSlice(c) => {
                let at = self.sweep_at(c.of).expect("a slice continues a command");
                let row = &self.tables.sweeps[at];
                assert_eq!(
                    row.position, c.after,
                    "a slice is listed before it is applied"
                );
                Some(SweepFilter {
                    cursor: self.order_lists.cursor(at),
                    instrument: row.instrument,
                    side: row.side,
                    after: c.after,
                    through: c.through,
                    before: row.first_command,
                    ..all(row.scope, row.user)
                })
            }
            _ => None,
        }
    }

    /// Number of open orders of a session or user; for a group, of the owner `user`.
    pub(crate) fn open_orders_in(&self, scope: &MassScope, user: UserIx) -> u32 {
        let of_user = |user| self.user(user).map_or(0, |row| row.open_orders);
        match *scope {
            MassScope::Session(session) => self.session(session).map_or(0, |row| row.open_orders),
            MassScope::User(user) => of_user(user),
            MassScope::Group(_) => of_user(user),
            MassScope::All => 0,
        }
    }

    /// Lists the selected orders of a slice, oldest first in each session.
    fn scan_slice(
        &self,
        filter: &SweepFilter,
        bound: SliceBound,
        listed: &mut Vec<Listed>,
    ) -> SliceScan {
        let mut scan = SliceScan {
            through: SweepPosition::END,
            inspected: 0,
            empty_sessions: 0,
        };
        // Without an open order no session is visited.
        if self.open_orders_in(&filter.scope, filter.user) == 0 {
            return scan;
        }
        let owner = self.owner_of(filter.scope, filter.user);
        let (user, sessions) = match &filter.scope {
            MassScope::All => return scan,
            MassScope::Session(session) => (UserIx::NONE, slice::from_ref(session)),
            MassScope::User(_) | MassScope::Group(_) => {
                (owner, self.order_lists.sessions_of(owner))
            }
        };
        let lists = sessions.iter().copied();
        let lists = lists.chain((!user.is_none()).then_some(SessionIx::NONE));
        let mut last = filter.after;
        'scan: for session in lists.skip_while(|session| *session < filter.after.session) {
            let is_first = session == filter.after.session;
            let from = filter.cursor.filter(|_| is_first);
            let inspected_before = scan.inspected;
            for slot in self.order_lists.after(user, session, from) {
                let order = self.tables.slots[slot as usize].order.as_ref();
                let order = order.expect("a list has open orders");
                let sequence = order.sequence;
                let position = SweepPosition { session, sequence };
                scan.inspected += 1;
                if filter.is_past(position) {
                    break;
                }
                if position <= filter.after {
                    continue;
                }
                let is_selected = filter.selects(order);
                if scan.inspected > bound.inspected || is_selected && listed.len() == bound.orders {
                    scan.through = last;
                    break 'scan;
                }
                if !is_selected {
                    last = position;
                    continue;
                }
                last = position;
                listed.push(Listed {
                    instrument: order.instrument,
                    handle: order.handle,
                });
            }
            let is_empty = !session.is_none() && scan.inspected == inspected_before;
            scan.empty_sessions += u64::from(is_empty);
        }
        listed.sort_unstable();
        scan
    }
}
