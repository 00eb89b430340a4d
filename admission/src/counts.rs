//! Open orders per (user, instrument).
//!
//! One short sorted vector per user: a lookup touches one or two cache lines. Derived data: not in
//! snapshots, rebuilt from the open orders on restore.

use alloc::vec::Vec;

use types::{InstrumentIx, UserIx};

#[derive(Clone, Debug, Default)]
pub(crate) struct OpenCounts {
    /// Indexed by user; each vector is sorted by instrument. An entry with count 0 remains.
    by_user: Vec<Vec<(InstrumentIx, u32)>>,
}

impl OpenCounts {
    #[inline]
    pub fn get(&self, user: UserIx, instrument: InstrumentIx) -> u32 {
        let counts = &self.by_user[user.index()];
        let found = counts.binary_search_by_key(&instrument, |(other, _)| *other);
        found.map_or(0, |at| counts[at].1)
    }

    /// Adds the next user, without orders.
    pub fn add_user(&mut self) {
        self.by_user.push(Vec::new());
    }

    /// Counts an open order. Allocates only for the user's first order on an instrument.
    #[inline]
    pub fn add(&mut self, user: UserIx, instrument: InstrumentIx) {
        let counts = &mut self.by_user[user.index()];
        match counts.binary_search_by_key(&instrument, |(other, _)| *other) {
            Ok(at) => counts[at].1 += 1,
            Err(at) => counts.insert(at, (instrument, 1)),
        }
    }

    #[inline]
    pub fn remove(&mut self, user: UserIx, instrument: InstrumentIx) {
        let counts = &mut self.by_user[user.index()];
        let at = counts.binary_search_by_key(&instrument, |(other, _)| *other);
        counts[at.expect("an open order was counted")].1 -= 1;
    }
}
