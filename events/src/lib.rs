//! Room `events`.
