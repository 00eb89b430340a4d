//! Requests that need prepared objects or a certain combination of fields. The requests of other
//! methods follow from the names and types of their fields.

use serde_json::{Value, json};

use super::stage::{DEPOSIT, Stage, fresh};
use crate::call::path_of;
use crate::world::{amount, limit_order, rub, symbol};

/// An account that no payout goes to.
const ACCOUNT: &str = "40702810900000000001";
/// SHA-256 of the decision on the issue that is not active yet.
const DOCUMENT: &str = "abababababababababababababababababababababababababababababababab";

/// A valid request of `service.Method` without its context; `None`: it has no special one.
pub fn special(stage: &Stage, name: &str) -> Option<Value> {
    let (area, _) = name.split_once('.')?;
    match area {
        "ledger" => ledger(stage, name),
        "cfa" => instruments(stage, name)
            .or_else(|| operations(stage, name))
            .or_else(|| enforcement(stage, name)),
        "payments" => payments(stage, name),
        "market" => orders(stage, name).or_else(|| supervision(stage, name)),
        "identity" => identity(stage, name),
        "chain" => chain(stage, name),
        "approvals" => approvals(stage, name),
        "sandbox" => bank(stage, name),
        "settlement" => settlement(stage, name),
        _ => None,
    }
}

fn ledger(stage: &Stage, name: &str) -> Option<Value> {
    let (user, victim) = (&stage.user, &stage.victim);
    // No flow of the platform uses this type; the run reverses it.
    let operation = json!({ "type": "OPERATION_TYPE_PAYMENT", "userId": user.id });
    let postings = json!([{
        "debitSubaccountId": user.cash(), "creditSubaccountId": stage.other.cash(),
        "amount": amount("CFA-RUB", "1.00"),
    }]);
    let [released, consumed, adjusted, _] = &stage.holds;
    let [finalized, reversed, _] = &stage.operations;
    Some(match name {
        "ledger.CreateOperation" => json!({ "operation": operation, "postings": postings }),
        "ledger.CreateOperations" => json!({
            "operations": [{ "operation": operation, "postings": postings }],
            "mode": "BATCH_MODE_INDEPENDENT",
        }),
        "ledger.FinalizeOperation" => json!({ "operationId": finalized }),
        "ledger.FinalizeOperations" => json!({ "operationIds": [finalized] }),
        "ledger.ReverseOperation" => json!({ "operationId": reversed, "reason": "a drill" }),
        "ledger.CreateHold" => json!({ "hold": {
            "subaccountId": user.cash(), "amount": amount("CFA-RUB", "1.00"), "reason": "a drill",
        } }),
        "ledger.ReleaseHold" => json!({ "holdId": released, "reason": "a drill" }),
        "ledger.ConsumeHold" => json!({ "holdId": consumed }),
        "ledger.AdjustHold" => {
            json!({ "holdId": adjusted, "remainingAmount": amount("CFA-RUB", "1.00") })
        }
        "ledger.GetSourcePosition" => json!({ "source": "drill" }),
        "ledger.ListAuditRecords" => json!({}),
        "ledger.SetSubAccountStatus" => json!({
            "subaccountId": victim.cash(), "status": "SUB_ACCOUNT_STATUS_ACTIVE",
            "reason": "a drill",
        }),
        "ledger.SetVelocityLimit" => json!({
            "limit": {
                "limitId": fresh(), "userId": victim.id, "instrumentId": "CFA-RUB",
                "side": "POSTING_SIDE_DEBIT", "windowSeconds": 3_600, "amount": { "value": "1000000.00" },
            },
            "reason": "a drill",
        }),
        _ => return None,
    })
}

fn instruments(stage: &Stage, name: &str) -> Option<Value> {
    let (user, bond, spare) = (&stage.user, &stage.bond, &stage.spare);
    let (one, rouble) = (amount(bond, "1"), amount("CFA-RUB", "1.00"));
    Some(match name {
        "cfa.RegisterInstrument" => json!({
            "symbol": symbol("FUZZ"), "name": "A bond", "type": "INSTRUMENT_TYPE_CFA_BOND",
            "decimals": 0, "issuerId": user.id, "currencyCode": "RUB",
            "issueLimit": { "value": "1000" }, "nominal": { "value": "1000.00" },
            "tickSize": { "value": "0.01" }, "lotSize": { "value": "1" },
            "priceBandLow": { "value": "1.00" }, "priceBandHigh": { "value": "100000.00" },
        }),
        "cfa.SignIssueDecision" => json!({
            "instrumentId": stage.draft, "documentHash": DOCUMENT, "signature": stage.signature,
        }),
        "cfa.ActivateInstrument" => {
            json!({ "instrumentId": stage.draft, "documentHash": DOCUMENT })
        }
        "cfa.UpdateInstrument" => {
            json!({ "instrumentId": spare, "priceBandHigh": { "value": "90000.00" } })
        }
        "cfa.Subscribe" => json!({
            "instrumentId": bond, "investorId": user.id, "amount": one, "payment": rouble,
        }),
        "cfa.OfferUnits" => json!({
            "instrumentId": bond, "holderId": user.id, "amount": one, "payment": rouble,
        }),
        "cfa.IssueInvestmentCfa" => json!({
            "instrumentId": bond, "investorId": user.id, "amount": one,
            "bookbuildingId": "placement",
        }),
        "cfa.RedeemInvestmentCfa" => json!({
            "instrumentId": bond, "holderId": user.id, "amount": one, "redemptionId": fresh(),
            "reason": "REDEMPTION_REASON_BUYBACK",
        }),
        "cfa.StartRedemption" => {
            json!({ "instrumentId": spare, "reason": "REDEMPTION_REASON_BUYBACK" })
        }
        "cfa.GetRedemption" => json!({ "instrumentId": spare, "pagination": { "pageSize": 5 } }),
        // The issue has no coupons, and its trading is not halted.
        "cfa.RestartCoupon" => json!({ "instrumentId": spare, "number": 1 }),
        "cfa.MoveHolders" => json!({ "instrumentId": spare, "reason": "a drill" }),
        "cfa.TransferCfa" => json!({
            "instrumentId": bond, "fromUserId": user.id, "toUserId": stage.other.id,
            "amount": one,
        }),
        _ => return None,
    })
}

fn operations(stage: &Stage, name: &str) -> Option<Value> {
    let user = &stage.user;
    Some(match name {
        "cfa.IssueCfaRub" => {
            json!({ "userId": user.id, "amount": rub(DEPOSIT), "paymentId": stage.payment })
        }
        "cfa.RedeemCfaRub" => {
            json!({ "userId": user.id, "amount": rub("1.00"), "payoutId": fresh() })
        }
        // A trade without a seller: a service's batch is executed without another question.
        "cfa.SettleTrades" => json!({
            "batchId": fresh(),
            "trades": [{
                "tradeId": fresh(), "instrumentId": stage.bond, "tradeNumber": "1",
                "buyerId": user.id, "quantity": { "value": "1" }, "payment": { "value": "1.00" },
            }],
        }),
        "cfa.GetTradeBatch" => json!({ "batchId": fresh(), "waitMs": 1 }),
        "cfa.ReplayChainTransfers" => json!({ "fromBlock": stage.block_number }),
        "cfa.CheckIntegrity" => json!({
            "blockNumber": stage.block_number, "blockHash": stage.block_hash,
            "algorithm": "HASH_ALGORITHM_KECCAK256",
        }),
        "cfa.ListOperations" => json!({ "userId": user.id, "pagination": { "pageSize": 5 } }),
        "cfa.ResolveSuspendedDeposit" => json!({ "paymentId": stage.payment, "refund": true }),
        "cfa.SetRedemptionBlock" => json!({
            "operationId": stage.cfa_operation, "blocked": true, "reason": "a drill",
        }),
        "cfa.FinalizeRedemption" => json!({ "payoutId": fresh() }),
        _ => return None,
    })
}

fn enforcement(stage: &Stage, name: &str) -> Option<Value> {
    let (bond, one) = (&stage.bond, amount(&stage.bond, "1"));
    let (basis, document) = ("ENFORCEMENT_BASIS_COURT", "A decision");
    Some(match name {
        "cfa.FreezeUnits" => json!({
            "instrumentId": bond, "holderId": stage.other.id, "amount": one, "basis": basis,
            "document": document,
        }),
        "cfa.LiftFreeze" => json!({ "actId": stage.freeze, "document": document }),
        "cfa.ForceTransfer" => json!({
            "instrumentId": bond, "fromUserId": stage.user.id, "toUserId": stage.other.id,
            "amount": one, "basis": basis, "document": document,
        }),
        "cfa.IssueExtract" => json!({ "instrumentId": bond, "holderId": stage.user.id }),
        _ => return None,
    })
}

fn settlement(stage: &Stage, name: &str) -> Option<Value> {
    Some(match name {
        "settlement.RetrySettlement" => json!({}),
        "settlement.CloseCase" => json!({ "tradeId": stage.trade, "note": "a drill" }),
        _ => return None,
    })
}

fn payments(stage: &Stage, name: &str) -> Option<Value> {
    let user = &stage.user;
    Some(match name {
        "payments.CreatePaymentIntent" => json!({
            "userId": user.id, "amount": rub("1.00"), "method": "PAYMENT_METHOD_SBP_QR",
        }),
        // Without the bank's signature it is refused.
        "payments.HandlePaymentWebhook" => json!({ "webhook": {
            "paymentId": stage.payment, "status": "PAYMENT_STATUS_SUCCESS",
            "amount": rub(DEPOSIT), "providerPayload": "{}",
            "receivedAt": "2026-01-01T00:00:00Z",
        } }),
        "payments.InitiatePayout" => json!({ "payout": {
            "payoutId": fresh(), "userId": user.id, "amount": rub("1.00"),
            "bankAccount": user.account,
        } }),
        "payments.CancelPayout" => json!({ "payoutId": stage.payout, "failureCode": "TEST" }),
        // No receipt is unmatched.
        "payments.AssignReceipt" => json!({
            "receiptId": fresh(), "userId": user.id, "reason": "a drill",
        }),
        "payments.RefundReceipt" => json!({
            "receiptId": fresh(), "bankAccount": user.account, "reason": "a drill",
        }),
        "payments.Reconcile" => json!({ "businessDate": "2026-01-01T00:00:00Z" }),
        _ => return None,
    })
}

fn orders(stage: &Stage, name: &str) -> Option<Value> {
    let (user, bond) = (&stage.user, &stage.bond);
    Some(match name {
        "market.PlaceOrder" => json!({ "order": limit_order(user, bond, "BUY", "1.00", "1") }),
        "market.AmendOrder" => json!({
            "orderId": stage.order, "price": { "value": "1.01" }, "quantity": { "value": "5" },
        }),
        "market.MassCancel" => json!({ "userId": user.id, "instrumentId": stage.spare }),
        "market.ListOrders" | "market.ListTrades" => json!({ "userId": user.id }),
        "market.GetOrderBook" => json!({ "instrumentId": bond, "depth": 5 }),
        "market.OpenTradingHold" => json!({
            "userId": user.id, "instrumentId": "CFA-RUB", "amount": { "value": "1.00" },
        }),
        "market.AdjustTradingHold" => {
            json!({ "holdId": stage.trading_hold, "undrawn": { "value": "2.00" } })
        }
        "market.CloseTradingHold" => json!({ "holdId": stage.closing_hold }),
        _ => return None,
    })
}

fn supervision(stage: &Stage, name: &str) -> Option<Value> {
    let (victim, reason) = (&stage.victim.id, "a drill");
    Some(match name {
        "market.SetTradingPhase" => json!({
            "instrumentId": stage.bond, "phase": "TRADING_PHASE_OPEN", "reason": reason,
        }),
        "market.SetKillSwitch" => json!({ "userId": victim, "engaged": true, "reason": reason }),
        "market.SetMemberBounds" => json!({
            "userId": victim, "reason": reason,
            "bounds": {
                "openOrdersPerUser": 10, "openOrdersPerInstrument": 10, "sessionsPerUser": 1,
            },
        }),
        "market.SetMemberGroup" => json!({ "userId": victim, "group": 1, "reason": reason }),
        "market.ConfirmClock" => json!({ "offsetSeconds": "0", "reason": reason }),
        _ => return None,
    })
}

fn identity(stage: &Stage, name: &str) -> Option<Value> {
    let (user, victim, reason) = (&stage.user.id, &stage.victim.id, "a drill");
    let limit = "LIMIT_TYPE_DEPOSIT";
    Some(match name {
        "identity.CheckLimits" => json!({
            "userId": user, "limitType": limit, "amount": rub("1.00"),
            "operationType": "OPERATION_TYPE_DEPOSIT",
        }),
        "identity.ReserveLimit" => json!({
            "reservationId": fresh(), "userId": victim, "limitType": limit,
            "amount": rub("1.00"), "operationType": "OPERATION_TYPE_DEPOSIT",
        }),
        "identity.CheckSanctions" => json!({ "userId": user, "payload": "a transfer" }),
        "identity.CreateUser" => json!({
            "userId": fresh(), "kycStatus": "KYC_STATUS_STANDARD", "fullName": "A person",
        }),
        "identity.UpdateUser" => {
            json!({ "userId": victim, "kycStatus": "KYC_STATUS_ENHANCED" })
        }
        "identity.SetLimit" => json!({
            "userId": victim, "limitType": limit, "dailyLimit": rub("1000.00"),
        }),
        "identity.BlockUser" | "identity.UnblockUser" => {
            json!({ "userId": victim, "reason": reason })
        }
        _ => return None,
    })
}

fn chain(stage: &Stage, name: &str) -> Option<Value> {
    // `setAddressFrozen(0, false)` of no contract.
    let to = format!("0x{}", "11".repeat(20));
    let data = format!("0xc69c09cf{}", "00".repeat(64));
    Some(match name {
        "chain.SubmitTransaction" => json!({ "payload": { "to": to, "data": data } }),
        "chain.EstimateGas" => json!({ "to": to, "data": data }),
        "chain.GetBlock" => json!({ "number": stage.block_number }),
        "chain.VerifyBlockHash" => {
            json!({ "number": stage.block_number, "hash": stage.block_hash })
        }
        _ => return None,
    })
}

fn approvals(stage: &Stage, name: &str) -> Option<Value> {
    let [(approved, hash), (rejected, _)] = &stage.approvals;
    Some(match name {
        "approvals.RequestApproval" => json!({
            "method": path_of("market.SetTradingPhase"),
            "requestJson": json!({
                "instrumentId": stage.bond, "phase": "TRADING_PHASE_OPEN", "reason": "a drill",
            }).to_string(),
            "reason": "a drill",
        }),
        "approvals.Approve" => json!({ "approvalId": approved, "hash": hash }),
        "approvals.Reject" => json!({ "approvalId": rejected, "reason": "a drill" }),
        _ => return None,
    })
}

fn bank(stage: &Stage, name: &str) -> Option<Value> {
    Some(match name {
        "sandbox.Pay" => json!({ "qrPayload": stage.qr_payload }),
        "sandbox.SetFault" => json!({ "fault": "BANK_FAULT_NONE", "account": ACCOUNT }),
        "sandbox.SignDocument" => json!({ "userId": stage.user.id, "documentHash": DOCUMENT }),
        _ => return None,
    })
}
