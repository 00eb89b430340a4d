//! Open order books of others on the same flow, as their crates come.

mod matchcore;
mod orderbook_rs;

pub use matchcore::matchcore;
pub use orderbook_rs::orderbook_rs;

/// What a peer did with a flow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peer {
    pub name: &'static str,
    pub ops_per_s: f64,
    /// Commands it was given and timed for, behind the prefill.
    pub commands: u64,
    /// Of the timed records.
    pub trades: u64,
    pub quantity: u64,
    /// True when trades, quantity and every trade in its order are the file's; false when it was
    /// stopped before the end.
    pub tape_ok: bool,
}
