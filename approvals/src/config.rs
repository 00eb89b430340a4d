//! Configuration of the approvals service.

use std::path::PathBuf;

use events::StoreUrl;
use serde::{Deserialize, Serialize};

/// A field that the configuration file omits has its default.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ApprovalsConfig {
    /// Folder of `approvals.db`, when `url` is empty.
    pub data_dir: PathBuf,
    /// `postgres://user:password@host:5432/database`; empty: SQLite.
    pub url: StoreUrl,
    /// Maximum undecided requests per person.
    pub open_per_person_max: u32,
    /// Seconds after the approval in which the call is made and repeated. After that an unanswered
    /// call fails: an old decision does not act.
    pub execute_within_s: u32,
    /// Timeout of one attempt of a call, in milliseconds. Below the deadline of Approve, which
    /// waits for the first attempt.
    pub call_timeout_ms: u64,
    /// Initial backoff between attempts; each attempt doubles it.
    pub retry_first_ms: u64,
    /// Longest backoff between attempts.
    pub retry_most_ms: u64,
}

impl Default for ApprovalsConfig {
    fn default() -> Self {
        ApprovalsConfig {
            data_dir: "data/approvals".into(),
            url: StoreUrl::default(),
            open_per_person_max: 100,
            execute_within_s: 3_600,
            call_timeout_ms: 8_000,
            retry_first_ms: 500,
            retry_most_ms: 60_000,
        }
    }
}
