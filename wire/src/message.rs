//! Every message of the protocol with its fields, in wire order.

use types::command::{FundingCause, RequestKind};
use types::{CancelReason, Id128, OrderType, Phase, RejectReason, Side, StpMode, TimeInForce};

use crate::field::{Field, Text};
use crate::frame::{Message, WireError};

/// ALPN name of the protocol. Every change of a layout requires a new name and a new [`VERSION`].
pub const ALPN: &[u8] = b"cfa-trade/2";
/// Version byte of the layouts below.
pub const VERSION: u8 = 2;

/// One row of a layout table: field, offset in the body, length, kind.
pub type LayoutRow = (&'static str, usize, usize, &'static str);

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
                $( $(#[$field_meta:meta])* $field:ident : $type:ty ),* $(,)?
            } )+
        }
    )+) => {
        $($(
            $(#[doc = $about])+
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name { $( $(#[$field_meta])* pub $field: $type ),* }

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
                        let row = (stringify!($field), at, <$type as Field>::LEN, <$type as Field>::KIND);
                        at += <$type as Field>::LEN;
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
        /// Opens a session on the header's channel (0 to 63). `last_sequence` is the last number
        /// received on this session, 0 for none.
        0x01 Login {
            /// Bearer credential, the same as on the RPC ports.
            token: Text<1024>,
            /// Names the session across connections, unique per user.
            session_name: Text<32>,
            last_sequence: u64,
            /// Bit 0 cancel on disconnect, bit 1 from now.
            flags: u8,
            /// Heartbeat interval: longest silence before the connection ends. 0 = the server's
            /// default.
            heartbeat_ms: u32,
            /// Self-trade prevention group of the session's orders. 0 = the user's own. Other
            /// groups are refused unless the exchange allows them.
            stp_group: u32,
            /// Undrawn amount of the user's CFA-RUB trading hold after the login, in kopecks. 0 =
            /// unchanged.
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
            instrument: u32,
            side: Side,
            order_type: OrderType,
            time_in_force: TimeInForce,
            stp: StpMode,
            /// Bit 0 post only.
            flags: u8,
            /// Limit price; for a market order its protection price or 0.
            price_ticks: i64,
            quantity_lots: u64,
            /// Nanoseconds since 1970 for GTD, else 0.
            expire_at_ns: u64,
        }
        /// Cancels one order, named by `engine_order_id` or, if that is 0, by `client_order_id`.
        0x11 Cancel {
            client_order_id: u64,
            engine_order_id: u64,
        }
        /// Changes an order, named as in `Cancel`. The order keeps its queue priority if the price
        /// is unchanged and the quantity is not larger.
        0x12 Amend {
            client_order_id: u64,
            engine_order_id: u64,
            /// 0 = unchanged.
            price_ticks: i64,
            /// New total, filled quantity included; 0 = unchanged.
            quantity_lots: u64,
            /// New client order id, unique among the user's open orders; 0 = unchanged.
            new_client_order_id: u64,
        }
        /// Cancels every open order in the scope: 0 = this session, 1 = this user, 2 = this
        /// session's self-trade prevention group.
        0x13 MassCancel {
            scope: u8,
            /// 4294967295 = every instrument.
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
            /// Kopecks, or 10^-decimals of a unit.
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
            first: u64,
            /// At most the last number sent on this connection.
            last: u64,
        }
    }

    /// Messages of the server. Numbered messages carry their number in the header, without gaps.
    ServerMessage {
        /// Unnumbered. The login is accepted. Instrument definitions precede this message. The
        /// numbered messages after `last_sequence` follow.
        0x81 LoginAccepted {
            session: u32,
            /// Last client sequence that the server has seen. The client sends later requests
            /// again.
            last_client_seq: u64,
            /// Number of the first numbered message on this connection.
            next_sequence: u64,
            node: u8,
            /// Messages per second above which requests get `THROTTLE`; 0 = no limit.
            throttle_per_s: u32,
            heartbeat_ms: u32,
            /// When the session's dead man's switch fires, nanoseconds since 1970; 0 = off.
            cancel_all_at_ns: u64,
            /// Server time, nanoseconds since 1970.
            time_ns: u64,
        }
        /// Unnumbered. The server ends the session, or on channel 65535 the connection, for this
        /// reason.
        0x82 Disconnect {
            code: u16,
            text: Text<96>,
        }
        /// Unnumbered, channel 65535. The server has sent nothing else for half the heartbeat
        /// interval.
        0x83 ServerHeartbeat {
            time_ns: u64,
        }
        /// Unnumbered. An instrument's parameters, sent before `LoginAccepted` and when its phase
        /// or band changes.
        0x84 InstrumentDefinition {
            instrument: u32,
            id: Text<32>,
            /// Fraction digits of a unit.
            decimals: u8,
            phase: Phase,
            /// Tick = mantissa * 10^-scale roubles.
            tick_mantissa: i64,
            tick_scale: u8,
            /// Lot = mantissa * 10^-scale units.
            lot_mantissa: i64,
            lot_scale: u8,
            /// Kopecks of one lot at one tick.
            value_minor: i64,
            /// 10^-decimals units in one lot.
            units_minor: i64,
            band_low_ticks: i64,
            band_high_ticks: i64,
            fee_ppm: u32,
        }
        /// Unnumbered. Answer to `SetTradingHold`.
        0x85 TradingHold {
            request_id: u32,
            asset: u32,
            hold_id: Id128,
            undrawn_minor: i64,
            drawn_minor: i64,
            /// 255 = done, else a reject reason.
            outcome: u8,
        }
        /// Unnumbered. An open order, in its state after all messages of its session up to
        /// `node_sequence`.
        0x86 OpenOrder {
            request_id: u32,
            client_order_id: u64,
            engine_order_id: u64,
            /// Public order id.
            order_id: Id128,
            instrument: u32,
            side: Side,
            time_in_force: TimeInForce,
            price_ticks: i64,
            /// Total, filled quantity included.
            quantity_lots: u64,
            open_lots: u64,
            /// Expiry, nanoseconds since 1970; 0 = none.
            expire_at_ns: u64,
            node_sequence: u64,
        }
        /// Unnumbered. Answer to `OpenOrders`, after its `OpenOrder`s.
        0x87 OpenOrdersEnd {
            request_id: u32,
            /// `OpenOrder`s sent.
            count: u32,
            /// 255 = done, else a reject reason.
            outcome: u8,
            node_sequence: u64,
        }
        /// Unnumbered. Answer to `Retransmit`, after the retransmitted messages.
        0x88 RetransmitEnd {
            request_id: u32,
            first: u64,
            last: u64,
            /// 255 = done, else a reject reason.
            outcome: u8,
        }
        /// Unnumbered, once per day and user. Above `allowed`, new orders and amends are throttled
        /// (`ORDER_TO_TRADE`). Each trade raises `allowed`.
        0x89 OrderToTrade {
            /// Order messages of the user today, over all sessions.
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
        /// it. `OrderAck`, `Amended` or `Cancelled` confirms it.
        0x90 Accepted {
            client_seq: u64,
            client_order_id: u64,
            engine_order_id: u64,
            node_sequence: u64,
        }
        /// Numbered. The order is durable and has reached the book. Its `Fill` and `Cancelled`
        /// messages follow.
        0x91 OrderAck {
            client_seq: u64,
            client_order_id: u64,
            engine_order_id: u64,
            /// Public order id.
            order_id: Id128,
            instrument: u32,
            side: Side,
            /// Limit, or the protection price of a market order.
            price_ticks: i64,
            open_lots: u64,
            node_sequence: u64,
            time_ns: u64,
            /// When the exchange read the request that caused this message, nanoseconds since 1970.
            received_ns: u64,
        }
        /// A request was rejected. Numbered if the rejection is journalled, else unnumbered
        /// (sequence 0, `node_sequence` 0).
        0x92 Rejected {
            client_seq: u64,
            client_order_id: u64,
            engine_order_id: u64,
            request: RequestKind,
            reason: RejectReason,
            /// Limit value of the reason, 0 for none. `THROTTLE`, `JOURNAL_QUOTA`,
            /// `ORDER_TO_TRADE`: microseconds until the next request is accepted.
            /// `USER_ORDER_LIMIT`, `INSTRUMENT_ORDER_LIMIT`, `ORDER_SIZE_LIMIT`,
            /// `ORDER_VALUE_LIMIT`, `MALFORMED`: the limit. `INSUFFICIENT_BALANCE`,
            /// `LIMIT_EXCEEDED`: the available amount, in minor units.
            limit: u64,
            node_sequence: u64,
            time_ns: u64,
            /// When the exchange read the request that caused this message, nanoseconds since 1970.
            received_ns: u64,
        }
        /// Numbered. One trade of this order.
        0x93 Fill {
            client_order_id: u64,
            engine_order_id: u64,
            instrument: u32,
            trade_id: Id128,
            /// Dense per instrument, from 1.
            trade_number: u64,
            side: Side,
            /// 0 = resting order (maker), 1 = incoming order (taker).
            aggressor: u8,
            price_ticks: i64,
            quantity_lots: u64,
            /// Open quantity after the trade.
            open_lots: u64,
            /// Fee of this order for this trade, in kopecks; 0 for a sell.
            fee_minor: i64,
            /// Engine id of the order on the other side.
            counter_order_id: u64,
            node_sequence: u64,
            time_ns: u64,
        }
        /// Numbered. The order has ended. `quantity_lots` is its unfilled quantity.
        0x94 Cancelled {
            /// Client sequence of the cancel; 0 if no request of this session caused it.
            client_seq: u64,
            client_order_id: u64,
            engine_order_id: u64,
            instrument: u32,
            reason: CancelReason,
            quantity_lots: u64,
            node_sequence: u64,
            time_ns: u64,
            /// When the exchange read the request that caused this message, nanoseconds since 1970.
            received_ns: u64,
        }
        /// Numbered. Price, total quantity or client order id changed.
        0x95 Amended {
            client_seq: u64,
            /// The order's client order id after the amend.
            client_order_id: u64,
            engine_order_id: u64,
            instrument: u32,
            price_ticks: i64,
            /// New total.
            quantity_lots: u64,
            open_lots: u64,
            /// 1 = queue priority was kept.
            kept_priority: u8,
            node_sequence: u64,
            time_ns: u64,
            /// When the exchange read the request that caused this message, nanoseconds since 1970.
            received_ns: u64,
        }
        /// Numbered. Self-trade prevention reduced the order without a trade; the order stays open.
        0x96 Reduced {
            client_order_id: u64,
            engine_order_id: u64,
            instrument: u32,
            reason: CancelReason,
            quantity_lots: u64,
            open_lots: u64,
            node_sequence: u64,
            time_ns: u64,
        }
        /// Numbered. A mass cancel of one instrument or of all (4294967295) was executed. The
        /// `Cancelled` messages of `count` orders precede this message. A mass cancel of more than
        /// 256 orders runs in slices, and requests of other members are processed between slices.
        /// After the first slice, `remaining` is the maximum number of orders to follow. After the
        /// last slice this message is sent again with `client_seq` 0, `remaining` 0 and the count
        /// of all cancelled orders.
        0x97 MassCancelled {
            client_seq: u64,
            instrument: u32,
            count: u32,
            remaining: u32,
            node_sequence: u64,
            time_ns: u64,
        }
        /// Numbered. Answer to `CancelAllAfter`.
        0x98 CancelAllAfterSet {
            client_seq: u64,
            /// When the dead man's switch fires, nanoseconds since 1970; 0 = off.
            cancel_all_at_ns: u64,
            node_sequence: u64,
            time_ns: u64,
        }
        /// Numbered, to every session of the user. A trading hold was funded, defunded or closed.
        /// The amounts are those after the command `node_sequence`.
        0x99 TradingHoldChanged {
            /// 0 = CFA-RUB, n = units of instrument n - 1.
            asset: u32,
            hold_id: Id128,
            undrawn_minor: i64,
            /// Amount that the user's open orders have drawn.
            drawn_minor: i64,
            cause: FundingCause,
            node_sequence: u64,
            time_ns: u64,
        }
        /// Numbered. Settlement has passed a trade of this session. Every `Fill` with a
        /// `node_sequence` up to `posted_sequence` is in the ledger. Every `Fill` up to
        /// `finalized_sequence` is final, unless an earlier `TradeBusted` named it.
        0x9a SettlementProgress {
            posted_sequence: u64,
            finalized_sequence: u64,
            /// Final and bust trades of the exchange since its first start.
            trades_final: u64,
            node_sequence: u64,
            time_ns: u64,
        }
        /// Numbered. A trade reported by a `Fill` is bust: the chain has refused it for good, and
        /// its operations are reversed. The order is not changed.
        0x9b TradeBusted {
            client_order_id: u64,
            engine_order_id: u64,
            instrument: u32,
            trade_id: Id128,
            /// Dense per instrument, from 1.
            trade_number: u64,
            side: Side,
            node_sequence: u64,
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
