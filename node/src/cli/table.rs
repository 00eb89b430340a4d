//! The nouns and verbs of the command line, one pair per RPC. A test compares the table with the
//! descriptors, so every call has a command (R350).

/// One RPC as a command: `platform <noun> <verb>`.
pub struct Entry {
    pub noun: &'static str,
    pub verb: &'static str,
    /// `<package>.<Service>/<Method>`: the call's path without the leading slash.
    pub path: &'static str,
}

macro_rules! entries {
    ($($service:literal { $($noun:literal $verb:literal $method:literal;)* })*) => {
        &[$($(Entry { noun: $noun, verb: $verb, path: concat!($service, "/", $method) },)*)*]
    };
}

/// Help texts of the nouns.
pub const NOUNS: &[(&str, &str)] = &[
    ("account", "Ledger accounts"),
    ("subaccount", "Sub-accounts and their balances"),
    ("op", "Ledger operations and postings"),
    ("hold", "Ledger holds"),
    (
        "ledger",
        "The ledger as a whole: balances, statements, checks",
    ),
    (
        "limit",
        "Limits on what may leave or enter sub-accounts within a window",
    ),
    ("instrument", "Registered issues and their contracts"),
    ("coupon", "Coupons of issues and their payments"),
    ("cfa", "Issue, redeem and transfer digital assets"),
    (
        "subscription",
        "Offers of investors to buy units of an issue",
    ),
    ("placement", "Placements of issues among subscribers"),
    (
        "offer",
        "Offers of holders to sell units back to the issuer",
    ),
    (
        "enforcement",
        "Freezes and forced transfers that a document orders",
    ),
    ("holders", "Holder registry"),
    ("chain", "The blockchain of the registry"),
    ("intent", "Deposits: payment intents and webhooks"),
    ("payout", "Payouts to bank accounts"),
    ("receipt", "Money received at the bank"),
    ("recon", "Reconciliation of bank and supply"),
    ("order", "Orders"),
    ("trade", "Trades"),
    ("book", "Order books"),
    ("trading-hold", "Money and units blocked for trading"),
    (
        "position",
        "Units of users in issues, as the market has them",
    ),
    ("market", "Phases and state of the market"),
    (
        "settle",
        "Settlement of trades: positions, batches, differences",
    ),
    ("user", "Users, limits and checks (identity)"),
    (
        "approval",
        "Calls that one person requests and another approves",
    ),
    (
        "bank",
        "The sandbox bank: actions of a payer, a signer or the bank",
    ),
];

pub const ENTRIES: &[Entry] = entries! {
    "dfa.ledger.v1.LedgerService" {
        "account" "get" "GetAccount";
        "account" "list" "ListAccounts";
        "subaccount" "get" "GetSubAccount";
        "subaccount" "list" "ListSubAccounts";
        "subaccount" "balance" "GetBalance";
        "subaccount" "set-status" "SetSubAccountStatus";
        "op" "create" "CreateOperation";
        "op" "create-batch" "CreateOperations";
        "op" "finalize" "FinalizeOperation";
        "op" "finalize-batch" "FinalizeOperations";
        "op" "reverse" "ReverseOperation";
        "op" "get" "GetOperation";
        "op" "list" "ListOperations";
        "hold" "create" "CreateHold";
        "hold" "release" "ReleaseHold";
        "hold" "consume" "ConsumeHold";
        "hold" "adjust" "AdjustHold";
        "hold" "get" "GetHold";
        "hold" "list" "ListHolds";
        "ledger" "position" "GetSourcePosition";
        "ledger" "trial-balance" "GetTrialBalance";
        "ledger" "statement" "GetStatement";
        "limit" "set" "SetVelocityLimit";
        "limit" "remove" "RemoveVelocityLimit";
        "limit" "list" "ListVelocityLimits";
        "ledger" "audit" "ListAuditRecords";
        "ledger" "head" "GetChainHead";
    }
    "dfa.cfa.v1.CfaRegistryService" {
        "instrument" "register" "RegisterInstrument";
        "instrument" "get" "GetInstrument";
        "instrument" "list" "ListInstruments";
        "instrument" "sign" "SignIssueDecision";
        "instrument" "activate" "ActivateInstrument";
        "instrument" "decision" "GetIssueDecision";
        "instrument" "update" "UpdateInstrument";
        "instrument" "redeem" "StartRedemption";
        "instrument" "redemption" "GetRedemption";
        "coupon" "list" "ListCoupons";
        "coupon" "restart" "RestartCoupon";
        "instrument" "supply" "GetSupply";
        "cfa" "issue-rub" "IssueCfaRub";
        "cfa" "redeem-rub" "RedeemCfaRub";
        "cfa" "issue" "IssueInvestmentCfa";
        "subscription" "create" "Subscribe";
        "subscription" "cancel" "CancelSubscription";
        "subscription" "list" "ListSubscriptions";
        "placement" "close" "ClosePlacement";
        "offer" "create" "OfferUnits";
        "offer" "cancel" "CancelOffer";
        "offer" "list" "ListOffers";
        "cfa" "redeem" "RedeemInvestmentCfa";
        "cfa" "transfer" "TransferCfa";
        "cfa" "settle" "SettleTrades";
        "cfa" "batch" "GetTradeBatch";
        "cfa" "get" "GetOperation";
        "cfa" "list" "ListOperations";
        "cfa" "finalize-issuance" "FinalizeIssuance";
        "cfa" "finalize-redemption" "FinalizeRedemption";
        "cfa" "suspended" "ListSuspendedDeposits";
        "cfa" "resolve-suspended" "ResolveSuspendedDeposit";
        "cfa" "block-redemption" "SetRedemptionBlock";
        "cfa" "refund-redemption" "RefundRedemption";
        "enforcement" "freeze" "FreezeUnits";
        "enforcement" "lift" "LiftFreeze";
        "enforcement" "transfer" "ForceTransfer";
        "enforcement" "list" "ListEnforcementActs";
        "holders" "list" "ListHolders";
        "holders" "extract" "IssueExtract";
        "holders" "on-chain" "ListChainBalances";
        "chain" "breaks" "ListChainBreaks";
        "chain" "accept-break" "AcceptChainBreak";
        "chain" "anchors" "ListAnchors";
        "instrument" "lift-quarantine" "LiftQuarantine";
        "instrument" "move-holders" "MoveHolders";
        "instrument" "holder-move" "GetHolderMove";
        "chain" "transfers" "ReplayChainTransfers";
        "chain" "check-integrity" "CheckIntegrity";
        "cfa" "audit" "ListAuditRecords";
    }
    "dfa.chain.v1.ChainConnectorService" {
        "chain" "submit" "SubmitTransaction";
        "chain" "receipt" "GetTransactionReceipt";
        "chain" "block" "GetBlock";
        "chain" "verify-block" "VerifyBlockHash";
        "chain" "estimate-gas" "EstimateGas";
    }
    "dfa.payments.v1.PaymentsService" {
        "intent" "create" "CreatePaymentIntent";
        "intent" "get" "GetPaymentIntent";
        "intent" "list" "ListPaymentIntents";
        "intent" "webhook" "HandlePaymentWebhook";
        "payout" "initiate" "InitiatePayout";
        "payout" "release" "ReleasePayout";
        "payout" "cancel" "CancelPayout";
        "payout" "get" "GetPayout";
        "payout" "list" "ListPayouts";
        "receipt" "list" "ListReceipts";
        "receipt" "assign" "AssignReceipt";
        "receipt" "refund" "RefundReceipt";
        "recon" "run" "Reconcile";
        "recon" "latest" "GetLatestReport";
        "payout" "audit" "ListAuditRecords";
    }
    "dfa.market.v1.MarketService" {
        "order" "place" "PlaceOrder";
        "order" "cancel" "CancelOrder";
        "order" "amend" "AmendOrder";
        "order" "cancel-all" "MassCancel";
        "order" "get" "GetOrder";
        "order" "list" "ListOrders";
        "trade" "get" "GetTrade";
        "trade" "list" "ListTrades";
        "book" "get" "GetOrderBook";
        "trading-hold" "open" "OpenTradingHold";
        "trading-hold" "adjust" "AdjustTradingHold";
        "trading-hold" "close" "CloseTradingHold";
        "trading-hold" "list" "ListTradingHolds";
        "position" "get" "GetPosition";
        "market" "set-phase" "SetTradingPhase";
        "market" "kill-switch" "SetKillSwitch";
        "market" "set-bounds" "SetMemberBounds";
        "market" "set-group" "SetMemberGroup";
        "market" "confirm-clock" "ConfirmClock";
        "market" "status" "GetMarketStatus";
        "market" "audit" "ListAuditRecords";
    }
    "dfa.settlement.v1.SettlementService" {
        "settle" "status" "GetSettlementStatus";
        "settle" "batches" "ListBatches";
        "settle" "breaks" "ListBreaks";
        "settle" "retry" "RetrySettlement";
        "settle" "bust" "BustTrade";
        "settle" "cases" "ListCases";
        "settle" "close" "CloseCase";
        "settle" "audit" "ListAuditRecords";
    }
    "dfa.identity.v1.IdentityService" {
        "user" "get" "GetUserProfile";
        "user" "list" "ListUsers";
        "user" "create" "CreateUser";
        "user" "update" "UpdateUser";
        "user" "block" "BlockUser";
        "user" "unblock" "UnblockUser";
        "user" "limits" "GetLimits";
        "user" "set-limit" "SetLimit";
        "user" "check-limits" "CheckLimits";
        "user" "reserve-limit" "ReserveLimit";
        "user" "confirm-limit" "ConfirmLimit";
        "user" "cancel-limit" "CancelLimit";
        "user" "check-sanctions" "CheckSanctions";
        "user" "audit" "ListAuditRecords";
    }
    "dfa.approvals.v1.ApprovalService" {
        "approval" "request" "RequestApproval";
        "approval" "approve" "Approve";
        "approval" "reject" "Reject";
        "approval" "get" "GetApproval";
        "approval" "list" "ListApprovals";
        "approval" "audit" "ListAuditRecords";
    }
    "dfa.sandbox.v1.SandboxBankService" {
        "bank" "pay" "Pay";
        "bank" "set-fault" "SetFault";
        "bank" "balance" "GetBankBalance";
        "bank" "transfers" "ListTransfers";
        "bank" "sign" "SignDocument";
    }
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::cli::schema;

    // rows: R350
    #[test]
    fn r350_every_rpc_has_exactly_one_command() {
        let known: BTreeSet<String> = schema::pool()
            .services()
            .filter(|service| service.full_name().starts_with("dfa."))
            .flat_map(|service| {
                service
                    .methods()
                    .map(|method| {
                        format!("{}/{}", method.parent_service().full_name(), method.name())
                    })
                    .collect::<Vec<_>>()
            })
            .collect();
        let listed: BTreeSet<String> = ENTRIES.iter().map(|entry| entry.path.to_owned()).collect();
        assert_eq!(known, listed);
        assert_eq!(listed.len(), ENTRIES.len(), "no call is listed twice");
        let words: BTreeSet<_> = ENTRIES
            .iter()
            .map(|entry| (entry.noun, entry.verb))
            .collect();
        assert_eq!(words.len(), ENTRIES.len(), "no two calls share their words");
        let nouns: BTreeSet<_> = ENTRIES.iter().map(|entry| entry.noun).collect();
        let described: BTreeSet<_> = NOUNS.iter().map(|(noun, _)| *noun).collect();
        assert_eq!(nouns, described);
    }
}
