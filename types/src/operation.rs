//! Types and states of the services' records (specification 3.1 to 3.4).
//!
//! Codes are the numbers of the contract.

use crate::code_enum;

code_enum! {
    /// Type of a business operation.
    OperationType: i32 {
        Deposit = 1 "DEPOSIT",
        Withdrawal = 2 "WITHDRAWAL",
        P2pTransfer = 3 "P2P_TRANSFER",
        Payment = 4 "PAYMENT",
        Issuance = 5 "ISSUANCE",
        Redemption = 6 "REDEMPTION",
        TradeBuy = 7 "TRADE_BUY",
        TradeSell = 8 "TRADE_SELL",
        Dividend = 9 "DIVIDEND",
        Coupon = 10 "COUPON",
        ExternalWithdrawal = 11 "EXTERNAL_WITHDRAWAL",
        ExternalTransfer = 12 "EXTERNAL_TRANSFER",
        Trading = 13 "TRADING",
        Fee = 14 "FEE",
        /// A forced transfer that a document orders.
        Enforcement = 15 "ENFORCEMENT",
    }
}

code_enum! {
    /// State of an operation (specification 3.1, D10).
    OperationStatus: i32 {
        Created = 1 "CREATED",
        KycRequired = 2 "KYC_REQUIRED",
        ComplianceCheck = 3 "COMPLIANCE_CHECK",
        AwaitingPayment = 4 "AWAITING_PAYMENT",
        Processing = 5 "PROCESSING",
        OnchainSubmitted = 6 "ONCHAIN_SUBMITTED",
        Finalized = 7 "FINALIZED",
        Rejected = 8 "REJECTED",
        Failed = 9 "FAILED",
        Settled = 10 "SETTLED",
        Blocked = 11 "BLOCKED",
        Refunded = 12 "REFUNDED",
    }
}

impl OperationStatus {
    /// True when D10's transition table allows this transition.
    pub fn may_become(self, next: Self) -> bool {
        use OperationStatus::{
            AwaitingPayment, Blocked, ComplianceCheck, Created, Failed, Finalized, KycRequired,
            OnchainSubmitted, Processing, Refunded, Rejected, Settled,
        };
        match self {
            Created => matches!(
                next,
                KycRequired | ComplianceCheck | AwaitingPayment | Processing | Rejected | Failed
            ),
            KycRequired | AwaitingPayment => matches!(next, Processing | Rejected | Failed),
            ComplianceCheck => matches!(next, Processing | Rejected | Failed | Blocked),
            Processing => matches!(
                next,
                OnchainSubmitted | Rejected | Failed | Blocked | Settled
            ),
            OnchainSubmitted | Settled => matches!(next, Finalized | Rejected | Failed | Blocked),
            Blocked => matches!(
                next,
                ComplianceCheck | Processing | OnchainSubmitted | Refunded
            ),
            // A trade that the chain left out may be retried in a later batch (`design.md` 4).
            Failed => matches!(next, Processing),
            // A deposit that was paid and rejected is refunded (T24).
            Rejected => matches!(next, Refunded),
            Finalized | Refunded => false,
        }
    }

    /// True if posted and not yet confirmed by the chain: the operation's unsettled credits cannot
    /// be spent.
    pub const fn is_open(self) -> bool {
        matches!(
            self,
            Self::Processing | Self::OnchainSubmitted | Self::Settled
        )
    }

    pub const fn is_terminal(self) -> bool {
        matches!(
            self,
            Self::Finalized | Self::Rejected | Self::Failed | Self::Refunded
        )
    }
}

code_enum! {
    /// State of a hold: `ACTIVE` -> `RELEASED | CONSUMED | EXPIRED`.
    HoldStatus: i32 {
        Active = 1 "ACTIVE",
        Released = 2 "RELEASED",
        Consumed = 3 "CONSUMED",
        Expired = 4 "EXPIRED",
    }
}

code_enum! {
    /// State of a payment intent or a payout (specification 3.4).
    PaymentStatus: i32 {
        Pending = 1 "PENDING",
        Success = 2 "SUCCESS",
        Failed = 3 "FAILED",
        Expired = 4 "EXPIRED",
        Refunded = 5 "REFUNDED",
    }
}

code_enum! {
    /// Limit of a user: per day (D33), and for purchases per year (F35).
    LimitType: i32 {
        Deposit = 1 "DEPOSIT",
        Withdrawal = 2 "WITHDRAWAL",
        Trading = 3 "TRADING",
        /// Purchases of investment CFAs per calendar year. Qualified investors have none.
        Investment = 4 "INVESTMENT",
    }
}
