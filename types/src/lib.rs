//! Room `types`.
