//! Room `gateway`.
