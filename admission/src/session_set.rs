//! A set of sessions, one bit each, iterated by index.
//!
//! Not part of the state: rebuilt from session rows. Cost: adding or removing a session takes
//! constant time and does not allocate; iteration reads one word per 64 sessions and then the
//! members.

use alloc::vec::Vec;

use types::SessionIx;

#[derive(Clone, Debug, Default)]
pub(crate) struct SessionSet {
    words: Vec<u64>,
    /// Number of sessions, members or not.
    sessions: usize,
}

impl SessionSet {
    /// Room for the next session, which is not a member.
    pub fn add_session(&mut self) {
        self.sessions += 1;
        self.words.resize(self.sessions.div_ceil(64), 0);
    }

    #[inline]
    pub fn insert(&mut self, session: SessionIx) {
        self.words[session.index() / 64] |= 1 << (session.index() % 64);
    }

    pub fn remove(&mut self, session: SessionIx) {
        self.words[session.index() / 64] &= !(1 << (session.index() % 64));
    }

    /// The first member at or after an index.
    pub fn next(&self, from: usize) -> Option<SessionIx> {
        let mut at = from / 64;
        let mut word = self.words.get(at)? & (u64::MAX << (from % 64));
        while word == 0 {
            at += 1;
            word = *self.words.get(at)?;
        }
        let index = at * 64 + word.trailing_zeros() as usize;
        Some(SessionIx(index as u32))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(set: &SessionSet) -> Vec<u32> {
        let first = set.next(0);
        let after = |session: &SessionIx| set.next(session.index() + 1);
        core::iter::successors(first, after)
            .map(|session| session.0)
            .collect()
    }

    #[test]
    fn members_are_visited_in_order_at_every_edge_of_a_word() {
        let mut set = SessionSet::default();
        assert!(members(&set).is_empty());
        for _ in 0..200 {
            set.add_session();
        }
        assert!(members(&set).is_empty());
        for session in [199, 0, 63, 64, 127, 128, 64] {
            set.insert(SessionIx(session));
        }
        assert_eq!(members(&set), [0, 63, 64, 127, 128, 199]);
        for session in [0, 64, 199, 5] {
            set.remove(SessionIx(session));
        }
        assert_eq!(members(&set), [63, 127, 128]);
        assert_eq!(set.next(200), None);
    }
}
