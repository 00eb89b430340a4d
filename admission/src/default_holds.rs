//! The open trading hold of each (user, asset).
//!
//! A short sorted list per user, so that an order finds it in one or two cache lines.

use alloc::vec::Vec;

use types::{AssetIx, HoldIx, UserIx};

#[derive(Clone, Debug, Default)]
pub(crate) struct DefaultHolds {
    /// Indexed by user; each list is sorted by asset.
    by_user: Vec<Vec<(AssetIx, HoldIx)>>,
}

impl DefaultHolds {
    #[inline]
    pub fn get(&self, user: UserIx, asset: AssetIx) -> Option<HoldIx> {
        let holds = self.by_user.get(user.index())?;
        let at = holds.partition_point(|(other, _)| *other < asset);
        holds
            .get(at)
            .filter(|(other, _)| *other == asset)
            .map(|(_, hold)| *hold)
    }

    /// The holds of a user, by asset.
    pub fn of(&self, user: UserIx) -> impl Iterator<Item = HoldIx> {
        let holds = self.by_user.get(user.index());
        holds.into_iter().flatten().map(|(_, hold)| *hold)
    }

    /// Sets the open trading hold of a (user, asset); returns the previous one.
    pub fn insert(&mut self, user: UserIx, asset: AssetIx, hold: HoldIx) -> Option<HoldIx> {
        if self.by_user.len() <= user.index() {
            self.by_user.resize(user.index() + 1, Vec::new());
        }
        let holds = &mut self.by_user[user.index()];
        match holds.binary_search_by_key(&asset, |(other, _)| *other) {
            Ok(at) => Some(core::mem::replace(&mut holds[at].1, hold)),
            Err(at) => {
                holds.insert(at, (asset, hold));
                None
            }
        }
    }

    pub fn remove(&mut self, user: UserIx, asset: AssetIx) {
        if let Some(holds) = self.by_user.get_mut(user.index()) {
            holds.retain(|(other, _)| *other != asset);
        }
    }
}
