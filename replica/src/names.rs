//! Names of the dense indexes of a node. Entries are added and never changed, except for an
//! instrument's trading terms, so that a follower behind the replica can use the same table.

use std::sync::{PoisonError, RwLock};

use admission::Pool;
use types::{AssetIx, HoldIx, Id128, InstrumentIx, InstrumentSpec, PoolKind, UserId, UserIx};

/// Users, instruments and holds by index.
#[derive(Debug, Default)]
pub struct Names {
    tables: RwLock<Tables>,
}

#[derive(Debug, Default)]
struct Tables {
    users: Vec<UserId>,
    instruments: Vec<InstrumentSpec>,
    holds: Vec<HoldName>,
}

/// What never changes of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldName {
    pub hold_id: Id128,
    pub kind: PoolKind,
    pub user: UserIx,
    pub asset: AssetIx,
}

impl Names {
    fn read<T>(&self, read: impl FnOnce(&Tables) -> T) -> T {
        read(&self.tables.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write(&self, write: impl FnOnce(&mut Tables)) {
        write(&mut self.tables.write().unwrap_or_else(PoisonError::into_inner));
    }

    /// # Panics
    /// The index is unknown: it was not taken from an effect of this node.
    pub fn user(&self, user: UserIx) -> UserId {
        self.read(|tables| tables.users[user.index()])
    }

    /// Decimals, steps and id never change; the rest is of some moment at or behind the one asked for.
    ///
    /// # Panics
    /// As [`Names::user`].
    pub fn instrument(&self, instrument: InstrumentIx) -> InstrumentSpec {
        self.read(|tables| tables.instruments[instrument.index()])
    }

    /// Every instrument, by index.
    pub fn instruments(&self) -> Vec<InstrumentSpec> {
        self.read(|tables| tables.instruments.clone())
    }

    /// # Panics
    /// As [`Names::user`].
    pub fn hold(&self, hold: HoldIx) -> HoldName {
        self.read(|tables| tables.holds[hold.index()])
    }

    pub(crate) fn add_user(&self, id: UserId) {
        self.write(|tables| tables.users.push(id));
    }

    pub(crate) fn set_instrument(&self, spec: InstrumentSpec) {
        self.write(|tables| match tables.instruments.get_mut(spec.ix.index()) {
            Some(known) => *known = spec,
            None => tables.instruments.push(spec),
        });
    }

    pub(crate) fn add_hold(&self, pool: &Pool) {
        self.write(|tables| {
            tables.holds.push(HoldName {
                hold_id: pool.hold_id,
                kind: pool.kind,
                user: pool.user,
                asset: pool.asset,
            });
        });
    }
}
