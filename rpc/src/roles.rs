//! Role table: one row per method of the contract (D32, R333).
//!
//! A test compares the table with the descriptors and fails for a method without a row or a row
//! without a method. For roles that act only for their own user (investor, trader, issuer) the
//! handler also checks the user id ([`crate::Caller::require_user`]). `Auditor` is in no row that
//! changes anything, which a test checks too.

use std::{collections::HashMap, sync::LazyLock};

use crate::{Role, Roles, contract::Contract};

use Role::{
    Auditor, Compliance, Investor, Issuer, MarketSupervisor, Operator, Service, Trader, Treasury,
};

/// Requirement of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// No credential needed.
    Open,
    /// At least one of these roles.
    AnyOf(Roles),
    /// In the contract, but without a row.
    Denied,
    /// RPC path outside the contract.
    Unknown,
}

/// Staff and services: they may use HTTP diagnostic reads (D43).
pub const STAFF: &[Role] = &[
    Operator,
    Treasury,
    Compliance,
    MarketSupervisor,
    Auditor,
    Service,
];

/// Staff and services that may read the accounts of users at the bank, which these records contain
/// (`Caller::sees_bank_account_of`).
const ACCOUNTS: &[Role] = &[Operator, Treasury, Compliance, Auditor, Service];

/// All roles; users see only their own objects.
const EVERYONE: &[Role] = &[
    Investor,
    Trader,
    Issuer,
    Operator,
    Treasury,
    Compliance,
    MarketSupervisor,
    Auditor,
    Service,
];
const OPERATE: &[Role] = &[Operator, Service];
const MONEY: &[Role] = &[Operator, Treasury, Service];
const DUTY: &[Role] = &[Operator, Compliance, Service];
/// The roles of trading sessions: orders and trading holds are the owner's own calls on every
/// protocol (`design.md` 10).
const TRADE: &[Role] = &Role::TRADING;
const SUPERVISE: &[Role] = &[Operator, MarketSupervisor, Service];
const ISSUE: &[Role] = &[Issuer, Operator, Service];
/// Staff, and issuers for their own issues.
const REGISTER: &[Role] = &[
    Issuer,
    Operator,
    Treasury,
    Compliance,
    MarketSupervisor,
    Auditor,
    Service,
];
const SERVICE_ONLY: &[Role] = &[Service];
/// Staff with a role that changes something. Services neither request nor approve.
const PERSONS: &[Role] = &[Operator, Treasury, Compliance, MarketSupervisor];

/// (service, its methods with their roles).
type Rows = &'static [(&'static str, &'static [Role])];

const TABLE: &[(&str, Rows)] = &[
    (
        "dfa.ledger.v1.LedgerService",
        &[
            ("GetAccount", EVERYONE),
            ("ListAccounts", EVERYONE),
            ("GetSubAccount", EVERYONE),
            ("ListSubAccounts", EVERYONE),
            ("GetBalance", EVERYONE),
            ("CreateOperation", OPERATE),
            ("CreateOperations", SERVICE_ONLY),
            ("FinalizeOperation", OPERATE),
            ("FinalizeOperations", SERVICE_ONLY),
            ("ReverseOperation", OPERATE),
            ("GetOperation", EVERYONE),
            ("ListOperations", EVERYONE),
            ("CreateHold", OPERATE),
            ("ReleaseHold", OPERATE),
            ("ConsumeHold", OPERATE),
            ("AdjustHold", SERVICE_ONLY),
            ("GetHold", EVERYONE),
            ("ListHolds", EVERYONE),
            ("GetSourcePosition", STAFF),
            ("GetTrialBalance", STAFF),
            ("SetSubAccountStatus", DUTY),
            ("GetStatement", EVERYONE),
            ("SetVelocityLimit", DUTY),
            ("RemoveVelocityLimit", DUTY),
            ("ListVelocityLimits", STAFF),
            ("ListAuditRecords", STAFF),
            ("GetChainHead", STAFF),
        ],
    ),
    (
        "dfa.cfa.v1.CfaRegistryService",
        &[
            ("RegisterInstrument", ISSUE),
            ("GetInstrument", EVERYONE),
            ("ListInstruments", EVERYONE),
            ("SignIssueDecision", ISSUE),
            ("ActivateInstrument", OPERATE),
            ("GetIssueDecision", EVERYONE),
            ("UpdateInstrument", ISSUE),
            ("IssueCfaRub", MONEY),
            ("RedeemCfaRub", &[Investor, Trader, Issuer]),
            ("Subscribe", &[Investor, Trader, Issuer]),
            ("CancelSubscription", &[Investor, Trader, Issuer, Operator]),
            ("ListSubscriptions", EVERYONE),
            ("ClosePlacement", ISSUE),
            ("IssueInvestmentCfa", ISSUE),
            ("OfferUnits", &[Investor, Trader, Issuer]),
            ("CancelOffer", &[Investor, Trader, Issuer, Operator]),
            ("ListOffers", EVERYONE),
            ("RedeemInvestmentCfa", ISSUE),
            ("StartRedemption", ISSUE),
            ("GetRedemption", EVERYONE),
            ("ListCoupons", EVERYONE),
            ("RestartCoupon", ISSUE),
            ("TransferCfa", &[Investor, Trader, Issuer, Service]),
            ("SettleTrades", SERVICE_ONLY),
            ("GetTradeBatch", STAFF),
            ("ListHolders", REGISTER),
            (
                "IssueExtract",
                &[Investor, Trader, Issuer, Operator, Compliance, Service],
            ),
            ("ListChainBalances", STAFF),
            ("ListChainBreaks", STAFF),
            ("AcceptChainBreak", DUTY),
            ("LiftQuarantine", DUTY),
            ("MoveHolders", OPERATE),
            ("GetHolderMove", STAFF),
            ("ListAnchors", STAFF),
            ("ReplayChainTransfers", STAFF),
            ("CheckIntegrity", EVERYONE),
            ("GetSupply", EVERYONE),
            ("GetOperation", EVERYONE),
            ("ListOperations", EVERYONE),
            ("FinalizeIssuance", OPERATE),
            ("FinalizeRedemption", OPERATE),
            ("ListSuspendedDeposits", STAFF),
            ("ResolveSuspendedDeposit", MONEY),
            ("FreezeUnits", DUTY),
            ("LiftFreeze", DUTY),
            ("ForceTransfer", DUTY),
            ("ListEnforcementActs", STAFF),
            ("SetRedemptionBlock", DUTY),
            ("RefundRedemption", &[Compliance, Service]),
            ("ListAuditRecords", STAFF),
        ],
    ),
    (
        "dfa.payments.v1.PaymentsService",
        &[
            (
                "CreatePaymentIntent",
                &[Investor, Trader, Issuer, Operator, Treasury, Service],
            ),
            ("GetPaymentIntent", EVERYONE),
            ("ListPaymentIntents", EVERYONE),
            ("HandlePaymentWebhook", MONEY),
            ("InitiatePayout", SERVICE_ONLY),
            ("ReleasePayout", SERVICE_ONLY),
            ("CancelPayout", MONEY),
            ("GetPayout", EVERYONE),
            ("ListPayouts", EVERYONE),
            ("ListReceipts", ACCOUNTS),
            ("AssignReceipt", MONEY),
            ("RefundReceipt", MONEY),
            ("Reconcile", MONEY),
            ("GetLatestReport", STAFF),
            ("ListAuditRecords", ACCOUNTS),
        ],
    ),
    (
        "dfa.market.v1.MarketService",
        &[
            ("PlaceOrder", TRADE),
            (
                "CancelOrder",
                &[Trader, Investor, Operator, MarketSupervisor, Service],
            ),
            ("AmendOrder", TRADE),
            (
                "MassCancel",
                &[Trader, Investor, Operator, MarketSupervisor, Service],
            ),
            ("GetOrder", EVERYONE),
            ("ListOrders", EVERYONE),
            ("GetTrade", EVERYONE),
            ("ListTrades", EVERYONE),
            ("GetOrderBook", EVERYONE),
            ("OpenTradingHold", TRADE),
            // The CFA service takes what a redemption lacks (`design.md` 4).
            ("AdjustTradingHold", &[Trader, Investor, Service]),
            ("CloseTradingHold", TRADE),
            ("ListTradingHolds", EVERYONE),
            ("GetPosition", EVERYONE),
            ("SetTradingPhase", SUPERVISE),
            ("ConfirmClock", SUPERVISE),
            (
                "SetKillSwitch",
                &[Trader, Investor, Operator, MarketSupervisor, Service],
            ),
            ("SetMemberBounds", SUPERVISE),
            ("SetMemberGroup", SUPERVISE),
            ("GetMarketStatus", EVERYONE),
            ("ListAuditRecords", STAFF),
        ],
    ),
    (
        "dfa.identity.v1.IdentityService",
        &[
            ("GetUserProfile", EVERYONE),
            ("ListUsers", STAFF),
            ("CheckLimits", EVERYONE),
            ("ReserveLimit", SERVICE_ONLY),
            ("ConfirmLimit", SERVICE_ONLY),
            ("CancelLimit", SERVICE_ONLY),
            ("CheckSanctions", STAFF),
            ("GetLimits", EVERYONE),
            ("CreateUser", DUTY),
            ("UpdateUser", DUTY),
            ("SetLimit", DUTY),
            ("BlockUser", DUTY),
            ("UnblockUser", DUTY),
            ("ListAuditRecords", ACCOUNTS),
        ],
    ),
    (
        "dfa.approvals.v1.ApprovalService",
        &[
            ("RequestApproval", PERSONS),
            ("Approve", PERSONS),
            ("Reject", PERSONS),
            ("GetApproval", STAFF),
            ("ListApprovals", STAFF),
            ("ListAuditRecords", STAFF),
        ],
    ),
    (
        "dfa.chain.v1.ChainConnectorService",
        &[
            ("SubmitTransaction", SERVICE_ONLY),
            ("GetTransactionReceipt", STAFF),
            ("GetBlock", STAFF),
            ("VerifyBlockHash", STAFF),
            ("EstimateGas", STAFF),
        ],
    ),
    (
        "dfa.settlement.v1.SettlementService",
        &[
            ("GetSettlementStatus", STAFF),
            ("ListBatches", STAFF),
            ("ListBreaks", STAFF),
            ("RetrySettlement", SUPERVISE),
            ("BustTrade", SUPERVISE),
            ("ListCases", STAFF),
            ("CloseCase", SUPERVISE),
            ("ListAuditRecords", STAFF),
        ],
    ),
    (
        "dfa.sandbox.v1.SandboxBankService",
        &[
            (
                "Pay",
                &[Investor, Trader, Issuer, Operator, Treasury, Service],
            ),
            ("SetFault", OPERATE),
            ("GetBankBalance", STAFF),
            ("ListTransfers", ACCOUNTS),
            ("SignDocument", REGISTER),
        ],
    ),
];

/// When a person's own call of a method is refused, because it takes two persons (D32).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Always: the access layer refuses the call.
    Always,
    /// Depending on the request, for instance to lift a block but not to set it. The handler
    /// refuses the call with [`crate::Caller::require_approval`].
    Partly,
}

/// A method that persons call by an approval.
#[derive(Clone, Copy, Debug)]
pub struct Approval {
    /// `package.Service/Method`.
    pub method: &'static str,
    pub when: When,
    /// Roles of the requester and of the approver.
    pub persons: Roles,
}

const fn approved(method: &'static str, when: When, persons: &[Role]) -> Approval {
    Approval {
        method,
        when,
        persons: Roles::of(persons),
    }
}

/// Methods that a person calls by an approval (`design.md` 10). Services call them directly; the
/// approvals service makes an approved call as a service.
pub const APPROVALS: &[Approval] = &[
    // To ACTIVE.
    approved(
        "dfa.ledger.v1.LedgerService/SetSubAccountStatus",
        When::Partly,
        &[Operator, Compliance],
    ),
    // To adopt an existing token.
    approved(
        "dfa.cfa.v1.CfaRegistryService/RegisterInstrument",
        When::Partly,
        &[Operator],
    ),
    // The publication of an issue.
    approved(
        "dfa.cfa.v1.CfaRegistryService/ActivateInstrument",
        When::Always,
        &[Operator],
    ),
    // Enforcement: a freeze takes one person.
    approved(
        "dfa.cfa.v1.CfaRegistryService/LiftFreeze",
        When::Always,
        &[Operator, Compliance],
    ),
    approved(
        "dfa.cfa.v1.CfaRegistryService/ForceTransfer",
        When::Always,
        &[Operator, Compliance],
    ),
    // Without a payment, unless the issuer calls.
    approved(
        "dfa.cfa.v1.CfaRegistryService/IssueInvestmentCfa",
        When::Partly,
        &[Operator],
    ),
    // A buyback with the issuer's money, unless the issuer calls.
    approved(
        "dfa.cfa.v1.CfaRegistryService/RedeemInvestmentCfa",
        When::Partly,
        &[Operator],
    ),
    // Before the maturity of the issue, which has no call terms.
    approved(
        "dfa.cfa.v1.CfaRegistryService/StartRedemption",
        When::Partly,
        &[Operator],
    ),
    // A mint by hand, and the end of a suspended deposit: a mint or a refund.
    approved(
        "dfa.cfa.v1.CfaRegistryService/IssueCfaRub",
        When::Always,
        &[Operator, Treasury],
    ),
    approved(
        "dfa.cfa.v1.CfaRegistryService/ResolveSuspendedDeposit",
        When::Always,
        &[Operator, Treasury],
    ),
    // To clear the block (R089).
    approved(
        "dfa.cfa.v1.CfaRegistryService/SetRedemptionBlock",
        When::Partly,
        &[Compliance],
    ),
    // A difference between chain and ledger counts as none.
    approved(
        "dfa.cfa.v1.CfaRegistryService/AcceptChainBreak",
        When::Always,
        &[Operator, Compliance],
    ),
    // The registry continues with the chain's balances.
    approved(
        "dfa.cfa.v1.CfaRegistryService/LiftQuarantine",
        When::Always,
        &[Operator, Compliance],
    ),
    // A new contract for the units of an issue.
    approved(
        "dfa.cfa.v1.CfaRegistryService/MoveHolders",
        When::Always,
        &[Operator],
    ),
    approved(
        "dfa.payments.v1.PaymentsService/CancelPayout",
        When::Always,
        &[Operator, Treasury],
    ),
    // To leave a halt, and to lift a kill switch.
    approved(
        "dfa.market.v1.MarketService/SetTradingPhase",
        When::Partly,
        &[Operator, MarketSupervisor],
    ),
    approved(
        "dfa.market.v1.MarketService/SetKillSwitch",
        When::Partly,
        &[Operator, MarketSupervisor],
    ),
    approved(
        "dfa.market.v1.MarketService/ConfirmClock",
        When::Always,
        &[Operator, MarketSupervisor],
    ),
    // To raise a limit.
    approved(
        "dfa.identity.v1.IdentityService/SetLimit",
        When::Partly,
        &[Operator, Compliance],
    ),
    approved(
        "dfa.identity.v1.IdentityService/UnblockUser",
        When::Always,
        &[Operator, Compliance],
    ),
    // Received money, bank accounts and limits, and what undoes operations.
    approved(
        "dfa.payments.v1.PaymentsService/AssignReceipt",
        When::Always,
        &[Operator, Treasury],
    ),
    approved(
        "dfa.payments.v1.PaymentsService/RefundReceipt",
        When::Always,
        &[Operator, Treasury],
    ),
    // To change the bank account of a user who has one, to end a mark as sanctioned, and to make a
    // user a qualified investor.
    approved(
        "dfa.identity.v1.IdentityService/UpdateUser",
        When::Partly,
        &[Operator, Compliance],
    ),
    // To allow what the limit refuses.
    approved(
        "dfa.ledger.v1.LedgerService/SetVelocityLimit",
        When::Partly,
        &[Operator, Compliance],
    ),
    approved(
        "dfa.ledger.v1.LedgerService/RemoveVelocityLimit",
        When::Always,
        &[Operator, Compliance],
    ),
    approved(
        "dfa.ledger.v1.LedgerService/ReverseOperation",
        When::Always,
        &[Operator],
    ),
    // To move money or units by hand.
    approved(
        "dfa.ledger.v1.LedgerService/CreateOperation",
        When::Always,
        &[Operator],
    ),
    approved(
        "dfa.ledger.v1.LedgerService/ConsumeHold",
        When::Always,
        &[Operator],
    ),
    // To end the halt of an issue.
    approved(
        "dfa.cfa.v1.CfaRegistryService/UpdateInstrument",
        When::Partly,
        &[Operator],
    ),
    approved(
        "dfa.cfa.v1.CfaRegistryService/RefundRedemption",
        When::Always,
        &[Compliance],
    ),
    approved(
        "dfa.settlement.v1.SettlementService/BustTrade",
        When::Always,
        &[Operator, MarketSupervisor],
    ),
    // To allow what the present bounds of the user or group refuse.
    approved(
        "dfa.market.v1.MarketService/SetMemberBounds",
        When::Partly,
        &[Operator, MarketSupervisor],
    ),
    approved(
        "dfa.market.v1.MarketService/SetMemberGroup",
        When::Partly,
        &[Operator, MarketSupervisor],
    ),
];

/// Services without authentication: health checks and reflection describe the platform and contain
/// no user data.
const OPEN_SERVICES: &[&str] = &[
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
];

/// HTTP paths without a credential. `/webhook` is authenticated by the bank's signature (D29).
const OPEN_PATHS: &[&str] = &[
    "/",
    "/health",
    "/livez",
    "/readyz",
    "/metrics",
    "/webhook",
    "/payments/webhook",
];

static BY_PATH: LazyLock<HashMap<String, Roles>> = LazyLock::new(|| {
    TABLE
        .iter()
        .flat_map(|(service, rows)| {
            rows.iter()
                .map(move |(method, roles)| (format!("/{service}/{method}"), Roles::of(roles)))
        })
        .collect()
});

/// The rule of a request path.
pub fn rule(path: &str) -> Rule {
    if OPEN_PATHS.contains(&path) {
        return Rule::Open;
    }
    if let Some(roles) = BY_PATH.get(path) {
        return Rule::AnyOf(*roles);
    }
    let Some((service, _)) = rpc_path(path) else {
        return Rule::AnyOf(Roles::of(STAFF));
    };
    if OPEN_SERVICES.contains(&service) {
        Rule::Open
    } else if Contract::platform().method(path).is_some() {
        Rule::Denied
    } else {
        Rule::Unknown
    }
}

/// The approval that a person's call of `package.Service/Method` needs, given with or without the
/// leading slash. `None`: never.
pub fn approval(method: &str) -> Option<&'static Approval> {
    let method = method.trim_start_matches('/');
    APPROVALS.iter().find(|row| row.method == method)
}

/// `/package.Service/Method`: two segments, the first one dotted.
pub(crate) fn is_rpc_path(path: &str) -> bool {
    rpc_path(path).is_some()
}

fn rpc_path(path: &str) -> Option<(&str, &str)> {
    let (service, method) = path.strip_prefix('/')?.split_once('/')?;
    (service.contains('.') && !method.contains('/')).then_some((service, method))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn contract() -> BTreeSet<String> {
        Contract::platform().paths().map(str::to_owned).collect()
    }

    // rows: R333
    #[test]
    fn r333_every_method_of_the_contract_has_a_row_and_every_row_a_method() {
        let rows: BTreeSet<_> = BY_PATH.keys().cloned().collect();
        let contract = contract();
        let missing: Vec<_> = contract.difference(&rows).collect();
        let stale: Vec<_> = rows.difference(&contract).collect();
        assert!(missing.is_empty(), "methods without a row: {missing:?}");
        assert!(stale.is_empty(), "rows without a method: {stale:?}");
        let count: usize = TABLE.iter().map(|(_, rows)| rows.len()).sum();
        assert_eq!(count, rows.len(), "a method is in the table twice");
    }

    // rows: R333
    #[test]
    fn r333_the_auditor_reads_everything_and_changes_nothing() {
        for path in contract() {
            let reads = Contract::platform().method(&path).unwrap().reads_only;
            let auditor = BY_PATH[&path].contains(Auditor);
            assert_eq!(auditor, reads, "{path}");
        }
    }

    // rows: R333
    #[test]
    fn r333_market_supervisors_read_no_records_with_bank_accounts() {
        for path in [
            "/dfa.payments.v1.PaymentsService/ListReceipts",
            "/dfa.payments.v1.PaymentsService/ListAuditRecords",
            "/dfa.identity.v1.IdentityService/ListAuditRecords",
            "/dfa.sandbox.v1.SandboxBankService/ListTransfers",
        ] {
            let staff = Roles::of(STAFF).without(MarketSupervisor);
            assert_eq!(BY_PATH[path], staff, "{path}");
        }
    }

    // rows: R333
    #[test]
    fn r333_calls_with_approval_are_writes_that_a_person_may_request() {
        let mut names = BTreeSet::new();
        for row in APPROVALS {
            let (method, path) = (row.method, format!("/{}", row.method));
            let contract = Contract::platform();
            let found = contract.method(&path).expect(method);
            assert!(!found.reads_only && !found.server_streaming && !found.client_streaming);
            assert!(
                found.input.get_field_by_name("context").is_some(),
                "{method}"
            );
            let admitted = BY_PATH[&path].intersection(Roles::of(PERSONS));
            assert!(!row.persons.is_empty(), "{method}");
            assert_eq!(row.persons.intersection(admitted), row.persons, "{method}");
            assert!(approval(&path).is_some_and(|found| found.method == method));
            assert!(names.insert(method), "{method} is listed twice");
        }
        assert!(approval("/dfa.market.v1.MarketService/PlaceOrder").is_none());
    }

    // rows: R333
    #[test]
    fn r333_calls_admit_the_traders_that_trading_sessions_admit_and_staff_only_to_cancel() {
        let trading = Roles::of(&Role::TRADING);
        for call in [
            "PlaceOrder",
            "AmendOrder",
            "OpenTradingHold",
            "CloseTradingHold",
        ] {
            let allowed = BY_PATH[&format!("/dfa.market.v1.MarketService/{call}")];
            assert_eq!(allowed, trading, "{call}");
        }
        let adjust = BY_PATH["/dfa.market.v1.MarketService/AdjustTradingHold"];
        assert_eq!(adjust, Roles::of(&[Trader, Investor, Service]));
        for call in ["CancelOrder", "MassCancel"] {
            let allowed = BY_PATH[&format!("/dfa.market.v1.MarketService/{call}")];
            let own = allowed.intersection(Roles::of(&Role::OWN));
            assert_eq!(own, trading, "{call}");
        }
    }
}
