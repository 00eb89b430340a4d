//! The open trading hold of each (user, asset).
//!
//! A short sorted list per user, so that an order finds it in one or two cache lines.

use alloc::vec::Vec;

use types::{AssetIx, HoldIx, UserIx};

#[derive(Clone, Debug, Default)]
pub(crate) struct DefaultPools {
    /// By user index; each by asset.
    by_user: Vec<Vec<(AssetIx, HoldIx)>>,
}

impl DefaultPools {
    #[inline]
    pub fn get(&self, user: UserIx, asset: AssetIx) -> Option<HoldIx> {
        let pools = self.by_user.get(user.index())?;
        let at = pools.partition_point(|(other, _)| *other < asset);
        pools
            .get(at)
            .filter(|(other, _)| *other == asset)
            .map(|(_, hold)| *hold)
    }

    /// The holds of a user, by asset.
    pub fn of(&self, user: UserIx) -> impl Iterator<Item = HoldIx> {
        let pools = self.by_user.get(user.index());
        pools.into_iter().flatten().map(|(_, hold)| *hold)
    }

    /// Returns the previous one.
    pub fn insert(&mut self, user: UserIx, asset: AssetIx, hold: HoldIx) -> Option<HoldIx> {
        if self.by_user.len() <= user.index() {
            self.by_user.resize(user.index() + 1, Vec::new());
        }
        let pools = &mut self.by_user[user.index()];
        match pools.binary_search_by_key(&asset, |(other, _)| *other) {
            Ok(at) => Some(core::mem::replace(&mut pools[at].1, hold)),
            Err(at) => {
                pools.insert(at, (asset, hold));
                None
            }
        }
    }

    pub fn remove(&mut self, user: UserIx, asset: AssetIx) {
        if let Some(pools) = self.by_user.get_mut(user.index()) {
            pools.retain(|(other, _)| *other != asset);
        }
    }
}
