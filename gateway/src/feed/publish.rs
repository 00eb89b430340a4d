//! Effects of the journal as events of `platform.market.events.v1` (specification 6.4, T41). Ids
//! derive from node, sequence and index, so that a republished record gets the same ids.

use events::{Event, topics};
use prost::Message;
use proto::common::v1::{Fee, RequestContext};
use proto::convert::{to_decimal, to_money, to_timestamp_us};
use proto::market::v1::{
    OrderCancelledEvent, OrderPlacedEvent, TradeBustedEvent, TradeExecutedEvent,
};
use replica::{Cause, Effect, Names};
use types::{InstrumentSpec, NodeId, child_uuid, order_uuid};
use uuid::Uuid;

use crate::api::render;
use crate::projection::batch::limit_price;
use crate::projection::micros;

/// Builds the events of one record.
pub struct Publisher<'a> {
    node: NodeId,
    names: &'a Names,
    cause: Cause,
    correlation_id: &'a str,
    count: u32,
}

impl<'a> Publisher<'a> {
    pub fn new(node: NodeId, names: &'a Names, cause: Cause, correlation_id: &'a str) -> Self {
        Self {
            node,
            names,
            cause,
            correlation_id,
            count: 0,
        }
    }

    /// The event of an effect; `None` if the effect is not published.
    pub fn event(&mut self, effect: &Effect) -> Option<Event> {
        // In microseconds, so that event and history row have the same time.
        let at = to_timestamp_us(micros(self.cause.time_ns));
        let context = Some(self.context());
        match effect {
            Effect::Accepted(order) => {
                let spec = &self.names.instrument(order.instrument);
                let user = self.names.user(order.user);
                let message = OrderPlacedEvent {
                    context,
                    order_id: order.id.to_string(),
                    user_id: user.to_string(),
                    instrument_id: spec.id.to_string(),
                    side: render::side(order.side).into(),
                    r#type: render::order_type(order.terms.order_type).into(),
                    price: limit_price(order.terms.order_type, order.price)
                        .map(|ticks| to_decimal(spec.price(ticks))),
                    quantity: Some(to_decimal(spec.quantity(order.quantity))),
                    placed_at: Some(at),
                };
                Some(self.build(spec, "OrderPlacedEvent", &order.id.to_string(), &message))
            }
            Effect::Traded(trade) => {
                let spec = &self.names.instrument(trade.instrument);
                let message = TradeExecutedEvent {
                    context,
                    trade_id: trade.id.to_string(),
                    buyer_id: self.names.user(trade.buy().user).to_string(),
                    seller_id: self.names.user(trade.sell().user).to_string(),
                    instrument_id: spec.id.to_string(),
                    quantity: Some(to_decimal(spec.quantity(trade.quantity))),
                    price: Some(to_decimal(spec.price(trade.price))),
                    fee: Some(Fee {
                        fee_type: "TRADING".to_owned(),
                        amount: Some(to_money(trade.fee_minor.0)),
                    }),
                    executed_at: Some(at),
                    trade_number: trade.number,
                };
                Some(self.build(spec, "TradeExecutedEvent", &trade.id.to_string(), &message))
            }
            Effect::Cancelled { order, reason, .. } => {
                let spec = &self.names.instrument(order.instrument);
                let message = OrderCancelledEvent {
                    context,
                    order_id: order.id.to_string(),
                    reason: reason.as_str().to_owned(),
                    cancelled_at: Some(at),
                };
                Some(self.build(spec, "OrderCancelledEvent", &order.id.to_string(), &message))
            }
            Effect::Bust(bust) => {
                let spec = &self.names.instrument(bust.instrument);
                let message = TradeBustedEvent {
                    context,
                    trade_id: bust.trade.to_string(),
                    instrument_id: spec.id.to_string(),
                    trade_number: bust.trade_number,
                    busted_at: Some(at),
                };
                Some(self.build(spec, "TradeBustedEvent", &bust.trade.to_string(), &message))
            }
            _ => None,
        }
    }

    /// Node, sequence and index of the event: unique, and equal when the event is republished.
    fn event_key(&self) -> String {
        format!("{}:{}:{}", self.node.get(), self.cause.sequence, self.count)
    }

    fn context(&self) -> RequestContext {
        RequestContext {
            request_id: self.event_key(),
            correlation_id: self.correlation_id.to_owned(),
            idempotency_key: self.event_key(),
            occurred_at: Some(to_timestamp_us(micros(self.cause.time_ns))),
            source: "market".to_owned(),
            ..RequestContext::default()
        }
    }

    fn build(
        &mut self,
        spec: &InstrumentSpec,
        name: &str,
        subject: &str,
        message: &impl Message,
    ) -> Event {
        // Time-ordered, so that consumers' inboxes grow at one end.
        let (time_ns, sequence) = (self.cause.time_ns, self.cause.sequence);
        let parent = order_uuid(time_ns, self.node, sequence);
        let id = Uuid::from_u128(child_uuid(parent, &self.event_key()).as_u128());
        self.count += 1;
        Event {
            id,
            topic: topics::MARKET.to_owned(),
            key: spec.id.to_string(),
            type_name: format!("dfa.market.v1.{name}"),
            subject: subject.to_owned(),
            source: "market".to_owned(),
            correlation_id: self.correlation_id.to_owned(),
            occurred_at_us: micros(self.cause.time_ns),
            payload: message.encode_to_vec(),
        }
    }
}
