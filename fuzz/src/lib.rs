//! Fuzz targets: decoders of bytes from another process, a member, the bank or a disk.
//!
//! A target is a function that takes any bytes and panics if a decoder breaks its contract: the
//! decoder panics, a decoded value does not round-trip, or two readers of one format disagree.
//! [`TARGETS`] lists the targets. `cargo xtask fuzz` runs them under libFuzzer (`fuzz/libfuzzer`).
//! The ordinary tests run each target over its seeds and over mutations of them.
//!
//! A target's `seeds` builds its seeds with encoders, so they follow the formats. The files in
//! `fuzz/seeds/<target>` are additional seeds; a fuzzer found some of them.

mod bank;
pub mod checkpoints;
pub mod commands;
mod expected_panics;
pub mod frames;
#[path = "../../node/src/replay/lobster.rs"]
#[allow(dead_code, clippy::missing_errors_doc)] // a source file of `node`
mod lobster;
mod market;
mod messages;
mod numbers;
mod order_flow;
mod packed;
mod random;
mod requests;

pub use expected_panics::expect_panics;
pub use random::Random;

/// One decoder, or several of one format.
pub struct Target {
    pub name: &'static str,
    /// What is decoded, and what is asserted besides the absence of panics.
    pub about: &'static str,
    pub check: fn(&[u8]),
    /// Inputs that the decoder accepts.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Mutations per seed in the ordinary tests.
    pub mutations: usize,
}

pub const TARGETS: &[Target] = &[
    Target {
        name: "client-messages",
        about: "binary protocol as the gateway decodes it: re-encodes to the same bytes, whole or in pieces",
        check: messages::check_client,
        seeds: messages::client_seeds,
        mutations: 200,
    },
    Target {
        name: "server-messages",
        about: "binary protocol as the client decodes it: re-encodes to the same bytes, whole or in pieces",
        check: messages::check_server,
        seeds: messages::server_seeds,
        mutations: 200,
    },
    Target {
        name: "frames",
        about: "journal frames, iteration and opening of a log: frames round-trip, both agree on the end of the log",
        check: frames::check,
        seeds: frames::seeds,
        mutations: 400,
    },
    Target {
        name: "commands",
        about: "payloads of journalled commands and events: decoded values survive a journal round trip",
        check: commands::check,
        seeds: commands::seeds,
        mutations: 20,
    },
    Target {
        name: "snapshots",
        about: "snapshot files: an accepted file round-trips, every reader of the folder agrees",
        check: checkpoints::check_file,
        seeds: checkpoints::file_seeds,
        mutations: 700,
    },
    Target {
        name: "checkpoints",
        about: "state of the core and of the replica: rejected with a reason, or round-trips",
        check: checkpoints::check_state,
        seeds: checkpoints::state_seeds,
        mutations: 1_000,
    },
    Target {
        name: "packed-events",
        about: "packed rows of outbox and log: both readers agree, records round-trip",
        check: packed::check,
        seeds: packed::seeds,
        mutations: 300,
    },
    Target {
        name: "bank-messages",
        about: "webhooks and answers of the bank: they round-trip, amounts and times are in range",
        check: bank::check_messages,
        seeds: bank::message_seeds,
        mutations: 300,
    },
    Target {
        name: "signatures",
        about: "headers of webhooks and of orders to the bank: only the signed text is accepted",
        check: bank::check_signatures,
        seeds: bank::signature_seeds,
        mutations: 400,
    },
    Target {
        name: "links",
        about: "payment links, requisites and account numbers: decoded values round-trip",
        check: bank::check_links,
        seeds: bank::link_seeds,
        mutations: 500,
    },
    Target {
        name: "requests",
        about: "check of encoded requests: no request with a bad text, time or enumeration value passes",
        check: requests::check,
        seeds: requests::seeds,
        mutations: 500,
    },
    Target {
        name: "numbers",
        about: "decimals, amounts, ids of requests: text and number agree, arithmetic is exact or an error",
        check: numbers::check,
        seeds: numbers::seeds,
        mutations: 300,
    },
    Target {
        name: "order-flow",
        about: "order flow in the LOBSTER format: rows round-trip",
        check: order_flow::check,
        seeds: order_flow::seeds,
        mutations: 500,
    },
];

/// The target with this name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|target| target.name == name)
}
