//! Room `settlement`.
