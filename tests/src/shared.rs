//! One runtime for all tests of a file, and one platform for those that do not disturb each other.

use std::sync::LazyLock;

use tokio::runtime::Runtime;
use tokio::sync::OnceCell;

use crate::Platform;

static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .expect("a runtime")
});

static PLATFORM: OnceCell<Platform> = OnceCell::const_new();

/// Runs a test on the runtime that owns the shared connections.
pub fn run<F: Future>(test: F) -> F::Output {
    RUNTIME.block_on(test)
}

/// The platform of this file, started on first use.
pub async fn platform() -> &'static Platform {
    PLATFORM.get_or_init(Platform::start).await
}
