//! CFA lifecycle service.
pub mod chain;
pub mod clock;
