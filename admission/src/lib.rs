//! Room `admission`.
