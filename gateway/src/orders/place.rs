//! PlaceOrder: the user's trading hold where it covers the order, else a hold of the order's own.
//!
//! Admission decides: whether the call is a repeat, whether a trading hold covers the order, and the
//! price that a market order may come to. The history is asked first only for the answer to a repeat,
//! which admission forgets after a day (D50).

use std::sync::Arc;

use admission::{Known, NewRequest, Reject, Request};
use replica::State;
use rpc::Context;
use sequencer::{NotTaken, Record};
use service_clients::ledger::NewHold;
use tonic::Status;
use types::{
    Done, HoldIx, Id128, InstrumentSpec, Minor, PoolKind, RejectReason, Side, Ticks, derived,
    order_uuid, reserve,
};

use super::{Answered, find, shown};
use crate::funding;
use crate::market::{Asset, Market, SOURCE};
use crate::projection::rows::OrderRow;
use crate::refusal;

/// Reason text of a hold of an order's own. The order's number is not known before the journal has
/// it; the holds that settlement splits out of it name the order.
pub const ORDER_REASON: &str = "Order of request";

/// A PlaceOrder on its way. The user is the context's.
struct Placing<'a> {
    market: &'a Arc<Market>,
    context: &'a Context,
    spec: InstrumentSpec,
    request: NewRequest,
}

/// What became of a request to enter.
enum Asked {
    Entered(Record),
    /// The call was answered before, says admission.
    Repeated(Reject),
    /// The trading hold does not cover it: the order may still have a hold of its own.
    NotCovered,
}

/// What came of making an order's own hold.
enum Made {
    /// With what it has of the asset.
    Held(HoldIx, Minor),
    /// The first call of this key has used it up.
    Ended,
    /// There is not that much.
    Short,
}

/// PlaceOrder. `request` lacks the user, the key and the client order id's number, which are of the
/// context and of `client_order_id` (empty for none).
pub async fn place(
    market: &Arc<Market>,
    context: &Context,
    spec: InstrumentSpec,
    client_order_id: &str,
    mut request: NewRequest,
) -> Result<Answered<OrderRow>, Status> {
    let user_id = &context.user_id;
    let key_hash = derived::key_hash("PlaceOrder", user_id, &context.idempotency_key);
    if let Some(answer) = market.answered(key_hash).await? {
        return find(market, &answer.order_id).await.map(Answered::before);
    }
    market.identity.check_may_trade(context, user_id).await?;
    request.user = market.bind_user(user_id).await?;
    request.key_hash = key_hash;
    if !client_order_id.is_empty() {
        request.client_order_id = derived::client_order_number(client_order_id);
    }
    let client_order = (user_id.as_str(), request.client_order_id, client_order_id);
    let client_order = (!client_order_id.is_empty()).then_some(client_order);
    market.note_request(context, key_hash, client_order).await?;
    let mut placing = Placing {
        market,
        context,
        spec,
        request,
    };
    let asked = match placing.ask().await? {
        Asked::NotCovered => placing.ask_with_own_hold().await?,
        asked => asked,
    };
    placing.answer(asked).await
}

impl Placing<'_> {
    /// Asks admission, and identity where the budget of the day does not cover the order.
    async fn ask(&mut self) -> Result<Asked, Status> {
        loop {
            let reject = match self.market.ask(Request::New(self.request)).await {
                Ok(record) => return Ok(Asked::Entered(record)),
                Err(NotTaken::Refused(reject)) => reject,
                Err(error) => return Err(refusal::not_taken(&error)),
            };
            match (reject.reason, reject.known) {
                (RejectReason::LimitExceeded, Known::Budget { needed, .. })
                    if !self.request.limit_checked =>
                {
                    self.check_limit(needed).await?;
                }
                (RejectReason::DuplicateRequest, _) => return Ok(Asked::Repeated(reject)),
                (RejectReason::InsufficientBalance | RejectReason::NoTradingHold, _)
                    if self.request.pool.is_none() =>
                {
                    return Ok(Asked::NotCovered);
                }
                // Its hold was closed by the sweeper while this call was on its way.
                (RejectReason::UnknownHold, _) => return Err(refusal::request_expired()),
                _ => return Err(refusal::refused(&reject)),
            }
        }
    }

    /// Asks identity for this one order: admission does not count it then.
    async fn check_limit(&mut self, notional: Minor) -> Result<(), Status> {
        let quantity = self.spec.quantity(self.request.quantity);
        let (identity, user_id) = (&self.market.identity, &self.context.user_id);
        identity
            .check_trading(self.context, user_id, quantity, notional)
            .await?;
        self.request.limit_checked = true;
        Ok(())
    }

    /// Makes the order's own hold and enters the order with it. The hold of an order that is refused
    /// is given back; where the same call may be tried again it stays for that, and the sweeper gives
    /// it back when nobody does (`design.md` 4).
    async fn ask_with_own_hold(&mut self) -> Result<Asked, Status> {
        // The hold would lock money for an order that cannot enter: the journal has no room, or those
        // who follow it are behind.
        if self.market.commit.stalled().is_some() {
            return Err(refusal::not_taken(&NotTaken::Busy));
        }
        if let Some(reason) = self.market.port.stage().reason() {
            return Err(refusal::refused(&reason.into()));
        }
        let (near, far) = self.prices().await?;
        let lowest = self.spec.band_low;
        if !self.request.limit_checked {
            let price = near.or(far).unwrap_or(lowest);
            let notional = self.spec.terms.value(price, self.request.quantity);
            self.check_limit(notional.ok_or_else(overflow)?).await?;
        }
        let Some(pool) = self.own_hold(near.unwrap_or(lowest), far).await? else {
            // The first call of this key has used its hold up: its answer is on the way.
            self.market.state(|_| ()).await?;
            return Ok(Asked::Repeated(RejectReason::DuplicateRequest.into()));
        };
        self.request.pool = Some(pool);
        let asked = self.ask().await;
        if let Err(status) = &asked
            && !is_retryable(status)
            && let Err(status) = funding::close_idle(self.market, pool).await
        {
            // The sweeper closes it later.
            tracing::warn!(%status, pool = pool.get(), "the hold of a refused order stays open for now");
        }
        asked
    }

    /// What the order's own hold is sized by: `near`, or first `far`, where that is another price.
    ///
    /// Admission decides what a market order without a price may come to, so its hold covers the far
    /// limit of the band; what the order does not need goes back when it ends, in the same command.
    /// Who has not that much money, or trades without a band, pays for the replica's best offer plus
    /// collar, which the order carries then (`design.md` 6). Without an offer he pays next to nothing, and
    /// the order ends `NO_LIQUIDITY` (T19).
    async fn prices(&self) -> Result<(Option<Ticks>, Option<Ticks>), Status> {
        let (spec, side) = (&self.spec, self.request.side);
        if let Some(price) = self.request.price {
            return Ok((Some(price), None));
        }
        let quote = |state: &State| state.core().admission().quote(spec.ix);
        let best = self.market.look(quote).await?.opposite(side);
        let near = match (side, best) {
            (Side::Buy, None) => None,
            (_, best) => spec.protection_price(side, best),
        };
        let is_wide = side == Side::Buy && spec.has_band();
        let far = (is_wide && self.need(spec.band_high).is_some()).then_some(spec.band_high);
        Ok((near, far))
    }

    /// What the order reserves at a price; `None` past 64 bits.
    fn need(&self, price: Ticks) -> Option<Minor> {
        let (spec, request) = (&self.spec, &self.request);
        let (side, quantity) = (request.side, request.quantity);
        let done = Done::default();
        let need = reserve(&spec.terms, side, price, quantity, done, spec.fee_rate);
        need.ok().map(|need| need.total())
    }

    /// A hold of size one; `None` when it has ended already.
    async fn own_hold(
        &mut self,
        near: Ticks,
        far: Option<Ticks>,
    ) -> Result<Option<HoldIx>, Status> {
        let mut made = match far {
            Some(far) => self.hold_of(far, false).await?,
            None => Made::Short,
        };
        if matches!(made, Made::Short) {
            made = self.hold_of(near, true).await?;
        }
        let Made::Held(pool, amount) = made else {
            return Ok(None);
        };
        if self.request.side == Side::Buy && self.request.price.is_none() {
            self.request.price = self.highest_price(amount);
        }
        Ok(Some(pool))
    }

    /// The highest price that `amount` pays for, as far as it has to be told: the hold may be one of an
    /// earlier try of this call. `None` where the far limit of the band is paid for.
    fn highest_price(&self, amount: Minor) -> Option<Ticks> {
        let pays = |price| self.need(Ticks(price)).is_some_and(|need| need <= amount);
        let (mut low, mut high) = (self.spec.band_low.0, self.spec.band_high.0);
        if pays(high) {
            return None;
        }
        while low < high {
            let middle = low + (high - low + 1) / 2;
            match pays(middle) {
                true => low = middle,
                false => high = middle - 1,
            }
        }
        Some(Ticks(low))
    }

    /// Made in the ledger and then journalled. With `covers` what available money lacks comes out of the
    /// user's trading hold, and `Insufficient balance` is an error.
    async fn hold_of(&self, price: Ticks, covers: bool) -> Result<Made, Status> {
        let (market, context, request) = (self.market, self.context, &self.request);
        let user_id = &context.user_id;
        let asset = match request.side {
            Side::Buy => Asset::MONEY,
            Side::Sell => Asset::units(self.spec),
        };
        let need = self.need(price).ok_or_else(overflow)?;
        let subaccount_id = asset.subaccount(user_id);
        let new = NewHold {
            hold_id: derived::dedicated_hold(user_id, &context.idempotency_key),
            subaccount_id: &subaccount_id,
            amount: asset.amount(need),
            reason: &format!("{ORDER_REASON} {}", context.idempotency_key),
            owner: SOURCE,
            destination: None,
        };
        let _turn = market.funding_turn(request.user).await;
        if covers {
            funding::cover(market, context, request.user, user_id, &asset, &new).await?;
        }
        let hold = match market.ledger.create_hold(context, new).await {
            Err(error) if funding::is_insufficient(&error) => {
                if !covers {
                    return Ok(Made::Short);
                }
                return Err(funding::short(market, context, user_id, &asset, need, None).await);
            }
            other => other?,
        };
        // The ledger has the hold, the journal does not know of it.
        service_kit::failpoint::reach("market.hold_placed");
        if !hold.is_active() {
            return Ok(Made::Ended);
        }
        let amount = asset.minor(hold.amount)?;
        // The key is the order's.
        let (kind, key_hash) = (PoolKind::Order, Id128::NONE);
        let pool = funding::bring_up(market, request.user, &asset, kind, &hold, key_hash).await?;
        Ok(Made::Held(pool, amount))
    }

    async fn answer(&self, asked: Asked) -> Result<Answered<OrderRow>, Status> {
        let market = self.market;
        match asked {
            Asked::Entered(record) => {
                let envelope = &record.command;
                let id = order_uuid(envelope.time_ns, market.node, envelope.sequence);
                let row = shown(market, &record, &id.to_string()).await?;
                Ok(Answered::now(row))
            }
            Asked::Repeated(reject) => {
                let answer = market.answered_by(&reject, self.request.key_hash).await?;
                let answer = answer.ok_or_else(refusal::request_expired)?;
                find(market, &answer.order_id).await.map(Answered::before)
            }
            Asked::NotCovered => {
                unreachable!("an order with a hold of its own is covered or refused")
            }
        }
    }
}

fn is_retryable(status: &Status) -> bool {
    matches!(
        status.code(),
        tonic::Code::ResourceExhausted | tonic::Code::Unavailable
    )
}

fn overflow() -> Status {
    refusal::refused(&RejectReason::AmountOverflow.into())
}
