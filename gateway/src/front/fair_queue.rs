//! A queue of sessions or users that take turns to be sent messages, each at most once in it. The
//! number of turns per round is bounded, since the front may run on the hot thread.
//!
//! - A member that was sent messages has a turn in the next round too.
//! - A member that waits for space in its connection, or for its user's look-up limit, has its next
//!   turn after other work of the front. Until then it costs nothing, and the front may park.
//! - A member leaves when nothing is missing, the client is gone, or messages are being read.

use std::collections::VecDeque;

/// Turns per round of ready members, and of waiting members.
const READY_TURNS: usize = 16;
const WAITING_TURNS: usize = 8;

/// Outcome of a member's turn. Of several outcomes the greatest counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Turn {
    /// The member leaves the queue.
    Over,
    /// The member waits for space in a connection, or for its user's look-up limit.
    Waits,
    /// Messages were sent, and more are missing.
    Sent,
}

#[derive(Debug)]
pub struct FairQueue<T> {
    ready: VecDeque<T>,
    waiting: VecDeque<T>,
    /// Number of members at the front of `waiting` that have had no turn since the last `retry`.
    untried: usize,
}

impl<T> Default for FairQueue<T> {
    fn default() -> Self {
        Self {
            ready: VecDeque::new(),
            waiting: VecDeque::new(),
            untried: 0,
        }
    }
}

impl<T: Copy> FairQueue<T> {
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.waiting.is_empty()
    }

    /// Adds a member that is not in the queue.
    pub fn push(&mut self, member: T) {
        self.ready.push_back(member);
    }

    /// Makes each waiting member have a turn. Call it after other work of the front.
    pub fn retry(&mut self) {
        self.untried = self.waiting.len();
    }

    /// Runs the turns of one round. True while another round may send something.
    pub fn round(&mut self, mut turn: impl FnMut(T) -> Turn) -> bool {
        let ready = self.ready.len().min(READY_TURNS);
        let waiting = self.untried.min(WAITING_TURNS);
        self.untried -= waiting;
        for nth in 0..ready + waiting {
            let queue = match nth < ready {
                true => &mut self.ready,
                false => &mut self.waiting,
            };
            let member = queue.pop_front().expect("counted above");
            match turn(member) {
                Turn::Sent => self.ready.push_back(member),
                Turn::Waits => self.waiting.push_back(member),
                Turn::Over => {}
            }
        }
        !self.ready.is_empty() || self.untried > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A round has a bounded number of turns however many members wait. The member that can send
    /// has a turn in each round. Each waiting member has one turn per `retry`.
    // rows: R343
    #[test]
    fn r343_a_round_has_a_bounded_number_of_turns() {
        const WAITING: usize = 1_000;
        let mut queue = FairQueue::default();
        (0..=WAITING).for_each(|at| queue.push(at));
        // The last one alone can send.
        let mut turns = vec![0; WAITING + 1];
        let round = |queue: &mut FairQueue<usize>, turns: &mut Vec<u32>| {
            let mut count = 0;
            let may_send = queue.round(|at| {
                count += 1;
                turns[at] += 1;
                match at == WAITING {
                    true => Turn::Sent,
                    false => Turn::Waits,
                }
            });
            assert!(count <= READY_TURNS + WAITING_TURNS, "{count}");
            assert!(may_send, "the last one can send");
        };
        while turns[WAITING] == 0 {
            round(&mut queue, &mut turns);
        }
        assert!(turns[..WAITING].iter().all(|turns| *turns == 1));
        // Without `retry` the waiting members have no turn.
        for nth in 1..10 {
            assert_eq!(turns[WAITING], nth);
            round(&mut queue, &mut turns);
        }
        assert!(turns[..WAITING].iter().all(|turns| *turns == 1));
        queue.retry();
        for nth in 10..10 + WAITING.div_ceil(WAITING_TURNS) as u32 {
            assert_eq!(turns[WAITING], nth);
            round(&mut queue, &mut turns);
        }
        assert!(turns[..WAITING].iter().all(|turns| *turns == 2));
    }

    #[test]
    fn a_member_without_a_further_turn_leaves_and_waiting_ones_are_no_work() {
        let mut queue = FairQueue::default();
        queue.push(1);
        queue.push(2);
        let waits = |at| match at {
            1 => Turn::Over,
            _ => Turn::Waits,
        };
        assert!(!queue.round(waits), "nothing can be sent");
        assert!(!queue.is_empty());
        assert!(!queue.round(|_| panic!("no turn without an arrival")));
        queue.retry();
        assert!(!queue.round(|_| Turn::Over));
        assert!(queue.is_empty());
        queue.retry();
        assert!(!queue.round(|_| panic!("none is left")));
    }
}
