//! Commands in flight: sequenced, sent to their engines if there are any, not yet complete.
//!
//! They complete in sequence, each with all its events, in whatever order the engines report. So
//! the journal's units are in sequence.
//!
//! A circular buffer of slots that are filled and read in place. When no command is in flight the
//! next one gets the first slot, so that a path without a backlog stays in the cache.

use types::{Envelope, EventEnvelope, Sequence, UserIx};

use crate::port::Reply;

/// Capacity of a slot's list of events: most commands cause fewer.
const EVENTS_ROOM: usize = 16;
/// Capacity of the lists for commands that cause more.
const MANY_EVENTS_ROOM: usize = 1_024;
/// Number of such lists.
const MANY_KEPT: usize = 64;

/// Where the outcome of a command goes.
pub(crate) enum ReplyTo {
    Reply(Reply),
    /// A front, with the tag of its request.
    Ring {
        port: usize,
        tag: u64,
    },
}

/// A command in flight, with its events so far.
pub(crate) struct InFlight {
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
    /// Number of engines that have not finished.
    waiting: usize,
    /// More than one engine has the command: their events arrive in any order.
    is_mixed: bool,
    /// Most orders and levels that a fill-or-kill order can inspect, until its engine has finished;
    /// 0 for other commands.
    visits_max: u32,
    /// See [`types::Command::member`].
    pub member: UserIx,
    pub reply_to: ReplyTo,
}

impl InFlight {
    /// Takes the events. A list of more than the usual capacity is copied and stays in place.
    pub fn take_events(&mut self) -> Vec<EventEnvelope> {
        if self.events.capacity() > EVENTS_ROOM {
            return self.events.drain(..).collect();
        }
        std::mem::replace(&mut self.events, Vec::with_capacity(EVENTS_ROOM))
    }
}

/// The commands in flight, in sequence.
pub(crate) struct InFlights {
    slots: Box<[InFlight]>,
    lists: Lists,
    /// Slot of the first command.
    head: usize,
    count: usize,
}

impl InFlights {
    /// Makes `count` slots, a power of two. `nothing` fills unused ones. One command at a time may
    /// cause `events_max` events without an allocation.
    pub fn new(count: usize, nothing: Envelope, events_max: usize) -> Self {
        assert!(count.is_power_of_two());
        let slot = |_| InFlight {
            command: nothing,
            // Allocated here, so that a growing number in flight allocates nothing.
            events: Vec::with_capacity(EVENTS_ROOM),
            waiting: 0,
            is_mixed: false,
            visits_max: 0,
            member: UserIx::NONE,
            reply_to: ReplyTo::Reply(Reply::None),
        };
        Self {
            slots: (0..count).map(slot).collect(),
            lists: Lists::new(events_max),
            head: 0,
            count: 0,
        }
    }

    pub fn room(&self) -> usize {
        self.slots.len() - self.count
    }

    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Sequence of the first command in flight; `u64::MAX` when there is none.
    pub fn first(&self) -> Sequence {
        if self.count == 0 {
            return Sequence(u64::MAX);
        }
        self.slots[self.head].command.sequence
    }

    /// The last command in flight, and the list of its events.
    ///
    /// # Panics
    /// No command is in flight.
    #[inline]
    pub fn last_with_events(&mut self) -> (&Envelope, EventList<'_>) {
        let offset = self.count.checked_sub(1).expect("a command is in flight");
        let slot = self.slot(offset);
        let entry = &mut self.slots[slot];
        let events = EventList {
            events: &mut entry.events,
            lists: &mut self.lists,
        };
        (&entry.command, events)
    }

    /// The last command in flight.
    pub fn last(&self) -> Option<&Envelope> {
        let offset = self.count.checked_sub(1)?;
        Some(&self.slots[self.slot(offset)].command)
    }

    /// Slot in which the next command is built, before it is in flight.
    ///
    /// # Panics
    /// No slot is free.
    #[inline]
    pub fn vacant(&mut self) -> &mut Envelope {
        assert!(self.count < self.slots.len(), "the caller checks for room");
        let slot = self.slot(self.count);
        &mut self.slots[slot].command
    }

    /// Sets the most orders and levels that the command built in [`InFlights::vacant`] can inspect.
    pub fn set_visits_max(&mut self, visits_max: u32) {
        let slot = self.slot(self.count);
        self.slots[slot].visits_max = visits_max;
    }

    /// Marks the command built in [`InFlights::vacant`] as in flight at `engines` engines.
    #[inline(always)]
    pub fn start(&mut self, engines: usize, member: UserIx, reply_to: ReplyTo) {
        let slot = self.slot(self.count);
        self.count += 1;
        let entry = &mut self.slots[slot];
        entry.waiting = engines;
        entry.is_mixed = engines > 1;
        entry.member = member;
        entry.reply_to = reply_to;
    }

    /// Adds an event to its command.
    #[inline]
    pub fn event(&mut self, event: &EventEnvelope) {
        let slot = self.slot_of(event.sequence);
        let events = &mut self.slots[slot].events;
        let lists = &mut self.lists;
        EventList { events, lists }.push(event);
    }

    /// The member that issued a command in flight.
    #[cold]
    pub fn member(&self, sequence: Sequence) -> UserIx {
        self.slots[self.slot_of(sequence)].member
    }

    /// Records that one engine has finished a command. Returns and clears what
    /// [`InFlights::set_visits_max`] has set.
    #[inline]
    pub fn done(&mut self, sequence: Sequence) -> u32 {
        let slot = self.slot_of(sequence);
        let entry = &mut self.slots[slot];
        entry.waiting -= 1;
        if entry.waiting == 0 && entry.is_mixed {
            entry
                .events
                .sort_unstable_by_key(|event| (event.instrument, event.index));
        }
        std::mem::take(&mut entry.visits_max)
    }

    /// True when the first command is complete.
    #[inline]
    pub fn has_complete(&self) -> bool {
        self.count > 0 && self.slots[self.head].waiting == 0
    }

    /// The first command, if it is complete. The caller then calls [`InFlights::remove_first`].
    #[inline]
    pub fn complete(&mut self) -> Option<&mut InFlight> {
        let entry = &mut self.slots[self.head];
        (self.count > 0 && entry.waiting == 0).then_some(entry)
    }

    /// Removes the first command and frees its slot.
    #[inline]
    pub fn remove_first(&mut self) {
        let events = &mut self.slots[self.head].events;
        events.clear();
        if events.capacity() > EVENTS_ROOM {
            self.lists.narrow(events);
        }
        self.count -= 1;
        self.head = if self.count == 0 { 0 } else { self.slot(1) };
    }

    #[inline]
    fn slot_of(&self, sequence: Sequence) -> usize {
        let first = self.slots[self.head].command.sequence.get();
        let offset =
            usize::try_from(sequence.get() - first).expect("commands in flight fit memory");
        assert!(offset < self.count, "only commands in flight are reported");
        self.slot(offset)
    }

    #[inline]
    fn slot(&self, offset: usize) -> usize {
        (self.head + offset) & (self.slots.len() - 1)
    }
}

/// The events of one command in flight.
pub(crate) struct EventList<'a> {
    events: &'a mut Vec<EventEnvelope>,
    lists: &'a mut Lists,
}

impl EventList<'_> {
    #[inline]
    pub fn push(&mut self, event: &EventEnvelope) {
        if self.events.len() == self.events.capacity() {
            self.lists.widen(self.events);
        }
        self.events.push(*event);
    }
}

/// Preallocated longer lists of events, for orders that take many makers and for mass cancels.
///
/// Some have room for a thousand events, and one for the maximum that one command can cause.
/// Untouched memory costs only address space.
struct Lists {
    /// Short lists of the slots that have a longer one at present.
    short: Vec<Vec<EventEnvelope>>,
    many: Vec<Vec<EventEnvelope>>,
    /// List of capacity `events_max`; `None` while a command uses it.
    longest: Option<Vec<EventEnvelope>>,
    events_max: usize,
}

impl Lists {
    fn new(events_max: usize) -> Self {
        let many = || Vec::with_capacity(MANY_EVENTS_ROOM);
        Self {
            short: Vec::with_capacity(2 * MANY_KEPT),
            many: std::iter::repeat_with(many).take(MANY_KEPT).collect(),
            longest: Some(Vec::with_capacity(events_max)),
            events_max,
        }
    }

    /// Moves a full list into a longer one.
    #[cold]
    #[inline(never)]
    fn widen(&mut self, events: &mut Vec<EventEnvelope>) {
        let room = events.capacity();
        let longer = if room < MANY_EVENTS_ROOM {
            self.many.pop()
        } else {
            self.longest.take_if(|longest| longest.capacity() > room)
        };
        // Allocates only when more such commands are in flight than lists are kept.
        let mut longer =
            longer.unwrap_or_else(|| Vec::with_capacity(MANY_EVENTS_ROOM.max(2 * room)));
        longer.append(events);
        self.keep(std::mem::replace(events, longer));
    }

    /// Replaces an empty long list with a short one, and keeps the long one.
    #[cold]
    #[inline(never)]
    fn narrow(&mut self, events: &mut Vec<EventEnvelope>) {
        let short = self.short.pop();
        let short = short.unwrap_or_else(|| Vec::with_capacity(EVENTS_ROOM));
        self.keep(std::mem::replace(events, short));
    }

    fn keep(&mut self, events: Vec<EventEnvelope>) {
        let room = events.capacity();
        if room < MANY_EVENTS_ROOM {
            if self.short.len() < self.short.capacity() {
                self.short.push(events);
            }
        } else if room >= self.events_max.max(2 * MANY_EVENTS_ROOM) {
            self.longest.get_or_insert(events);
        } else if self.many.len() < MANY_KEPT {
            self.many.push(events);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use types::command::ExpireOrders;
    use types::event::{Cancelled, Event};
    use types::{Command, InstrumentIx};

    fn nothing() -> Envelope {
        Envelope {
            sequence: Sequence::ZERO,
            time_ns: 0,
            received_ns: 0,
            command: Command::ExpireOrders(ExpireOrders {
                instrument: InstrumentIx::NONE,
                orders_max: 0,
            }),
        }
    }

    fn play(in_flight: &mut InFlights, sequence: u64, events: u32) {
        in_flight.vacant().sequence = Sequence(sequence);
        in_flight.start(1, UserIx::NONE, ReplyTo::Reply(Reply::None));
        for index in 0..events {
            in_flight.event(&EventEnvelope {
                sequence: Sequence(sequence),
                time_ns: 0,
                number: 0,
                instrument: InstrumentIx(0),
                index,
                event: Event::Cancelled(Cancelled {
                    handle: types::Handle::NONE,
                    reason: types::CancelReason::MassCancel,
                    quantity: types::Lots(u64::from(index)),
                }),
            });
        }
        in_flight.done(Sequence(sequence));
    }

    #[test]
    fn event_lists_grow_as_needed_and_are_reused() {
        let mut in_flight = InFlights::new(4, nothing(), 5_000);
        for round in 0..300u64 {
            let first = 1 + round * 4;
            // Two of them need the longest list at the same time, and there is one.
            let sizes = [3_000, 5, 700, 4_000];
            for (at, events) in (0..).zip(sizes) {
                play(&mut in_flight, first + at, events);
            }
            for events in sizes {
                let entry = in_flight.complete().expect("complete");
                let taken = entry.take_events();
                assert_eq!(taken.len(), events as usize);
                assert!(taken.iter().zip(0..).all(|(event, at)| event.index == at));
                in_flight.remove_first();
            }
            let lists = &in_flight.lists;
            assert_eq!(lists.many.len(), MANY_KEPT, "round {round}");
            let longest = lists.longest.as_ref().map(Vec::capacity);
            assert!(
                longest.is_some_and(|room| room >= 5_000),
                "round {round}: {longest:?}"
            );
        }
        let mut rooms = in_flight.slots.iter().map(|slot| slot.events.capacity());
        assert!(rooms.all(|room| room <= EVENTS_ROOM));
    }
}
