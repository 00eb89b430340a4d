//! Room `benches`.
