//! Calls amid which the platform aborts at a failpoint.

use serde_json::Value;

use crate::Platform;

/// A call that the platform may not survive.
///
/// # Panics
/// If it is refused.
pub async fn asked(platform: &Platform, token: &str, name: &str, request: Value) {
    if let Err(refusal) = platform.call(token, name, request).await {
        assert_eq!(refusal.code, "transport", "{name}: {refusal:?}");
    }
}

/// Makes a call that ends in an abort at `place`; starts the platform again.
pub async fn killed_at(
    platform: &mut Platform,
    place: &str,
    token: &str,
    name: &str,
    request: Value,
) {
    platform.stop().await;
    platform.restart_with(&[("PLATFORM_CRASH_AT", place)]).await;
    asked(platform, token, name, request).await;
    platform.aborted().await;
    platform.restart().await;
}
