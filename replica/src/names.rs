//! Ids of a node's dense indexes.
//!
//! Entries are added and never changed, except an instrument's trading terms. So a follower that
//! lags uses the same table. Changes of instruments, bounds and member groups are announced here.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use admission::HoldBalance;
use tokio::sync::{broadcast, watch};
use types::command::BoundsOf;
use types::{
    AssetIx, HoldIx, HoldKind, Id128, InstrumentId, InstrumentIx, InstrumentSpec, UserId, UserIx,
};

/// Capacity for changes of bounds and member groups that a receiver has not read.
const MEMBER_CHANGES_MAX: usize = 256;

/// Users, instruments and holds by index.
#[derive(Debug)]
pub struct Names {
    tables: RwLock<Tables>,
    /// Number of changes of instruments.
    instrument_changes: watch::Sender<u64>,
    /// The members whose bounds or group a command has changed.
    member_changes: broadcast::Sender<BoundsOf>,
}

impl Default for Names {
    fn default() -> Self {
        Self {
            tables: RwLock::default(),
            instrument_changes: watch::Sender::default(),
            member_changes: broadcast::Sender::new(MEMBER_CHANGES_MAX),
        }
    }
}

#[derive(Debug, Default)]
struct Tables {
    users: Vec<UserId>,
    by_user: HashMap<UserId, UserIx>,
    instruments: Vec<InstrumentSpec>,
    by_instrument: HashMap<InstrumentId, InstrumentIx>,
    holds: Vec<HoldName>,
}

/// The constant part of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HoldName {
    pub hold_id: Id128,
    pub kind: HoldKind,
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
    /// The index is unknown, so not one of an effect of this node.
    pub fn user(&self, user: UserIx) -> UserId {
        self.read(|tables| tables.users[user.index()])
    }

    /// Decimals, steps and id are constant; other fields may be newer than the caller's position.
    ///
    /// # Panics
    /// As [`Names::user`].
    pub fn instrument(&self, instrument: InstrumentIx) -> InstrumentSpec {
        self.read(|tables| tables.instruments[instrument.index()])
    }

    /// As [`Names::instrument`], for an index that may be unknown.
    pub fn find_instrument(&self, instrument: InstrumentIx) -> Option<InstrumentSpec> {
        self.read(|tables| tables.instruments.get(instrument.index()).copied())
    }

    /// The index of a user, if there was a `BindUser` of it.
    pub fn user_ix(&self, id: &UserId) -> Option<UserIx> {
        self.read(|tables| tables.by_user.get(id).copied())
    }

    /// The instrument of an id, if known.
    pub fn instrument_of(&self, id: &InstrumentId) -> Option<InstrumentSpec> {
        self.read(|tables| Some(tables.instruments[tables.by_instrument.get(id)?.index()]))
    }

    /// Every instrument, by index.
    pub fn instruments(&self) -> Vec<InstrumentSpec> {
        self.read(|tables| tables.instruments.clone())
    }

    /// Returns a receiver that is notified after a change of an instrument.
    pub fn instrument_changes(&self) -> watch::Receiver<u64> {
        self.instrument_changes.subscribe()
    }

    /// Returns a receiver of the members whose bounds or group change from now on.
    ///
    /// The replica's state has the change at the next read.
    pub fn member_changes(&self) -> broadcast::Receiver<BoundsOf> {
        self.member_changes.subscribe()
    }

    /// # Panics
    /// As [`Names::user`].
    pub fn hold(&self, hold: HoldIx) -> HoldName {
        self.read(|tables| tables.holds[hold.index()])
    }

    pub(crate) fn add_user(&self, id: UserId) {
        self.write(|tables| {
            let user = u32::try_from(tables.users.len()).expect("more than 2^32 users");
            tables.by_user.insert(id, UserIx(user));
            tables.users.push(id);
        });
    }

    pub(crate) fn set_instrument(&self, spec: InstrumentSpec) {
        self.write(|tables| match tables.instruments.get_mut(spec.ix.index()) {
            Some(known) => *known = spec,
            None => {
                tables.by_instrument.insert(spec.id, spec.ix);
                tables.instruments.push(spec);
            }
        });
        self.instrument_changes.send_modify(|count| *count += 1);
    }

    pub(crate) fn note_member_change(&self, of: BoundsOf) {
        // An error means that there is no receiver.
        let _ = self.member_changes.send(of);
    }

    pub(crate) fn add_hold(&self, balance: &HoldBalance) {
        self.write(|tables| {
            tables.holds.push(HoldName {
                hold_id: balance.hold_id,
                kind: balance.kind,
                user: balance.user,
                asset: balance.asset,
            });
        });
    }
}
