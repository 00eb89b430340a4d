//! One session of a client under chaos: seeded requests, and a record of received messages.

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use types::{Side, TimeInForce};
use wire::{Amend, Cancel, ClientMessage, NewOrder, ServerMessage};

use crate::flow::Random;

/// Price around which all clients trade and the distance of orders that never trade, in kopecks.
const MIDDLE_TICKS: u64 = 10_000;
const FAR_TICKS: u64 = 3_000;
/// Most open orders of a session.
const OPEN_MAX: usize = 40;

/// A request without an answer.
pub(super) struct PendingRequest {
    pub message: ClientMessage,
    /// Login under which it was last sent.
    pub login: u32,
}

/// Client-side record of one session.
pub struct Session {
    pub name: String,
    pub cancel_on_disconnect: bool,
    /// Message n at index n - 1, as bytes on channel 0.
    pub messages: Vec<Bytes>,
    /// Requests without an answer, by client sequence.
    pub(super) waiting: BTreeMap<u64, PendingRequest>,
    answered: BTreeSet<u64>,
    acknowledged: BTreeSet<u64>,
    /// Client ids of open orders.
    open: Vec<u64>,
    /// Client sequence of the final mass cancel.
    pub(super) last: Option<u64>,
}

impl Session {
    pub(super) fn new(name: &str, cancel_on_disconnect: bool) -> Self {
        Self {
            name: name.to_owned(),
            cancel_on_disconnect,
            messages: Vec::new(),
            waiting: BTreeMap::new(),
            answered: BTreeSet::new(),
            acknowledged: BTreeSet::new(),
            open: Vec::new(),
            last: None,
        }
    }

    /// Generates the next request: a resting, crossing, immediate or far order, a cancel or an
    /// amend. A new order gets the id `id`, which must be unique among all orders of the user.
    pub(super) fn request(&self, random: &mut Random, instrument: u32, id: u64) -> ClientMessage {
        let roll = random.below(100);
        if !self.open.is_empty() && (roll < 30 || self.open.len() >= OPEN_MAX) {
            let at = random.below(self.open.len() as u64);
            let client_order_id = self.open[usize::try_from(at).expect("small")];
            if roll < 20 || self.open.len() >= OPEN_MAX {
                return Cancel {
                    client_order_id,
                    engine_order_id: 0,
                }
                .into();
            }
            let near = MIDDLE_TICKS - 20 + random.below(40);
            return Amend {
                client_order_id,
                engine_order_id: 0,
                price_ticks: (random.below(2) * near).cast_signed(),
                quantity_lots: 1 + random.below(4),
                new_client_order_id: 0,
            }
            .into();
        }
        let side = match random.below(2) {
            0 => Side::Buy,
            _ => Side::Sell,
        };
        let price = match (roll < 50, side) {
            (true, Side::Buy) => MIDDLE_TICKS - FAR_TICKS,
            (true, Side::Sell) => MIDDLE_TICKS + FAR_TICKS,
            (false, _) => MIDDLE_TICKS - 15 + random.below(30),
        };
        let quantity = 1 + random.below(3);
        let mut order = NewOrder::limit(id, instrument, side, price.cast_signed(), quantity);
        if roll >= 80 {
            order.time_in_force = TimeInForce::Ioc;
        }
        order.into()
    }

    /// Records a numbered message; returns the violation, if it is one.
    pub(super) fn note(&mut self, message: &ServerMessage) -> Option<String> {
        let answers = message.answers();
        if answers != 0 {
            self.waiting.remove(&answers);
            if !self.answered.insert(answers) {
                return Some(format!("request {answers} was answered twice"));
            }
        }
        match message {
            ServerMessage::OrderAck(ack) => {
                self.open.push(ack.client_order_id);
                if !self.acknowledged.insert(ack.client_order_id) {
                    return Some(format!("order {} was executed twice", ack.client_order_id));
                }
            }
            ServerMessage::Cancelled(cancelled) => self.remove_open(cancelled.client_order_id),
            ServerMessage::Fill(fill) if fill.open_lots == 0 => {
                self.remove_open(fill.client_order_id)
            }
            _ => {}
        }
        None
    }

    fn remove_open(&mut self, client_order_id: u64) {
        self.open.retain(|open| *open != client_order_id);
    }

    /// Orders acknowledged as durable.
    pub fn orders(&self) -> usize {
        self.acknowledged.len()
    }

    /// True once the final mass cancel is answered.
    pub(super) fn has_finished(&self) -> bool {
        self.last.is_some_and(|last| self.answered.contains(&last))
    }
}
