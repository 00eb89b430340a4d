//! Parses messages of the contract. An invalid field is INVALID_ARGUMENT with its name in the
//! schema (D23, D35).

use admission::NewRequest;
use proto::common::v1::Decimal as WireDecimal;
use proto::convert::{decimal, optional_decimal, timestamp_us};
use proto::market::v1 as pb;
use tonic::Status;
use types::command::{MemberGroup, OrderBounds};
use types::{
    Decimal, DecimalError, Id128, InstrumentIx, InstrumentSpec, Lots, Minor, OrderStatus,
    OrderType, Phase, SessionIx, Side, StpMode, Ticks, TimeInForce, UserId, UserIx,
};

use crate::market::Asset;
use crate::orders::Change;
use crate::orders::members::Member;
use crate::refusal;

fn invalid(field: &str, problem: impl ToString) -> Status {
    rpc::status::invalid_argument(field, problem.to_string())
}

/// Value of an enumeration. Refuses a value that this version does not know (R339).
fn enum_value<E: TryFrom<i32>>(field: &str, value: i32) -> Result<E, Status> {
    E::try_from(value).map_err(|_| invalid(field, format!("has no value {value}")))
}

/// Parses an order: the request without price and quantity, then price and quantity as decimals.
/// [`to_ticks_and_lots`] joins them. The caller sets user, idempotency key and client order id.
pub fn order(order: &pb::Order) -> Result<(NewRequest, Option<Decimal>, Decimal), Status> {
    let side = side("order.side", order.side)?;
    let side = side.ok_or_else(|| invalid("order.side", "is required"))?;
    let order_type = match enum_value("order.type", order.r#type)? {
        pb::OrderType::Limit => OrderType::Limit,
        pb::OrderType::Market => OrderType::Market,
        pb::OrderType::Unspecified => return Err(invalid("order.type", "is required")),
    };
    let time_in_force = enum_value("order.time_in_force", order.time_in_force)?;
    let time_in_force = match (time_in_force, order_type) {
        (pb::TimeInForce::Unspecified, OrderType::Limit) => TimeInForce::Gtc,
        (pb::TimeInForce::Unspecified, OrderType::Market) => TimeInForce::Ioc,
        (pb::TimeInForce::Gtc | pb::TimeInForce::Gtd, OrderType::Market) => {
            return Err(invalid(
                "order.time_in_force",
                "of a market order is IOC or FOK",
            ));
        }
        (pb::TimeInForce::Gtc, _) => TimeInForce::Gtc,
        (pb::TimeInForce::Gtd, _) => TimeInForce::Gtd,
        (pb::TimeInForce::Ioc, _) => TimeInForce::Ioc,
        (pb::TimeInForce::Fok, _) => TimeInForce::Fok,
    };
    let field = "order.self_trade_prevention";
    let stp = match enum_value(field, order.self_trade_prevention)? {
        pb::SelfTradePrevention::Unspecified | pb::SelfTradePrevention::CancelNewest => {
            StpMode::CancelNewest
        }
        pb::SelfTradePrevention::CancelOldest => StpMode::CancelOldest,
        pb::SelfTradePrevention::CancelBoth => StpMode::CancelBoth,
        pb::SelfTradePrevention::Decrement => StpMode::Decrement,
    };
    let expire_at_ns = match (&order.expires_at, time_in_force) {
        (Some(at), TimeInForce::Gtd) => u64::try_from(timestamp_us(at))
            .ok()
            .and_then(|us| us.checked_mul(1_000))
            .filter(|ns| *ns > 0)
            .ok_or_else(|| invalid("order.expires_at", "must be in the future"))?,
        (None, TimeInForce::Gtd) => return Err(invalid("order.expires_at", "is required for GTD")),
        (Some(_), _) => return Err(invalid("order.expires_at", "is for GTD orders only")),
        (None, _) => 0,
    };
    let price = optional_positive("order.price", order.price.as_ref())?;
    if price.is_none() && order_type == OrderType::Limit {
        return Err(invalid("order.price", "is required"));
    }
    let quantity = positive("order.quantity", order.quantity.as_ref())?;
    let request = NewRequest {
        instrument: InstrumentIx::NONE,
        user: UserIx::NONE,
        session: SessionIx::NONE,
        client_seq: 0,
        client_order_id: 0,
        stp_group: None,
        stp,
        side,
        order_type,
        time_in_force,
        post_only: order.post_only,
        expire_at_ns,
        price: None,
        quantity: Lots::ZERO,
        hold: None,
        limit_checked: false,
        key_hash: Id128::NONE,
    };
    Ok((request, price, quantity))
}

/// Converts price and quantity to ticks and lots of the instrument.
pub fn to_ticks_and_lots(
    (request, price, quantity): (NewRequest, Option<Decimal>, Decimal),
    spec: &InstrumentSpec,
) -> Result<NewRequest, Status> {
    let price = price.map(|price| ticks(spec, "order.price", price));
    Ok(NewRequest {
        instrument: spec.ix,
        price: price.transpose()?,
        quantity: lots(spec, "order.quantity", quantity)?,
        ..request
    })
}

/// The client order id, empty for none. If it is not set, `order_id` is used instead (D37).
pub fn client_order_id(order: &pb::Order) -> Result<&str, Status> {
    let id = match order.client_order_id.as_str() {
        "" => &order.order_id,
        id => id,
    };
    check_client_order_id("order.client_order_id", id)?;
    Ok(id)
}

fn check_client_order_id(field: &str, id: &str) -> Result<(), Status> {
    match id.len() {
        0..=128 => Ok(()),
        _ => Err(invalid(field, "must have at most 128 bytes")),
    }
}

/// The order of a PlaceOrder. Checks that user id and instrument id are well-formed.
pub fn required_order(order: Option<pb::Order>) -> Result<pb::Order, Status> {
    let order = order.ok_or_else(|| invalid("order", "is required"))?;
    UserId::new(&order.user_id).map_err(|error| invalid("order.user_id", error))?;
    refusal::check_not_empty("order.instrument_id", &order.instrument_id)?;
    Ok(order)
}

fn optional_positive(field: &str, value: Option<&WireDecimal>) -> Result<Option<Decimal>, Status> {
    let value = optional_decimal(value).map_err(|error| invalid(field, error))?;
    match value {
        Some(value) if !value.is_positive() => Err(invalid(field, "must be greater than zero")),
        value => Ok(value),
    }
}

fn positive(field: &str, value: Option<&WireDecimal>) -> Result<Decimal, Status> {
    let value = decimal(value).map_err(|error| invalid(field, error))?;
    if value.is_positive() {
        Ok(value)
    } else {
        Err(invalid(field, "must be greater than zero"))
    }
}

fn ticks(spec: &InstrumentSpec, field: &str, price: Decimal) -> Result<Ticks, Status> {
    spec.ticks(price).map_err(|_| {
        let tick = spec.tick_size();
        invalid(field, format!("must be a multiple of the tick {tick}"))
    })
}

fn lots(spec: &InstrumentSpec, field: &str, quantity: Decimal) -> Result<Lots, Status> {
    spec.lots(quantity).map_err(|_| {
        let lot = spec.lot_size();
        invalid(field, format!("must be a multiple of the lot {lot}"))
    })
}

/// Price and total of an amend. At least one change is required.
pub fn change(
    spec: &InstrumentSpec,
    price: Option<&WireDecimal>,
    quantity: Option<&WireDecimal>,
    new_client_order_id: String,
) -> Result<Change, Status> {
    let price = optional_positive("price", price)?;
    let quantity = optional_positive("quantity", quantity)?;
    if price.is_none() && quantity.is_none() && new_client_order_id.is_empty() {
        let text = "price, quantity or new_client_order_id is required";
        return Err(invalid("quantity", text));
    }
    check_client_order_id("new_client_order_id", &new_client_order_id)?;
    Ok(Change {
        new_client_order_id,
        price: price.map(|price| ticks(spec, "price", price)).transpose()?,
        quantity: quantity
            .map(|quantity| lots(spec, "quantity", quantity))
            .transpose()?,
    })
}

/// The user or the member group that a call names.
pub fn member(user_id: String, group: u32) -> Result<Member, Status> {
    match (user_id.is_empty(), group) {
        (true, 0) => Err(invalid("user_id", "a user or a group is required")),
        (true, group) => Ok(Member::Group(MemberGroup(group))),
        (false, 0) => Ok(Member::User(user_id)),
        (false, _) => Err(invalid("group", "must be 0 where a user is named")),
    }
}

/// Parses the bounds of a member. `open_orders_per_user_max`: the highest valid value of
/// `open_orders_per_user`. Unset rates and session counts are as in `default`.
pub fn bounds(
    given: &pb::OrderBounds,
    member: &Member,
    default: &OrderBounds,
    open_orders_per_user_max: u32,
) -> Result<OrderBounds, Status> {
    let (per_user, per_instrument) = (given.open_orders_per_user, given.open_orders_per_instrument);
    if !(1..=open_orders_per_user_max).contains(&per_user) {
        let text = format!("must be 1 to {open_orders_per_user_max}");
        return Err(invalid("bounds.open_orders_per_user", &text));
    }
    if per_instrument == 0 {
        return Err(invalid(
            "bounds.open_orders_per_instrument",
            "must be at least 1",
        ));
    }
    let sessions = given.sessions_per_user.unwrap_or(default.sessions);
    if sessions == 0 {
        return Err(invalid("bounds.sessions_per_user", "must be at least 1"));
    }
    let none = OrderBounds::NONE;
    let group_rate = match (member, given.messages_per_second_group) {
        (Member::Group(_), rate) => rate.unwrap_or(default.group_rate),
        (Member::User(_), None) => none.group_rate,
        (Member::User(_), Some(_)) => {
            let field = "bounds.messages_per_second_group";
            return Err(invalid(field, "must be unset where a user is named"));
        }
    };
    let session_rate = given.messages_per_second_session;
    let user_rate = given.messages_per_second_user;
    let field = "bounds.value_per_order";
    let value = optional_positive(field, given.value_per_order.as_ref())?;
    let value = value.map(|value| minor(&Asset::MONEY, field, value));
    Ok(OrderBounds {
        per_user,
        per_instrument,
        lots_per_order: match given.lots_per_order {
            0 => none.lots_per_order,
            lots => Lots(lots),
        },
        value_per_order: value.transpose()?.unwrap_or(none.value_per_order),
        journal_bytes_per_minute: OrderBounds::journal_mib(given.journal_mib_per_minute),
        messages_per_trade: match given.order_messages_per_trade {
            0 => none.messages_per_trade,
            messages => messages,
        },
        sessions,
        session_rate: session_rate.unwrap_or(default.session_rate),
        user_rate: user_rate.unwrap_or(default.user_rate),
        group_rate,
    })
}

/// An amount of an asset, greater than zero.
pub fn amount(asset: &Asset, field: &str, value: Option<&WireDecimal>) -> Result<Minor, Status> {
    minor(asset, field, positive(field, value)?)
}

/// An amount of an asset, zero allowed.
pub fn amount_or_zero(
    asset: &Asset,
    field: &str,
    value: Option<&WireDecimal>,
) -> Result<Minor, Status> {
    let value = decimal(value).map_err(|error| invalid(field, error))?;
    if value.is_negative() {
        return Err(invalid(field, "must not be negative"));
    }
    minor(asset, field, value)
}

fn minor(asset: &Asset, field: &str, value: Decimal) -> Result<Minor, Status> {
    let decimals = asset.decimals();
    value.to_minor(decimals).map(Minor).map_err(|error| {
        let why = match error {
            DecimalError::Overflow => error.to_string(),
            _ => format!("has more than {decimals} digits after the point"),
        };
        invalid(field, why)
    })
}

pub fn side(field: &str, value: i32) -> Result<Option<Side>, Status> {
    Ok(match enum_value(field, value)? {
        pb::OrderSide::Unspecified => None,
        pb::OrderSide::Buy => Some(Side::Buy),
        pb::OrderSide::Sell => Some(Side::Sell),
    })
}

pub fn status(field: &str, value: i32) -> Result<Option<OrderStatus>, Status> {
    Ok(match enum_value(field, value)? {
        pb::OrderStatus::Unspecified => None,
        pb::OrderStatus::Open => Some(OrderStatus::Open),
        pb::OrderStatus::PartiallyFilled => Some(OrderStatus::PartiallyFilled),
        pb::OrderStatus::Filled => Some(OrderStatus::Filled),
        pb::OrderStatus::Cancelled => Some(OrderStatus::Cancelled),
        pb::OrderStatus::Rejected => Some(OrderStatus::Rejected),
    })
}

pub fn phase(field: &str, value: i32) -> Result<Phase, Status> {
    Ok(match enum_value(field, value)? {
        pb::TradingPhase::PreOpen => Phase::PreOpen,
        pb::TradingPhase::Open => Phase::Open,
        pb::TradingPhase::Halt => Phase::Halt,
        pb::TradingPhase::Closed => Phase::Closed,
        pb::TradingPhase::Unspecified => return Err(invalid(field, "is required")),
    })
}
