//! Room `sandbox`.
