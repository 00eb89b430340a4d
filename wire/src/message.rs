//! Every message of the protocol with its fields, in wire order.

use types::command::{FundingCause, RequestKind};
use types::{CancelReason, Id128, OrderType, Phase, RejectReason, Side, StpMode, TimeInForce};

use crate::field::{Field, Text};
use crate::frame::{Message, WireError};

/// ALPN name of the protocol. Every change of a layout requires a new name and a new [`VERSION`].
pub const ALPN: &[u8] = b"cfa-trade/3";
/// Version byte of the layouts below.
pub const VERSION: u8 = 3;

/// One row of a layout table.
pub struct LayoutRow {
    pub field: &'static str,
    /// Offset in the body, in bytes.
    pub offset: usize,
    /// Bytes of the field.
    pub len: usize,
    pub kind: &'static str,
    /// The field's doc comment.
    pub meaning: &'static str,
}

/// A message type, as shown in `docs/protocol.md`.
pub struct Layout {
    pub kind: u8,
    pub name: &'static str,
    pub about: &'static str,
    pub rows: fn() -> Vec<LayoutRow>,
}

macro_rules! messages {
    ($(
        $(#[$set_meta:meta])* $set:ident {
            $( $(#[doc = $about:literal])+ $kind:literal $name:ident {
                $( $(#[doc = $meaning:literal])+ $field:ident : $type:ty ),* $(,)?
            } )+
        }
    )+) => {
        $($(
            $(#[doc = $about])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name { $( $(#[doc = $meaning])+ pub $field: $type ),* }

            impl $name {
                pub const KIND: u8 = $kind;
                /// Bytes of the body.
                pub const LEN: usize = 0 $(+ <$type as Field>::LEN)*;

                #[allow(unused_mut, unused_variables, unused_assignments)]
                fn put(&self, out: &mut [u8]) {
                    let mut at = 0;
                    $(
                        let end = at + <$type as Field>::LEN;
                        self.$field.put(&mut out[at..end]);
                        at = end;
                    )*
                }

                #[allow(unused_mut, unused_variables, unused_assignments)]
                fn get(body: &[u8]) -> Result<Self, WireError> {
                    let mut at = 0;
                    $(
                        let end = at + <$type as Field>::LEN;
                        let $field = <$type as Field>::get(&body[at..end])
                            .ok_or(WireError::Field { kind: $kind, field: stringify!($field) })?;
                        at = end;
                    )*
                    Ok(Self { $($field),* })
                }

                #[allow(unused_mut, unused_variables, unused_assignments)]
                fn rows() -> Vec<LayoutRow> {
                    let mut at = 0;
                    let rows = vec![$({
                        let row = LayoutRow {
                            field: stringify!($field),
                            offset: at,
                            len: <$type as Field>::LEN,
                            kind: <$type as Field>::KIND,
                            meaning: concat!($($meaning),+),
                        };
                        at += row.len;
                        row
                    }),*];
                    rows
                }
            }

            impl From<$name> for $set {
                fn from(message: $name) -> Self {
                    $set::$name(message)
                }
            }
        )+

        $(#[$set_meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $set { $( $name($name) ),+ }

        impl $set {
            /// Types of this direction, in the order of `docs/protocol.md`.
            pub const LAYOUTS: &'static [Layout] = &[
                $( Layout {
                    kind: $kind,
                    name: stringify!($name),
                    about: concat!($($about),+),
                    rows: $name::rows,
                } ),+
            ];
        }

        impl Message for $set {
            fn kind(&self) -> u8 {
                match self { $( $set::$name(_) => $kind ),+ }
            }

            fn body_len(kind: u8) -> Option<usize> {
                match kind { $( $kind => Some($name::LEN), )+ _ => None }
            }

            fn put_body(&self, out: &mut [u8]) {
                match self { $( $set::$name(message) => message.put(out) ),+ }
            }

            fn get_body(kind: u8, body: &[u8]) -> Result<Self, WireError> {
                match kind {
                    $( $kind => $name::get(body).map($set::$name), )+
                    _ => Err(WireError::Type { kind }),
                }
            }
        }
    )+};
}

messages! {
    /// Messages of the client. Requests that act (`NewOrder` to `MassCancel`, `CancelAllAfter`)
    /// carry their client sequence in the header.
    ClientMessage {
        /// Opens a session on the header's channel (0 to 63).
        0x01 Login {
            /// Bearer credential, the same as on the RPC ports.
            token: Text<1024>,
            /// Names the session across connections, unique per user. Not empty, without control
            /// characters.
            session_name: Text<32>,
            /// Last number received on this session, 0 for none. Ignored with *from now*.
            last_sequence: u64,
            /// Sum of 1 = cancel on disconnect, 2 = *from now*.
            flags: u8,
            /// Heartbeat interval in milliseconds: longest silence before the connection ends. 0 =
            /// the server's default.
            heartbeat_ms: u32,
            /// Self-trade prevention group of the session's orders, below 2147483647. 0 = the
            /// user's own. Other groups are refused unless the exchange allows them.
            stp_group: u32,
            /// Undrawn amount of the user's CFA-RUB trading hold after the login, in kopecks. 0 =
            /// unchanged. Not negative.
            money_hold_minor: i64,
        }
        /// Ends the session: the server answers with `Disconnect` 0 on its channel. Open orders
        /// stay.
        0x02 Logout {}
        /// Keeps the connection alive when there is nothing else to send; channel 65535.
        0x03 Heartbeat {}
        /// A new order.
        0x10 NewOrder {
            /// Chosen by the client, unique among the user's open orders, not 0.
            client_order_id: u64,
            /// Instrument number of `InstrumentDefinition`.
            instrument: u32,
            /// Buy or sell.
            side: Side,
            /// Limit or market.
            order_type: OrderType,
            /// How long the order stays: see Orders.
            time_in_force: TimeInForce,
            /// What happens when the order meets an order of its own self-trade prevention group.
            stp: StpMode,
            /// 1 = post only, 0 = none.
            flags: u8,
            /// Limit price, 1 to 2^40 ticks. Of a market order its protection price, 0 = the
            /// exchange's.
            price_ticks: i64,
            /// Quantity, 1 to 2^40 lots.
            quantity_lots: u64,
            /// Expiry of a GTD order, nanoseconds since 1970; 0 for other orders.
            expire_at_ns: u64,
        }
        /// Cancels one order of the user.
        0x11 Cancel {
            /// Names the order if `engine_order_id` is 0.
            client_order_id: u64,
            /// Names the order; 0 = by `client_order_id`.
            engine_order_id: u64,
        }
        /// Changes an order, named as in `Cancel`. The order keeps its queue priority if the price
        /// is unchanged and the quantity is not larger.
        0x12 Amend {
            /// Names the order if `engine_order_id` is 0.
            client_order_id: u64,
            /// Names the order; 0 = by `client_order_id`.
            engine_order_id: u64,
            /// New limit price, 1 to 2^40 ticks; 0 = unchanged.
            price_ticks: i64,
            /// New total, filled quantity included, at most 2^40 lots; 0 = unchanged.
            quantity_lots: u64,
            /// New client order id, unique among the user's open orders; 0 = unchanged.
            new_client_order_id: u64,
        }
        /// Cancels every open order in the scope.
        0x13 MassCancel {
            /// 0 = of this session, 1 = of this user, 2 = of this session's self-trade prevention
            /// group.
            scope: u8,
            /// Instrument number; 4294967295 = every instrument.
            instrument: u32,
            /// 0 buy, 1 sell, 255 both.
            side: u8,
        }
        /// Sets the undrawn amount of the user's trading hold of an asset. Opens the hold if there
        /// is none.
        0x14 SetTradingHold {
            /// Echoed in `TradingHold`.
            request_id: u32,
            /// 0 = CFA-RUB, n = units of instrument n - 1.
            asset: u32,
            /// Kopecks, or 10^-decimals of a unit. Not negative.
            undrawn_minor: i64,
        }
        /// Starts, restarts or stops the session's dead man's switch. The session's open orders are
        /// cancelled after this time unless another `CancelAllAfter` comes first.
        0x15 CancelAllAfter {
            /// Seconds, 1 to 600; 0 = off.
            timeout_s: u32,
        }
        /// Requests every open order of the session or of the user. The answer is one `OpenOrder`
        /// per order, then `OpenOrdersEnd`.
        0x16 OpenOrders {
            /// Echoed in the answers.
            request_id: u32,
            /// 0 = of this session, 1 = of this user.
            scope: u8,
        }
        /// Requests a range of numbered messages again. The answer is each message under its
        /// number, then `RetransmitEnd`.
        0x17 Retransmit {
            /// Echoed in `RetransmitEnd`.
            request_id: u32,
            /// First number of the range, at least 1.
            first: u64,
            /// Last number of the range, at most 4,095 after `first`, and at most the last number
            /// that the server has sent.
            last: u64,
        }
    }

    /// Messages of the server. Numbered messages carry their number in the header, without gaps.
    ServerMessage {
        /// Unnumbered. The login is accepted. Instrument definitions precede this message. The
        /// numbered messages after `last_sequence` follow.
        0x81 LoginAccepted {
            /// Number of the session at the exchange. No other message contains it.
            session: u32,
            /// Client sequence of the session's last journalled request. The client sends later
            /// requests again.
            last_client_seq: u64,
            /// Number of the first numbered message on this connection.
            next_sequence: u64,
            /// Number of the exchange's engine node.
            node: u8,
            /// Messages per second above which requests get `THROTTLE`; 0 = no limit.
            throttle_per_s: u32,
            /// Heartbeat interval of the session in milliseconds: longest silence before the
            /// connection ends.
            heartbeat_ms: u32,
            /// When the session's dead man's switch fires, nanoseconds since 1970; 0 = off.
            cancel_all_at_ns: u64,
            /// Server time, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Unnumbered. The server ends the session, or on channel 65535 the connection, for this
        /// reason.
        0x82 Disconnect {
            /// Reason: see Disconnect codes.
            code: u16,
            /// The reason in words.
            text: Text<96>,
        }
        /// Unnumbered, channel 65535. The server has sent nothing else for half the heartbeat
        /// interval.
        0x83 ServerHeartbeat {
            /// Server time, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Unnumbered. An instrument's parameters, sent before `LoginAccepted`, for a new
        /// instrument, and after each change of one.
        0x84 InstrumentDefinition {
            /// Instrument number, by which the other messages name it: 0, 1, 2, ...
            instrument: u32,
            /// Instrument id of the RPC side.
            id: Text<32>,
            /// Fraction digits of a unit.
            decimals: u8,
            /// Trading phase.
            phase: Phase,
            /// Tick = `tick_mantissa` x 10^-`tick_scale` roubles per unit. A tick of 0.05 has
            /// mantissa 5.
            tick_mantissa: i64,
            /// Fraction digits of the tick. A tick of 0.05 has scale 2.
            tick_scale: u8,
            /// Lot = `lot_mantissa` x 10^-`lot_scale` units.
            lot_mantissa: i64,
            /// Fraction digits of the lot.
            lot_scale: u8,
            /// Kopecks of one lot at one tick.
            value_minor: i64,
            /// 10^-decimals units in one lot.
            units_minor: i64,
            /// Lowest price of an order.
            band_low_ticks: i64,
            /// Highest price of an order; 1099511627776 = no limit.
            band_high_ticks: i64,
            /// Fee of a buy, in parts per million of the traded value.
            fee_ppm: u32,
        }
        /// Unnumbered. Answer to `SetTradingHold`.
        0x85 TradingHold {
            /// Id of the request.
            request_id: u32,
            /// Asset of the request.
            asset: u32,
            /// Id of the trading hold on the RPC side; zero if the request is refused.
            hold_id: Id128,
            /// Undrawn amount after the request, in kopecks or 10^-decimals of a unit; 0 if it is
            /// refused.
            undrawn_minor: i64,
            /// Amount that the user's open orders have drawn, in the same unit; 0 if the request is
            /// refused.
            drawn_minor: i64,
            /// 255 = done, else a reject reason.
            outcome: u8,
            /// With `THROTTLE`: microseconds until the next request is accepted. 0 otherwise.
            limit: u64,
        }
        /// Unnumbered. An open order, in its state after all messages of its session up to
        /// `node_sequence`.
        0x86 OpenOrder {
            /// Id of the request.
            request_id: u32,
            /// Client order id; 0 for none.
            client_order_id: u64,
            /// The exchange's id of the order.
            engine_order_id: u64,
            /// Public order id.
            order_id: Id128,
            /// Instrument number.
            instrument: u32,
            /// Buy or sell.
            side: Side,
            /// GTC or GTD.
            time_in_force: TimeInForce,
            /// Limit price.
            price_ticks: i64,
            /// Total, filled quantity included.
            quantity_lots: u64,
            /// Open quantity.
            open_lots: u64,
            /// Expiry, nanoseconds since 1970; 0 = none.
            expire_at_ns: u64,
            /// Sequence in the exchange's journal. Later changes of the order have higher ones.
            node_sequence: u64,
        }
        /// Unnumbered. Answer to `OpenOrders`, after its `OpenOrder`s.
        0x87 OpenOrdersEnd {
            /// Id of the request.
            request_id: u32,
            /// `OpenOrder`s sent.
            count: u32,
            /// 255 = done, else a reject reason.
            outcome: u8,
            /// With `THROTTLE`: microseconds until the next request is accepted. 0 otherwise.
            limit: u64,
            /// Sequence in the exchange's journal: the list has the orders that were open after it.
            /// 0 if the request is refused.
            node_sequence: u64,
        }
        /// Unnumbered. Answer to `Retransmit`, after the retransmitted messages.
        0x88 RetransmitEnd {
            /// Id of the request.
            request_id: u32,
            /// First number of the request.
            first: u64,
            /// Last number of the request.
            last: u64,
            /// 255 = done, else a reject reason.
            outcome: u8,
            /// With `THROTTLE`: microseconds until the next request is accepted. 0 otherwise.
            limit: u64,
        }
        /// Unnumbered, once per day and user, to the session whose message reaches 80 % of
        /// `allowed`. Above `allowed`, new orders and amends are throttled (`ORDER_TO_TRADE`). Each
        /// trade raises `allowed`.
        0x89 OrderToTrade {
            /// New orders, amends and cancels of the user today, over all sessions and calls,
            /// refused ones included.
            messages: u64,
            /// Order messages that the user's trades of today allow.
            allowed: u64,
        }
        /// Unnumbered, conflated. Ledger balance of a sub-account of the user after a change,
        /// including what is on hold or not yet final. At most ten per second and sub-account.
        0x8a LedgerBalance {
            /// 0 = CFA-RUB, n = units of instrument n - 1.
            asset: u32,
            /// Kopecks, or 10^-decimals of a unit.
            balance_minor: i64,
            /// When it changed, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Unnumbered hint: the request is admitted but not yet durable, and a crash may withdraw
        /// it. Its numbered report confirms it: `OrderAck`, `Amended`, `Cancelled`,
        /// `MassCancelled` or `CancelAllAfterSet`.
        0x90 Accepted {
            /// Client sequence of the request.
            client_seq: u64,
            /// Client order id of its order; 0 for none.
            client_order_id: u64,
            /// The exchange's id of its order; 0 for none.
            engine_order_id: u64,
            /// Sequence of the request in the exchange's journal, as in its report.
            node_sequence: u64,
        }
        /// Numbered. The order is durable and has reached the book. Its `Fill` and `Cancelled`
        /// messages follow.
        0x91 OrderAck {
            /// Client sequence of the order.
            client_seq: u64,
            /// Client order id of the order.
            client_order_id: u64,
            /// The exchange's id of the order: `Cancel` and `Amend` may name it.
            engine_order_id: u64,
            /// Public order id, the one of the RPC side.
            order_id: Id128,
            /// Instrument number.
            instrument: u32,
            /// Buy or sell.
            side: Side,
            /// Limit, or the protection price of a market order. Without one: 0 for a buy,
            /// 9223372036854775807 for a sell.
            price_ticks: i64,
            /// Quantity of the order, before its fills.
            open_lots: u64,
            /// Sequence of the order in the exchange's journal.
            node_sequence: u64,
            /// When the exchange accepted the order, nanoseconds since 1970.
            time_ns: u64,
            /// When the exchange read the request that caused this message, nanoseconds since 1970.
            received_ns: u64,
        }
        /// A request was rejected. Numbered if the rejection is journalled, else unnumbered
        /// (sequence 0, `node_sequence` 0).
        0x92 Rejected {
            /// Client sequence of the request.
            client_seq: u64,
            /// Client order id of its order, as far as it is known; 0 for none.
            client_order_id: u64,
            /// The exchange's id of its order, as far as it is known; 0 for none.
            engine_order_id: u64,
            /// Kind of the request.
            request: RequestKind,
            /// Why it was rejected.
            reason: RejectReason,
            /// Limit value of the reason, 0 for none: see Reject reasons.
            limit: u64,
            /// Sequence of the rejection in the exchange's journal; 0 if it is not journalled.
            node_sequence: u64,
            /// When the exchange rejected the request, nanoseconds since 1970.
            time_ns: u64,
            /// When the exchange read the request that caused this message, nanoseconds since 1970.
            received_ns: u64,
        }
        /// Numbered. One trade of this order.
        0x93 Fill {
            /// Client order id of this order; 0 for none.
            client_order_id: u64,
            /// The exchange's id of this order.
            engine_order_id: u64,
            /// Instrument number.
            instrument: u32,
            /// Public id of the trade, the same for both orders.
            trade_id: Id128,
            /// Number of the trade on its instrument, without gaps, from 1.
            trade_number: u64,
            /// Side of this order.
            side: Side,
            /// 1 = this order is the incoming one (taker), 0 = it was resting (maker).
            aggressor: u8,
            /// Price of the trade.
            price_ticks: i64,
            /// Quantity of the trade.
            quantity_lots: u64,
            /// Open quantity of this order after the trade.
            open_lots: u64,
            /// Fee of this order for this trade, in kopecks; 0 for a sell.
            fee_minor: i64,
            /// The exchange's id of the order on the other side.
            counter_order_id: u64,
            /// Sequence of the incoming order or amend in the exchange's journal.
            node_sequence: u64,
            /// When the trade was made, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Numbered. The order has ended.
        0x94 Cancelled {
            /// Client sequence of the `Cancel` of this session that ended the order; 0 for any
            /// other cause, a `MassCancel` included.
            client_seq: u64,
            /// Client order id of the order; 0 for none.
            client_order_id: u64,
            /// The exchange's id of the order.
            engine_order_id: u64,
            /// Instrument number.
            instrument: u32,
            /// Why the order ended.
            reason: CancelReason,
            /// Unfilled quantity.
            quantity_lots: u64,
            /// Sequence in the exchange's journal of the command that ended the order.
            node_sequence: u64,
            /// When the order ended, nanoseconds since 1970.
            time_ns: u64,
            /// When the exchange read the request that caused this message, nanoseconds since 1970.
            received_ns: u64,
        }
        /// Numbered. Price, total quantity or client order id changed.
        0x95 Amended {
            /// Client sequence of the `Amend`; 0 if another session or a call amended the order.
            client_seq: u64,
            /// The order's client order id after the amend: the new one if the amend changed it.
            client_order_id: u64,
            /// The exchange's id of the order, which an amend does not change.
            engine_order_id: u64,
            /// Instrument number.
            instrument: u32,
            /// Limit price after the amend.
            price_ticks: i64,
            /// Total after the amend, filled quantity included.
            quantity_lots: u64,
            /// Open quantity after the amend, before the fills that it causes.
            open_lots: u64,
            /// 1 = the order kept its place in the queue of its price, 0 = it lost it.
            kept_priority: u8,
            /// Sequence of the amend in the exchange's journal.
            node_sequence: u64,
            /// When the order was amended, nanoseconds since 1970.
            time_ns: u64,
            /// When the exchange read the request that caused this message, nanoseconds since 1970.
            received_ns: u64,
        }
        /// Numbered. Self-trade prevention reduced the order without a trade; the order stays open.
        0x96 Reduced {
            /// Client order id of the order; 0 for none.
            client_order_id: u64,
            /// The exchange's id of the order.
            engine_order_id: u64,
            /// Instrument number.
            instrument: u32,
            /// `SELF_TRADE`.
            reason: CancelReason,
            /// Quantity by which the order was reduced; its total is smaller by as much.
            quantity_lots: u64,
            /// Open quantity after it.
            open_lots: u64,
            /// Sequence of the incoming order or amend in the exchange's journal.
            node_sequence: u64,
            /// When the order was reduced, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Numbered. A mass cancel was executed. The `Cancelled` messages of `count` orders precede
        /// this message. A mass cancel of more than 256 orders runs in slices, and requests of
        /// other members are processed between slices. After the last slice this message is sent
        /// again with `client_seq` 0, `remaining` 0 and the count of all cancelled orders.
        0x97 MassCancelled {
            /// Client sequence of the `MassCancel`; 0 in the message after the last slice.
            client_seq: u64,
            /// Instrument of the request; 4294967295 = every instrument.
            instrument: u32,
            /// Orders cancelled: by the first slice, or after the last one by all.
            count: u32,
            /// Maximum number of orders that further slices cancel; 0 = the mass cancel is
            /// complete.
            remaining: u32,
            /// Sequence of the mass cancel or of its last slice in the exchange's journal.
            node_sequence: u64,
            /// When it was executed, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Numbered. Answer to `CancelAllAfter`.
        0x98 CancelAllAfterSet {
            /// Client sequence of the request.
            client_seq: u64,
            /// When the dead man's switch fires, nanoseconds since 1970; 0 = off.
            cancel_all_at_ns: u64,
            /// Sequence of the request in the exchange's journal.
            node_sequence: u64,
            /// When the timer was set, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Numbered, to every session of the user. A trading hold was funded, defunded or closed.
        /// The amounts are those after the command `node_sequence`.
        0x99 TradingHoldChanged {
            /// 0 = CFA-RUB, n = units of instrument n - 1.
            asset: u32,
            /// Id of the trading hold on the RPC side.
            hold_id: Id128,
            /// Amount that orders may draw, in kopecks or 10^-decimals of a unit.
            undrawn_minor: i64,
            /// Amount that the user's open orders have drawn, in the same unit.
            drawn_minor: i64,
            /// What changed the hold.
            cause: FundingCause,
            /// Sequence of the change in the exchange's journal.
            node_sequence: u64,
            /// When the hold changed, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Numbered. Settlement has passed a trade of this session.
        0x9a SettlementProgress {
            /// Every `Fill` with a `node_sequence` up to this one is in the ledger.
            posted_sequence: u64,
            /// Every `Fill` with a `node_sequence` up to this one is final, unless an earlier
            /// `TradeBusted` named it.
            finalized_sequence: u64,
            /// Final and bust trades of the exchange, of all members and instruments, since its
            /// first start.
            trades_final: u64,
            /// Sequence of this message's command in the exchange's journal.
            node_sequence: u64,
            /// When the exchange journalled the positions, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Numbered. A trade reported by a `Fill` is bust: the ledger or the chain has refused
        /// it for good, and operations of it in the ledger are reversed. The order is not
        /// changed.
        0x9b TradeBusted {
            /// Client order id of this order; 0 for none.
            client_order_id: u64,
            /// The exchange's id of this order.
            engine_order_id: u64,
            /// Instrument number.
            instrument: u32,
            /// Id of the trade, as in its `Fill`.
            trade_id: Id128,
            /// Number of the trade on its instrument, as in its `Fill`.
            trade_number: u64,
            /// Side of this order.
            side: Side,
            /// Sequence of the bust in the exchange's journal.
            node_sequence: u64,
            /// When the exchange journalled the bust, nanoseconds since 1970.
            time_ns: u64,
        }
    }
}

impl NewOrder {
    /// A good-till-cancelled limit order.
    pub fn limit(
        client_order_id: u64,
        instrument: u32,
        side: Side,
        price_ticks: i64,
        quantity_lots: u64,
    ) -> Self {
        Self {
            client_order_id,
            instrument,
            side,
            order_type: OrderType::Limit,
            time_in_force: TimeInForce::Gtc,
            stp: StpMode::CancelNewest,
            flags: 0,
            price_ticks,
            quantity_lots,
            expire_at_ns: 0,
        }
    }
}

impl ServerMessage {
    /// Client sequence of the request that this message finally answers, 0 for none.
    pub fn answers(&self) -> u64 {
        match self {
            Self::OrderAck(m) => m.client_seq,
            Self::Rejected(m) => m.client_seq,
            Self::Cancelled(m) => m.client_seq,
            Self::Amended(m) => m.client_seq,
            Self::MassCancelled(m) => m.client_seq,
            Self::CancelAllAfterSet(m) => m.client_seq,
            _ => 0,
        }
    }
}

/// Bytes of the longest numbered message, header included.
pub const NUMBERED_LEN_MAX: usize = crate::HEADER_LEN + longest();

const fn longest() -> usize {
    let lengths = [
        OrderAck::LEN,
        Rejected::LEN,
        Fill::LEN,
        Cancelled::LEN,
        Amended::LEN,
        Reduced::LEN,
        MassCancelled::LEN,
        CancelAllAfterSet::LEN,
        TradingHoldChanged::LEN,
        SettlementProgress::LEN,
        TradeBusted::LEN,
    ];
    let (mut longest, mut at) = (0, 0);
    while at < lengths.len() {
        if lengths[at] > longest {
            longest = lengths[at];
        }
        at += 1;
    }
    longest
}
