//! The service's stored types. Enum numbers in the database are those of the contract.

pub use types::OperationStatus as Status;
use types::{Decimal, LimitType, OperationType, code_enum};

use crate::error::Refusal;
use crate::placement::PlacementTerms;
use crate::saga::{Chain, LimitReservation, SagaProgress};

pub use types::CFA_RUB;
/// Decimals of the money claim, the same as in the ledger.
pub use types::instrument::MONEY_DECIMALS as CFA_RUB_DECIMALS;

/// Owners of the fee account, the redemption account and the placement account, on the chain and in
/// the ledger.
pub use types::subaccount::{
    FEES, PLACEMENT as PLACEMENT_ACCOUNT, REDEMPTION as REDEMPTION_ACCOUNT,
};

code_enum! {
    /// Process of an operation. Part of the idempotency scope (T12).
    Flow: i32 {
        IssueRub = 1 "IssueCfaRub",
        RedeemRub = 2 "RedeemCfaRub",
        IssueInvestment = 3 "IssueInvestmentCfa",
        RedeemInvestment = 4 "RedeemInvestmentCfa",
        Transfer = 5 "TransferCfa",
        Trade = 6 "SettleTrades",
        Maturity = 7 "StartRedemption",
        Placement = 8 "ClosePlacement",
        ForceTransfer = 9 "ForceTransfer",
        Coupon = 10 "Coupon",
    }
}

impl Flow {
    pub fn kind(self) -> OperationType {
        match self {
            Self::IssueRub | Self::IssueInvestment | Self::Placement => OperationType::Issuance,
            Self::RedeemRub | Self::RedeemInvestment | Self::Maturity => OperationType::Redemption,
            Self::Transfer | Self::Trade => OperationType::P2pTransfer,
            Self::ForceTransfer => OperationType::Enforcement,
            Self::Coupon => OperationType::Coupon,
        }
    }
}

code_enum! {
    Rejection: i32 {
        KycRequired = 1 "KYC_REQUIRED",
        LimitExceeded = 2 "LIMIT_EXCEEDED",
        IntegrationError = 3 "INTEGRATION_ERROR",
        SanctionsHit = 4 "SANCTIONS_HIT",
        AmlBlocked = 5 "AML_BLOCKED",
        InsufficientBalance = 6 "INSUFFICIENT_BALANCE",
        IssueLimitExceeded = 7 "ISSUE_LIMIT_EXCEEDED",
        InstrumentNotActive = 8 "INSTRUMENT_NOT_ACTIVE",
    }
}

/// Fixed texts (T51, T35).
pub const REVERTED_MESSAGE: &str = "Blockchain transaction reverted";
pub const PAYOUT_FAILED_MESSAGE: &str = "Payout failed, tokens returned";

/// Maps the text of a limit refusal to a rejection (specification 3.2; case-sensitive, T35).
pub fn limit_rejection(message: String) -> (Rejection, String) {
    let code = if message.contains("KYC") {
        Rejection::KycRequired
    } else {
        Rejection::LimitExceeded
    };
    (code, message)
}

/// Maps the refusal of a user to the rejection that CheckLimits would return.
pub fn user_rejection(refusal: &Refusal) -> (Rejection, String) {
    limit_rejection(refusal.to_string())
}

/// A CFA operation (specification 2.2, D06).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Operation {
    pub operation_id: String,
    pub flow: Flow,
    pub status: Status,
    /// Status to which a BLOCKED operation returns.
    pub status_before_block: Option<Status>,
    pub user_id: String,
    pub hold_id: Option<String>,
    /// Amount of the request.
    pub amount: Decimal,
    /// `amount` in the instrument's smallest units.
    pub units_minor: i64,
    pub currency_code: String,
    pub idempotency_key: String,
    pub external_ref: String,
    pub tx_hash: Option<String>,
    pub rejection: Option<(Rejection, String)>,
    pub finalized_at_us: Option<i64>,
    pub instrument_id: String,
    pub from_user_id: String,
    pub to_user_id: String,
    pub trade_id: String,
    pub bookbuilding_id: String,
    /// CFA-RUB paid in return, in kopecks.
    pub payment_minor: i64,
    /// Fee on top of the payment, in kopecks.
    pub fee_minor: i64,
    pub created_at_us: i64,
    pub updated_at_us: i64,
    pub block_number: Option<u64>,
    /// Failed attempts of steps.
    pub attempts: u32,
    pub correlation_id: String,
    pub progress: SagaProgress,
}

impl Operation {
    pub fn new(
        flow: Flow,
        user_id: &str,
        idempotency_key: &str,
        correlation_id: &str,
        now_us: i64,
    ) -> Self {
        Self {
            operation_id: uuid::Uuid::now_v7().to_string(),
            flow,
            status: Status::Created,
            status_before_block: None,
            user_id: user_id.to_owned(),
            hold_id: None,
            amount: Decimal::ZERO,
            units_minor: 0,
            currency_code: String::new(),
            idempotency_key: idempotency_key.to_owned(),
            external_ref: String::new(),
            tx_hash: None,
            rejection: None,
            finalized_at_us: None,
            instrument_id: String::new(),
            from_user_id: String::new(),
            to_user_id: String::new(),
            trade_id: String::new(),
            bookbuilding_id: String::new(),
            payment_minor: 0,
            fee_minor: 0,
            created_at_us: now_us,
            updated_at_us: now_us,
            block_number: None,
            attempts: 0,
            correlation_id: correlation_id.to_owned(),
            progress: SagaProgress::default(),
        }
    }

    /// Changes the status.
    ///
    /// # Panics
    /// If the transition is not allowed (D10).
    pub fn set_status(&mut self, next: Status, now_us: i64) {
        assert!(
            self.status == next || self.status.may_become(next),
            "operation {} cannot go from {} to {}",
            self.operation_id,
            self.status.as_str(),
            next.as_str()
        );
        self.status = next;
        self.updated_at_us = now_us;
        if next == Status::Finalized {
            self.finalized_at_us = Some(now_us);
        }
    }

    /// The first violated invariant. Asserted before a write, checked after a read.
    pub fn inconsistency(&self) -> Option<&'static str> {
        let progress = &self.progress;
        let amounts = [self.units_minor, self.payment_minor, self.fee_minor];
        [
            (
                "a negative amount",
                amounts.iter().any(|amount| *amount < 0),
            ),
            ("settled and undone", progress.settled && progress.undone),
            (
                "minted back without a burn",
                progress.minted_back && progress.chain != Chain::Succeeded,
            ),
            (
                "sent although its limit was refused",
                progress.limit == LimitReservation::Refused && progress.chain != Chain::Unsent,
            ),
            (
                "the final time does not match the status",
                (self.status == Status::Finalized) != self.finalized_at_us.is_some(),
            ),
        ]
        .into_iter()
        .find_map(|(what, is_so)| is_so.then_some(what))
    }

    /// # Panics
    /// If an invariant of the operation is violated.
    pub fn assert_consistent(&self) {
        let inconsistency = self.inconsistency();
        assert!(inconsistency.is_none(), "{inconsistency:?}: {self:?}");
    }

    /// The day limit that the operation uses, the type under which identity counts it, and the
    /// amount. `None`: the operation uses no limit.
    pub fn limit_use(&self) -> Option<(LimitType, OperationType, Decimal)> {
        Some(match self.flow {
            Flow::IssueRub => (LimitType::Deposit, OperationType::Issuance, self.amount),
            Flow::RedeemRub => (
                LimitType::Withdrawal,
                OperationType::Withdrawal,
                self.amount,
            ),
            Flow::IssueInvestment => {
                let paid = Decimal::from_minor(self.payment_minor, CFA_RUB_DECIMALS);
                let amount = if self.payment_minor > 0 {
                    paid
                } else {
                    self.amount
                };
                (LimitType::Trading, OperationType::Issuance, amount)
            }
            Flow::Transfer => {
                let limit = match self.instrument_id.as_str() {
                    CFA_RUB => LimitType::Withdrawal,
                    _ => LimitType::Trading,
                };
                (limit, OperationType::P2pTransfer, self.amount)
            }
            // The subscriptions of a placement have reserved their limits. Enforcement acts do not
            // depend on limits.
            Flow::RedeemInvestment
            | Flow::Trade
            | Flow::Maturity
            | Flow::Placement
            | Flow::ForceTransfer
            | Flow::Coupon => {
                return None;
            }
        })
    }

    /// Whether this user may see the operation.
    pub fn concerns(&self, user_id: &str) -> bool {
        [&self.user_id, &self.from_user_id, &self.to_user_id]
            .iter()
            .any(|id| *id == user_id)
    }
}

code_enum! {
    InstrumentStatus: i32 {
        Draft = 1 "DRAFT",
        Active = 2 "ACTIVE",
        Halted = 3 "HALTED",
        Matured = 4 "MATURED",
        Redeemed = 5 "REDEEMED",
    }
}

impl InstrumentStatus {
    pub fn may_become(self, next: Self) -> bool {
        use InstrumentStatus::{Active, Draft, Halted, Matured, Redeemed};
        match self {
            Draft => next == Active,
            Active => matches!(next, Halted | Matured),
            Halted => matches!(next, Active | Matured),
            Matured => next == Redeemed,
            Redeemed => false,
        }
    }
}

code_enum! {
    InstrumentType: i32 {
        Bond = 1 "CFA_BOND",
        MoneyClaim = 2 "MONEY_CLAIM",
        Equity = 3 "CFA_EQUITY",
        Commodity = 4 "CFA_COMMODITY",
        Hybrid = 5 "CFA_HYBRID",
    }
}

/// A coupon: its payment date and roubles per unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Coupon {
    pub pays_at_us: i64,
    pub amount: Decimal,
}

/// An issue (D07).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Instrument {
    pub instrument_id: String,
    pub name: String,
    pub kind: InstrumentType,
    pub decimals: u8,
    pub issuer_id: String,
    /// Empty until the token is deployed, or set at registration if an existing one is adopted.
    pub contract_address: String,
    pub currency_code: String,
    pub status: InstrumentStatus,
    pub issue_limit_minor: Option<i64>,
    /// Units issued or being issued. An issue that fails returns its units; a redemption does not,
    /// because `issue_limit_minor` limits the whole issue.
    pub issued_minor: i64,
    pub nominal: Option<Decimal>,
    pub coupons: Vec<Coupon>,
    pub issued_at_us: Option<i64>,
    pub matures_at_us: Option<i64>,
    pub tick_size: Decimal,
    pub lot_size: Decimal,
    pub price_band_low: Option<Decimal>,
    pub price_band_high: Option<Decimal>,
    pub document_hash: String,
    pub document_uri: String,
    pub idempotency_key: String,
    pub registered_at_us: i64,
    pub updated_at_us: i64,
    /// The operator has activated it. A DRAFT is activated until its contract is deployed.
    pub activated: bool,
}

/// The decision on an issue. Hash and address of its document are in the instrument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssueDecision {
    pub instrument_id: String,
    /// Empty if only its hash is known.
    pub document: Vec<u8>,
    /// Empty: not signed.
    pub signature: Vec<u8>,
    /// Subject and serial number of the certificate.
    pub signer: String,
    pub certificate_serial: String,
    /// Caller that gave the signature.
    pub signed_by: String,
    pub signed_at_us: Option<i64>,
    /// Persons of the approval.
    pub activated_by: String,
    pub activated_at_us: Option<i64>,
}

impl IssueDecision {
    /// A decision that is not signed.
    pub fn of(instrument_id: &str, document: Vec<u8>) -> Self {
        Self {
            instrument_id: instrument_id.to_owned(),
            document,
            signature: Vec::new(),
            signer: String::new(),
            certificate_serial: String::new(),
            signed_by: String::new(),
            signed_at_us: None,
            activated_by: String::new(),
            activated_at_us: None,
        }
    }
}

impl Instrument {
    /// The terms of the issue and of its placement as one text, a line `name=value` each; its hash
    /// is on chain (F31). The lines and their order never change (`docs/contracts.md`).
    pub fn terms_text(&self, placed: Option<&PlacementTerms>) -> String {
        let number = |value: Option<i64>| value.map_or_else(String::new, |value| value.to_string());
        let nominal = self.nominal.map(|nominal| nominal.normalized().to_string());
        let mut lines = vec![
            format!("instrument={}", self.instrument_id),
            format!("type={}", self.kind.as_str()),
            format!("issuer={}", self.issuer_id),
            format!("decimals={}", self.decimals),
            format!("currency={}", self.currency_code),
            format!("nominal={}", nominal.unwrap_or_default()),
            format!("issue_limit_minor={}", number(self.issue_limit_minor)),
            format!("issued_at_us={}", number(self.issued_at_us)),
            format!("matures_at_us={}", number(self.matures_at_us)),
        ];
        for Coupon { pays_at_us, amount } in &self.coupons {
            lines.push(format!("coupon={pays_at_us}:{}", amount.normalized()));
        }
        if let Some(placed) = placed {
            lines.extend([
                format!("placement_opens_at_us={}", placed.opens_at_us),
                format!("placement_closes_at_us={}", placed.closes_at_us),
                format!("placement_price={}", placed.price.normalized()),
                format!("placement_minimum_minor={}", placed.minimum_minor),
                format!("placement_investor_min_minor={}", placed.investor_min_minor),
                format!("placement_investor_max_minor={}", placed.investor_max_minor),
                format!("placement_allotment={}", placed.allotment.as_str()),
            ]);
        }
        lines.join("\n")
    }

    /// Whether the issue has reached its maturity.
    pub fn is_mature(&self, now_us: i64) -> bool {
        self.matures_at_us.is_some_and(|at_us| at_us <= now_us)
    }
}

code_enum! {
    BatchStatus: i32 {
        Submitted = 1 "SUBMITTED",
        Finalized = 2 "FINALIZED",
        Failed = 3 "FAILED",
    }
}

/// Trades of one chain transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub batch_id: String,
    pub status: BatchStatus,
    pub tx_hash: Option<String>,
    pub block_number: Option<u64>,
    pub trades: u32,
    pub failed_trade_ids: Vec<String>,
    pub gas_used: u64,
}

/// One trade of a batch or of a market event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TradeLeg {
    pub trade_id: String,
    pub instrument_id: String,
    pub trade_number: u64,
    pub buyer_id: String,
    pub seller_id: String,
    pub quantity: Decimal,
    pub payment_minor: i64,
    pub fee_minor: i64,
}

/// A paid deposit whose issue was refused (T24).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SuspendedDeposit {
    pub payment_id: String,
    pub user_id: String,
    pub amount_minor: i64,
    pub operation_id: String,
    pub reason: String,
    pub created_at_us: i64,
    pub resolved: bool,
}

code_enum! {
    OfferSide: i32 {
        /// A subscription: the user offers to buy units of an issue.
        Buy = 1 "subscription",
        /// The user offers to sell units back to the issuer.
        Sell = 2 "offer",
    }
}

code_enum! {
    OfferStatus: i32 {
        /// The hold is not confirmed yet.
        Pending = 1 "PENDING",
        Active = 2 "ACTIVE",
        Used = 3 "USED",
        Cancelled = 4 "CANCELLED",
        Expired = 5 "EXPIRED",
        /// The placement gave it no units.
        NotAllotted = 6 "NOT_ALLOTTED",
    }
}

code_enum! {
    /// Reservation of limits at identity for a subscription (F35).
    OfferLimit: i32 {
        /// Not reserved, or the reservation has ended.
        None = 0 "NONE",
        /// Reserved, or to be reserved before the hold is made.
        Reserved = 1 "RESERVED",
        ToConfirm = 2 "TO_CONFIRM",
        ToCancel = 3 "TO_CANCEL",
    }
}

/// A user's consent to give money for units or units for money (D46). The ledger holds what the
/// user gives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Offer {
    pub offer_id: String,
    pub side: OfferSide,
    pub instrument_id: String,
    pub user_id: String,
    pub units_minor: i64,
    /// CFA-RUB for all units, in kopecks: of a sale the least.
    pub payment_minor: i64,
    pub status: OfferStatus,
    /// Empty until an operation uses it.
    pub operation_id: String,
    pub idempotency_key: String,
    pub correlation_id: String,
    pub expires_at_us: i64,
    pub created_at_us: i64,
    pub updated_at_us: i64,
    /// A subscription to a placement.
    pub in_placement: bool,
    pub limit: OfferLimit,
    /// Units and payment that the placement has allotted; 0: none.
    pub allotted_minor: i64,
    pub allotted_payment_minor: i64,
    /// Number of the allotment, from 1.
    pub allotted_number: i64,
}

impl Offer {
    /// The first violated invariant: an error before a write and after a read.
    pub fn contradiction(&self) -> Option<&'static str> {
        let is_allotted = self.allotted_number > 0;
        let is_within = |part: i64, whole: i64| match is_allotted {
            true => (1..=whole).contains(&part),
            false => part == 0,
        };
        let has_operation = !self.operation_id.is_empty();
        let is_taken = matches!(self.status, OfferStatus::Used | OfferStatus::NotAllotted);
        let is_sale = self.side == OfferSide::Sell;
        [
            (
                "units or payment of an offer not positive",
                self.units_minor <= 0 || self.payment_minor <= 0,
            ),
            (
                "an allotment that does not fit its offer",
                !is_within(self.allotted_minor, self.units_minor)
                    || !is_within(self.allotted_payment_minor, self.payment_minor),
            ),
            (
                "a sale with an allotment or a limit",
                is_sale && (is_allotted || self.limit != OfferLimit::None),
            ),
            // What the operation takes would be released too, or used again.
            (
                "an operation or allotment of an offer that is not used",
                (has_operation || is_allotted) && !is_taken,
            ),
            // The operation of an allotment follows with its delivery.
            (
                "a used offer without its operation",
                self.status == OfferStatus::Used && !has_operation && !is_allotted,
            ),
        ]
        .into_iter()
        .find_map(|(what, is_so)| is_so.then_some(what))
    }
}

code_enum! {
    ActKind: i32 {
        Freeze = 1 "FREEZE",
        Transfer = 2 "FORCED_TRANSFER",
    }
}

code_enum! {
    /// What orders an enforcement act.
    ActBasis: i32 {
        /// Arrest or another decision of a court.
        Court = 1 "COURT",
        /// Levy by a bailiff.
        Levy = 2 "LEVY",
        Inheritance = 3 "INHERITANCE",
        /// The holder has lost access and has another account.
        Recovery = 4 "RECOVERY",
        /// Sanctions or 115-FZ.
        Sanctions = 5 "SANCTIONS",
    }
}

code_enum! {
    ActStatus: i32 {
        /// A freeze: ledger, chain or market have not confirmed it. A transfer: its operation is
        /// open.
        Pending = 1 "PENDING",
        Active = 2 "ACTIVE",
        /// Forced transfers, or the redemption of the issue, have taken all units of the freeze.
        Used = 3 "USED",
        Lifting = 4 "LIFTING",
        Lifted = 5 "LIFTED",
        Done = 6 "DONE",
        Failed = 7 "FAILED",
    }
}

/// A freeze or a forced transfer that a document orders.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnforcementAct {
    /// Of a transfer: its operation's id.
    pub act_id: String,
    pub kind: ActKind,
    pub basis: ActBasis,
    pub instrument_id: String,
    pub holder_id: String,
    /// Empty for a freeze.
    pub to_user_id: String,
    /// 0: a freeze of all units.
    pub units_minor: i64,
    /// Units of a freeze that no transfer has taken.
    pub left_minor: i64,
    pub document: String,
    /// Empty unless lifted.
    pub lift_document: String,
    /// Freeze whose units a transfer takes; empty: available units.
    pub freeze_id: String,
    pub status: ActStatus,
    /// The ledger has frozen.
    pub held: bool,
    /// The contract has frozen.
    pub frozen: bool,
    /// Transactions that the contract refused in the current step.
    pub attempts: i64,
    pub tx_hash: String,
    pub idempotency_key: String,
    pub actor: String,
    pub correlation_id: String,
    pub created_at_us: i64,
    pub updated_at_us: i64,
}

impl EnforcementAct {
    /// Whether it freezes all units, also later ones.
    pub fn is_whole(&self) -> bool {
        self.kind == ActKind::Freeze && self.units_minor == 0
    }
}

code_enum! {
    ExtractFormat: i32 {
        Csv = 1 "CSV",
        Text = 2 "TEXT",
        Pdf = 3 "PDF",
    }
}

code_enum! {
    ExtractRecipient: i32 {
        Holder = 1 "HOLDER",
        Court = 2 "COURT",
        Bailiff = 3 "BAILIFF",
    }
}

/// A signed extract from the register.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extract {
    pub extract_id: String,
    pub instrument_id: String,
    pub holder_id: String,
    pub as_of_us: i64,
    pub format: ExtractFormat,
    pub recipient: ExtractRecipient,
    pub document: String,
    pub content: Vec<u8>,
    /// Detached CMS, DER.
    pub signature: Vec<u8>,
    pub signer: String,
    pub actor: String,
    pub issued_at_us: i64,
}

code_enum! {
    RedemptionStatus: i32 {
        Snapshot = 1 "SNAPSHOT",
        Underfunded = 2 "UNDERFUNDED",
        Funded = 3 "FUNDED",
        Submitted = 4 "SUBMITTED",
        Finalized = 5 "FINALIZED",
        Failed = 6 "FAILED",
    }
}

code_enum! {
    RedemptionReason: i32 {
        Maturity = 1 "MATURITY",
        Buyback = 2 "BUYBACK",
        /// Not part of the contract: no redemption of the issue.
        Coupon = 3 "COUPON",
    }
}

code_enum! {
    /// State of a coupon. The first six are those of its distribution, `RedemptionStatus`.
    CouponStatus: i32 {
        Snapshot = 1 "SNAPSHOT",
        Underfunded = 2 "UNDERFUNDED",
        Funded = 3 "FUNDED",
        Submitted = 4 "SUBMITTED",
        Paid = 5 "PAID",
        Failed = 6 "FAILED",
        /// Its record day has not ended.
        Scheduled = 7 "SCHEDULED",
        /// Paid with the redemption of the issue on its day.
        Redeemed = 8 "REDEEMED",
        /// The issue was redeemed before its day.
        Cancelled = 9 "CANCELLED",
    }
}

impl From<RedemptionStatus> for CouponStatus {
    fn from(status: RedemptionStatus) -> Self {
        match status {
            RedemptionStatus::Snapshot => Self::Snapshot,
            RedemptionStatus::Underfunded => Self::Underfunded,
            RedemptionStatus::Funded => Self::Funded,
            RedemptionStatus::Submitted => Self::Submitted,
            RedemptionStatus::Finalized => Self::Paid,
            RedemptionStatus::Failed => Self::Failed,
        }
    }
}

/// A coupon of an activated issue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CouponPayment {
    pub instrument_id: String,
    /// From 1, in the order of the payment days.
    pub number: u32,
    pub pays_at_us: i64,
    /// Roubles per unit.
    pub amount: Decimal,
    pub status: CouponStatus,
    /// Kopecks for all holders of the record date.
    pub total_minor: i64,
    /// Last transaction of the distribution.
    pub tx_hash: Option<String>,
    /// Time of the snapshot.
    pub recorded_at_us: Option<i64>,
    pub finalized_at_us: Option<i64>,
}

/// A holder's payment when a whole issue is redeemed or a coupon is paid.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RedemptionLine {
    pub user_id: String,
    pub address: String,
    /// Units at the record date.
    pub units_minor: i64,
    pub payment_minor: i64,
}

impl RedemptionLine {
    /// A violated invariant: an error before a write and after a read.
    pub fn contradiction(&self) -> Option<&'static str> {
        let is_wrong = self.units_minor <= 0 || self.payment_minor < 0;
        is_wrong.then_some("a line without units, or with a negative payment")
    }
}

/// Redemption of a whole issue (specification 1.5), or the payment of one of its coupons.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IssueRedemption {
    pub redemption_id: String,
    pub instrument_id: String,
    pub reason: RedemptionReason,
    pub status: RedemptionStatus,
    pub record_date_us: i64,
    pub total_minor: i64,
    pub lines: Vec<RedemptionLine>,
    /// Number of final parts of the distribution.
    pub parts_done: u64,
    /// Number of restarts after a failure. The keys of a restarted attempt contain it, so they
    /// differ from the keys that failed.
    pub attempt: u32,
    /// Number of the coupon that is paid; 0: the issue is redeemed.
    pub coupon_number: u32,
    pub tx_hash: Option<String>,
    pub idempotency_key: String,
    pub created_at_us: i64,
    pub finalized_at_us: Option<i64>,
}

impl IssueRedemption {
    pub fn is_coupon(&self) -> bool {
        self.coupon_number > 0
    }

    /// A violated invariant of its lines: an error before a write and after a read.
    pub fn contradiction(&self) -> Option<&'static str> {
        if let Some(what) = self.lines.iter().find_map(RedemptionLine::contradiction) {
            return Some(what);
        }
        let payments = self.lines.iter().map(|line| i128::from(line.payment_minor));
        let is_other = payments.sum::<i128>() != i128::from(self.total_minor);
        is_other.then_some("a total that is not the sum of its lines")
    }

    /// Status after the restart of a failed one: a part was submitted, so it is funded.
    pub fn restarted(&self) -> RedemptionStatus {
        match self.tx_hash {
            Some(_) => RedemptionStatus::Funded,
            None => RedemptionStatus::Snapshot,
        }
    }

    /// Flow of the holders' operations.
    pub fn flow(&self) -> Flow {
        match self.is_coupon() {
            true => Flow::Coupon,
            false => Flow::Maturity,
        }
    }

    /// Name in audit records.
    pub fn subject(&self) -> &'static str {
        match self.is_coupon() {
            true => "coupon",
            false => "redemption",
        }
    }

    /// The coupon for audit records; empty for a redemption.
    pub fn coupon_text(&self) -> String {
        match self.coupon_number {
            0 => String::new(),
            number => format!("coupon {number}"),
        }
    }
}

code_enum! {
    /// The next step of a move of all holders.
    MoveStep: i32 {
        PauseOld = 1 "PAUSE_OLD",
        DeployToken = 2 "DEPLOY_TOKEN",
        PauseNew = 3 "PAUSE_NEW",
        DeployMigration = 4 "DEPLOY_MIGRATION",
        GrantOld = 5 "GRANT_OLD",
        GrantNew = 6 "GRANT_NEW",
        /// The registry reads the old token up to the pause, and stops following it.
        FixHolders = 7 "FIX_HOLDERS",
        MoveHolders = 8 "MOVE_HOLDERS",
        /// Frozen addresses, which may have no units.
        MoveFrozen = 9 "MOVE_FROZEN",
        Verify = 10 "VERIFY",
        RevokeOld = 11 "REVOKE_OLD",
        RevokeNew = 12 "REVOKE_NEW",
        UnpauseNew = 13 "UNPAUSE_NEW",
        /// The instrument gets the new token.
        Switch = 14 "SWITCH",
        Done = 15 "DONE",
    }
}

impl MoveStep {
    /// The step that follows; `Done` is the last.
    pub fn next(self) -> Self {
        Self::from_code(self.code() + 1).unwrap_or(Self::Done)
    }
}

/// A move of all holders of an issue to a new token.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenMove {
    pub move_id: String,
    pub instrument_id: String,
    pub reason: String,
    pub actor: String,
    pub correlation_id: String,
    pub old_token: String,
    /// Empty until it is deployed, as the migration contract.
    pub new_token: String,
    pub migration: String,
    /// Block of the new token's deployment.
    pub new_block: u64,
    /// Block of the last part.
    pub last_block: u64,
    /// Supply of the old token, in smallest units.
    pub supply_minor: i64,
    pub step: MoveStep,
    /// Reverted transactions of the step.
    pub attempts: i64,
    pub parts_done: u64,
    /// Addresses of the next part. Empty: they are not listed yet.
    pub part: Vec<String>,
    /// The last address, or the last user with a frozen address, that was listed.
    pub listed_through: String,
    /// The last transaction.
    pub tx_hash: String,
    /// Time of the last part's block; 0 until all holders are moved.
    pub moved_at_us: i64,
    pub created_at_us: i64,
    pub updated_at_us: i64,
    pub finished_at_us: Option<i64>,
}

/// A holder in the registry (D05).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holder {
    pub user_id: String,
    pub address: String,
    pub units_minor: i64,
    pub since_us: i64,
    pub as_of_block: u64,
    pub updated_at_us: i64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::saga::is_limited;

    // rows: R042 R043 R044
    #[test]
    fn r042_reason_of_a_limit_refusal() {
        assert_eq!(
            limit_rejection("KYC level too low".into()),
            (Rejection::KycRequired, "KYC level too low".into())
        );
        assert_eq!(
            limit_rejection("Daily limit".into()),
            (Rejection::LimitExceeded, "Daily limit".into())
        );
        assert_eq!(limit_rejection("kyc".into()).0, Rejection::LimitExceeded);
        assert_eq!(
            limit_rejection("Limit exceeded".into()),
            (Rejection::LimitExceeded, "Limit exceeded".into())
        );
    }

    #[test]
    fn violated_invariants_of_an_operation_are_detected() {
        let whole = Operation::new(Flow::Transfer, "u1", "k1", "c1", 1);
        assert_eq!(whole.inconsistency(), None);
        let of = |change: fn(&mut Operation)| {
            let mut operation = whole.clone();
            change(&mut operation);
            operation.inconsistency()
        };
        let both = of(|o| (o.progress.settled, o.progress.undone) = (true, true));
        assert_eq!(both, Some("settled and undone"));
        assert_eq!(of(|o| o.fee_minor = -1), Some("a negative amount"));
        let early = of(|o| o.status = Status::Finalized);
        assert_eq!(early, Some("the final time does not match the status"));
    }

    #[test]
    fn t24_the_saga_reserves_for_the_flows_that_use_a_limit() {
        for flow in Flow::ALL.iter().copied() {
            let used = Operation::new(flow, "u1", "k1", "c1", 1).limit_use();
            assert_eq!(used.is_some(), is_limited(flow, true), "{flow:?}");
        }
    }

    /// All allowed transitions of an operation (D10).
    const TRANSITIONS: [(Status, &[Status]); 12] = {
        use Status::{
            AwaitingPayment, Blocked, ComplianceCheck, Created, Failed, Finalized, KycRequired,
            OnchainSubmitted, Processing, Refunded, Rejected, Settled,
        };
        [
            (
                Created,
                &[
                    KycRequired,
                    ComplianceCheck,
                    AwaitingPayment,
                    Processing,
                    Rejected,
                    Failed,
                ],
            ),
            (KycRequired, &[Processing, Rejected, Failed]),
            (ComplianceCheck, &[Processing, Rejected, Failed, Blocked]),
            (AwaitingPayment, &[Processing, Rejected, Failed]),
            (
                Processing,
                &[OnchainSubmitted, Rejected, Failed, Settled, Blocked],
            ),
            (OnchainSubmitted, &[Finalized, Rejected, Failed, Blocked]),
            (Finalized, &[]),
            (Rejected, &[Refunded]),
            (Failed, &[Processing]),
            (Settled, &[Finalized, Rejected, Failed, Blocked]),
            (
                Blocked,
                &[ComplianceCheck, Processing, OnchainSubmitted, Refunded],
            ),
            (Refunded, &[]),
        ]
    };

    fn in_status(status: Status) -> Operation {
        let mut operation = Operation::new(Flow::RedeemRub, "u1", "k1", "c1", 1);
        operation.status = status;
        operation
    }

    // rows: R320
    #[test]
    fn r320_an_operation_makes_the_moves_of_the_table_and_no_other() {
        assert_eq!(TRANSITIONS.map(|(from, _)| from), *Status::ALL);
        for (from, allowed) in TRANSITIONS {
            for next in Status::ALL.iter().copied().filter(|next| *next != from) {
                let mut operation = in_status(from);
                let moved = std::panic::catch_unwind(move || {
                    operation.set_status(next, 2);
                    operation
                });
                let (from, to) = (from.as_str(), next.as_str());
                match moved {
                    Ok(moved) => {
                        assert!(allowed.contains(&next), "{from} must not become {to}");
                        assert_eq!((moved.status, moved.updated_at_us), (next, 2));
                        let is_final = next == Status::Finalized;
                        assert_eq!(moved.finalized_at_us.is_some(), is_final, "{to}");
                    }
                    Err(_) => assert!(!allowed.contains(&next), "{from} must become {to}"),
                }
            }
        }
    }

    // rows: R320
    #[test]
    fn r320_ends_are_terminal_and_left_only_by_a_refund_or_a_retry() {
        let ends = [
            Status::Finalized,
            Status::Rejected,
            Status::Failed,
            Status::Refunded,
        ];
        for (from, allowed) in TRANSITIONS {
            assert_eq!(from.is_terminal(), ends.contains(&from), "{from:?}");
            if from.is_terminal() {
                assert!(allowed.len() <= 1, "{from:?}");
            }
        }
    }

    // rows: R052
    #[test]
    fn r052_ten_thousand_operations_have_different_ids() {
        const THREADS: usize = 4;
        const EACH: usize = 2_500;
        // All have the same time and key, so neither makes the ids differ.
        let issue = || Operation::new(Flow::IssueRub, "u1", "k1", "c1", 1).operation_id;
        let of_thread = || (0..EACH).map(|_| issue()).collect::<Vec<_>>();
        let ids: Vec<String> = std::thread::scope(|scope| {
            let threads = [(); THREADS].map(|()| scope.spawn(of_thread));
            let ids = threads.into_iter();
            ids.flat_map(|thread| thread.join().expect("joined"))
                .collect()
        });
        assert!(ids.iter().all(|id| uuid::Uuid::parse_str(id).is_ok()));
        let different: std::collections::HashSet<&String> = ids.iter().collect();
        assert_eq!(different.len(), THREADS * EACH);
    }
}
