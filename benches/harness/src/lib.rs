//! `engine` behind the C ABI of the public matching-engine benchmark harness
//! (flash1-dev/matching-engine-benchmark). The harness loads this library, plays messages into it one
//! at a time and hashes the reports. `cargo xtask harness` runs it; `benches/README.md` says how.
//!
//! | file | what |
//! |---|---|
//! | `abi` | memory layouts of messages, reports and the report queue |
//! | `adapter` | messages to commands, events to reports |
//! | `orders` | the harness's order ids against the book's handles |
//!
//! The ABI is one engine per process, driven by one thread at a time. A call that breaks it (null
//! pointer, call outside `engine_init` and `engine_shutdown`) ends the process: a panic does not cross
//! the boundary.
//!
//! Not exported: `engine_get_transport` (the harness's own queue carries the reports),
//! `engine_prebuild` and `engine_on_batch`. Each message is translated inside the timed window.

pub mod abi;
mod adapter;
mod orders;

use core::ffi::c_void;
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use abi::{Amend, Cancel, New, Transport};
use adapter::{Adapter, Reports};

/// The engine between `engine_init` and `engine_shutdown`, null outside.
static ADAPTER: AtomicPtr<Adapter> = AtomicPtr::new(null_mut());

/// The engine of the call under way.
///
/// # Safety
/// No other call of this library is under way, and the reference does not outlive the call.
#[allow(unsafe_code)]
unsafe fn adapter<'call>() -> &'call mut Adapter {
    let adapter = ADAPTER.load(Ordering::Relaxed);
    // SAFETY: not null means that it came out of `Box::into_raw` in `engine_init` and that
    // `engine_shutdown` has not taken it back. The caller vouches that no second reference exists.
    unsafe { adapter.as_mut() }.expect("engine_init comes before every other call")
}

/// Makes an empty book that reports into `sink` by `transport`. The nonce is not used.
///
/// # Safety
/// `transport` names a queue whose functions may be called with `sink` until `engine_shutdown`. No
/// other call of this library is under way.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_init(_nonce: u64, transport: *const Transport, sink: *mut c_void) {
    // SAFETY: the caller passes a valid transport or null, which `as_ref` turns into none.
    let transport = unsafe { transport.as_ref() }.expect("a transport");
    let push = transport.push.expect("a transport takes reports");
    // SAFETY: the caller keeps queue and sink alive until `engine_shutdown`, which drops the adapter.
    let reports = unsafe { Reports::new(push, sink) };
    let before = ADAPTER.swap(
        Box::into_raw(Box::new(Adapter::new(reports))),
        Ordering::Relaxed,
    );
    assert!(before.is_null(), "engine_init comes once");
}

/// Ends the engine.
///
/// # Safety
/// No other call of this library is under way.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_shutdown() {
    let adapter = ADAPTER.swap(null_mut(), Ordering::Relaxed);
    assert!(
        !adapter.is_null(),
        "engine_init comes before engine_shutdown"
    );
    // SAFETY: it came out of `Box::into_raw` in `engine_init`, and the swap gave it to this call alone.
    drop(unsafe { Box::from_raw(adapter) });
}

/// Plays a new order.
///
/// # Safety
/// `message` is valid. No other call of this library is under way.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_on_new_order(message: *const New) {
    // SAFETY: the caller's pointer is valid or null, and no other call is under way.
    let (adapter, message) = unsafe { (adapter(), message.as_ref()) };
    adapter.new_order(message.expect("a message"));
}

/// Plays a cancel.
///
/// # Safety
/// As of [`engine_on_new_order`].
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_on_cancel(message: *const Cancel) {
    // SAFETY: as in `engine_on_new_order`.
    let (adapter, message) = unsafe { (adapter(), message.as_ref()) };
    adapter.cancel(message.expect("a message"));
}

/// Plays a change of price or quantity.
///
/// # Safety
/// As of [`engine_on_new_order`].
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_on_modify(message: *const Amend) {
    // SAFETY: as in `engine_on_new_order`.
    let (adapter, message) = unsafe { (adapter(), message.as_ref()) };
    adapter.amend(message.expect("a message"));
}

/// Nothing: every call has matched and reported when it returns.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub extern "C" fn engine_flush() {}

/// Best bid in ticks, `i64::MIN` without bids.
///
/// # Safety
/// No other call of this library is under way.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_query_best_bid() -> i64 {
    // SAFETY: no other call is under way.
    unsafe { adapter() }.best(abi::BUY).unwrap_or(i64::MIN)
}

/// Best ask in ticks, `i64::MAX` without asks.
///
/// # Safety
/// No other call of this library is under way.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_query_best_ask() -> i64 {
    // SAFETY: no other call is under way.
    unsafe { adapter() }.best(abi::SELL).unwrap_or(i64::MAX)
}

/// Open quantity at a price, 0 where nothing rests.
///
/// # Safety
/// No other call of this library is under way.
#[allow(unsafe_code)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn engine_query_depth_at(price: i64, side: u8) -> u64 {
    // SAFETY: no other call is under way.
    unsafe { adapter() }.depth_at(price, side)
}
