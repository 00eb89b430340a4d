//! Published open-source order books on the same flow.

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
    /// Trades of the timed records.
    pub trades: u64,
    /// Traded lots of the timed records.
    pub quantity: u64,
    /// True if number, quantity and sequence of the trades equal the file's. False if the run was
    /// stopped early.
    pub tape_ok: bool,
}
