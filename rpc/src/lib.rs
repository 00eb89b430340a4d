//! Room `rpc`.
