//! Checks of all requests that are not client orders: binding, sessions, money, blocks, budgets.

use types::command::{
    BindUser, BlockCause, BlockUser, Bust, CloseHold, CloseSession, Command, Defund, ExpireOrders,
    ForgetSession, Fund, OpenSession, SetInstrument, SetKillSwitch, SetPhase, Settled,
    SweepPosition, TradeParty, UnblockUser,
};
use types::{
    HoldIx, HoldKind, Id128, InstrumentIx, InstrumentSpec, Minor, Phase, RejectReason, Sequence,
    SessionIx, StpGroup, UserId, UserIx,
};

use crate::admission::Admission;
use crate::request::{FundRequest, Reject, RejectDetails, Request, SessionRequest};
use crate::state::HoldBalance;

/// Maximum orders that an expiry command cancels per book. The others have their own commands, with
/// the requests of other members between them.
const EXPIRED_MAX: u32 = 256;

fn expire_orders(instrument: InstrumentIx) -> Command {
    Command::ExpireOrders(ExpireOrders {
        instrument,
        orders_max: EXPIRED_MAX,
    })
}

impl Admission {
    pub(crate) fn admit_control(&self, request: &Request, now_ns: u64) -> Result<Command, Reject> {
        self.check_key(request.key_hash(), now_ns)?;
        match request {
            Request::BindUser(id) => self.admit_user(id),
            Request::SetInstrument(spec) => self.admit_instrument(spec),
            Request::SetPhase {
                instrument,
                phase,
                cancel_orders,
                lifts_halt,
                key_hash,
            } => self.admit_phase(
                SetPhase {
                    instrument: *instrument,
                    phase: *phase,
                    cancel_orders: *cancel_orders,
                    key_hash: *key_hash,
                },
                *lifts_halt,
            ),
            Request::OpenSession(r) => self.admit_session(r),
            Request::CloseSession {
                session,
                epoch,
                keep_orders,
            } => self.admit_close(*session, *epoch, *keep_orders),
            Request::ForgetSession { session, epoch } => self.admit_forget(*session, *epoch),
            Request::Fund(r) => self.admit_fund(r),
            Request::Defund {
                hold,
                amount_minor,
                funding_seq,
                key_hash,
            } => self.admit_defund(Defund {
                hold: *hold,
                amount_minor: *amount_minor,
                funding_seq: *funding_seq,
                key_hash: *key_hash,
            }),
            Request::CloseHold {
                hold,
                funding_seq,
                key_hash,
            } => self.admit_close_hold(CloseHold {
                hold: *hold,
                funding_seq: *funding_seq,
                key_hash: *key_hash,
            }),
            Request::BlockUser { user, cause } => self.admit_block(*user, *cause, true),
            Request::UnblockUser { user, cause } => self.admit_block(*user, *cause, false),
            Request::Settled {
                posted,
                finalized,
                trades_final,
            } => self.admit_settled(*posted, *finalized, *trades_final),
            Request::Bust(bust) => self.admit_bust(bust),
            Request::SetBudget(set) => self.admit_budget(*set),
            Request::ExpireOrders(instrument) => Ok(expire_orders(*instrument)),
            Request::SetKillSwitch {
                user,
                is_engaged,
                key_hash,
            } => self.admit_kill_switch(*user, *is_engaged, *key_hash),
            Request::SuspectClock { .. } | Request::ConfirmClock { .. } => {
                self.admit_clock(request, now_ns)
            }
            Request::SetOrderBounds(bounds) => self.admit_bounds(bounds),
            Request::SetMemberGroup(change) => self.admit_group(change),
            _ => unreachable!("client requests are checked in `orders.rs`"),
        }
    }

    fn admit_user(&self, id: &UserId) -> Result<Command, Reject> {
        match self.users.get(id) {
            Some(user) => Err(duplicate_request(RejectDetails::User(*user))),
            None => Ok(Command::BindUser(BindUser {
                user: UserIx(self.tables.users.len() as u32),
                id: *id,
            })),
        }
    }

    fn admit_close_hold(&self, close: CloseHold) -> Result<Command, Reject> {
        let balance = self.fundable(close.hold, close.funding_seq)?;
        if balance.open_orders > 0 {
            let details = RejectDetails::Hold(close.hold);
            return Err(Reject::with(RejectReason::HoldInUse, details));
        }
        Ok(Command::CloseHold(close))
    }

    fn admit_defund(&self, c: Defund) -> Result<Command, Reject> {
        let balance = self.fundable(c.hold, c.funding_seq)?;
        if c.amount_minor.0 <= 0 {
            return Err(RejectReason::Malformed.into());
        }
        if c.amount_minor > balance.undrawn {
            let details = RejectDetails::Balance {
                undrawn: balance.undrawn,
                main: c.amount_minor,
                fee: Minor::ZERO,
            };
            return Err(Reject::with(RejectReason::HoldInUse, details));
        }
        Ok(Command::Defund(c))
    }

    fn admit_kill_switch(
        &self,
        user: UserIx,
        is_engaged: bool,
        key_hash: Id128,
    ) -> Result<Command, Reject> {
        if !user.is_none() && self.user(user).is_none() {
            return Err(RejectReason::UnknownUser.into());
        }
        // Engaging it again would end nothing: no order has entered since.
        if self.kill_switch(user) == is_engaged {
            return Err(duplicate_request(RejectDetails::User(user)));
        }
        Ok(Command::SetKillSwitch(SetKillSwitch {
            user,
            is_engaged,
            key_hash,
            through: SweepPosition::END,
        }))
    }

    /// A new instrument gets the next index. A known one keeps its steps and decimals, and its
    /// phase, which only `SetPhase` changes.
    fn admit_instrument(&self, spec: &InstrumentSpec) -> Result<Command, Reject> {
        let mut spec = *spec;
        match self.instruments.get(&spec.id) {
            Some(ix) => {
                let known = &self.tables.instruments[ix.index()].spec;
                spec.ix = *ix;
                spec.phase = known.phase;
                if spec == *known {
                    return Err(duplicate_request(RejectDetails::Instrument(*ix)));
                }
                if !spec.same_steps(known) || spec.decimals != known.decimals {
                    return Err(Reject::with(
                        RejectReason::InvalidCombination,
                        RejectDetails::Instrument(*ix),
                    ));
                }
            }
            None => spec.ix = InstrumentIx(self.tables.instruments.len() as u32),
        }
        Ok(Command::SetInstrument(SetInstrument { spec }))
    }

    fn admit_phase(&self, c: SetPhase, lifts_halt: bool) -> Result<Command, Reject> {
        let spec = self
            .spec(c.instrument)
            .ok_or(RejectReason::UnknownInstrument)?;
        if spec.phase == c.phase && !c.cancel_orders {
            return Err(duplicate_request(RejectDetails::Instrument(c.instrument)));
        }
        match spec.phase {
            Phase::Matured => Err(RejectReason::InstrumentMatured.into()),
            // Any caller who may set phases may halt; lifting a halt takes `lifts_halt`
            // (`design.md` 10).
            Phase::Halt if !lifts_halt && !matches!(c.phase, Phase::Halt | Phase::Matured) => {
                Err(RejectReason::InstrumentHalted.into())
            }
            _ => Ok(Command::SetPhase(c)),
        }
    }

    fn admit_session(&self, r: &SessionRequest) -> Result<Command, Reject> {
        if r.key.is_none() {
            return Err(RejectReason::Malformed.into());
        }
        if self.user(r.user).is_none() {
            return Err(RejectReason::UnknownUser.into());
        }
        let session = match self.sessions.get(&r.key) {
            Some(session) if self.tables.sessions[session.index()].user != r.user => {
                return Err(RejectReason::NotOwner.into());
            }
            Some(session) => *session,
            None => {
                let user = &self.tables.users[r.user.index()];
                let most = self.bounds(user).sessions;
                if user.sessions >= most {
                    let details = RejectDetails::MaxCount(most);
                    return Err(Reject::with(RejectReason::SessionLimit, details));
                }
                SessionIx(self.tables.sessions.len() as u32)
            }
        };
        // An explicit group belongs to its first user: no other user may cancel orders through it.
        if let Some(group) = r.stp_group
            && self.group_owner(group).is_some_and(|owner| owner != r.user)
        {
            return Err(RejectReason::NotOwner.into());
        }
        Ok(Command::OpenSession(OpenSession {
            session,
            user: r.user,
            stp_group: r.stp_group.unwrap_or(StpGroup::of_user(r.user)),
            cancel_on_disconnect: r.cancel_on_disconnect,
            key: r.key,
        }))
    }

    fn admit_close(
        &self,
        session: SessionIx,
        epoch: Option<Sequence>,
        keep_orders: bool,
    ) -> Result<Command, Reject> {
        match self.session(session) {
            Some(row) if row.open && epoch.is_none_or(|epoch| epoch == row.epoch) => {
                Ok(Command::CloseSession(CloseSession {
                    session,
                    keep_orders,
                }))
            }
            _ => Err(RejectReason::UnknownSession.into()),
        }
    }

    /// Admits only a session that can get no more messages: closed, all orders ended and settled,
    /// no timer.
    fn admit_forget(&self, session: SessionIx, epoch: Sequence) -> Result<Command, Reject> {
        let row = self.session(session).filter(|row| !row.key.is_none());
        let row = row.ok_or(RejectReason::UnknownSession)?;
        let is_idle = !row.open
            && row.epoch == epoch
            && row.open_orders == 0
            && row.cancel_all_at_ns == 0
            && !row.unsettled.any();
        match is_idle {
            true => Ok(Command::ForgetSession(ForgetSession { session })),
            false => Err(RejectReason::InvalidCombination.into()),
        }
    }

    fn admit_fund(&self, r: &FundRequest) -> Result<Command, Reject> {
        let hold = match self.holds.get(&r.hold_id) {
            Some(hold) => {
                let balance = self.fundable(*hold, r.funding_seq)?;
                if balance.user != r.user || balance.asset != r.asset || balance.kind != r.kind {
                    return Err(Reject::with(
                        RejectReason::UnknownHold,
                        RejectDetails::Hold(*hold),
                    ));
                }
                *hold
            }
            None => {
                if self.user(r.user).is_none() {
                    return Err(RejectReason::UnknownUser.into());
                }
                if let Some(instrument) = r.asset.instrument()
                    && self.spec(instrument).is_none()
                {
                    return Err(RejectReason::UnknownInstrument.into());
                }
                let default = self.default_holds.get(r.user, r.asset);
                if r.kind == HoldKind::Trading
                    && let Some(open) = default
                {
                    // One trading hold per (user, sub-account, node): T49.
                    return Err(Reject::with(
                        RejectReason::HoldInUse,
                        RejectDetails::Hold(open),
                    ));
                }
                HoldIx(self.tables.holds.len() as u32)
            }
        };
        if r.amount_minor.0 <= 0 || r.hold_id.is_none() || r.funding_seq == 0 {
            return Err(RejectReason::Malformed.into());
        }
        let held = self
            .hold(hold)
            .map_or(Minor::ZERO, |balance| balance.undrawn + balance.reserved);
        if held.checked_add(r.amount_minor).is_none() {
            return Err(RejectReason::AmountOverflow.into());
        }
        Ok(Command::Fund(Fund {
            hold,
            kind: r.kind,
            user: r.user,
            asset: r.asset,
            amount_minor: r.amount_minor,
            funding_seq: r.funding_seq,
            hold_id: r.hold_id,
            key_hash: r.key_hash,
        }))
    }

    fn admit_block(
        &self,
        user: UserIx,
        cause: BlockCause,
        is_blocked: bool,
    ) -> Result<Command, Reject> {
        let row = self.user(user).ok_or(RejectReason::UnknownUser)?;
        match (row.blocks.has(cause), is_blocked) {
            (false, true) => Ok(Command::BlockUser(BlockUser { user, cause })),
            (true, false) => Ok(Command::UnblockUser(UnblockUser { user, cause })),
            _ => Err(duplicate_request(RejectDetails::User(user))),
        }
    }

    /// Settlement's positions never decrease, even when it resumes earlier after a restart.
    fn admit_settled(
        &self,
        posted: Sequence,
        finalized: Sequence,
        trades_final: u64,
    ) -> Result<Command, Reject> {
        if finalized > posted || posted > self.tables.sequence {
            return Err(RejectReason::Malformed.into());
        }
        let known = &self.tables.settlement;
        if posted <= known.posted
            && finalized <= known.finalized
            && trades_final <= known.trades_final
        {
            return Err(duplicate_request(RejectDetails::None));
        }
        Ok(Command::Settled(Settled {
            posted: posted.max(known.posted),
            finalized: finalized.max(known.finalized),
            trades_final: trades_final.max(known.trades_final),
        }))
    }

    /// Admits one bust per trade, between known sessions.
    fn admit_bust(&self, bust: &Bust) -> Result<Command, Reject> {
        if self.is_bust(bust.trade) {
            return Err(duplicate_request(RejectDetails::None));
        }
        let is_known =
            |party: &TradeParty| party.session.is_none() || self.session(party.session).is_some();
        if bust.trade.is_none() || !is_known(&bust.buy) || !is_known(&bust.sell) {
            return Err(RejectReason::Malformed.into());
        }
        Ok(Command::Bust(*bust))
    }

    /// The hold, if it is open and has not seen this funding number yet.
    fn fundable(&self, hold: HoldIx, funding_seq: u64) -> Result<&HoldBalance, Reject> {
        let balance = self.hold(hold).ok_or(RejectReason::UnknownHold)?;
        if funding_seq <= balance.funding_seq {
            return Err(duplicate_request(RejectDetails::Hold(hold)));
        }
        if balance.closed {
            return Err(RejectReason::UnknownHold.into());
        }
        Ok(balance)
    }
}

/// The refusal of a request that would have no effect.
pub(crate) fn duplicate_request(details: RejectDetails) -> Reject {
    Reject::with(RejectReason::DuplicateRequest, details)
}
