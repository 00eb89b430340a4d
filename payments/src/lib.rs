//! Room `payments`.
