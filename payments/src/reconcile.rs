//! Reconciliation arithmetic (specification 4.2.6, T28): bank balance against token supply; pure.
//!
//! `bank - supply = deposits paid but not minted + burned but not paid out + suspense +
//! unexplained`. Suspense: deposits whose tokens were refused, and unmatched receipts. A report is
//! balanced only if bank and supply are equal. The unexplained part needs an operator.

use rail::{Rub, RubError};
use std::fmt;
use types::PaymentStatus;

use crate::payout::Payout;

/// Notes of a report whose bank balance equals the token supply.
pub const BALANCED: &str = "Balanced";
/// Notes of any other report.
pub const DISCREPANCY: &str = "Discrepancy detected";

/// State of the CFA operation of a payment or a payout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenState {
    /// No operation.
    Missing,
    Underway,
    Finalized,
    /// REJECTED or FAILED. For a redemption, the user has the tokens again.
    Ended,
    /// REFUNDED: a refund payout returns the deposit.
    Refunded,
}

/// The token side of a payment or a payout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenSide {
    pub state: TokenState,
    /// Block of the operation's transaction; 0 without one.
    pub block_number: u64,
}

impl TokenSide {
    pub const MISSING: TokenSide = TokenSide {
        state: TokenState::Missing,
        block_number: 0,
    };

    /// Whether the supply at `supply_block` includes the operation's transaction.
    fn is_in_supply(self, supply_block: u64) -> bool {
        match self.state {
            TokenState::Finalized => true,
            TokenState::Underway => self.block_number != 0 && self.block_number <= supply_block,
            TokenState::Missing | TokenState::Ended | TokenState::Refunded => false,
        }
    }
}

/// Where the money of a successful deposit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DepositPart {
    /// At the bank, not minted yet.
    InFlight,
    /// At the bank, tokens refused: an operator decides (T24).
    Suspense,
    /// Minted: no longer part of the explanation.
    Settled,
}

pub fn deposit_part(token: TokenSide, supply_block: u64) -> DepositPart {
    match token.state {
        TokenState::Ended | TokenState::Refunded => DepositPart::Suspense,
        _ if token.is_in_supply(supply_block) => DepositPart::Settled,
        _ => DepositPart::InFlight,
    }
}

/// Where the money of a payout is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PayoutPart {
    /// Tokens burned or being returned, money still at the bank.
    InFlight,
    /// Tokens not burned yet: bank and supply agree.
    NotBurned,
    /// Both sides are done: no longer part of the explanation.
    Settled,
}

pub fn payout_part(payout: &Payout, token: TokenSide, supply_block: u64) -> PayoutPart {
    let burned = payout.released_at_us.is_some() || token.is_in_supply(supply_block);
    match payout.status {
        PaymentStatus::Pending if burned => PayoutPart::InFlight,
        PaymentStatus::Pending => PayoutPart::NotBurned,
        // The bank kept the money: part of the explanation until the tokens return.
        PaymentStatus::Failed if burned && token.state != TokenState::Ended => PayoutPart::InFlight,
        _ => PayoutPart::Settled,
    }
}

/// Sums that explain a difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Explained {
    pub in_flight_deposits: Rub,
    pub in_flight_payouts: Rub,
    pub suspense: Rub,
}

impl Explained {
    /// # Errors
    /// [`RubError::Overflow`].
    pub fn total(&self) -> Result<Rub, RubError> {
        self.in_flight_deposits
            .plus(self.in_flight_payouts)?
            .plus(self.suspense)
    }
}

/// Result of one comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assessment {
    pub bank_balance: Rub,
    pub token_supply: Rub,
    pub explained: Explained,
    pub unexplained: Rub,
}

impl Assessment {
    /// # Errors
    /// [`RubError::Overflow`].
    pub fn new(
        bank_balance: Rub,
        token_supply: Rub,
        explained: Explained,
    ) -> Result<Assessment, RubError> {
        let unexplained = bank_balance
            .minus(token_supply)?
            .minus(explained.total()?)?;
        Ok(Assessment {
            bank_balance,
            token_supply,
            explained,
            unexplained,
        })
    }

    pub fn balanced(&self) -> bool {
        self.bank_balance == self.token_supply
    }

    pub fn notes(&self) -> &'static str {
        if self.balanced() {
            BALANCED
        } else {
            DISCREPANCY
        }
    }
}

/// The alert's text: the difference and what explains it.
impl fmt::Display for Assessment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}: bank balance {} RUB, token supply {} CFA-RUB; \
             explained: deposits in flight {}, payouts in flight {}, suspense {}; \
             unexplained {}",
            self.notes(),
            self.bank_balance,
            self.token_supply,
            self.explained.in_flight_deposits,
            self.explained.in_flight_payouts,
            self.explained.suspense,
            self.unexplained
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rub(kopecks: i64) -> Rub {
        Rub::from_kopecks(kopecks)
    }

    const fn token(state: TokenState, block_number: u64) -> TokenSide {
        TokenSide {
            state,
            block_number,
        }
    }

    // rows: R129 R131
    #[test]
    fn r131_notes_are_one_of_two_texts() {
        let even = Assessment::new(rub(100), rub(100), Explained::default()).unwrap();
        assert!(even.balanced());
        assert_eq!(even.notes(), "Balanced");
        let odd = Assessment::new(rub(101), rub(100), Explained::default()).unwrap();
        assert!(!odd.balanced());
        assert_eq!(odd.notes(), "Discrepancy detected");
        assert_eq!(odd.unexplained, rub(1));
    }

    #[test]
    fn t28_amounts_in_flight_explain_the_difference() {
        let explained = Explained {
            in_flight_deposits: rub(50),
            in_flight_payouts: rub(30),
            suspense: rub(20),
        };
        let a = Assessment::new(rub(1_100), rub(1_000), explained).unwrap();
        assert!(!a.balanced());
        assert_eq!(a.unexplained, Rub::ZERO);
        assert!(a.to_string().contains("unexplained 0.00"));
        let largest = rub(i64::MAX);
        assert!(Assessment::new(largest, rub(-1), Explained::default()).is_err());
    }

    #[test]
    fn t28_a_deposit_explains_until_its_mint_is_in_the_supply() {
        use TokenState::{Ended, Finalized, Missing, Refunded, Underway};
        for (state, block, part) in [
            (Missing, 0, DepositPart::InFlight),
            (Underway, 0, DepositPart::InFlight),
            (Underway, 11, DepositPart::InFlight),
            (Underway, 10, DepositPart::Settled),
            (Finalized, 0, DepositPart::Settled),
            (Ended, 9, DepositPart::Suspense),
            (Refunded, 0, DepositPart::Suspense),
        ] {
            assert_eq!(deposit_part(token(state, block), 10), part, "{state:?}");
        }
    }

    #[test]
    fn t28_a_payout_explains_from_the_burn_until_payment_or_return() {
        use PaymentStatus::{Failed, Pending, Success};
        use TokenState::{Ended, Missing, Underway};
        for (status, released, state, block, part) in [
            (Pending, None, Missing, 0, PayoutPart::NotBurned),
            (Pending, None, Underway, 0, PayoutPart::NotBurned),
            (Pending, None, Underway, 10, PayoutPart::InFlight),
            (Pending, Some(1), Underway, 0, PayoutPart::InFlight),
            (Success, Some(1), Underway, 9, PayoutPart::Settled),
            (Failed, Some(1), Underway, 9, PayoutPart::InFlight),
            (Failed, Some(1), Ended, 9, PayoutPart::Settled),
            (Failed, None, Ended, 9, PayoutPart::Settled),
            (Failed, None, Missing, 0, PayoutPart::Settled),
        ] {
            let payout = Payout {
                payout_id: "p".into(),
                user_id: "u".into(),
                amount: rub(1),
                bank_account: String::new(),
                refunds: None,
                refunds_receipt: None,
                status,
                released_at_us: released,
                ordered_at_us: None,
                stopped: None,
                bank_transfer_id: String::new(),
                failure_code: String::new(),
                failure_message: String::new(),
                attempts: 0,
                next_attempt_at_us: 0,
                idempotency_key: None,
                correlation_id: String::new(),
                created_at_us: 0,
                updated_at_us: 0,
            };
            assert_eq!(
                payout_part(&payout, token(state, block), 10),
                part,
                "{status:?} {state:?} {block}"
            );
        }
    }
}
