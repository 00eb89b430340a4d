//! Ids that settlement derives and never stores: the same trade or order gives the same ids on every replay, so that a repeat meets what is
//! already there (`design.md` 4, T05).
//!
//! Children of an order: uuid5(order, `main`) and uuid5(order, `fee`).

use types::{Id128, NodeId, Sequence};
use uuid::Uuid;

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

/// uuid5 of a name under an id.
pub fn derived(of: Id128, name: &str) -> Id128 {
    let space = Uuid::from_u128(of.as_u128());
    Id128::from_u128(Uuid::new_v5(&space, name.as_bytes()).as_u128())
}

/// The hold of an order's part.
pub fn order_hold(order: Id128, part: Part) -> Id128 {
    derived(order, part.as_str())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_of_an_order_are_named_as_the_design_says() {
        let order = Id128::from_u128(0x0192_0000_0000_7000_8000_0000_0000_0001);
        let expected = Uuid::new_v5(&Uuid::from_u128(order.as_u128()), b"main");
        assert_eq!(
            order_hold(order, Part::Main).to_string(),
            expected.to_string()
        );
        assert_ne!(order_hold(order, Part::Fee), order_hold(order, Part::Main));
    }
}
