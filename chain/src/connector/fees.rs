//! Fees of a transaction (EIP-1559), in wei per gas.

use alloy::consensus::TxEip1559;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Fees {
    pub max: u128,
    /// At most `max`.
    pub priority: u128,
}

impl Fees {
    pub fn of(tx: &TxEip1559) -> Self {
        Self {
            max: tx.max_fee_per_gas,
            priority: tx.max_priority_fee_per_gas,
        }
    }

    pub fn capped(self, cap: u128) -> Self {
        let max = self.max.min(cap);
        Self {
            max,
            priority: self.priority.min(max),
        }
    }

    /// Fees of a replacement: at least 12.5 % above these, at least `estimate`, at most `cap`.
    /// Nodes demand the rise of both fees. `None`: the cap does not allow it.
    pub fn raised(self, estimate: Self, cap: u128) -> Option<Self> {
        let (max, priority) = (raise(self.max), raise(self.priority));
        let raised = Self {
            max: max.max(estimate.max),
            priority: priority.max(estimate.priority),
        };
        let raised = raised.capped(cap);
        (raised.max >= max && raised.priority >= priority).then_some(raised)
    }
}

/// Adds an eighth, rounded up, and at least 1 wei.
fn raise(fee: u128) -> u128 {
    fee.saturating_add(fee.div_ceil(8).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fees(max: u128, priority: u128) -> Fees {
        Fees { max, priority }
    }

    #[test]
    fn a_replacement_pays_an_eighth_more_of_both_fees() {
        let estimate = fees(0, 0);
        assert_eq!(fees(800, 8).raised(estimate, 1_000), Some(fees(900, 9)));
        assert_eq!(fees(9, 1).raised(estimate, 1_000), Some(fees(11, 2)));
        assert_eq!(fees(0, 0).raised(estimate, 1_000), Some(fees(1, 1)));
        assert_eq!(
            fees(800, 8).raised(fees(2_000, 100), 5_000),
            Some(fees(2_000, 100)),
            "a higher estimate counts"
        );
    }

    #[test]
    fn no_replacement_exceeds_the_cap() {
        let estimate = fees(5_000, 4_000);
        assert_eq!(
            fees(800, 8).raised(estimate, 900),
            Some(fees(900, 900)),
            "at the cap"
        );
        assert_eq!(fees(800, 8).raised(estimate, 899), None, "one below");
        assert_eq!(fees(2_000, 1_500).capped(1_000), fees(1_000, 1_000));
    }
}
