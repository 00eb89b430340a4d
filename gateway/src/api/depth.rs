//! Views of the books: depth of one instrument, state of all instruments. Read from the replica
//! once it has reached the last assigned sequence. A view therefore contains no order that a crash
//! could withdraw, and is never older than the last durable order (R178, T42). Nothing is cached.

use proto::convert::{to_decimal, to_timestamp_us};
use proto::market::v1 as pb;
use tonic::Status;
use types::command::{BoundsOf, OrderBounds};
use types::{Decimal, InstrumentId, Lots, Minor, Side, Ticks, UserId, UserIx};

use super::render;
use crate::market::{MONEY_DECIMALS, Market, now_us};
use crate::refusal;

/// Levels per side when the caller names none (D40).
const LEVELS_DEFAULT: u32 = 50;
/// Maximum levels per side.
const LEVELS_MAX: u32 = 1_000;
/// Maximum open orders for which a state hash is computed. Computing it blocks reads and the
/// replica.
const HASHED_ORDERS_MAX: usize = 50_000;

/// Depth of a book. `Instrument not found` for an unknown one; empty sides for an empty book.
pub async fn book(
    market: &Market,
    instrument_id: &str,
    depth: u32,
) -> Result<pb::OrderBookSnapshot, Status> {
    refusal::check_not_empty("instrument_id", instrument_id)?;
    let id = InstrumentId::new(instrument_id).map_err(|_| refusal::instrument_not_found())?;
    let levels = match depth {
        0 => LEVELS_DEFAULT,
        given => given.min(LEVELS_MAX),
    };
    let seen = market.query(|state| {
        let core = state.core();
        let ix = core.admission().instrument_ix(&id)?;
        let (spec, book) = (*core.admission().spec(ix)?, core.book(ix)?);
        let side = |side| -> Vec<(Ticks, Lots)> {
            let levels = book.depth(side).take(levels as usize);
            levels.map(|level| (level.price, level.open)).collect()
        };
        let sides = (side(Side::Buy), side(Side::Sell));
        Some((spec, book.phase(), sides, core.sequence(), now_us()))
    });
    let seen = seen.await?.ok_or_else(refusal::instrument_not_found)?;
    let (spec, phase, (bids, asks), sequence, captured_at_us) = seen;
    let levels = |side: Vec<(Ticks, Lots)>| {
        let levels = side.into_iter().map(|(price, open)| pb::OrderBookLevel {
            price: Some(to_decimal(spec.price(price))),
            quantity: Some(to_decimal(spec.quantity(open))),
        });
        levels.collect()
    };
    Ok(pb::OrderBookSnapshot {
        instrument_id: spec.id.to_string(),
        bids: levels(bids),
        asks: levels(asks),
        captured_at: Some(to_timestamp_us(captured_at_us)),
        sequence: sequence.0,
        phase: render::phase(phase).into(),
    })
}

/// State of every instrument and of settlement. For staff (`own` is `None`) also the users whose
/// kill switch is engaged, and the state hash for at most [`HASHED_ORDERS_MAX`] orders.
pub async fn status(
    market: &Market,
    own: Option<&str>,
) -> Result<pb::GetMarketStatusResponse, Status> {
    let for_staff = own.is_none();
    let own = own.and_then(|id| UserId::new(id).ok());
    let seen = market.query(|state| {
        let core = state.core();
        let instruments = core.books().map(|book| {
            let best = |side| Some(to_decimal(book.spec().price(book.best(side)?)));
            pb::InstrumentMarketStatus {
                instrument_id: book.spec().id.to_string(),
                phase: render::phase(book.phase()).into(),
                open_orders: book.resting().into(),
                trades: book.trade_number(),
                best_bid: best(Side::Buy),
                best_ask: best(Side::Sell),
            }
        });
        let admission = core.admission();
        let settlement = admission.settlement();
        let counted = admission.orders().take(HASHED_ORDERS_MAX + 1).count();
        let is_hashed = for_staff && counted <= HASHED_ORDERS_MAX;
        let hash = is_hashed.then(|| format!("{:016x}", core.state_hash()));
        let killed = admission.killed_users().filter(|_| for_staff);
        pb::GetMarketStatusResponse {
            commit_sequence: core.sequence().0,
            settled_sequence: settlement.posted.0,
            trades_pending: core.trades().saturating_sub(settlement.trades_final),
            trades_settled: settlement.trades_final.saturating_sub(admission.busts()),
            instruments: instruments.collect(),
            kill_switch_engaged: admission.kill_switch(UserIx::NONE),
            killed_user_ids: killed.map(|id| id.to_string()).collect(),
            state_hash: hash.unwrap_or_default(),
            bounds: Some(member_bounds(admission, own)),
        }
    });
    seen.await
}

/// Bounds of a user. Without one, or before a user's first order: the node's bounds.
fn member_bounds(admission: &admission::Admission, own: Option<UserId>) -> pb::MemberBounds {
    let user = own.and_then(|id| admission.user(admission.user_ix(&id)?));
    let bounds = match user {
        Some(user) => *admission.bounds(user),
        None => admission.bounds_of(BoundsOf::Node).unwrap_or_default(),
    };
    let group_rate = user.map(|user| admission.rates(user).group);
    let none = OrderBounds::NONE;
    let lots = Some(bounds.lots_per_order.0).filter(|lots| *lots < none.lots_per_order.0);
    let value = Some(bounds.value_per_order).filter(|value| *value < none.value_per_order);
    pb::MemberBounds {
        open_orders_per_user: bounds.per_user,
        open_orders_per_instrument: bounds.per_instrument,
        messages_per_second_session: bounds.session_rate,
        messages_per_second_user: bounds.user_rate,
        sessions_per_user: bounds.sessions,
        lots_per_order: lots.unwrap_or(0),
        value_per_order: value.map(|value| to_decimal(money(value))),
        group: user.map_or(0, |user| user.group.0),
        messages_per_second_group: group_rate.unwrap_or(bounds.group_rate),
        journal_mib_per_minute: u32::try_from(bounds.journal_bytes_per_minute >> 20).unwrap_or(0),
        order_messages_per_trade: match bounds.messages_per_trade {
            u32::MAX => 0,
            messages => messages,
        },
    }
}

fn money(value: Minor) -> Decimal {
    Decimal::from_minor(value.0, MONEY_DECIMALS)
}
