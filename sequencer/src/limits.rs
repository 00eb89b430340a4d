//! The bounds of admission on this node.

use std::hash::{BuildHasher, RandomState};

use admission::AdmissionConfig;

/// The defaults, with a random key that no client can know.
pub fn limits() -> AdmissionConfig {
    AdmissionConfig {
        client_id_key: [0, 1].map(|word: u64| RandomState::new().hash_one(word)),
        ..AdmissionConfig::default()
    }
}
