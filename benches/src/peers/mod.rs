//! Open-source order books on the same flow, in their published versions.

mod matchcore;
mod orderbook_rs;

pub use matchcore::matchcore;
pub use orderbook_rs::orderbook_rs;

/// Result of a peer on a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peer {
    pub name: &'static str,
    pub ops_per_s: f64,
    /// Timed commands, after the prefill.
    pub commands: u64,
    /// Of the timed records.
    pub trades: u64,
    pub quantity: u64,
    /// True if trades, quantity and the order of trades match the file; false if the run was
    /// stopped early.
    pub tape_ok: bool,
}
