//! Read access to admission: lookups, totals per hold, snapshot, state hash, invariants.

use alloc::collections::BTreeMap;
use alloc::vec;
use alloc::vec::Vec;

use types::{
    AssetIx, HoldIx, HoldKind, Id128, InstrumentId, InstrumentIx, InstrumentSpec, Minor, Reserve,
    Sequence, SessionIx, StateHasher, StpGroup, UserId, UserIx,
};

use crate::admission::{Admission, AdmissionConfig};
use crate::state::{
    AdmissionImage, HoldBalance, KeyedCall, OpenOrder, Session, Settlement, Sweep, User,
};

/// Money of a hold, which `design.md` 4 compares with the ledger.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HoldTotals {
    pub undrawn: Minor,
    /// Sum of the reserves of its open orders, main and fee apart.
    pub reserved: Reserve,
    pub orders: u32,
}

impl HoldTotals {
    /// Amount that the ledger must still hold: the rest of the trading hold and of its children.
    pub fn held(&self) -> Minor {
        self.undrawn + self.reserved.total()
    }
}

impl Admission {
    /// Last command applied.
    #[inline]
    pub fn sequence(&self) -> Sequence {
        self.tables.sequence
    }

    /// Journalled time of the last command.
    #[inline]
    pub fn time_ns(&self) -> u64 {
        self.tables.time_ns
    }

    /// Maximum number of open orders, over all instruments.
    pub fn orders_max(&self) -> u32 {
        self.config.orders_max
    }

    #[inline]
    pub fn user(&self, user: UserIx) -> Option<&User> {
        self.tables.users.get(user.index())
    }

    pub fn user_ix(&self, id: &UserId) -> Option<UserIx> {
        self.users.get(id).copied()
    }

    #[inline]
    pub fn spec(&self, instrument: InstrumentIx) -> Option<&InstrumentSpec> {
        self.tables
            .instruments
            .get(instrument.index())
            .map(|row| &row.spec)
    }

    pub fn instrument_ix(&self, id: &InstrumentId) -> Option<InstrumentIx> {
        self.instruments.get(id).copied()
    }

    /// Every instrument, by index.
    pub fn instruments(&self) -> impl Iterator<Item = &InstrumentSpec> {
        self.tables.instruments.iter().map(|row| &row.spec)
    }

    /// Number of the last applied event of an instrument.
    pub fn event_number(&self, instrument: InstrumentIx) -> u64 {
        self.tables
            .instruments
            .get(instrument.index())
            .map_or(0, |row| row.event_number)
    }

    /// Number of open orders of an instrument, those in flight to its book included.
    pub fn open_orders_of(&self, instrument: InstrumentIx) -> u32 {
        self.tables
            .instruments
            .get(instrument.index())
            .map_or(0, |row| row.open_orders)
    }

    /// True while the kill switch of this user is engaged; of all users for `NONE` (F11).
    pub fn kill_switch(&self, user: UserIx) -> bool {
        if user.is_none() {
            return self.tables.is_kill_switch_on;
        }
        let row = self.tables.users.get(user.index());
        row.is_some_and(|row| row.is_kill_switch_on)
    }

    /// Users whose own kill switch is engaged.
    pub fn killed_users(&self) -> impl Iterator<Item = UserId> {
        let rows = self.tables.users.iter();
        rows.filter(|row| row.is_kill_switch_on).map(|row| row.id)
    }

    /// Settlement's positions, as journalled.
    pub fn settlement(&self) -> &Settlement {
        &self.tables.settlement
    }

    /// True when the chain has refused this trade for good.
    pub fn is_bust(&self, trade: Id128) -> bool {
        self.busts.contains(&trade)
    }

    /// Bust trades since the beginning of the journal.
    pub fn busts(&self) -> u64 {
        self.tables.busts.len() as u64
    }

    #[inline]
    pub fn session(&self, session: SessionIx) -> Option<&Session> {
        self.tables.sessions.get(session.index())
    }

    pub fn session_ix(&self, key: Id128) -> Option<SessionIx> {
        self.sessions.get(&key).copied()
    }

    /// Sessions that count as connected: recovery and takeover close them.
    pub fn open_sessions(&self) -> impl Iterator<Item = (SessionIx, &Session)> {
        self.sessions().filter(|(_, row)| row.open)
    }

    /// Every session.
    pub fn sessions(&self) -> impl Iterator<Item = (SessionIx, &Session)> {
        self.tables
            .sessions
            .iter()
            .enumerate()
            .map(|(at, row)| (SessionIx(at as u32), row))
    }

    /// The sessions of a user that are not forgotten, open or not.
    pub fn sessions_of(&self, user: UserIx) -> &[SessionIx] {
        self.order_lists.sessions_of(user)
    }

    #[inline]
    pub fn hold(&self, hold: HoldIx) -> Option<&HoldBalance> {
        self.tables.holds.get(hold.index())
    }

    /// User to whom an explicit self-trade group belongs.
    pub(crate) fn group_owner(&self, group: StpGroup) -> Option<UserIx> {
        self.groups.get(&group).map(|row| row.owner)
    }

    pub fn hold_ix(&self, hold_id: Id128) -> Option<HoldIx> {
        self.holds.get(&hold_id).copied()
    }

    /// The open trading hold of a user for an asset.
    pub fn default_hold(&self, user: UserIx, asset: AssetIx) -> Option<HoldIx> {
        self.default_holds.get(user, asset)
    }

    /// The open trading holds of a user.
    pub fn trading_holds(&self, user: UserIx) -> impl Iterator<Item = HoldIx> {
        self.default_holds.of(user)
    }

    /// Every hold, closed ones included, by index.
    pub fn holds(&self) -> impl Iterator<Item = (HoldIx, &HoldBalance)> {
        self.tables
            .holds
            .iter()
            .enumerate()
            .map(|(at, row)| (HoldIx(at as u32), row))
    }

    /// The call that used an idempotency key, for [`crate::KEY_LIFETIME_NS`].
    pub fn keyed_call(&self, key: Id128) -> Option<KeyedCall> {
        self.keys.get(&key).copied()
    }

    /// Open orders in slot order.
    pub fn orders(&self) -> impl Iterator<Item = &OpenOrder> {
        self.tables
            .slots
            .iter()
            .filter_map(|slot| slot.order.as_ref())
    }

    /// The user's open orders, in sessions or not.
    pub fn orders_of(&self, user: UserIx) -> impl Iterator<Item = &OpenOrder> {
        let slots = self.order_lists.of_user(user);
        slots.filter_map(|slot| self.tables.slots[slot as usize].order.as_ref())
    }

    /// The user's open order with this client order id.
    #[inline]
    pub fn client_order(&self, user: UserIx, client_order_id: u64) -> Option<types::Handle> {
        let slot = self.client_ids.get(user, client_order_id)?;
        let order = self.tables.slots[slot as usize].order.as_ref();
        Some(order.expect("an id belongs to an open order").handle)
    }

    /// Money of a hold, summed over all open orders.
    pub fn hold_totals(&self, hold: HoldIx) -> HoldTotals {
        let mut totals = HoldTotals {
            undrawn: self
                .hold(hold)
                .map_or(Minor::ZERO, |balance| balance.undrawn),
            ..HoldTotals::default()
        };
        for order in self.orders().filter(|order| order.hold == hold) {
            totals.add(order);
        }
        totals
    }

    /// Money of every hold, by index, in one pass over the open orders.
    pub fn all_hold_totals(&self) -> Vec<HoldTotals> {
        let mut totals: Vec<HoldTotals> = self
            .tables
            .holds
            .iter()
            .map(|balance| HoldTotals {
                undrawn: balance.undrawn,
                ..HoldTotals::default()
            })
            .collect();
        for order in self.orders() {
            totals[order.hold.index()].add(order);
        }
        totals
    }

    /// The whole state, for an archive.
    pub fn image(&self) -> AdmissionImage {
        let mut image = self.tables.clone();
        image.keys = self
            .key_queue
            .iter()
            .filter_map(|(_, key)| self.keys.get(key).map(|seen| (*key, *seen)))
            .collect();
        image
    }

    /// Restores the state of an image. Panics on an invalid image (a checksum guards the file).
    pub fn restore(image: &AdmissionImage, config: AdmissionConfig) -> Self {
        // Checked first: the index of holds allocates a row for each user up to the highest one.
        let has_user = |balance: &HoldBalance| balance.user.index() < image.users.len();
        assert!(image.holds.iter().all(has_user), "a hold belongs to a user");
        let mut room = Self::new(config);
        let mut slots = core::mem::take(&mut room.tables.slots);
        slots.extend_from_slice(&image.slots);
        room.tables = AdmissionImage {
            sequence: image.sequence,
            time_ns: image.time_ns,
            is_kill_switch_on: image.is_kill_switch_on,
            settlement: image.settlement,
            clock: image.clock,
            order_bounds: image.order_bounds,
            bounds: image.bounds.clone(),
            busts: image.busts.clone(),
            instruments: image.instruments.clone(),
            users: image.users.clone(),
            sessions: image.sessions.clone(),
            holds: image.holds.clone(),
            slots,
            sweeps: image.sweeps.clone(),
            keys: Vec::new(),
        };
        room.busts.extend(&image.busts);
        for (at, row) in image.bounds.iter().enumerate() {
            room.note_bounds(row.of, at as u32);
        }
        for (key, seen) in &image.keys {
            room.insert_key(*key, *seen);
        }
        for (at, row) in image.users.iter().enumerate() {
            room.users.insert(row.id, UserIx(at as u32));
            room.order_lists.add_user();
            room.counts.add_user();
        }
        for row in &image.instruments {
            room.instruments.insert(row.spec.id, row.spec.ix);
        }
        for (at, row) in image.sessions.iter().enumerate() {
            let session = SessionIx(at as u32);
            room.order_lists.add_session(row.user);
            if row.key.is_none() {
                room.order_lists.forget_session(row.user, session);
            } else {
                room.sessions.insert(row.key, session);
                room.note_group(row.stp_group, row.user);
            }
            room.awaiting.add_session();
            if row.unsettled.any() {
                room.awaiting.insert(SessionIx(at as u32));
            }
        }
        for (at, row) in image.holds.iter().enumerate() {
            let hold = HoldIx(at as u32);
            room.holds.insert(row.hold_id, hold);
            if row.kind == HoldKind::Trading && !row.closed {
                room.default_holds.insert(row.user, row.asset, hold);
            }
        }
        room.restore_orders(image);
        room.restore_cursors();
        room.check_invariants();
        room
    }

    /// Restores slots and the indexes of the open orders.
    fn restore_orders(&mut self, image: &AdmissionImage) {
        let mut open = Vec::new();
        for (at, slot) in image.slots.iter().enumerate() {
            let Some(order) = &slot.order else {
                if slot.generation == u32::MAX {
                    self.slots.take(at as u32);
                }
                continue;
            };
            self.slots.take(at as u32);
            self.note_group(order.stp_group, order.user);
            open.push((order.sequence, at as u32, order.user, order.session));
            self.counts.add(order.user, order.instrument);
            if order.client_order_id != 0 {
                self.client_ids
                    .insert(order.user, order.client_order_id, at as u32);
            }
        }
        open.sort_unstable_by_key(|(sequence, ..)| *sequence);
        for (_, slot, user, session) in open {
            self.order_lists.insert(user, session, slot);
        }
    }

    /// Hash of the state. Comparable only when every event of every applied command has been
    /// applied.
    pub fn state_hash(&self) -> u64 {
        let mut hash = StateHasher::new();
        let tables = &self.tables;
        hash.write_u64s(&[
            tables.sequence.0,
            tables.time_ns,
            u64::from(tables.is_kill_switch_on),
        ]);
        self.hash_bounds(&mut hash);
        tables.clock.hash(&mut hash);
        hash_settlement(&mut hash, tables);
        for row in &tables.instruments {
            hash.write_length_prefixed(row.spec.id.as_str().as_bytes());
            hash.write_u64s(&[
                row.event_number,
                u64::from(row.open_orders),
                u64::from(row.spec.phase.code()),
                u64::from(row.spec.fee_rate.0),
                row.spec.band_low.0 as u64,
                row.spec.band_high.0 as u64,
            ]);
        }
        for row in &tables.users {
            hash.write_length_prefixed(row.id.as_str().as_bytes());
            hash.write_u64s(&[
                u64::from(row.blocks.bits()),
                u64::from(row.is_kill_switch_on),
                u64::from(row.group.0) << 32 | u64::from(row.own_bounds),
            ]);
            hash.write_u64s(&row.budget.hash_words());
        }
        for row in &tables.sessions {
            let (high, low) = row.key.halves();
            hash.write_u64s(&[
                high,
                low,
                u64::from(row.user.0) << 32 | u64::from(row.stp_group.0),
                u64::from(row.open) << 1 | u64::from(row.cancel_on_disconnect),
                row.client_seq,
                row.epoch.0,
                row.last_number,
                row.cancel_all_at_ns,
            ]);
            hash.write_u64s(&row.unsettled.hash_words());
        }
        for row in &tables.holds {
            let (high, low) = row.hold_id.halves();
            hash.write_u64s(&[
                high,
                low,
                u64::from(row.user.0) << 32 | u64::from(row.asset.get()),
                row.undrawn.0 as u64,
                row.reserved.0 as u64,
                row.funding_seq,
                u64::from(row.open_orders) << 1 | u64::from(row.closed),
            ]);
        }
        for (at, slot) in tables.slots.iter().enumerate() {
            if slot.generation > 0 {
                hash.write_u64s(&[at as u64, u64::from(slot.generation)]);
            }
            if let Some(order) = &slot.order {
                hash_order(&mut hash, order);
            }
        }
        for (_, key) in &self.key_queue {
            let (high, low) = key.halves();
            hash.write_u64s(&[high, low]);
        }
        hash.finish()
    }

    /// Number of rows that [`Admission::state_hash`] visits. Slots count from their first use on,
    /// with or without an order.
    pub fn hashed_rows(&self) -> usize {
        let tables = &self.tables;
        tables.bounds.len()
            + tables.busts.len()
            + tables.sweeps.len()
            + tables.instruments.len()
            + tables.users.len()
            + tables.sessions.len()
            + tables.holds.len()
            + tables.slots.len()
            + self.key_queue.len()
    }

    /// Checks that an owner's list has exactly its `count` open orders.
    fn check_list(
        &self,
        slots: impl Iterator<Item = u32>,
        count: u32,
        is_owned: impl Fn(&OpenOrder) -> bool,
    ) {
        let mut left = count;
        for slot in slots {
            let order = self.tables.slots[slot as usize].order.as_ref();
            assert!(
                order.is_some_and(&is_owned),
                "a list has its owner's orders"
            );
            left = left.checked_sub(1).expect("a list has each order once");
        }
        assert_eq!(left, 0, "a list has all of its owner's orders");
    }

    /// Checks that the groups in use are those of sessions and open orders.
    fn check_groups(&self) {
        let remembered = self.tables.sessions.iter().filter(|row| !row.key.is_none());
        let of_sessions = remembered.map(|row| row.stp_group);
        let of_orders = self.orders().map(|order| order.stp_group);
        let mut counts = BTreeMap::<StpGroup, u64>::new();
        for group in of_sessions.chain(of_orders) {
            if group.is_explicit() {
                *counts.entry(group).or_insert(0) += 1;
            }
        }
        let found = self.groups.iter().map(|(group, row)| (*group, row.count));
        assert!(found.eq(counts), "a group in use is counted");
    }

    /// Panics when an invariant is broken: a hold's money equals the sum of its orders, counts
    /// agree, slots are free or taken as the table shows, client order ids point at open orders,
    /// and an order without amends in flight reserves no more than the formula requires.
    pub fn check_invariants(&self) {
        let mut per_instrument = vec![0; self.tables.instruments.len()];
        let mut per_user = vec![0; self.tables.users.len()];
        let mut per_session = vec![0; self.tables.sessions.len()];
        let mut client_ids = 0;
        let mut counts = BTreeMap::new();
        for (at, slot) in self.tables.slots.iter().enumerate() {
            let Some(order) = &slot.order else { continue };
            assert_eq!(order.handle.slot as usize, at);
            assert_eq!(order.handle.generation, slot.generation);
            assert!(!order.open.is_zero() && order.open <= order.quantity);
            per_instrument[order.instrument.index()] += 1;
            per_user[order.user.index()] += 1;
            *counts.entry((order.user, order.instrument)).or_insert(0) += 1;
            if let Some(count) = per_session.get_mut(order.session.index()) {
                *count += 1;
            }
            if order.client_order_id != 0 {
                client_ids += 1;
                let found = self.client_order(order.user, order.client_order_id);
                assert_eq!(found, Some(order.handle));
            }
            let row = &self.tables.holds[order.hold.index()];
            assert!(row.user == order.user && !row.closed);
            if order.amends_pending == 0 && !order.reserved.total().is_zero() {
                let terms = self.tables.instruments[order.instrument.index()].spec.terms;
                let formula = types::reserve(
                    &terms,
                    order.side,
                    order.price,
                    order.open,
                    order.fill_totals,
                    order.fee_rate,
                );
                assert_eq!(Ok(order.reserved), formula, "reserve follows the formula");
            }
        }
        self.check_groups();
        assert_eq!(client_ids, self.client_ids.len());
        for ((user, instrument), found) in counts {
            assert_eq!(self.counts.get(user, instrument), found);
        }
        let settlement = &self.tables.settlement;
        assert!(settlement.finalized <= settlement.posted);
        assert!(settlement.posted <= self.tables.sequence);
        assert_eq!(self.busts.len(), self.tables.busts.len());
        for (row, found) in self.tables.instruments.iter().zip(per_instrument) {
            assert_eq!(row.open_orders, found);
        }
        for (at, (row, found)) in self.tables.users.iter().zip(per_user).enumerate() {
            assert_eq!(row.open_orders, found);
            let user = UserIx(at as u32);
            self.check_list(self.order_lists.of_user(user), found, |order| {
                order.user == user
            });
        }
        for (at, (row, found)) in self.tables.sessions.iter().zip(per_session).enumerate() {
            assert_eq!(row.open_orders, found);
            let session = SessionIx(at as u32);
            let slots = self.order_lists.of_session(session);
            self.check_list(slots, found, |order| order.session == session);
        }
        for (row, totals) in self.tables.holds.iter().zip(self.all_hold_totals()) {
            assert!(!row.undrawn.is_negative());
            assert_eq!(
                row.reserved,
                totals.reserved.total(),
                "hold equals its orders"
            );
            assert_eq!(row.open_orders, totals.orders);
        }
    }
}

impl HoldTotals {
    fn add(&mut self, order: &OpenOrder) {
        self.reserved.main += order.reserved.main;
        self.reserved.fee += order.reserved.fee;
        self.orders += 1;
    }
}

/// Hashes the fields that change: the others follow from the sweep's first command.
fn hash_sweeps(hash: &mut StateHasher, rows: &[Sweep]) {
    for row in rows {
        hash.write_u64s(&[
            row.first_command.0,
            u64::from(row.position.session.0) << 32 | u64::from(row.count),
            row.position.sequence.0,
        ]);
    }
}

fn hash_settlement(hash: &mut StateHasher, tables: &AdmissionImage) {
    let known = &tables.settlement;
    hash.write_u64s(&[
        known.posted.0,
        known.finalized.0,
        known.trades_final,
        known.own_first.0,
        known.own_last.0,
    ]);
    for trade in &tables.busts {
        let (high, low) = trade.halves();
        hash.write_u64s(&[high, low]);
    }
    hash_sweeps(hash, &tables.sweeps);
}

fn hash_order(hash: &mut StateHasher, order: &OpenOrder) {
    hash.write_u64s(&[
        order.sequence.0,
        u64::from(order.instrument.0) << 32 | u64::from(order.user.0),
        u64::from(order.session.0) << 32 | u64::from(order.hold.0),
        u64::from(order.stp_group.0) << 32 | u64::from(order.fee_rate.0),
        order.client_order_id,
        order.price.0 as u64,
        order.open.0,
        order.quantity.0,
        order.fill_totals.value_minor.0 as u64,
        order.fill_totals.fee_minor.0 as u64,
        order.reserved.main.0 as u64,
        order.reserved.fee.0 as u64,
        u64::from(order.amends_pending) << 1 | u64::from(order.side.code()),
    ]);
    hash.write_u64s(&order.budget.hash_words());
}
