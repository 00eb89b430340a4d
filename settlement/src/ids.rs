//! Ids that settlement derives and never stores: the same trade or order gives the same ids on every replay, so that a repeat meets what is
//! already there (`design.md` 4, T05).
//!
//! Children of an order or trade are [`types::child_uuid`] of its id and a name: `main` and `fee` of an
//! order, `TRADE_BUY`, `TRADE_SELL` and `FEE` of a trade.

use types::{Id128, NodeId, Sequence, child_uuid};

/// Which of an order's two holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// Value of the order: roubles of a buy, units of a sell.
    Main,
    /// Fees still to come.
    Fee,
}

impl Part {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Fee => "fee",
        }
    }
}

/// The hold of an order's part.
pub fn order_hold(order: Id128, part: Part) -> Id128 {
    child_uuid(order, part.as_str())
}

/// Source name under which the ledger keeps settlement's position.
pub fn source(node: NodeId) -> String {
    format!("market:{}", node.get())
}

/// Source of batches that only carve holds and cover no new sequence.
pub fn carve_source(node: NodeId) -> String {
    format!("market:{}/carve", node.get())
}

/// Source of the parts of one command that is too large for a batch.
pub fn parts_source(node: NodeId, sequence: Sequence) -> String {
    format!("market:{}/{sequence}", node.get())
}

/// Batch id on chain: `<node>:<first>-<last>`.
pub fn batch(node: NodeId, first: u64, through: u64) -> String {
    format!("{}:{first}-{through}", node.get())
}
