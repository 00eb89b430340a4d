//! Trading holds (T49): opens, resizes and closes holds of money blocked in the ledger for trading.
//!
//! | direction | first | then |
//! |---|---|---|
//! | in | the ledger hold grows | `Fund` is journalled ([`sync_funding`]) |
//! | out | `Defund` or `CloseHold` is journalled | the ledger releases ([`release_to_holder`]) |
//!
//! The ledger releases only after settlement has posted every trade up to that record. After a
//! crash between the two steps, the amounts that ledger and journal have recorded determine the
//! second step. Both steps are idempotent, and the sweeper repeats them.
//!
//! No units of a matured issue enter a hold: its redemption would have to release them. What a hold
//! has can always be taken out.

mod abandoned;
mod purchases;
mod release;

use std::sync::Arc;

use admission::{Admission, FundRequest, HoldBalance, Request};
use replica::State;
use rpc::Context;
use sequencer::SubmitError;
use service_clients::CallError;
use service_clients::ledger::{Hold, HoldChange, NewHold};
use service_kit::failpoint;
use tonic::Status;
use types::RejectReason::{DuplicateRequest, HoldInUse, InstrumentMatured};
use types::{AssetIx, CFA_RUB, Decimal, HoldIx, HoldKind, Id128, Minor, UserIx, derived};
use uuid::Uuid;

pub use abandoned::AbandonedHolds;
pub use purchases::check_purchases;
pub use release::release_to_holder;
use release::{release_when_settled, start_release};

use crate::market::{Asset, Market, SOURCE};
use crate::orders::{Actor, Answered};
use crate::refusal::{self, Shortfall};

/// A trading hold as a caller reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HoldView {
    pub hold_id: Id128,
    pub user_id: String,
    pub instrument_id: String,
    pub subaccount_id: String,
    pub undrawn: Decimal,
    pub drawn: Decimal,
    pub closed: bool,
}

/// Prefix of a trading hold's reason in the ledger; the hold's id follows.
pub const TRADING_REASON: &str = "Trading hold";

/// Opens the trading hold of an asset. Returns the hold if the same call has opened it before.
///
/// # Errors
/// ALREADY_EXISTS if the user has another trading hold for the asset; INSTRUMENT_MATURED for units
/// of a matured issue; the refusal of [`check_purchases`].
pub async fn open(
    market: &Market,
    context: &Context,
    user_id: &str,
    asset: &Asset,
    amount: Minor,
) -> Result<HoldView, Status> {
    let user = market.bind_user(user_id).await?;
    let _lock = market.lock_funding(user).await;
    let new = NewTrading {
        hold_id: derived::trading_hold(user_id, &context.idempotency_key),
        amount,
        key_hash: derived::key_hash("OpenTradingHold", user_id, &context.idempotency_key),
    };
    open_locked(market, context, user, user_id, asset, &new).await
}

/// A trading hold to open.
struct NewTrading {
    hold_id: Id128,
    amount: Minor,
    key_hash: Id128,
}

/// Opens the hold. The caller holds the user's lock.
async fn open_locked(
    market: &Market,
    context: &Context,
    user: UserIx,
    user_id: &str,
    asset: &Asset,
    new: &NewTrading,
) -> Result<HoldView, Status> {
    if let Some((hold, balance)) = market.default_hold(user, asset.ix).await? {
        if balance.hold_id == new.hold_id {
            return view(market, hold).await;
        }
        return Err(rpc::status::already_exists(
            "TRADING_HOLD_EXISTS",
            "Trading hold already exists",
        ));
    }
    check_not_matured(market, asset.ix)?;
    let own_id = Some(new.hold_id);
    check_purchases(market, context, user_id, asset, own_id, new.amount).await?;
    let subaccount_id = asset.subaccount(user_id);
    let wanted = NewHold {
        hold_id: new.hold_id,
        subaccount_id: &subaccount_id,
        amount: asset.amount(new.amount),
        reason: &format!("{TRADING_REASON} {}", new.hold_id),
        owner: SOURCE,
        destination: None,
        expires_at_us: None,
    };
    let hold = match market.ledger.create_hold(context, wanted).await {
        Err(error) if is_insufficient(&error) => {
            return Err(
                insufficient_balance(market, context, user_id, asset, new.amount, None).await,
            );
        }
        other => other?,
    };
    // The ledger has the hold, the journal does not know it yet.
    failpoint::reach("market.trading_hold_opened");
    if !hold.is_active() {
        return Err(refusal::request_expired());
    }
    let kind = HoldKind::Trading;
    let hold = sync_funding(market, user, asset, kind, &hold, new.key_hash).await?;
    view(market, hold).await
}

/// Accepts money, and units of an issue that has not matured as of the replica's position. An issue
/// that matures meanwhile has the units in its holds released by its redemption.
///
/// # Errors
/// FAILED_PRECONDITION `INSTRUMENT_MATURED`.
fn check_not_matured(market: &Market, asset: AssetIx) -> Result<(), Status> {
    match market.asset_of(asset).is_matured() {
        true => Err(refusal::refused(&InstrumentMatured.into())),
        false => Ok(()),
    }
}

/// Attempts to change a hold while concurrent changes interfere.
const FUNDING_TRIES: u32 = 5;

/// Journals a `Fund` for the amount of the ledger hold that the journal has not funded yet. The
/// caller holds the user's lock.
pub async fn sync_funding(
    market: &Market,
    user: UserIx,
    asset: &Asset,
    kind: HoldKind,
    hold: &Hold,
    key_hash: Id128,
) -> Result<HoldIx, Status> {
    let received = asset.minor(hold.amount)?;
    for _ in 0..FUNDING_TRIES {
        let known = market.state(|state| state.hold_of(hold.hold_id)).await?;
        if let Some(market_hold) = known {
            if market_hold.closed {
                return Err(refusal::request_expired());
            }
            if received <= market_hold.funded {
                return Ok(market_hold.hold);
            }
        }
        let (funded, funding_seq) =
            known.map_or((Minor::ZERO, 0), |hold| (hold.funded, hold.funding_seq));
        let request = Request::Fund(FundRequest {
            hold_id: hold.hold_id,
            kind,
            user,
            asset: asset.ix,
            amount_minor: received - funded,
            funding_seq: funding_seq + 1,
            key_hash,
        });
        // Refused if the hold has changed meanwhile. Compute the amount again.
        if let Some(record) = market.submit_unless(request, &[DuplicateRequest]).await? {
            return match record.command.command {
                types::Command::Fund(fund) => Ok(fund.hold),
                _ => unreachable!("Fund is journalled as Fund"),
            };
        }
    }
    Err(refusal::submit_error(&SubmitError::Busy))
}

/// AdjustTradingHold: sets the undrawn amount, once per key.
///
/// # Errors
/// `Hold is in use`: a service would add to the hold. It may only take, and orders may have drawn
/// since it read the hold.
pub async fn adjust(
    market: &Arc<Market>,
    context: &Context,
    actor: Actor,
    hold: HoldIx,
    target: Minor,
    key_hash: Id128,
) -> Result<Answered<HoldView>, Status> {
    let balance = balance_of(market, hold).await?;
    let _lock = market.lock_funding(balance.user).await;
    // The previous holder of the lock may have been the same call. Its command is durable by now.
    market.await_applied(market.commit.position()).await?;
    if market.answered(key_hash).await?.is_some() {
        return view(market, hold).await.map(Answered::replayed);
    }
    if actor == Actor::Staff && target > balance_of(market, hold).await?.undrawn {
        return Err(refusal::hold_in_use());
    }
    let key = context.idempotency_key.clone();
    let view = set_locked(market, context, hold, target, &key, key_hash).await?;
    market.note_answered(key_hash).await?;
    Ok(Answered::executed(view))
}

/// Sets the undrawn amount of a hold to `target`: grows it from available money, or shrinks it. The
/// caller holds the user's lock.
async fn set_locked(
    market: &Arc<Market>,
    context: &Context,
    hold: HoldIx,
    target: Minor,
    key: &str,
    key_hash: Id128,
) -> Result<HoldView, Status> {
    let balance = balance_of(market, hold).await?;
    if balance.closed {
        return Err(refusal::hold_not_found());
    }
    let asset = market.asset_of(balance.asset);
    if target > balance.undrawn {
        let more = target - balance.undrawn;
        grow(market, context, &balance, &asset, more, key, key_hash).await?;
    } else if target < balance.undrawn {
        let request = Request::Defund {
            hold,
            amount_minor: balance.undrawn - target,
            funding_seq: balance.funding_seq + 1,
            key_hash,
        };
        let record = market.submit_durable(request).await?;
        start_release(market, balance.hold_id, record.command.sequence).await;
    }
    view(market, hold).await
}

/// Ensures that available money covers a hold to be created (4.3.3), unless the hold exists. Takes
/// a shortfall from the undrawn amount of the user's trading hold and waits until the ledger has
/// released it. The caller holds the user's lock, so that no other call takes the same money.
///
/// # Errors
/// `Insufficient balance` if the undrawn amount is less than the shortfall.
pub async fn ensure_covered(
    market: &Arc<Market>,
    context: &Context,
    user: UserIx,
    user_id: &str,
    asset: &Asset,
    new: &NewHold<'_>,
) -> Result<(), Status> {
    for _ in 0..FUNDING_TRIES {
        let subaccount = market.ledger.balance(context, new.subaccount_id).await?;
        let available = asset.minor(subaccount.available)?;
        let needed = new.amount.minor;
        if available >= needed {
            return Ok(());
        }
        if market.ledger.hold(context, new.hold_id).await?.is_some() {
            return Ok(());
        }
        let missing = needed - available.or_zero();
        let balance = market.default_hold(user, asset.ix).await?;
        let Some((hold, balance)) = balance.filter(|(_, balance)| balance.undrawn >= missing)
        else {
            let balance = balance.as_ref().map(|(_, balance)| balance);
            return Err(
                insufficient_balance(market, context, user_id, asset, needed, balance).await,
            );
        };
        let request = Request::Defund {
            hold,
            amount_minor: missing,
            funding_seq: balance.funding_seq + 1,
            key_hash: Id128::NONE,
        };
        // Refused if orders have drawn on the hold or it has changed meanwhile. Read again.
        let unless = [DuplicateRequest, HoldInUse];
        if let Some(record) = market.submit_unless(request, &unless).await? {
            release_when_settled(market, balance.hold_id, record.command.sequence).await?;
        }
    }
    Err(refusal::submit_error(&SubmitError::Busy))
}

/// Adds available money to a hold: in the ledger, then in the journal. The caller holds the user's
/// lock.
///
/// # Errors
/// INSTRUMENT_MATURED for units of a matured issue; the refusals of [`check_purchases`] and of the
/// ledger.
pub async fn grow(
    market: &Market,
    context: &Context,
    balance: &HoldBalance,
    asset: &Asset,
    amount: Minor,
    key: &str,
    key_hash: Id128,
) -> Result<(), Status> {
    check_not_matured(market, asset.ix)?;
    let user_id = user_id(market, balance.user);
    check_purchases(market, context, &user_id, asset, None, amount).await?;
    let key = format!("grow:{}:{key}", balance.hold_id);
    let (change, added) = (HoldChange::Grow, asset.amount(amount));
    let grown = market
        .ledger
        .change_hold(context, &key, balance.hold_id, change, added, "");
    match grown.await {
        Err(error) if is_insufficient(&error) => {
            return Err(insufficient_balance(
                market,
                context,
                &user_id,
                asset,
                amount,
                Some(balance),
            )
            .await);
        }
        other => other?,
    }
    // The ledger has the amount, the journal has not funded it yet.
    failpoint::reach("market.hold_grown");
    let hold = ledger_hold(market, context, balance.hold_id).await?;
    sync_funding(market, balance.user, asset, balance.kind, &hold, key_hash).await?;
    Ok(())
}

/// Opens the trading hold of an asset with the undrawn amount `target`, or resizes an existing one.
pub async fn open_or_set(
    market: &Arc<Market>,
    context: &Context,
    user_id: &str,
    asset: &Asset,
    target: Minor,
) -> Result<HoldView, Status> {
    let user = market.bind_user(user_id).await?;
    let _lock = market.lock_funding(user).await;
    // Another login of the user may have opened it just now.
    let hold_id = Id128::from_u128(Uuid::now_v7().as_u128());
    if let Some((hold, _)) = market.default_hold(user, asset.ix).await? {
        let key = hold_id.to_string();
        return set_locked(market, context, hold, target, &key, Id128::NONE).await;
    }
    let new = NewTrading {
        hold_id,
        amount: target,
        key_hash: Id128::NONE,
    };
    open_locked(market, context, user, user_id, asset, &new).await
}

/// Closes a trading hold without open orders. Its money returns to available.
pub async fn close(
    market: &Arc<Market>,
    hold: HoldIx,
    key_hash: Id128,
) -> Result<HoldView, Status> {
    let balance = balance_of(market, hold).await?;
    let _lock = market.lock_funding(balance.user).await;
    let balance = balance_of(market, hold).await?;
    if !balance.closed {
        let record = market
            .submit_durable(Request::CloseHold {
                hold,
                funding_seq: balance.funding_seq + 1,
                key_hash,
            })
            .await?;
        start_release(market, balance.hold_id, record.command.sequence).await;
    }
    view(market, hold).await
}

/// Closes a hold without open orders, for example of a refused order or of a blocked user. Does
/// nothing if the hold is closed or has open orders.
pub async fn close_idle(market: &Arc<Market>, hold: HoldIx) -> Result<(), Status> {
    close_if(market, hold, |_| true).await
}

/// Closes a hold that a search has found, if it is still abandoned once the user's lock is held.
pub async fn close_abandoned(
    market: &Arc<Market>,
    hold: HoldIx,
    search: &mut AbandonedHolds,
) -> Result<(), Status> {
    close_if(market, hold, |state| search.is_abandoned(state, hold)).await
}

/// Closes a hold without open orders if `still` returns true under the user's lock. The ledger's
/// release continues in the background.
async fn close_if(
    market: &Arc<Market>,
    hold: HoldIx,
    still: impl FnOnce(&State) -> bool,
) -> Result<(), Status> {
    let balance = balance_of(market, hold).await?;
    let _lock = market.lock_funding(balance.user).await;
    let balance = balance_of(market, hold).await?;
    if balance.closed || balance.open_orders > 0 || !market.replica.read(still) {
        return Ok(());
    }
    let request = Request::CloseHold {
        hold,
        funding_seq: balance.funding_seq + 1,
        key_hash: Id128::NONE,
    };
    let unless = [DuplicateRequest, HoldInUse];
    if let Some(record) = market.submit_unless(request, &unless).await? {
        let (own, sequence) = (market.clone(), record.command.sequence);
        tokio::spawn(async move { start_release(&own, balance.hold_id, sequence).await });
    }
    Ok(())
}

/// The trading holds of a user (empty = all users) for an asset (empty = any), closed ones
/// included, newest first: at most `rows` of those before `before`.
pub async fn list(
    market: &Market,
    user_id: &str,
    instrument_id: &str,
    before: i64,
    rows: usize,
) -> Result<Vec<(HoldIx, HoldView)>, Status> {
    let found = market.query(|state| {
        let admission = state.core().admission();
        let is_of = |hold: &replica::Hold| {
            let user = admission.user(hold.user);
            i64::from(hold.hold.get()) < before
                && (user_id.is_empty() || user.is_some_and(|user| user.id.as_str() == user_id))
                && (instrument_id.is_empty() || asset_id(admission, hold.asset) == instrument_id)
        };
        let newest_first = state.trading_holds().rev().filter(is_of).take(rows);
        let viewed = newest_first.filter_map(|hold| {
            let balance = admission.hold(hold.hold)?;
            Some((hold.hold, view_of(admission, balance)))
        });
        viewed.collect()
    });
    found.await
}

/// Id of an asset.
fn asset_id(admission: &Admission, asset: AssetIx) -> &str {
    let spec = asset.instrument().and_then(|ix| admission.spec(ix));
    spec.map_or(CFA_RUB, |spec| spec.id.as_str())
}

/// The trading hold with a ledger hold id given as text.
///
/// # Errors
/// `Hold not found`, also for the hold of a single order.
pub async fn find(market: &Market, hold_id: &str) -> Result<(HoldIx, HoldView), Status> {
    let id = Id128::parse(hold_id).ok_or_else(refusal::hold_not_found)?;
    let found = market
        .state(|state| {
            let admission = state.core().admission();
            let hold = admission.hold_ix(id)?;
            let balance = admission.hold(hold)?;
            (balance.kind == HoldKind::Trading).then(|| (hold, view_of(admission, balance)))
        })
        .await?;
    found.ok_or_else(refusal::hold_not_found)
}

async fn view(market: &Market, hold: HoldIx) -> Result<HoldView, Status> {
    let view = market
        .state(|state| {
            let admission = state.core().admission();
            Some(view_of(admission, admission.hold(hold)?))
        })
        .await?;
    view.ok_or_else(refusal::hold_not_found)
}

fn view_of(admission: &Admission, balance: &HoldBalance) -> HoldView {
    let asset = match balance.asset.instrument() {
        None => Asset::MONEY,
        Some(ix) => Asset::units(*admission.spec(ix).expect("a hold's instrument is known")),
    };
    let user_id = admission
        .user(balance.user)
        .expect("a hold's user is bound")
        .id
        .to_string();
    HoldView {
        hold_id: balance.hold_id,
        subaccount_id: asset.subaccount(&user_id),
        user_id,
        instrument_id: asset.id().to_owned(),
        undrawn: Decimal::from_minor(balance.undrawn.0, asset.decimals()),
        drawn: Decimal::from_minor(balance.reserved.0, asset.decimals()),
        closed: balance.closed,
    }
}

pub async fn balance_of(market: &Market, hold: HoldIx) -> Result<HoldBalance, Status> {
    let balance = market.state(|state| state.core().admission().hold(hold).copied());
    balance.await?.ok_or_else(refusal::hold_not_found)
}

fn user_id(market: &Market, user: UserIx) -> String {
    market.replica.names().user(user).to_string()
}

async fn ledger_hold(market: &Market, context: &Context, hold_id: Id128) -> Result<Hold, Status> {
    let hold = market.ledger.hold(context, hold_id).await?;
    let unknown = || std::io::Error::other(format!("the ledger does not know hold {hold_id}"));
    hold.ok_or_else(|| refusal::internal(unknown()))
}

/// True when the ledger refused a hold for lack of balance, or because it does not know the
/// sub-account or the instrument.
pub fn is_insufficient(error: &CallError) -> bool {
    matches!(
        error.reason().as_deref(),
        Some("INSUFFICIENT_BALANCE" | "SUB_ACCOUNT_NOT_FOUND" | "INSTRUMENT_NOT_FOUND")
    )
}

/// `Insufficient balance` with the amounts of the ledger and of `balance`.
pub async fn insufficient_balance(
    market: &Market,
    context: &Context,
    user_id: &str,
    asset: &Asset,
    required: Minor,
    balance: Option<&HoldBalance>,
) -> Status {
    let digits = asset.decimals();
    let subaccount_id = asset.subaccount(user_id);
    let mut short = Shortfall {
        required: Decimal::from_minor(required.0, digits),
        ..Shortfall::default()
    };
    // The amounts only explain the refusal. They are zero if the ledger is unavailable.
    if let Ok(subaccount) = market.ledger.balance(context, &subaccount_id).await {
        short.balance = subaccount.balance;
        short.held = subaccount.held;
        short.unsettled = subaccount.unsettled;
        short.available = subaccount.available;
    }
    if let Some(balance) = balance {
        short.undrawn = Decimal::from_minor(balance.undrawn.0, digits);
        short.drawn = Decimal::from_minor(balance.reserved.0, digits);
    }
    refusal::insufficient_balance(&short)
}
