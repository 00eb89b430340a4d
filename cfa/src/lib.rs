//! Room `cfa`.
