//! Exports `engine` with the C ABI of the public matching-engine benchmark harness
//! (flash1-dev/matching-engine-benchmark). The harness loads this library, sends it one message at
//! a time and hashes the reports. `cargo xtask harness` runs it; `docs/measurements/matching.md`
//! describes how.
//!
//! | file | contents |
//! |---|---|
//! | `abi` | memory layouts of messages, reports and the report queue |
//! | `adapter` | translation of messages to commands and of events to reports |
//! | `orders` | map from the harness's order ids to the book's handles |
//!
//! The ABI has one engine per process, called by one thread at a time. A call that violates it
//! (null pointer, call outside `engine_init` and `engine_shutdown`) aborts the process: a panic
//! does not cross the boundary.
//!
//! Not exported: `engine_get_transport` (the harness's own queue carries the reports),
//! `engine_prebuild` and `engine_on_batch`. Each message is translated inside the timed window.

pub mod abi;
mod adapter;
mod orders;

use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use abi::{Amend, Cancel, NewOrder, Transport};
use adapter::{Adapter, Reports};

/// The engine between `engine_init` and `engine_shutdown`, null outside.
static ADAPTER: AtomicPtr<Adapter> = AtomicPtr::new(null_mut());

/// The engine of the current call.
///
/// # Safety
/// No other call of this library is in progress, and the reference does not outlive the call.
#[allow(unsafe_code)]
unsafe fn adapter<'call>() -> &'call mut Adapter {
    let adapter = ADAPTER.load(Ordering::Relaxed);
    // SAFETY: a non-null pointer came from `Box::into_raw` in `engine_init`, and `engine_shutdown`
    // has not freed it. The caller guarantees that no second reference exists.
    unsafe { adapter.as_mut() }.expect("engine_init must be called before any other function")
}

/// Creates an empty book that sends its reports with `transport.push` to `sink`. The nonce is not
/// used.
///
/// # Safety
/// `transport` is valid, and its `push` may be called with `sink` until `engine_shutdown`. No other
/// call of this library is in progress.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_init(_nonce: u64, transport: *const Transport, sink: *mut c_void) {
    // SAFETY: the caller passes a valid transport or null, which `as_ref` turns into `None`.
    let transport = unsafe { transport.as_ref() }.expect("transport is null");
    let push = transport.push.expect("transport has no push");
    // SAFETY: the caller keeps queue and sink alive until `engine_shutdown`, which drops the
    // adapter.
    let reports = unsafe { Reports::new(push, sink) };
    let previous = ADAPTER.swap(
        Box::into_raw(Box::new(Adapter::new(reports))),
        Ordering::Relaxed,
    );
    assert!(previous.is_null(), "engine_init called twice");
}

/// Shuts the engine down.
///
/// # Safety
/// No other call of this library is in progress.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_shutdown() {
    let adapter = ADAPTER.swap(null_mut(), Ordering::Relaxed);
    assert!(
        !adapter.is_null(),
        "engine_shutdown called without engine_init"
    );
    // SAFETY: the pointer came from `Box::into_raw` in `engine_init`, and the swap made it
    // exclusive.
    drop(unsafe { Box::from_raw(adapter) });
}

/// Processes a new order.
///
/// # Safety
/// `message` is valid. No other call of this library is in progress.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_on_new_order(message: *const NewOrder) {
    // SAFETY: the caller's pointer is valid or null, and no other call is in progress.
    let (adapter, message) = unsafe { (adapter(), message.as_ref()) };
    adapter.new_order(message.expect("message is null"));
}

/// Processes a cancel.
///
/// # Safety
/// As for [`engine_on_new_order`].
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_on_cancel(message: *const Cancel) {
    // SAFETY: as in `engine_on_new_order`.
    let (adapter, message) = unsafe { (adapter(), message.as_ref()) };
    adapter.cancel(message.expect("message is null"));
}

/// Processes a change of price or quantity.
///
/// # Safety
/// As for [`engine_on_new_order`].
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_on_modify(message: *const Amend) {
    // SAFETY: as in `engine_on_new_order`.
    let (adapter, message) = unsafe { (adapter(), message.as_ref()) };
    adapter.amend(message.expect("message is null"));
}

/// Does nothing: each call completes matching and reports before it returns.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub extern "C" fn engine_flush() {}

/// Best bid in ticks, `i64::MIN` without bids.
///
/// # Safety
/// No other call of this library is in progress.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_query_best_bid() -> i64 {
    // SAFETY: no other call is in progress.
    unsafe { adapter() }
        .best_price(abi::BUY)
        .unwrap_or(i64::MIN)
}

/// Best ask in ticks, `i64::MAX` without asks.
///
/// # Safety
/// No other call of this library is in progress.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_query_best_ask() -> i64 {
    // SAFETY: no other call is in progress.
    unsafe { adapter() }
        .best_price(abi::SELL)
        .unwrap_or(i64::MAX)
}

/// Open quantity at a price, 0 without orders.
///
/// # Safety
/// No other call of this library is in progress.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_query_depth_at(price: i64, side: u8) -> u64 {
    // SAFETY: no other call is in progress.
    unsafe { adapter() }.depth_at(price, side)
}
