//! Panics that production code catches: they are no findings and are not printed.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::sync::Once;

use sequencer::image::panic_text;

thread_local! {
    static IS_EXPECTED: Cell<bool> = const { Cell::new(false) };
}

/// Runs code that catches its own panics. The installed panic hook is not called: the default hook
/// prints, and the fuzzer's hook ends the process.
pub fn expect_panics<T>(run: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info: &PanicHookInfo<'_>| {
            if !IS_EXPECTED.get() {
                before(info);
            }
        }));
    });
    IS_EXPECTED.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(run));
    IS_EXPECTED.set(false);
    outcome.unwrap_or_else(|panic| panic!("uncaught panic: {}", panic_text(&*panic)))
}
