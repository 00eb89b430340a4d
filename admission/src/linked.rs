//! The open orders of each owner, a user or a session: lists through the slots of the order table, so that
//! what ends an owner's orders costs those orders. No part of the state; no order within a list is visible.

use alloc::vec::Vec;

use types::command::{Listed, MassScope};
use types::{Command, Side, UserIx};

use crate::admission::Admission;
use crate::state::OpenOrder;

/// One slot's neighbours: slot + 1, 0 for none.
#[derive(Clone, Copy, Debug, Default)]
struct Node {
    prev: u32,
    next: u32,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Linked {
    /// Slot + 1 of the order that came last, by owner; 0 for none.
    heads: Vec<u32>,
    nodes: Vec<Node>,
}

impl Linked {
    /// Room for orders in slots below `slots_max`; untouched room costs address space alone.
    pub fn new(slots_max: u32) -> Self {
        Self {
            heads: Vec::new(),
            nodes: Vec::with_capacity(slots_max as usize),
        }
    }

    /// Slots of the owner's open orders.
    pub fn of(&self, owner: usize) -> impl Iterator<Item = u32> + '_ {
        let step = |index: u32| (index != 0).then_some(index);
        let first = self.heads.get(owner).copied().and_then(step);
        core::iter::successors(first, move |index| {
            step(self.nodes[*index as usize - 1].next)
        })
        .map(|index| index - 1)
    }

    /// A new owner, the next one, without orders.
    pub fn add_owner(&mut self) {
        self.heads.push(0);
    }

    pub fn insert(&mut self, owner: usize, slot: u32) {
        if self.nodes.len() <= slot as usize {
            self.nodes.resize(slot as usize + 1, Node::default());
        }
        let next = core::mem::replace(&mut self.heads[owner], slot + 1);
        self.nodes[slot as usize] = Node { prev: 0, next };
        if next != 0 {
            self.nodes[next as usize - 1].prev = slot + 1;
        }
    }

    /// Takes the order of a slot out of its owner's list.
    pub fn remove(&mut self, owner: usize, slot: u32) {
        let Node { prev, next } = self.nodes[slot as usize];
        match prev {
            0 => self.heads[owner] = next,
            prev => self.nodes[prev as usize - 1].next = next,
        }
        if next != 0 {
            self.nodes[next as usize - 1].prev = prev;
        }
    }
}

impl Admission {
    /// The orders that a command of [`types::Route::Listed`] ends, by instrument and slot; none of another
    /// command. Some may have ended already: their events are on the way.
    pub fn list(&self, command: &Command, listed: &mut Vec<Listed>) {
        listed.clear();
        match command {
            Command::MassCancel(c) => {
                let is_wanted = |order: &OpenOrder| {
                    (c.instrument.is_none() || order.instrument == c.instrument)
                        && c.side.is_none_or(|side: Side| order.side == side)
                };
                match c.scope {
                    MassScope::All => return,
                    MassScope::User(user) => self.list_user(user, listed, is_wanted),
                    MassScope::Session(session) => {
                        let slots = self.by_session.of(session.index());
                        self.list_slots(slots, listed, is_wanted);
                    }
                    // A group has one user's orders, and he alone asks for it.
                    MassScope::Group(group) => self.list_user(c.user, listed, |order| {
                        order.stp_group == group && is_wanted(order)
                    }),
                }
            }
            Command::SetKillSwitch(c) if c.is_engaged => self.list_user(c.user, listed, |_| true),
            _ => return,
        }
        listed.sort_unstable();
    }

    fn list_user(
        &self,
        user: UserIx,
        listed: &mut Vec<Listed>,
        is_wanted: impl Fn(&OpenOrder) -> bool,
    ) {
        self.list_slots(self.by_user.of(user.index()), listed, is_wanted);
    }

    fn list_slots(
        &self,
        slots: impl Iterator<Item = u32>,
        listed: &mut Vec<Listed>,
        is_wanted: impl Fn(&OpenOrder) -> bool,
    ) {
        for slot in slots {
            let order = self.tables.slots[slot as usize].order.as_ref();
            let order = order.expect("a list has open orders");
            if is_wanted(order) {
                listed.push(Listed {
                    instrument: order.instrument,
                    handle: order.handle,
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;

    #[test]
    fn a_list_has_what_was_put_in_and_not_taken_out() {
        let mut linked = Linked::new(8);
        let slots = |linked: &Linked, owner| {
            let mut slots: Vec<u32> = linked.of(owner).collect();
            slots.sort_unstable();
            slots
        };
        (0..4).for_each(|_| linked.add_owner());
        for (owner, slot) in [(3, 5), (0, 1), (3, 2), (3, 9), (0, 4)] {
            linked.insert(owner, slot);
        }
        assert_eq!(slots(&linked, 3), [2, 5, 9]);
        for (owner, slot, left) in [
            (3, 2, vec![5, 9]),
            (3, 9, vec![5]),
            (3, 5, vec![]),
            (0, 1, vec![4]),
        ] {
            linked.remove(owner, slot);
            assert_eq!(slots(&linked, owner), left);
        }
        linked.insert(3, 1);
        assert_eq!((slots(&linked, 3), slots(&linked, 0)), (vec![1], vec![4]));
        assert_eq!(linked.of(77).count(), 0);
    }
}
