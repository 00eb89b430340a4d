//! Types and states of the contract as enums of this room; names and numbers are those of the
//! schema.

use proto::common::v1 as common;

macro_rules! mirrored {
    ($(#[$meta:meta])* $name:ident { $($variant:ident),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum $name { $($variant = common::$name::$variant as isize),+ }

        impl $name {
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// Its number in the contract.
            pub const fn code(self) -> i32 {
                self as i32
            }

            /// `None` for a number that is none of these, zero included.
            pub fn from_code(code: i32) -> Option<Self> {
                Self::ALL.iter().copied().find(|known| known.code() == code)
            }
        }
    };
}

mirrored! {
    OperationType {
        Deposit, Withdrawal, P2pTransfer, Payment, Issuance, Redemption, TradeBuy, TradeSell,
        Dividend, Coupon, ExternalWithdrawal, ExternalTransfer, Trading, Fee,
    }
}

mirrored! {
    OperationStatus {
        Created, KycRequired, ComplianceCheck, AwaitingPayment, Processing, OnchainSubmitted,
        Finalized, Rejected, Failed, Settled, Blocked, Refunded,
    }
}

mirrored! {
    /// Of a payment intent or a payout.
    PaymentStatus { Pending, Success, Failed, Expired, Refunded }
}

mirrored! {
    LimitType { Deposit, Withdrawal, Trading }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_the_contract_round_trips() {
        for code in 0..100 {
            let known = common::OperationStatus::try_from(code).is_ok() && code != 0;
            let mirrored = OperationStatus::from_code(code);
            assert_eq!(mirrored.map(OperationStatus::code), known.then_some(code));
            let known = common::OperationType::try_from(code).is_ok() && code != 0;
            let mirrored = OperationType::from_code(code);
            assert_eq!(mirrored.map(OperationType::code), known.then_some(code));
        }
        assert_eq!(PaymentStatus::ALL.len(), 5);
        assert_eq!(LimitType::Trading.code(), 3);
    }
}
