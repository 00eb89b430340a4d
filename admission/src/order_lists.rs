//! Doubly linked lists of open orders, indexed by order slot: one per session, and one per user for
//! orders without a session.
//!
//! Cancelling all orders of a session or user costs O(its orders). Derived data: not in snapshots,
//! rebuilt from the open orders, oldest first.

use alloc::vec::Vec;

use types::{Handle, SessionIx, UserIx};

use crate::admission::Admission;

/// One slot's neighbours: slot + 1, 0 for none.
#[derive(Clone, Copy, Debug, Default)]
struct Link {
    prev: u32,
    next: u32,
    /// False if no cursor points here: a removal then skips the search for one.
    may_have_cursor: bool,
}

/// First and last of a list: slot + 1, 0 for none.
#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    first: u32,
    last: u32,
}

/// Each order is in one list: that of its session, or its user's list of orders without one.
#[derive(Clone, Debug, Default)]
pub(crate) struct OrderLists {
    nodes: Vec<Link>,
    of_session: Vec<Ends>,
    /// By user: orders without a session.
    of_user: Vec<Ends>,
    /// By user: sessions that are not forgotten, in the order in which they were first opened.
    sessions: Vec<Vec<SessionIx>>,
    /// Cursor of each sweep, in the order of the sweep table: slot + 1, 0 = before the first.
    cursors: Vec<u32>,
    /// By user: sweeps in progress that the user has requested.
    sweeps_in_progress: Vec<u32>,
}

impl OrderLists {
    /// Reserves capacity for `slots_max` slots. Unused capacity costs virtual memory only.
    pub fn new(slots_max: u32) -> Self {
        Self {
            nodes: Vec::with_capacity(slots_max as usize),
            ..Self::default()
        }
    }

    /// Slots of the session's open orders; with [`SessionIx::NONE`], of the user's orders without a
    /// session. Starts after `slot`, or at the first for `None`.
    pub fn after(
        &self,
        user: UserIx,
        session: SessionIx,
        slot: Option<u32>,
    ) -> impl Iterator<Item = u32> + '_ {
        let ends = match session.is_none() {
            true => self.of_user.get(user.index()),
            false => self.of_session.get(session.index()),
        };
        match slot {
            Some(slot) => self.slots_from(self.nodes[slot as usize].next),
            None => self.slots_from(first(ends)),
        }
    }

    /// Slots of the session's open orders.
    pub fn of_session(&self, session: SessionIx) -> impl Iterator<Item = u32> + '_ {
        self.slots_from(first(self.of_session.get(session.index())))
    }

    /// The sessions of a user, open or not, in the order in which they were first opened.
    pub fn sessions_of(&self, user: UserIx) -> &[SessionIx] {
        self.sessions.get(user.index()).map_or(&[], Vec::as_slice)
    }

    /// Slots of the user's open orders, in sessions or not.
    pub fn of_user(&self, user: UserIx) -> impl Iterator<Item = u32> + '_ {
        let sessions = self.sessions_of(user).iter();
        let in_sessions = sessions.flat_map(|session| self.of_session(*session));
        in_sessions.chain(self.slots_from(first(self.of_user.get(user.index()))))
    }

    /// Slots of a list, starting at `link` (slot + 1; 0 = empty).
    fn slots_from(&self, link: u32) -> impl Iterator<Item = u32> + '_ {
        let non_zero = |link: u32| (link != 0).then_some(link);
        let next = move |link: &u32| non_zero(self.nodes[*link as usize - 1].next);
        core::iter::successors(non_zero(link), next).map(|link| link - 1)
    }

    /// Appends the cursor of a new sweep, positioned before the first order.
    pub fn add_cursor(&mut self, user: UserIx) {
        self.cursors.push(0);
        if let Some(count) = self.sweeps_in_progress.get_mut(user.index()) {
            *count += 1;
        }
    }

    /// Sweeps in progress that the user has requested.
    pub fn sweeps_in_progress(&self, user: UserIx) -> usize {
        let count = self.sweeps_in_progress.get(user.index()).copied();
        count.unwrap_or(0) as usize
    }

    /// The slot at the cursor of a sweep.
    pub fn cursor(&self, sweep: usize) -> Option<u32> {
        self.cursors[sweep].checked_sub(1)
    }

    pub fn set_cursor(&mut self, sweep: usize, slot: Option<u32>) {
        self.cursors[sweep] = slot.map_or(0, |slot| slot + 1);
        if let Some(slot) = slot {
            self.nodes[slot as usize].may_have_cursor = true;
        }
    }

    pub fn remove_cursor(&mut self, sweep: usize, user: UserIx) {
        self.cursors.remove(sweep);
        if let Some(count) = self.sweeps_in_progress.get_mut(user.index()) {
            *count -= 1;
        }
    }

    /// Adds the next user, without orders.
    pub fn add_user(&mut self) {
        self.of_user.push(Ends::default());
        self.sweeps_in_progress.push(0);
        self.sessions.push(Vec::new());
    }

    /// Appends an empty list for the next session index, owned by the user.
    pub fn add_session(&mut self, user: UserIx) {
        self.sessions[user.index()].push(SessionIx(self.of_session.len() as u32));
        self.of_session.push(Ends::default());
    }

    /// Removes a session without orders from its user's sessions.
    pub fn forget_session(&mut self, user: UserIx, session: SessionIx) {
        self.sessions[user.index()].retain(|known| *known != session);
    }

    /// Appends the order in `slot` to its session's list, or to the user's if it has no session.
    #[inline(always)]
    pub fn insert(&mut self, user: UserIx, session: SessionIx, slot: u32) {
        if self.nodes.len() <= slot as usize {
            self.nodes.resize(slot as usize + 1, Link::default());
        }
        let ends = self.ends(user, session);
        let prev = core::mem::replace(&mut ends.last, slot + 1);
        match prev {
            0 => ends.first = slot + 1,
            prev => self.nodes[prev as usize - 1].next = slot + 1,
        }
        self.nodes[slot as usize] = Link {
            prev,
            ..Link::default()
        };
    }

    /// Removes the order of a slot from its list.
    #[inline(always)]
    pub fn remove(&mut self, user: UserIx, session: SessionIx, slot: u32) {
        let Link {
            prev,
            next,
            may_have_cursor,
        } = self.nodes[slot as usize];
        if may_have_cursor {
            self.move_back(slot + 1, prev);
        }
        let ends = self.ends(user, session);
        if prev == 0 {
            ends.first = next;
        }
        if next == 0 {
            ends.last = prev;
        }
        if prev != 0 {
            self.nodes[prev as usize - 1].next = next;
        }
        if next != 0 {
            self.nodes[next as usize - 1].prev = prev;
        }
    }

    /// Moves cursors from an order that is removed to the one before it.
    #[cold]
    fn move_back(&mut self, from: u32, to: u32) {
        let mut has_moved = false;
        for cursor in self.cursors.iter_mut().filter(|cursor| **cursor == from) {
            *cursor = to;
            has_moved = true;
        }
        if to != 0 && has_moved {
            self.nodes[to as usize - 1].may_have_cursor = true;
        }
    }

    #[inline]
    fn ends(&mut self, user: UserIx, session: SessionIx) -> &mut Ends {
        match self.of_session.get_mut(session.index()) {
            Some(ends) => ends,
            None => &mut self.of_user[user.index()],
        }
    }
}

/// Slot + 1, 0 for none.
fn first(ends: Option<&Ends>) -> u32 {
    ends.map_or(0, |ends| ends.first)
}

impl Admission {
    /// Handles of the open orders that a session has entered, oldest first.
    pub fn handles_of_session(&self, session: SessionIx) -> impl Iterator<Item = Handle> + '_ {
        self.handles(self.order_lists.of_session(session))
    }

    /// Handles of a user's open orders: those of each session, in the order in which the sessions
    /// were first opened, then those without a session. Each group is oldest first.
    pub fn handles_of_user(&self, user: UserIx) -> impl Iterator<Item = Handle> + '_ {
        self.handles(self.order_lists.of_user(user))
    }

    fn handles<'a>(
        &'a self,
        slots: impl Iterator<Item = u32> + 'a,
    ) -> impl Iterator<Item = Handle> + 'a {
        slots.filter_map(|slot| Some(self.tables.slots[slot as usize].order.as_ref()?.handle))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn a_list_contains_what_was_inserted_and_not_removed() {
        let mut order_lists = OrderLists::new(8);
        let sorted = |slots: &mut dyn Iterator<Item = u32>| {
            let mut slots: Vec<u32> = slots.collect();
            slots.sort_unstable();
            slots
        };
        let slots_of_user =
            |order_lists: &OrderLists, user| sorted(&mut order_lists.of_user(UserIx(user)));
        let slots_of_session = |order_lists: &OrderLists, session| {
            sorted(&mut order_lists.of_session(SessionIx(session)))
        };
        (0..2).for_each(|_| order_lists.add_user());
        for owner in [0, 1, 1] {
            order_lists.add_session(UserIx(owner));
        }
        // Of user 1: three in session 1, one in session 2, one without.
        let at = |session| (UserIx(1), SessionIx(session));
        for ((user, session), slot) in [
            (at(1), 5),
            ((UserIx(0), SessionIx(0)), 1),
            (at(1), 2),
            (at(2), 7),
            (at(1), 9),
            ((UserIx(1), SessionIx::NONE), 4),
        ] {
            order_lists.insert(user, session, slot);
        }
        assert_eq!(slots_of_session(&order_lists, 1), [2, 5, 9]);
        assert_eq!(slots_of_user(&order_lists, 1), [2, 4, 5, 7, 9]);
        for (slot, left) in [(2, vec![5, 9]), (9, vec![5]), (5, vec![])] {
            order_lists.remove(UserIx(1), SessionIx(1), slot);
            assert_eq!(slots_of_session(&order_lists, 1), left);
        }
        order_lists.remove(UserIx(1), SessionIx::NONE, 4);
        assert_eq!(
            (
                slots_of_user(&order_lists, 1),
                slots_of_user(&order_lists, 0)
            ),
            (vec![7], vec![1])
        );
        order_lists.insert(UserIx(1), SessionIx(1), 0);
        assert_eq!(slots_of_user(&order_lists, 1), [0, 7]);
        assert_eq!(
            (
                slots_of_user(&order_lists, 77),
                slots_of_session(&order_lists, 77)
            ),
            (vec![], vec![])
        );
    }
}
