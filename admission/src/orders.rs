//! Checks of client requests, in the order of specification 4.3: form, user, budget, money.
//!
//! Read-only. Other components make the remaining checks of 4.3.

use types::command::{
    Amend, CANCEL_ALL_AFTER_MAX_S, Cancel, CancelAllAfter, MassCancel, MassScope, New,
    SweepPosition,
};
use types::{
    AssetIx, Command, FillTotals, Handle, HoldIx, HoldKind, Id128, InstrumentSpec, Lots, Minor,
    OrderType, RejectReason, Reserve, SessionIx, Side, Ticks, TimeInForce, UserIx, reserve,
};

use crate::admission::{Admission, KEY_LIFETIME_NS};
use crate::request::{
    AmendRequest, CancelAllAfterRequest, CancelRequest, MassCancelRequest, NewRequest, OrderRef,
    Reject, RejectDetails,
};
use crate::state::{HoldBalance, OpenOrder};

/// A user with fewer open orders may take any free slot (`design.md` 7).
const FEW_ORDERS: u32 = 1_000;
/// A price that is not positive or above the maximum, which is the limit of the refusal.
const PRICE_TICK: Reject = Reject::with(
    RejectReason::PriceTick,
    RejectDetails::Max(Ticks::ORDER_MAX.0.unsigned_abs()),
);
/// A quantity that is zero or above the maximum, which is the limit of the refusal.
const QUANTITY_LOT: Reject = Reject::with(
    RejectReason::QuantityLot,
    RejectDetails::Max(Lots::ORDER_MAX.0),
);

impl Admission {
    /// Writes the command in place: a copy right after its fields are written would stall.
    pub(crate) fn admit_new(
        &self,
        r: &NewRequest,
        now_ns: u64,
        place: &mut Command,
    ) -> Result<(), Reject> {
        self.check_session(r.session, r.user, r.client_seq)?;
        self.check_key(r.key_hash, now_ns)?;
        let spec = self
            .spec(r.instrument)
            .ok_or(RejectReason::UnknownInstrument)?;
        check_form(r, now_ns)?;
        self.check_user(r)?;
        if let Some(reason) = self.refusing() {
            return Err(reason.into());
        }
        self.check_client_order_id(r.user, r.client_order_id)?;
        let price = self.effective_price(spec, r)?;
        // Without a price the order spends nothing and the book ends it NO_LIQUIDITY (T19).
        let spends = price.is_some();
        let price = price.unwrap_or(match r.side {
            Side::Buy => Ticks::ZERO,
            Side::Sell => Ticks::MAX,
        });
        let (draw, value) = if spends {
            let draw = reserve(
                &spec.terms,
                r.side,
                price,
                r.quantity,
                FillTotals::default(),
                spec.fee_rate,
            )
            .map_err(|_| RejectReason::AmountOverflow)?;
            let value = spec
                .terms
                .value(self.valuation_price(r, price), r.quantity)
                .ok_or(RejectReason::AmountOverflow)?;
            (draw, value)
        } else {
            (Reserve::ZERO, Minor::ZERO)
        };
        self.check_size(&self.tables.users[r.user.index()], r.quantity, value)?;
        let budget_minor = self.check_budget(r.user, value, r.limit_checked, now_ns)?;
        let asset = match r.side {
            Side::Buy => AssetIx::MONEY,
            Side::Sell => AssetIx::units(r.instrument),
        };
        let hold = self.choose_hold(r, asset)?;
        check_undrawn(self.hold_row(hold), draw)?;
        let slot = self.slots.peek().ok_or(RejectReason::TooManyOrders)?;
        let last = self.tables.slots.get(slot as usize);
        let generation = last.map_or(0, |last| last.generation) + 1;
        *place = Command::New(New {
            handle: Handle { slot, generation },
            instrument: r.instrument,
            user: r.user,
            session: r.session,
            stp_group: r.stp_group.unwrap_or_else(|| self.group(r)),
            hold,
            fee_rate: spec.fee_rate,
            side: r.side,
            order_type: r.order_type,
            time_in_force: r.time_in_force,
            post_only: r.post_only,
            stp: r.stp,
            client_order_id: r.client_order_id,
            client_seq: seq(r.session, r.client_seq),
            expire_at_ns: r.expire_at_ns,
            price,
            quantity: r.quantity,
            draw,
            budget_minor,
            key_hash: r.key_hash,
        });
        Ok(())
    }

    /// Checks that the user may order, is within its limits, and leaves the last slots to users
    /// with few orders (`design.md` 7).
    #[inline]
    fn check_user(&self, r: &NewRequest) -> Result<(), Reject> {
        let user = self.user(r.user).ok_or(RejectReason::UnknownUser)?;
        if user.blocks.any() {
            return Err(RejectReason::UserBlocked.into());
        }
        if user.is_kill_switch_on || self.tables.is_kill_switch_on {
            return Err(RejectReason::KillSwitch.into());
        }
        let (open_orders, bounds) = (user.open_orders, self.bounds(user));
        if open_orders >= bounds.per_user {
            let details = RejectDetails::MaxCount(bounds.per_user);
            return Err(Reject::with(RejectReason::UserOrderLimit, details));
        }
        if bounds.per_instrument < u32::MAX
            && self.counts.get(r.user, r.instrument) >= bounds.per_instrument
        {
            let details = RejectDetails::MaxCount(bounds.per_instrument);
            return Err(Reject::with(RejectReason::InstrumentOrderLimit, details));
        }
        if open_orders >= FEW_ORDERS && self.slots.is_scarce() {
            return Err(RejectReason::TooManyOrders.into());
        }
        Ok(())
    }

    /// Limit price, or the protection price of a market order (T19). That is the order's own price,
    /// capped by the far limit of the band, or is derived from the last best price.
    #[inline(always)]
    fn effective_price(
        &self,
        spec: &InstrumentSpec,
        r: &NewRequest,
    ) -> Result<Option<Ticks>, Reject> {
        let given = match r.price {
            Some(price) if !(1..=Ticks::ORDER_MAX.0).contains(&price.0) => {
                return Err(PRICE_TICK);
            }
            given => given,
        };
        match (r.order_type, given) {
            (OrderType::Limit, None) => Err(PRICE_TICK),
            (OrderType::Limit, given) => Ok(given),
            (OrderType::Market, Some(price)) => Ok(Some(match r.side {
                Side::Buy => price.min(spec.band_high),
                Side::Sell => price.max(spec.band_low),
            })),
            (OrderType::Market, None) => {
                let best = self.quote(r.instrument).opposite(r.side);
                Ok(spec.protection_price(r.side, best))
            }
        }
    }

    /// The price at which the order may trade at once: a sell gets the best bid, however low its
    /// own price.
    fn valuation_price(&self, r: &NewRequest, price: Ticks) -> Ticks {
        match (r.side, self.quote(r.instrument).opposite(r.side)) {
            (Side::Sell, Some(bid)) => price.max(bid),
            _ => price,
        }
    }

    fn group(&self, r: &NewRequest) -> types::StpGroup {
        self.session(r.session).map_or_else(
            || types::StpGroup::of_user(r.user),
            |session| session.stp_group,
        )
    }

    #[inline(always)]
    fn choose_hold(&self, r: &NewRequest, asset: AssetIx) -> Result<HoldIx, Reject> {
        let hold = match r.hold {
            Some(hold) => hold,
            None => self
                .default_holds
                .get(r.user, asset)
                .ok_or(RejectReason::NoTradingHold)?,
        };
        let row = self.hold(hold).ok_or(RejectReason::UnknownHold)?;
        if row.closed || row.asset != asset {
            return Err(RejectReason::UnknownHold.into());
        }
        if row.user != r.user {
            return Err(RejectReason::NotOwner.into());
        }
        if row.kind == HoldKind::Order && row.open_orders > 0 {
            // A single-order hold backs one order.
            return Err(Reject::with(
                RejectReason::HoldInUse,
                RejectDetails::Hold(hold),
            ));
        }
        Ok(hold)
    }

    pub(crate) fn admit_cancel(
        &self,
        r: &CancelRequest,
        now_ns: u64,
        place: &mut Command,
    ) -> Result<(), Reject> {
        self.check_session(r.session, r.user, r.client_seq)?;
        self.check_key(r.key_hash, now_ns)?;
        let order = self.find_order(r.order, r.user)?;
        *place = Command::Cancel(Cancel {
            handle: order.handle,
            instrument: order.instrument,
            user: r.user,
            session: r.session,
            reason: r.reason,
            client_seq: seq(r.session, r.client_seq),
            key_hash: r.key_hash,
        });
        Ok(())
    }

    /// The open order that an amend reduces at an unchanged price; `None` for any other amend.
    pub fn reduced_by(&self, r: &AmendRequest) -> Option<Handle> {
        let order = self.find_order(r.order, r.user).ok()?;
        let is_smaller = order.amends_pending == 0
            && r.price.is_none_or(|price| price == order.price)
            && r.quantity.is_some_and(|quantity| quantity < order.quantity);
        is_smaller.then_some(order.handle)
    }

    pub(crate) fn admit_amend(
        &self,
        r: &AmendRequest,
        now_ns: u64,
        place: &mut Command,
    ) -> Result<(), Reject> {
        self.check_session(r.session, r.user, r.client_seq)?;
        self.check_key(r.key_hash, now_ns)?;
        let order = self.find_order(r.order, r.user)?;
        check_amend_form(r, order)?;
        self.check_client_order_id(order.user, r.new_client_order_id)?;
        if self.user(order.user).is_some_and(|user| user.blocks.any()) {
            return Err(RejectReason::UserBlocked.into());
        }
        if self.kill_switch(order.user) || self.kill_switch(UserIx::NONE) {
            return Err(RejectReason::KillSwitch.into());
        }
        let spec = self
            .spec(order.instrument)
            .expect("an open order's instrument is known");
        // Several amends may be in flight. The reserve covers the worst of their outcomes; the rest
        // returns after the last outcome.
        let (price, quantity) = worst(order, r.price, r.quantity);
        let is_no_better = |price: Ticks| {
            order.amends_pending == 0
                && match order.side {
                    Side::Buy => price <= order.price,
                    Side::Sell => price >= order.price,
                }
        };
        let is_harmless = r.price.is_none_or(is_no_better)
            && r.quantity.is_none_or(|quantity| quantity <= order.quantity);
        // A better price may trade, and added quantity counts as a new order.
        if let Some(reason) = self.refusing().filter(|_| !is_harmless) {
            return Err(reason.into());
        }
        let open = quantity - order.filled();
        let target = reserve(
            &spec.terms,
            order.side,
            price,
            open,
            order.fill_totals,
            order.fee_rate,
        )
        .map_err(|_| RejectReason::AmountOverflow)?;
        let draw = order.reserved.growth_to(target);
        let value = |price, quantity| {
            spec.terms
                .value(price, quantity)
                .ok_or(RejectReason::AmountOverflow)
        };
        let user = &self.tables.users[order.user.index()];
        let worst_value = value(price, quantity)?;
        if !is_harmless {
            self.check_size(user, quantity, worst_value)?;
        }
        let before = value(order.price_worst, order.quantity_worst)?;
        let growth = self.budget_growth(order, worst_value, before);
        let budget_minor = self.check_budget(order.user, growth, r.limit_checked, now_ns)?;
        check_undrawn(self.hold_row(order.hold), draw)?;
        *place = Command::Amend(Amend {
            handle: order.handle,
            instrument: order.instrument,
            // The owner, even when an operator amends: the budget is the owner's.
            user: order.user,
            session: r.session,
            client_seq: seq(r.session, r.client_seq),
            new_client_order_id: r.new_client_order_id,
            price: r.price,
            quantity: r.quantity,
            draw,
            budget_minor,
            budget_returns: self.returns_budget(order),
            key_hash: r.key_hash,
        });
        Ok(())
    }

    /// Checks that no open order of the user has the id; 0 is none.
    #[inline]
    fn check_client_order_id(&self, user: UserIx, id: u64) -> Result<(), Reject> {
        if id != 0
            && let Some(open) = self.client_order(user, id)
        {
            let details = RejectDetails::Order(open);
            return Err(Reject::with(RejectReason::DuplicateClientOrderId, details));
        }
        Ok(())
    }

    pub(crate) fn admit_mass_cancel(
        &self,
        r: &MassCancelRequest,
        now_ns: u64,
    ) -> Result<MassCancel, Reject> {
        self.check_session(r.session, r.user, r.client_seq)?;
        self.check_key(r.key_hash, now_ns)?;
        if !r.instrument.is_none() && self.spec(r.instrument).is_none() {
            return Err(RejectReason::UnknownInstrument.into());
        }
        let own = match r.scope {
            MassScope::All => false,
            MassScope::User(user) => user == r.user,
            MassScope::Session(session) => self.session(session).is_some_and(|s| s.user == r.user),
            MassScope::Group(group) => {
                group == types::StpGroup::of_user(r.user) || self.group_owner(group) == Some(r.user)
            }
        };
        if !own && !r.user.is_none() {
            return Err(RejectReason::NotOwner.into());
        }
        Ok(MassCancel {
            scope: r.scope,
            instrument: r.instrument,
            side: r.side,
            reason: r.reason,
            user: r.user,
            session: r.session,
            client_seq: seq(r.session, r.client_seq),
            key_hash: r.key_hash,
            through: SweepPosition::END,
            remaining: 0,
        })
    }

    pub(crate) fn admit_cancel_all_after(
        &self,
        r: &CancelAllAfterRequest,
    ) -> Result<Command, Reject> {
        if r.session.is_none() {
            return Err(RejectReason::UnknownSession.into());
        }
        self.check_session(r.session, r.user, r.client_seq)?;
        if r.timeout_s > CANCEL_ALL_AFTER_MAX_S {
            let details = RejectDetails::MaxCount(CANCEL_ALL_AFTER_MAX_S);
            return Err(Reject::with(RejectReason::Malformed, details));
        }
        Ok(Command::CancelAllAfter(CancelAllAfter {
            user: r.user,
            session: r.session,
            client_seq: r.client_seq,
            timeout_s: r.timeout_s,
        }))
    }

    pub(crate) fn find_order(&self, order: OrderRef, user: UserIx) -> Result<&OpenOrder, Reject> {
        let handle = match order {
            OrderRef::Handle(handle) => handle,
            OrderRef::Client(id) => self
                .client_order(user, id)
                .ok_or(RejectReason::UnknownOrder)?,
        };
        let Some(open) = self.order(handle) else {
            let slot = self.tables.slots.get(handle.slot as usize);
            let was = slot.is_some_and(|s| (1..=s.generation).contains(&handle.generation));
            return Err(if was {
                RejectReason::OrderNotOpen.into()
            } else {
                RejectReason::UnknownOrder.into()
            });
        };
        if !user.is_none() && open.user != user {
            return Err(RejectReason::NotOwner.into());
        }
        Ok(open)
    }

    pub(crate) fn check_session(
        &self,
        session: SessionIx,
        user: UserIx,
        client_seq: u64,
    ) -> Result<(), Reject> {
        if session.is_none() {
            return Ok(());
        }
        let row = self.session(session).ok_or(RejectReason::UnknownSession)?;
        if !row.open {
            return Err(RejectReason::UnknownSession.into());
        }
        if row.user != user {
            return Err(RejectReason::NotOwner.into());
        }
        if client_seq <= row.client_seq {
            let details = RejectDetails::ClientSeq(row.client_seq);
            return Err(Reject::with(RejectReason::AlreadySeen, details));
        }
        Ok(())
    }

    pub(crate) fn check_key(&self, key: Id128, now_ns: u64) -> Result<(), Reject> {
        if key.is_none() {
            return Ok(());
        }
        match self.keys.get(&key) {
            Some(seen) if now_ns < seen.time_ns + KEY_LIFETIME_NS => {
                let details = RejectDetails::Request(*seen);
                Err(Reject::with(RejectReason::DuplicateRequest, details))
            }
            _ => Ok(()),
        }
    }

    fn hold_row(&self, hold: HoldIx) -> &HoldBalance {
        self.hold(hold).expect("hold was found before")
    }
}

/// Checks that depend on no state.
fn check_form(r: &NewRequest, now_ns: u64) -> Result<(), Reject> {
    let rests = r.time_in_force.rests();
    if (r.order_type == OrderType::Market && rests) || (r.post_only && !rests) {
        return Err(RejectReason::InvalidCombination.into());
    }
    if r.quantity.is_zero() || r.quantity > Lots::ORDER_MAX {
        return Err(QUANTITY_LOT);
    }
    if r.time_in_force == TimeInForce::Gtd {
        if r.expire_at_ns <= now_ns {
            return Err(RejectReason::Expired.into());
        }
    } else if r.expire_at_ns != 0 {
        return Err(RejectReason::InvalidCombination.into());
    }
    Ok(())
}

/// Checks an amend against the order.
#[inline]
fn check_amend_form(r: &AmendRequest, order: &OpenOrder) -> Result<(), Reject> {
    let changes_nothing = r.price.is_none() && r.quantity.is_none() && r.new_client_order_id == 0;
    if order.is_market || changes_nothing {
        return Err(RejectReason::InvalidAmend.into());
    }
    if let Some(price) = r.price
        && !(1..=Ticks::ORDER_MAX.0).contains(&price.0)
    {
        return Err(PRICE_TICK);
    }
    match r.quantity {
        Some(quantity) if quantity.is_zero() || quantity > Lots::ORDER_MAX => Err(QUANTITY_LOT),
        Some(quantity) if quantity <= order.filled() => Err(RejectReason::InvalidAmend.into()),
        _ => Ok(()),
    }
}

fn check_undrawn(balance: &HoldBalance, draw: Reserve) -> Result<(), Reject> {
    let enough = draw
        .main
        .checked_add(draw.fee)
        .is_some_and(|total| total <= balance.undrawn);
    if enough {
        return Ok(());
    }
    let details = RejectDetails::Balance {
        undrawn: balance.undrawn,
        main: draw.main,
        fee: draw.fee,
    };
    Err(Reject::with(RejectReason::InsufficientBalance, details))
}

/// Highest price and largest total quantity that the order may reach with one more amend.
pub(crate) fn worst(
    order: &OpenOrder,
    price: Option<Ticks>,
    quantity: Option<Lots>,
) -> (Ticks, Lots) {
    (
        price.map_or(order.price_worst, |p| p.max(order.price_worst)),
        quantity.map_or(order.quantity_worst, |q| q.max(order.quantity_worst)),
    )
}

/// The client sequence to journal: 0 without a session.
fn seq(session: SessionIx, client_seq: u64) -> u64 {
    if session.is_none() { 0 } else { client_seq }
}
