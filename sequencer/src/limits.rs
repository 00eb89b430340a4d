//! The bounds of admission on this node.

use std::hash::{BuildHasher, RandomState};

use admission::AdmissionConfig;

/// The default bounds. The key of the table of client order ids is random, since a client that knew
/// it could make ids collide.
pub fn limits() -> AdmissionConfig {
    AdmissionConfig {
        client_id_key: [0, 1].map(|word: u64| RandomState::new().hash_one(word)),
        ..AdmissionConfig::default()
    }
}
