//! Memory layouts of the harness's C ABI. Prices are ticks, quantities lots, sides [`BUY`] or
//! [`SELL`].

use core::ffi::{c_int, c_void};

pub const BUY: u8 = 0;
pub const SELL: u8 = 1;

/// A new order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NewOrder {
    pub order_id: u64,
    /// Number of the message, echoed in its reports.
    pub sequence: u64,
    pub price: i64,
    pub quantity: u32,
    pub side: u8,
    /// 1 = immediate or cancel, 0 = the remainder rests.
    pub ioc: u8,
    pub reserved: [u8; 2],
}

/// A cancel of one order.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Cancel {
    pub order_id: u64,
    pub sequence: u64,
}

/// A change of one order to a new price and open quantity.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Amend {
    pub order_id: u64,
    pub sequence: u64,
    pub price: i64,
    pub quantity: u32,
    pub side: u8,
    pub reserved: [u8; 3],
}

/// The order has been accepted.
pub const ORDER_ACK: u8 = 0;
/// One match, at the resting order's price.
pub const TRADE: u8 = 1;
/// A resting order, or the remainder of an immediate order, is cancelled.
pub const CANCEL_ACK: u8 = 2;
/// The order has its new price and quantity.
pub const MODIFY_ACK: u8 = 3;
/// The order to cancel does not rest.
pub const CANCEL_REJECT: u8 = 4;
/// The order to change does not rest.
pub const MODIFY_REJECT: u8 = 5;

/// One effect of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Report {
    /// [`ORDER_ACK`] to [`MODIFY_REJECT`].
    pub kind: u8,
    pub side: u8,
    pub reserved: [u8; 6],
    /// Number of the message.
    pub sequence: u64,
    /// 0 in a trade.
    pub order_id: u64,
    pub price: i64,
    pub quantity: u32,
    pub reserved_2: u32,
    /// In a trade only.
    pub maker_order_id: u64,
    /// In a trade only.
    pub taker_order_id: u64,
    pub reserved_3: u64,
}

/// Enqueues one report: 1 = accepted, 0 = the queue is full.
pub type Push = unsafe extern "C" fn(sink: *mut c_void, report: *const Report) -> c_int;

/// Functions of the queue to the harness's other thread. This library calls only `push`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Transport {
    pub create: Option<unsafe extern "C" fn(capacity: u32) -> *mut c_void>,
    pub push: Option<Push>,
    pub drain: Option<unsafe extern "C" fn(sink: *mut c_void, out: *mut Report, max: u32) -> u32>,
    pub flush: Option<unsafe extern "C" fn(sink: *mut c_void)>,
    pub destroy: Option<unsafe extern "C" fn(sink: *mut c_void)>,
}

const _: () = assert!(size_of::<NewOrder>() == 32 && size_of::<Cancel>() == 16);
const _: () = assert!(size_of::<Amend>() == 32 && size_of::<Report>() == 64);
