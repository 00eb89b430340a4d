//! How a command changes the state.
//!
//! Every command of the node is applied here, in sequence without gaps. No command is refused: one
//! that does not fit the state is a bug and panics.

use types::command::{
    Amend, BindUser, Cause, CloseHold, Command, Defund, Fund, MassCancel, MassScope, MemberGroup,
    New, OpenSession, RequestKind, Settled, SweepPosition,
};
use types::{
    CancelReason, Envelope, Handle, HoldIx, HoldKind, Id128, Minor, Sequence, SessionIx, StpGroup,
    UserIx,
};

use crate::admission::{Admission, GroupUse, KEY_LIFETIME_NS};
use crate::budget::Budget;
use crate::orders::worst;
use crate::state::{
    Blocks, HoldBalance, Instrument, KeyedCall, OpenOrder, Session, Slot, Unsettled, User,
};

impl Admission {
    /// Applies the next command, of which `cause` is [`Cause::of`]. Panics on a gap in the
    /// sequence.
    pub fn apply_command(&mut self, envelope: &Envelope, cause: &Cause) {
        assert_eq!(
            envelope.sequence,
            self.tables.sequence.next(),
            "commands come without gap"
        );
        assert!(
            envelope.time_ns >= self.tables.time_ns,
            "journalled time never goes back"
        );
        self.tables.sequence = envelope.sequence;
        self.tables.time_ns = envelope.time_ns;
        self.forget_keys(envelope.time_ns);
        if !cause.session.is_none() {
            self.advance_session(cause.session, cause.client_seq);
        }
        match &envelope.command {
            Command::BindUser(c) => self.bind_user(c),
            Command::SetInstrument(c) => self.set_instrument(&c.spec),
            Command::SetPhase(c) => {
                self.tables.instruments[c.instrument.index()].spec.phase = c.phase
            }
            Command::OpenSession(c) => self.open_session(c, envelope.sequence),
            Command::CloseSession(c) => {
                let row = &mut self.tables.sessions[c.session.index()];
                row.open = false;
                row.cancel_on_disconnect &= !c.keep_orders;
            }
            Command::ForgetSession(c) => self.forget_session(c.session),
            Command::Fund(c) => self.fund(c),
            Command::Defund(c) => self.defund(c),
            Command::CloseHold(c) => self.close_hold(c),
            Command::BlockUser(c) => self.tables.users[c.user.index()].blocks.set(c.cause),
            Command::UnblockUser(c) => self.tables.users[c.user.index()].blocks.lift(c.cause),
            Command::Settled(c) => self.settled(c, envelope.sequence),
            Command::Bust(c) => {
                assert!(self.busts.insert(c.trade), "a trade is bust once");
                self.tables.busts.push(c.trade);
                let settlement = &mut self.tables.settlement;
                settlement.record_settlement_command(envelope.sequence);
            }
            Command::SetKillSwitch(c) => {
                match self.tables.users.get_mut(c.user.index()) {
                    _ if c.user.is_none() => self.tables.is_kill_switch_on = c.is_engaged,
                    Some(user) => user.is_kill_switch_on = c.is_engaged,
                    None => panic!("a user is bound before commands name it"),
                }
                self.note_sweep(&envelope.command, envelope.sequence);
            }
            Command::SetBudget(c) => self.tables.users[c.user.index()].budget.set(c),
            Command::SuspectClock(c) => self.tables.clock.suspect(c),
            Command::ConfirmClock(c) => self.tables.clock.confirm(c),
            Command::SetOrderBounds(c) => self.set_bounds(c),
            Command::SetMemberGroup(c) => self.set_group(c.user, c.group),
            Command::CancelAllAfter(c) => {
                let row = &mut self.tables.sessions[c.session.index()];
                row.cancel_all_at_ns = c.at_ns(envelope.time_ns);
            }
            Command::MassCancel(c) => {
                self.note_fired(c);
                self.note_sweep(&envelope.command, envelope.sequence);
            }
            Command::CancelSlice(_) => self.note_sweep(&envelope.command, envelope.sequence),
            Command::New(c) => self.open_order(c, envelope),
            Command::Amend(c) => self.draw_growth(c),
            Command::Cancel(_) | Command::ExpireOrders(_) | Command::Refused(_) => {}
        }
        if !cause.key_hash.is_none() {
            self.remember_key(envelope, cause.key_hash, cause.request);
        }
    }

    /// Turns off the dead man's switch of a session that has fired.
    fn note_fired(&mut self, c: &MassCancel) {
        if let (CancelReason::CancelAllAfter, MassScope::Session(session)) = (c.reason, c.scope) {
            self.tables.sessions[session.index()].cancel_all_at_ns = 0;
        }
    }

    fn bind_user(&mut self, c: &BindUser) {
        assert_eq!(c.user.index(), self.tables.users.len(), "users are dense");
        self.users.insert(c.id, c.user);
        self.tables.users.push(User {
            id: c.id,
            blocks: Blocks::default(),
            is_kill_switch_on: false,
            budget: Budget::default(),
            open_orders: 0,
            sessions: 0,
            group: MemberGroup::NONE,
            own_bounds: 0,
        });
        self.order_lists.add_user();
        self.counts.add_user();
    }

    fn settled(&mut self, c: &Settled, sequence: Sequence) {
        let known = &mut self.tables.settlement;
        assert!(
            c.finalized <= c.posted && c.posted < sequence,
            "what is settled is journalled"
        );
        assert!(
            c.posted >= known.posted && c.finalized >= known.finalized,
            "settlement's positions never go back"
        );
        known.posted = c.posted;
        known.finalized = c.finalized;
        known.trades_final = c.trades_final;
        known.record_settlement_command(sequence);
    }

    fn set_instrument(&mut self, spec: &types::InstrumentSpec) {
        let table = &mut self.tables.instruments;
        match table.get_mut(spec.ix.index()) {
            Some(row) => {
                assert!(row.spec.same_steps(spec), "tick and lot never change");
                row.spec = *spec;
            }
            None => {
                assert_eq!(spec.ix.index(), table.len(), "instruments are dense");
                table.push(Instrument {
                    spec: *spec,
                    event_number: 0,
                    open_orders: 0,
                });
                self.instruments.insert(spec.id, spec.ix);
            }
        }
    }

    fn open_session(&mut self, c: &OpenSession, sequence: Sequence) {
        self.note_group(c.stp_group, c.user);
        let table = &mut self.tables.sessions;
        let is_new = c.session.index() == table.len();
        if is_new {
            table.push(Session {
                key: c.key,
                user: c.user,
                stp_group: c.stp_group,
                cancel_on_disconnect: false,
                open: false,
                client_seq: 0,
                epoch: Sequence::ZERO,
                last_number: 0,
                open_orders: 0,
                cancel_all_at_ns: 0,
                unsettled: Unsettled::default(),
            });
            self.awaiting.add_session();
            self.sessions.insert(c.key, c.session);
            self.order_lists.add_session(c.user);
            self.tables.users[c.user.index()].sessions += 1;
        }
        let row = &mut table[c.session.index()];
        assert!(
            row.key == c.key && row.user == c.user,
            "a session keeps its key"
        );
        let group_before = core::mem::replace(&mut row.stp_group, c.stp_group);
        row.cancel_on_disconnect = c.cancel_on_disconnect;
        row.open = true;
        row.epoch = sequence;
        if !is_new {
            self.release_group(group_before);
        }
    }

    /// Clears the key and keeps the row. Its index is not reused, because the journal has the old
    /// session's messages under that index. Its group is free for others, although the row names
    /// it.
    fn forget_session(&mut self, session: SessionIx) {
        let row = &mut self.tables.sessions[session.index()];
        assert!(
            !row.open && row.open_orders == 0 && !row.unsettled.any(),
            "a forgotten session has nothing to report"
        );
        let (key, user) = (core::mem::replace(&mut row.key, Id128::NONE), row.user);
        let group = row.stp_group;
        self.sessions.remove(&key);
        self.release_group(group);
        self.order_lists.forget_session(user, session);
        self.tables.users[user.index()].sessions -= 1;
    }

    /// Counts a session or an open order of the group. An explicit group belongs to the first user
    /// who chose it, as long as a session or an open order has it.
    #[inline]
    pub(crate) fn note_group(&mut self, group: StpGroup, user: UserIx) {
        if group.is_explicit() {
            self.note_explicit_group(group, user);
        }
    }

    #[cold]
    fn note_explicit_group(&mut self, group: StpGroup, user: UserIx) {
        let unused = GroupUse {
            owner: user,
            count: 0,
        };
        self.groups.entry(group).or_insert(unused).count += 1;
    }

    /// Ends a count of [`Admission::note_group`].
    #[inline]
    pub(crate) fn release_group(&mut self, group: StpGroup) {
        if group.is_explicit() {
            self.release_explicit_group(group);
        }
    }

    #[cold]
    fn release_explicit_group(&mut self, group: StpGroup) {
        let row = self.groups.get_mut(&group);
        let row = row.expect("a group in use has a row");
        row.count -= 1;
        if row.count == 0 {
            self.groups.remove(&group);
        }
    }

    fn advance_session(&mut self, session: SessionIx, client_seq: u64) {
        let row = &mut self.tables.sessions[session.index()];
        assert!(
            client_seq > row.client_seq,
            "client sequence strictly increases"
        );
        row.client_seq = client_seq;
    }

    fn fund(&mut self, c: &Fund) {
        if c.hold.index() == self.tables.holds.len() {
            self.tables.holds.push(HoldBalance {
                hold_id: c.hold_id,
                kind: c.kind,
                user: c.user,
                asset: c.asset,
                undrawn: Minor::ZERO,
                reserved: Minor::ZERO,
                open_orders: 0,
                funding_seq: 0,
                closed: false,
            });
            self.holds.insert(c.hold_id, c.hold);
            if c.kind == HoldKind::Trading {
                let before = self.default_holds.insert(c.user, c.asset, c.hold);
                assert!(
                    before.is_none(),
                    "one trading hold per sub-account and node"
                );
            }
        }
        let balance = &mut self.tables.holds[c.hold.index()];
        assert_eq!(balance.hold_id, c.hold_id, "a hold keeps its ledger hold");
        if c.funding_seq > balance.funding_seq {
            balance.funding_seq = c.funding_seq;
            balance.undrawn += c.amount_minor;
        }
    }

    fn defund(&mut self, c: &Defund) {
        let balance = &mut self.tables.holds[c.hold.index()];
        if c.funding_seq > balance.funding_seq {
            balance.funding_seq = c.funding_seq;
            draw_undrawn(balance, c.amount_minor);
        }
    }

    fn close_hold(&mut self, c: &CloseHold) {
        let balance = &mut self.tables.holds[c.hold.index()];
        if c.funding_seq <= balance.funding_seq {
            return;
        }
        assert_eq!(balance.open_orders, 0, "a hold with open orders stays");
        assert!(balance.reserved.is_zero());
        balance.funding_seq = c.funding_seq;
        balance.undrawn = Minor::ZERO;
        balance.closed = true;
        if balance.kind == HoldKind::Trading {
            self.default_holds.remove(balance.user, balance.asset);
        }
    }

    fn open_order(&mut self, c: &New, envelope: &Envelope) {
        let budget = self.order_budget(c);
        self.slots.take(c.handle.slot);
        let place = c.handle.slot as usize;
        if self.tables.slots.len() <= place {
            let empty = Slot {
                generation: 0,
                order: None,
            };
            self.tables.slots.resize(place + 1, empty);
        }
        let slot = &mut self.tables.slots[place];
        assert!(
            slot.order.is_none() && slot.generation < c.handle.generation,
            "a slot serves one order at a time"
        );
        slot.generation = c.handle.generation;
        slot.order = Some(OpenOrder {
            handle: c.handle,
            sequence: envelope.sequence,
            time_ns: envelope.time_ns,
            instrument: c.instrument,
            user: c.user,
            session: c.session,
            stp_group: c.stp_group,
            hold: c.hold,
            fee_rate: c.fee_rate,
            side: c.side,
            is_market: c.order_type == types::OrderType::Market,
            client_order_id: c.client_order_id,
            price: c.price,
            open: c.quantity,
            quantity: c.quantity,
            fill_totals: types::FillTotals::default(),
            reserved: c.draw,
            budget,
            amends_pending: 0,
            price_worst: c.price,
            quantity_worst: c.quantity,
        });
        let balance = &mut self.tables.holds[c.hold.index()];
        draw_undrawn(balance, c.draw.total());
        balance.reserved += c.draw.total();
        balance.open_orders += 1;
        self.tables.instruments[c.instrument.index()].open_orders += 1;
        self.tables.users[c.user.index()].open_orders += 1;
        self.order_lists.insert(c.user, c.session, c.handle.slot);
        self.counts.add(c.user, c.instrument);
        self.note_group(c.stp_group, c.user);
        if let Some(session) = self.tables.sessions.get_mut(c.session.index()) {
            session.open_orders += 1;
        }
        self.charge_budget(c.user, c.budget_minor);
        if c.client_order_id != 0 {
            self.client_ids
                .insert(c.user, c.client_order_id, c.handle.slot);
        }
    }

    /// Draws the amount that an amend may need. In a replay the order may be closed already,
    /// because its events come first: the growth would be drawn and returned at once.
    fn draw_growth(&mut self, c: &Amend) {
        self.charge_amend(c);
        let place = c.handle.slot as usize;
        let order = self.tables.slots[place]
            .order
            .as_mut()
            .filter(|order| order.handle == c.handle);
        let Some(order) = order else { return };
        (order.price_worst, order.quantity_worst) = worst(order, c.price, c.quantity);
        order.amends_pending += 1;
        order.reserved.main += c.draw.main;
        order.reserved.fee += c.draw.fee;
        let balance = &mut self.tables.holds[order.hold.index()];
        draw_undrawn(balance, c.draw.total());
        balance.reserved += c.draw.total();
    }

    fn remember_key(&mut self, envelope: &Envelope, key: Id128, request: RequestKind) {
        let handle = match &envelope.command {
            Command::New(c) => c.handle,
            Command::Cancel(c) => c.handle,
            Command::Amend(c) => c.handle,
            Command::CancelSlice(c) => {
                // The answer to the call counts the orders of all slices.
                if c.through == SweepPosition::END
                    && let Some(seen) = self.keys.get_mut(&key)
                {
                    seen.sequence = envelope.sequence;
                }
                return;
            }
            // A refusal has no effect: a retry is checked again.
            Command::Refused(_) => return,
            // Every other command that has a key is remembered.
            _ => Handle::NONE,
        };
        let seen = KeyedCall {
            request,
            sequence: envelope.sequence,
            time_ns: envelope.time_ns,
            handle,
        };
        self.insert_key(key, seen);
    }

    pub(crate) fn insert_key(&mut self, key: Id128, seen: KeyedCall) {
        self.keys.insert(key, seen);
        self.key_queue.push_back((seen.time_ns, key));
    }

    fn forget_keys(&mut self, now_ns: u64) {
        while let Some((time_ns, key)) = self.key_queue.front().copied() {
            if now_ns < time_ns + KEY_LIFETIME_NS {
                return;
            }
            self.key_queue.pop_front();
            self.keys.remove(&key);
        }
    }

    pub(crate) fn hold_mut(&mut self, hold: HoldIx) -> &mut HoldBalance {
        &mut self.tables.holds[hold.index()]
    }
}

/// Deducts from a hold's undrawn money. Admission has checked that there is enough.
fn draw_undrawn(balance: &mut HoldBalance, amount: Minor) {
    assert!(
        !balance.closed || amount.is_zero(),
        "a closed hold has no money to take"
    );
    balance.undrawn -= amount;
    assert!(
        !balance.undrawn.is_negative(),
        "a hold's undrawn money covers a draw"
    );
}
