//! What the sweeps of old rows report.

/// Counts the removed rows of a store and sets the time of its last successful sweep. `kind` names
/// the rows.
pub fn report(kind: &'static str, store: &str, removed: u64) {
    let store = store.to_owned();
    metrics::counter!("retention_removed_rows_total", "kind" => kind, "store" => store.clone())
        .increment(removed);
    let now_s = service_kit::clock::now_us() as f64 / 1e6;
    if removed > 0 {
        tracing::info!(kind, store, removed, "old rows removed");
    }
    metrics::gauge!("retention_last_success_timestamp_seconds", "kind" => kind, "store" => store)
        .set(now_s);
}
