//! Room `tests`.
