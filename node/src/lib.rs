//! Room `node`.
