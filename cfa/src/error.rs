//! Errors of this service. A refusal that the specification defines as a *result* (a REJECTED
//! operation) is not an error.

use chain::ChainError;
use tonic::{Code, Status};

/// A refusal by rule, with the exact text and reason of D23.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("Operation not found")]
    OperationNotFound,
    #[error("Instrument not found")]
    InstrumentNotFound,
    #[error("Redemption not found")]
    RedemptionNotFound,
    #[error("Coupon not found")]
    CouponNotFound,
    #[error("Trade batch not found")]
    BatchNotFound,
    #[error("Suspended deposit not found")]
    DepositNotFound,
    #[error("User not found")]
    UserNotFound,
    #[error("Block not found")]
    BlockNotFound,
    #[error("KYC level too low for withdrawal")]
    KycTooLowForWithdrawal,
    #[error("Insufficient balance")]
    InsufficientBalance,
    #[error("Payout failed")]
    PayoutFailed,
    #[error("Instrument already exists")]
    InstrumentExists,
    #[error("Instrument is not active")]
    InstrumentNotActive,
    #[error("Terms of the issue are immutable")]
    TermsImmutable,
    #[error("The issue decision is not signed")]
    DecisionUnsigned,
    #[error("Signatures cannot be verified: no certificate authority is configured (cfa.ca_file)")]
    NoAuthority,
    #[error("Extracts cannot be signed: no key is configured (cfa.extract_key_file)")]
    NoExtractKey,
    #[error("Too many extracts in a day")]
    TooManyExtracts,
    #[error("Enforcement act not found")]
    ActNotFound,
    #[error("All units of the holder are frozen already")]
    AlreadyFrozen,
    #[error("Too many freezes of the holder")]
    TooManyFreezes,
    #[error("Receiver is on a sanctions list: {0}")]
    ReceiverSanctioned(String),
    #[error("Too many drafts")]
    TooManyDrafts,
    #[error("Operation is not in a state for this")]
    OperationState,
    /// One person ends the halt of an issue (D32).
    #[error("This call needs an approval")]
    ApprovalRequired,
    #[error("Deposit is resolved already")]
    DepositResolved,
    #[error("Payment not found or not paid")]
    PaymentUnpaid,
    #[error("Redemption was started already")]
    RedemptionExists,
    #[error("Instrument has no nominal")]
    NominalMissing,
    #[error("Redemption would burn units without payment")]
    NothingToPay,
    #[error("Only two operators may redeem an issue before its maturity")]
    NotMatured,
    #[error("Instrument has not matured: before maturity use reason BUYBACK")]
    UnitsNotMatured,
    #[error("Operations of the instrument are not final yet")]
    OperationsOpen,
    #[error("Payout id belongs to another payout")]
    PayoutIdTaken,
    #[error("Reference belongs to another operation")]
    ReferenceTaken,
    #[error("Contract at the address cannot be adopted: {0}")]
    ContractUnfit(String),
    #[error("User is blocked")]
    UserBlocked,
    #[error("KYC level too low")]
    KycTooLow,
    #[error("No active subscription for this investor")]
    NotSubscribed,
    #[error("Subscription not found")]
    SubscriptionNotFound,
    #[error("Too many active subscriptions")]
    TooManySubscriptions,
    #[error("No active offer of this holder")]
    NotOffered,
    #[error("Offer not found")]
    OfferNotFound,
    #[error("Too many active offers")]
    TooManyOffers,
    #[error("Placement not found")]
    PlacementNotFound,
    #[error("Placement is not open")]
    PlacementNotOpen,
    #[error("Placement has not ended")]
    PlacementUnderWay,
    #[error("Units of the instrument are issued by its placement only")]
    PlacementOnly,
    /// The limit's own text.
    #[error("{0}")]
    LimitExceeded(String),
    #[error("Transfers of the instrument's token contradict each other")]
    TokenQuarantined,
    #[error("Chain and ledger differ in the instrument")]
    BreakOpen,
    #[error("Break not found")]
    BreakNotFound,
    #[error("Chain and ledger differ by another amount")]
    BreakChanged,
    #[error("Token is not quarantined")]
    NotQuarantined,
    #[error("Token still has impossible amounts on the chain")]
    StillImpossible,
    #[error("Holders of the instrument are being moved to a new token")]
    HoldersMoving,
    #[error("Holders of the instrument were never moved to a new token")]
    MoveNotFound,
    #[error("Token of the instrument is in use: {0}")]
    TokenInUse(&'static str),
    #[error("The platform's signing account is not the owner of the tokens")]
    OwnerElsewhere,
    #[error("Another user has the same on-chain address")]
    AddressTaken,
    #[error("{field}: {why}")]
    Field { field: &'static str, why: String },
}

impl Refusal {
    pub fn field(field: &'static str, why: impl Into<String>) -> Self {
        Self::Field {
            field,
            why: why.into(),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// Another service refused; its status is passed on unchanged.
    #[error("{}", .0.message())]
    Peer(Status),
    /// Another service is unavailable. Nothing is lost: retry.
    #[error("{0} is unavailable")]
    Unavailable(&'static str),
    #[error("store: {0}")]
    Store(#[from] events::Error),
    #[error("store: {0}")]
    Sql(#[from] sqlx::Error),
    #[error(transparent)]
    Chain(#[from] ChainError),
    #[error("configuration: {0}")]
    Config(String),
    #[error("invalid stored data: {0}")]
    Damaged(String),
}

impl Error {
    /// Whether a retry may succeed.
    pub fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Unavailable(_)
                | Self::Chain(ChainError::Unavailable(_))
                | Self::Store(_)
                | Self::Sql(_)
        )
    }

    /// Whether another service refused this service's credential: a fault of the installation.
    pub fn is_credential_refused(&self) -> bool {
        matches!(self, Self::Peer(status) if status.code() == Code::Internal)
    }

    /// Whether another service refused with this reason.
    pub fn has_reason(&self, reason: &str) -> bool {
        matches!(self, Self::Peer(status) if rpc::status::reason(status).as_deref() == Some(reason))
    }

    /// Whether the ledger refused for lack of available money.
    pub fn is_insufficient(&self) -> bool {
        self.has_reason("INSUFFICIENT_BALANCE")
    }

    /// Like `is_insufficient`, or the sub-account does not exist because nothing was credited yet.
    pub fn is_shortage(&self) -> bool {
        self.is_insufficient() || self.has_reason("SUB_ACCOUNT_NOT_FOUND")
    }
}
