//! Requests in flight: submitted, without a report yet. Counts them per user, and keeps the client
//! sequences of those of a session.
//!
//! Users share the ring by dynamic thresholds: a user gets another slot while it has fewer requests
//! in flight than slots are free. A single user gets half of the slots. Of `n` users at their
//! threshold each has `1 / (n + 1)` of the slots, and the same number stays free for another user.
//!
//! Orders use half of the ring. Requests that reduce risk also use the other half, except for a
//! reserve for logins and closings of sessions. Nothing is allocated per request.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use admission::Request;
use types::{Sequence, UserIx};

use super::state::RING_CAPACITY;

/// Number of requests in flight, of all users, at which orders get no more slots.
pub const ORDERS_MAX: usize = RING_CAPACITY / 2;
/// The same for requests that reduce risk.
pub const REDUCTIONS_MAX: usize = RING_CAPACITY - RING_CAPACITY / 8;
/// How long a request without a slot waits in its stream before it is refused as `BUSY`. Longer
/// than the hot thread waits for an engine, so that a burst, or a thread that loses its core,
/// causes no refusal. A user waits once: later requests are refused at once until one gets a slot.
pub const SLOT_WAIT: Duration = Duration::from_millis(20);
/// Time since the start of a wait after which the user's requests may wait again.
const WAIT_AGAIN: Duration = Duration::from_secs(1);
/// Requests in flight that a user may have regardless of the threshold, while the ring has slots.
/// Otherwise the cancels of other users could leave a user no slot for orders.
const GUARANTEED: usize = 16;
/// Number of requests in flight at which users lose their guaranteed slots for orders. The
/// remaining slots are for requests that reduce risk.
const GUARANTEED_ORDERS_MAX: usize = (ORDERS_MAX + REDUCTIONS_MAX) / 2;
/// Capacity, in client sequences, that a session without requests in flight keeps.
const SEQUENCES_KEPT: usize = 256;
/// Bit in the tags of requests. Tags of openings count from 1. Tags of closings have bit 63.
const REQUEST: u64 = 1 << 62;
/// Bits of the login's epoch in a tag.
const EPOCH_MASK: u64 = (1 << 30) - 1;

const _: () = assert!(ORDERS_MAX < REDUCTIONS_MAX && REDUCTIONS_MAX < RING_CAPACITY);

/// The tag of a request. It contains the user and the epoch of the login that sent the request.
pub fn tag(user: UserIx, epoch: Sequence) -> u64 {
    REQUEST | ((epoch.0 & EPOCH_MASK) << 32) | u64::from(user.0)
}

/// The user of a request's tag; `None` for other tags.
pub fn user_of(tag: u64) -> Option<UserIx> {
    (tag >> 62 == 1).then_some(UserIx(tag as u32))
}

/// True for requests that may reduce risk: cancels, and amends of the quantity alone. The front
/// does not know whether such an amend grows the order. The hot thread checks that.
pub fn reduces(request: &Request) -> bool {
    match request {
        Request::Cancel(_) | Request::MassCancel(_) => true,
        Request::Amend(amend) => amend.price.is_none() && amend.new_client_order_id == 0,
        _ => false,
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct UserInFlight {
    count: u32,
    /// Start of the wait for a slot: of orders, and of requests that reduce risk.
    waits_since: [Option<Instant>; 2],
}

/// The number of requests in flight, in total and per user.
#[derive(Debug, Default)]
pub struct InFlight {
    total: usize,
    /// Indexed by user.
    users: Vec<UserInFlight>,
}

impl InFlight {
    /// True if the user may submit one more request now.
    #[inline]
    pub fn has_slot(&self, user: UserIx, reduces: bool) -> bool {
        let most = if reduces { REDUCTIONS_MAX } else { ORDERS_MAX };
        let row = self.users.get(user.index());
        let own = row.map_or(0, |row| row.count as usize);
        let guaranteed_max = if reduces {
            REDUCTIONS_MAX
        } else {
            GUARANTEED_ORDERS_MAX
        };
        let is_guaranteed = own < GUARANTEED && self.total < guaranteed_max;
        own < most.saturating_sub(self.total) || is_guaranteed
    }

    /// True while a request without a slot waits. False when it is to be refused.
    pub fn waits(&mut self, user: UserIx, reduces: bool, now: Instant) -> bool {
        let since = &mut self.row(user).waits_since[usize::from(reduces)];
        let waited = since.map(|since| now.saturating_duration_since(since));
        match waited {
            Some(waited) if waited < WAIT_AGAIN => waited < SLOT_WAIT,
            // The user waits for the first time, or again after `WAIT_AGAIN`.
            _ => {
                *since = Some(now);
                true
            }
        }
    }

    /// Counts a request that was submitted.
    #[inline]
    pub fn begin(&mut self, user: UserIx, reduces: bool) {
        self.total += 1;
        let row = self.row(user);
        row.count += 1;
        row.waits_since[usize::from(reduces)] = None;
    }

    /// Counts the report of a request.
    #[inline]
    pub fn end(&mut self, user: UserIx) {
        self.total = self.total.saturating_sub(1);
        let row = self.row(user);
        row.count = row.count.saturating_sub(1);
        if row.count == 0 {
            row.waits_since = [None; 2];
        }
    }

    pub fn is_empty(&self) -> bool {
        self.total == 0
    }

    fn row(&mut self, user: UserIx) -> &mut UserInFlight {
        let at = user.index();
        if self.users.len() <= at {
            self.users.resize(at + 1, UserInFlight::default());
        }
        &mut self.users[at]
    }
}

/// Client sequences of a session's requests in flight, ascending. All are above the last answered
/// sequence.
#[derive(Debug, Default)]
pub struct Unanswered(VecDeque<u64>);

impl Unanswered {
    #[inline]
    pub fn contains(&self, client_seq: u64) -> bool {
        // Fast path: a new request is above all others.
        self.0.back().is_some_and(|last| client_seq <= *last)
            && self.0.binary_search(&client_seq).is_ok()
    }

    /// Adds a request that was submitted. Cost: constant, unless a request that was refused is
    /// sent again after later ones.
    #[inline]
    pub fn insert(&mut self, client_seq: u64) {
        if self.0.back().is_none_or(|last| *last < client_seq) {
            self.0.push_back(client_seq);
        } else if let Err(at) = self.0.binary_search(&client_seq) {
            self.0.insert(at, client_seq);
        }
    }

    /// Removes an answered request and those below it. Their repeats are answered from the window.
    #[inline]
    pub fn answered(&mut self, client_seq: u64) {
        while self.0.front().is_some_and(|first| *first <= client_seq) {
            self.0.pop_front();
        }
        if self.0.is_empty() && self.0.capacity() > SEQUENCES_KEPT {
            self.0.shrink_to(SEQUENCES_KEPT);
        }
    }

    /// Removes a request that was not journalled: it may be sent again.
    pub fn refused(&mut self, client_seq: u64) {
        if let Ok(at) = self.0.binary_search(&client_seq) {
            self.0.remove(at);
        }
    }

    /// Removes all, and frees the memory.
    pub fn clear(&mut self) {
        self.0 = VecDeque::new();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Begins requests of a user until it gets no slot. Returns their number.
    fn fill(in_flight: &mut InFlight, user: UserIx, reduces: bool) -> usize {
        let mut count = 0;
        while in_flight.has_slot(user, reduces) {
            in_flight.begin(user, reduces);
            count += 1;
        }
        count
    }

    // rows: R341
    #[test]
    fn r341_a_user_gets_half_of_the_free_slots_and_cancels_have_more() {
        let mut in_flight = InFlight::default();
        let users: Vec<UserIx> = (0..4).map(UserIx).collect();
        let orders = users.iter().map(|user| fill(&mut in_flight, *user, false));
        assert_eq!(orders.collect::<Vec<_>>(), [1_024, 512, 256, 128]);
        assert!(in_flight.has_slot(UserIx(4), false), "for another user");
        for user in &users {
            assert!(!in_flight.has_slot(*user, false) && in_flight.has_slot(*user, true));
        }
        // The first user's cancels, until its requests in flight equal the slots free for cancels.
        let cancels = fill(&mut in_flight, users[0], true);
        assert_eq!(cancels, 320);
        assert!(
            users[1..]
                .iter()
                .all(|user| in_flight.has_slot(*user, true))
        );
        // Slots that become free are free for all users.
        for _ in 0..1_024 + cancels {
            in_flight.end(users[0]);
        }
        assert!(users.iter().all(|user| in_flight.has_slot(*user, false)));
        for (user, count) in [(1, 512), (2, 256), (3, 128)] {
            (0..count).for_each(|_| in_flight.end(UserIx(user)));
        }
        assert!(in_flight.is_empty());
        assert_eq!(fill(&mut in_flight, users[3], false), 1_024);
    }

    #[test]
    fn a_user_waits_for_a_slot_once_until_an_order_gets_one() {
        let (mut in_flight, user, begun) = (InFlight::default(), UserIx(7), Instant::now());
        fill(&mut in_flight, user, false);
        assert!(in_flight.waits(user, false, begun));
        assert!(in_flight.waits(user, false, begun + SLOT_WAIT / 2));
        let later = begun + SLOT_WAIT;
        assert!(!in_flight.waits(user, false, later));
        let again = begun + WAIT_AGAIN;
        assert!(in_flight.waits(user, false, again) && in_flight.waits(user, false, again));
        let later = again + SLOT_WAIT;
        assert!(!in_flight.waits(user, false, later));
        in_flight.begin(user, true);
        assert!(
            !in_flight.waits(user, false, later),
            "a cancel changes nothing"
        );
        assert!(
            in_flight.waits(UserIx(3), false, later),
            "each user by itself"
        );
        in_flight.end(user);
        in_flight.end(user);
        assert!(in_flight.has_slot(user, false));
        in_flight.begin(user, false);
        assert!(in_flight.waits(user, false, later), "another wait");
        fill(&mut in_flight, user, true);
        assert!(in_flight.waits(user, true, later), "cancels by themselves");
        assert!(!in_flight.waits(user, true, later + SLOT_WAIT));
    }

    #[test]
    fn a_sequence_is_unanswered_from_its_submission_to_its_report() {
        let mut unanswered = Unanswered::default();
        for seq in [3, 5, 9, 12] {
            unanswered.insert(seq);
        }
        let are = |unanswered: &Unanswered, wanted: &[u64]| {
            let found = (0..20).filter(|seq| unanswered.contains(*seq));
            assert_eq!(found.collect::<Vec<_>>(), wanted);
        };
        are(&unanswered, &[3, 5, 9, 12]);
        unanswered.refused(9);
        unanswered.refused(10);
        are(&unanswered, &[3, 5, 12]);
        // Sent again after a later one.
        unanswered.insert(9);
        unanswered.insert(9);
        are(&unanswered, &[3, 5, 9, 12]);
        unanswered.answered(5);
        are(&unanswered, &[9, 12]);
        unanswered.answered(12);
        are(&unanswered, &[]);
    }

    #[test]
    fn a_tag_names_the_user_and_the_login() {
        let of = |user, epoch| tag(UserIx(user), Sequence(epoch));
        assert_eq!(user_of(of(0, 0)), Some(UserIx(0)));
        let large = of(u32::MAX - 1, u64::MAX);
        assert_eq!(user_of(large), Some(UserIx(u32::MAX - 1)));
        assert_ne!(of(1, 5), of(1, 6));
        assert_eq!((user_of(1), user_of((1 << 63) | 1)), (None, None));
    }
}
