//! Fuzz targets: every decoder of bytes that another process, a member, the bank or a disk has made.
//!
//! A target is a function that takes any bytes and panics where a decoder breaks its word: a panic of
//! the decoder, a value that does not encode to what it was read from, two readers of one format that
//! differ. [`TARGETS`] lists them. `cargo xtask fuzz` runs them under libFuzzer (`fuzz/libfuzzer`); the
//! ordinary tests run each over its seeds and a few thousand mutations of them.
//!
//! Seeds are made by the target's `seeds` from encoders, so that they follow the formats; beside them
//! are the files in `fuzz/seeds/<target>`, some of which a fuzzer has found.

mod bank;
pub mod checkpoints;
pub mod commands;
pub mod frames;
#[path = "../../node/src/replay/lobster.rs"]
#[allow(dead_code, clippy::missing_errors_doc)] // the program's own file: nothing depends on it
mod lobster;
mod market;
mod messages;
mod numbers;
mod packed;
mod quiet;
mod random;
mod tape;
mod times;

pub use quiet::expect_panics;
pub use random::Random;

/// One decoder, or several of one format.
pub struct Target {
    pub name: &'static str,
    /// What it reads, and what is asserted beside "no panic".
    pub about: &'static str,
    pub check: fn(&[u8]),
    /// Inputs that the decoder takes.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Mutations of each seed in the ordinary tests.
    pub mutations: usize,
}

pub const TARGETS: &[Target] = &[
    Target {
        name: "client-messages",
        about: "binary protocol as the gateway reads it: re-encodes to the same bytes, whole or in pieces",
        check: messages::check_client,
        seeds: messages::client_seeds,
        mutations: 200,
    },
    Target {
        name: "server-messages",
        about: "binary protocol as the client reads it: re-encodes to the same bytes, whole or in pieces",
        check: messages::check_server,
        seeds: messages::server_seeds,
        mutations: 200,
    },
    Target {
        name: "frames",
        about: "journal frames, walk and opening of a log: a frame is written the same, both agree on the end",
        check: frames::check,
        seeds: frames::seeds,
        mutations: 400,
    },
    Target {
        name: "commands",
        about: "payloads of journalled commands and events: what is read is journalled and read the same",
        check: commands::check,
        seeds: commands::seeds,
        mutations: 20,
    },
    Target {
        name: "snapshots",
        about: "files of snapshots: a payload that is given was written, every reader of the folder agrees",
        check: checkpoints::check_file,
        seeds: checkpoints::file_seeds,
        mutations: 700,
    },
    Target {
        name: "checkpoints",
        about: "state of the machine and of the replica: refused with a reason, or written and read the same",
        check: checkpoints::check_state,
        seeds: checkpoints::state_seeds,
        mutations: 1_000,
    },
    Target {
        name: "packed-events",
        about: "packed rows of outbox and log: both readers agree, packed again they are the same records",
        check: packed::check,
        seeds: packed::seeds,
        mutations: 300,
    },
    Target {
        name: "bank-messages",
        about: "webhooks and answers of the bank: read, written and read the same, amounts and times in range",
        check: bank::check_messages,
        seeds: bank::message_seeds,
        mutations: 300,
    },
    Target {
        name: "signatures",
        about: "headers of webhooks and of orders to the bank: no text but the signed one is taken",
        check: bank::check_signatures,
        seeds: bank::signature_seeds,
        mutations: 400,
    },
    Target {
        name: "links",
        about: "payment links, requisites and account numbers: what is read is written and read the same",
        check: bank::check_links,
        seeds: bank::link_seeds,
        mutations: 500,
    },
    Target {
        name: "request-times",
        about: "the check of times in encoded requests: no request with a time out of range passes",
        check: times::check,
        seeds: times::seeds,
        mutations: 500,
    },
    Target {
        name: "numbers",
        about: "decimals, amounts, ids of requests: text and number agree, arithmetic is exact or refused",
        check: numbers::check,
        seeds: numbers::seeds,
        mutations: 300,
    },
    Target {
        name: "order-flow",
        about: "order flow in the LOBSTER format: a row is written and read the same",
        check: tape::check,
        seeds: tape::seeds,
        mutations: 500,
    },
];

/// The target of a name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
