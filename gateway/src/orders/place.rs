//! PlaceOrder: uses the user's trading hold if it covers the order, else a hold of the order's own.
//!
//! Admission decides whether the call is a repeat, whether a trading hold covers the order, and the
//! highest price of a market order. The history is read first because admission knows idempotency
//! keys for a day only (D50).

use std::sync::Arc;

use admission::{NewRequest, Reject, RejectDetails, Request};
use replica::State;
use rpc::Context;
use sequencer::{Record, SubmitError};
use service_clients::ledger::NewHold;
use tonic::Status;
use types::{
    Command, FillTotals, HoldIx, HoldKind, Id128, InstrumentSpec, Minor, RejectReason, Side, Ticks,
    derived, order_uuid, reserve,
};

use super::replica_rows::order_after;
use super::{Answered, find_for_write};
use crate::funding;
use crate::market::{Asset, Market, SOURCE};
use crate::projection::rows::OrderRow;
use crate::refusal;

/// Prefix of the ledger reason of an order's own hold; the idempotency key follows. The order's id
/// is not known before the order is journalled. Holds that settlement splits off name the order.
pub const ORDER_REASON: &str = "Order of request";

/// A PlaceOrder in progress. The user is the context's.
struct Placement<'a> {
    market: &'a Arc<Market>,
    context: &'a Context,
    spec: InstrumentSpec,
    /// As the caller sent it, empty for none.
    client_order_id: &'a str,
    request: NewRequest,
}

/// Outcome of a submitted order.
enum SubmitOutcome {
    Entered(Record),
    /// Admission refused the call as a repeat of an earlier one.
    Repeated(Reject),
    /// The trading hold does not cover the order; a hold of its own may.
    NotCovered,
}

/// Outcome of creating an order's own hold.
enum OwnHold {
    /// The hold and its amount of the asset.
    Held(HoldIx, Minor),
    /// An earlier call with this key created the hold, and it has ended.
    Ended,
    /// The available money does not cover the hold.
    Short,
}

/// PlaceOrder. `request` lacks the user, the key and the number of the client order id; they come
/// from the context and from `client_order_id` (empty for none).
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
        return find_for_write(market, &answer.order_id)
            .await
            .map(Answered::replayed);
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
    let mut placement = Placement {
        market,
        context,
        spec,
        client_order_id,
        request,
    };
    let outcome = match placement.submit().await? {
        SubmitOutcome::NotCovered => placement.submit_with_own_hold().await?,
        outcome => outcome,
    };
    placement.answer(outcome).await
}

impl Placement<'_> {
    /// Submits the order. If the daily budget does not cover it, identity checks it first.
    async fn submit(&mut self) -> Result<SubmitOutcome, Status> {
        loop {
            let reject = match self.market.submit(Request::New(self.request)).await {
                Ok(record) => return Ok(SubmitOutcome::Entered(record)),
                Err(SubmitError::Refused(reject)) => reject,
                Err(error) => return Err(refusal::submit_error(&error)),
            };
            match (reject.reason, reject.details) {
                (RejectReason::LimitExceeded, RejectDetails::Budget { needed, .. })
                    if !self.request.limit_checked =>
                {
                    self.check_limit(needed).await?;
                }
                (RejectReason::DuplicateRequest, _) => return Ok(SubmitOutcome::Repeated(reject)),
                (RejectReason::InsufficientBalance | RejectReason::NoTradingHold, _)
                    if self.request.hold.is_none() =>
                {
                    return Ok(SubmitOutcome::NotCovered);
                }
                // The sweeper closed the hold while this call was in flight.
                (RejectReason::UnknownHold, _) => return Err(refusal::request_expired()),
                _ => return Err(refusal::refused(&reject)),
            }
        }
    }

    /// Lets identity check the order. Admission then does not count it against the budget.
    async fn check_limit(&mut self, notional: Minor) -> Result<(), Status> {
        let quantity = self.spec.quantity(self.request.quantity);
        let (identity, user_id) = (&self.market.identity, &self.context.user_id);
        identity
            .check_trading(self.context, user_id, quantity, notional)
            .await?;
        self.request.limit_checked = true;
        Ok(())
    }

    /// Creates the order's own hold and submits the order with it. Closes the hold if the order is
    /// refused. After a retryable error the hold stays for the retry; without a retry the sweeper
    /// closes it (`design.md` 4).
    async fn submit_with_own_hold(&mut self) -> Result<SubmitOutcome, Status> {
        // Without these checks the hold would block money for an order that cannot enter: the
        // journal has no space, or its followers lag.
        if self.market.commit.stalled().is_some() {
            return Err(refusal::submit_error(&SubmitError::Busy));
        }
        if let Some(reason) = self.market.port.stage().reason() {
            return Err(refusal::refused(&reason.into()));
        }
        let (near, far) = self.prices().await?;
        let lowest = self.spec.band_low;
        if !self.request.limit_checked {
            let price = near.or(far).unwrap_or(lowest);
            let price = self.market.valuation_price(&self.request, price).await?;
            let notional = self.spec.terms.value(price, self.request.quantity);
            self.check_limit(notional.ok_or_else(overflow)?).await?;
        }
        let Some(hold) = self.own_hold(near.unwrap_or(lowest), far).await? else {
            // An earlier call with this key has used the hold. Wait until the replica has its
            // answer.
            self.market.state(|_| ()).await?;
            return Ok(SubmitOutcome::Repeated(
                RejectReason::DuplicateRequest.into(),
            ));
        };
        self.request.hold = Some(hold);
        let outcome = self.submit().await;
        if let Err(status) = &outcome
            && !is_retryable(status)
            && let Err(status) = funding::close_idle(self.market, hold).await
        {
            tracing::warn!(%status, hold_ix = hold.get(), "hold of a refused order not closed: the sweeper retries");
        }
        outcome
    }

    /// Prices for the size of the order's own hold: (`near`, `far`). `far`, if there is one, is
    /// tried first.
    ///
    /// Admission decides the highest price of a market buy. Its hold therefore covers `far`, the
    /// upper limit of the band. What the order does not need is released when it ends, in the same
    /// command. If the user has less money, or the instrument has no band, the hold covers `near`:
    /// the replica's best offer plus collar, which the order then carries as its limit
    /// (`design.md` 6). Without an offer the hold covers the lowest price, and the order ends
    /// `NO_LIQUIDITY` (T19).
    async fn prices(&self) -> Result<(Option<Ticks>, Option<Ticks>), Status> {
        let (spec, side) = (&self.spec, self.request.side);
        if let Some(price) = self.request.price {
            return Ok((Some(price), None));
        }
        let quote = |state: &State| state.core().admission().quote(spec.ix);
        let best = self.market.query(quote).await?.opposite(side);
        let near = match (side, best) {
            (Side::Buy, None) => None,
            (_, best) => spec.protection_price(side, best),
        };
        let is_wide = side == Side::Buy && spec.has_band();
        let far = (is_wide && self.required(spec.band_high).is_some()).then_some(spec.band_high);
        Ok((near, far))
    }

    /// The amount that the order reserves at a price; `None` if it exceeds 64 bits.
    fn required(&self, price: Ticks) -> Option<Minor> {
        let (spec, request) = (&self.spec, &self.request);
        let (side, quantity) = (request.side, request.quantity);
        let fill_totals = FillTotals::default();
        let need = reserve(
            &spec.terms,
            side,
            price,
            quantity,
            fill_totals,
            spec.fee_rate,
        );
        need.ok().map(|need| need.total())
    }

    /// Creates the order's own hold and sets the limit of a market buy. `None` if the hold has
    /// already ended.
    async fn own_hold(
        &mut self,
        near: Ticks,
        far: Option<Ticks>,
    ) -> Result<Option<HoldIx>, Status> {
        let mut own_hold = match far {
            Some(far) => self.create_hold(far, false).await?,
            None => OwnHold::Short,
        };
        if matches!(own_hold, OwnHold::Short) {
            own_hold = self.create_hold(near, true).await?;
        }
        let OwnHold::Held(hold, amount) = own_hold else {
            return Ok(None);
        };
        if self.request.side == Side::Buy && self.request.price.is_none() {
            self.request.price = self.highest_price(amount);
        }
        Ok(Some(hold))
    }

    /// The highest price that `amount` covers; `None` if it covers the upper limit of the band.
    /// Computed from the amount because an earlier attempt of this call may have created the hold.
    fn highest_price(&self, amount: Minor) -> Option<Ticks> {
        let is_covered = |price| {
            self.required(Ticks(price))
                .is_some_and(|need| need <= amount)
        };
        let (mut low, mut high) = (self.spec.band_low.0, self.spec.band_high.0);
        if is_covered(high) {
            return None;
        }
        while low < high {
            let middle = low + (high - low + 1) / 2;
            match is_covered(middle) {
                true => low = middle,
                false => high = middle - 1,
            }
        }
        Some(Ticks(low))
    }

    /// Creates the hold in the ledger, then journals it. With `is_last`, a shortfall of available
    /// money is taken from the user's trading hold, and `Insufficient balance` is an error instead
    /// of [`OwnHold::Short`].
    async fn create_hold(&self, price: Ticks, is_last: bool) -> Result<OwnHold, Status> {
        let (market, context, request) = (self.market, self.context, &self.request);
        let user_id = &context.user_id;
        let asset = match request.side {
            Side::Buy => Asset::MONEY,
            Side::Sell => Asset::units(self.spec),
        };
        let need = self.required(price).ok_or_else(overflow)?;
        let subaccount_id = asset.subaccount(user_id);
        let new = NewHold {
            hold_id: derived::dedicated_hold(user_id, &context.idempotency_key),
            subaccount_id: &subaccount_id,
            amount: asset.amount(need),
            reason: &format!("{ORDER_REASON} {}", context.idempotency_key),
            owner: SOURCE,
            destination: None,
            expires_at_us: None,
        };
        let _lock = market.lock_funding(request.user).await;
        if is_last {
            funding::ensure_covered(market, context, request.user, user_id, &asset, &new).await?;
        }
        let own_id = Some(new.hold_id);
        let checked =
            funding::check_purchases(market, context, user_id, &asset, own_id, need).await;
        if checked.is_err() && !is_last {
            // The hold at the near price is smaller.
            return Ok(OwnHold::Short);
        }
        checked?;
        let hold = match market.ledger.create_hold(context, new).await {
            Err(error) if funding::is_insufficient(&error) => {
                if !is_last {
                    return Ok(OwnHold::Short);
                }
                return Err(funding::insufficient_balance(
                    market, context, user_id, &asset, need, None,
                )
                .await);
            }
            other => other?,
        };
        // The ledger has the hold, the journal does not know it yet.
        service_kit::failpoint::reach("market.hold_placed");
        if !hold.is_active() {
            return Ok(OwnHold::Ended);
        }
        let amount = asset.minor(hold.amount)?;
        // The idempotency key belongs to the order's command, not to this one.
        let (kind, key_hash) = (HoldKind::Order, Id128::NONE);
        let hold =
            funding::sync_funding(market, request.user, &asset, kind, &hold, key_hash).await?;
        Ok(OwnHold::Held(hold, amount))
    }

    async fn answer(&self, outcome: SubmitOutcome) -> Result<Answered<OrderRow>, Status> {
        let market = self.market;
        match outcome {
            SubmitOutcome::Entered(record) => {
                let Command::New(new) = &record.command.command else {
                    unreachable!("the record of a new order is a New command");
                };
                let (sequence, time_ns) = (record.command.sequence, record.command.time_ns);
                market.await_durable(sequence).await?;
                let order_id = order_uuid(time_ns, market.node, sequence).to_string();
                let text = Some(self.client_order_id);
                let order = order_after(market, sequence, new.handle, &order_id, text).await?;
                Ok(Answered::executed(order))
            }
            SubmitOutcome::Repeated(reject) => {
                let answer = market.answered_by(&reject, self.request.key_hash).await?;
                let answer = answer.ok_or_else(refusal::request_expired)?;
                find_for_write(market, &answer.order_id)
                    .await
                    .map(Answered::replayed)
            }
            SubmitOutcome::NotCovered => {
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
