//! `platform demo`: an asset's life cycle over public interfaces only. Each step is checked; the
//! first difference is an error.

mod participants;
mod scenario;
mod trading;

use anyhow::{Context, bail};
use serde_json::{Value, json};
use types::CFA_RUB;

pub use participants::Participants;
pub use scenario::{Scenario, same_number, text};

use crate::cli::call::Target;

/// Parameters of the demonstration.
pub struct Demo {
    pub target: Target,
    /// `host:port` of the trading gateway.
    pub trading: std::net::SocketAddr,
    pub json: bool,
}

/// Runs all steps and prints the summary.
///
/// # Errors
/// Any difference from the expected result.
pub async fn run(demo: Demo) -> anyhow::Result<()> {
    let mut scenario = Scenario::new(demo.target.clone(), demo.json);
    let parties = Participants::enter(&mut scenario).await?;
    deposits(&mut scenario, &parties).await?;
    issue(&mut scenario, &parties).await?;
    let trades = trading::play(&mut scenario, &parties, demo.trading).await?;
    redemption(&mut scenario, &parties).await?;
    refused_redemption(&mut scenario, &parties).await?;
    early_redemption(&mut scenario, &parties).await?;
    let reconciliation = reconcile(&mut scenario).await?;
    let proof = crate::proof::take(&demo.target).await?;
    if !proof.ok {
        bail!(
            "the proof of balances has differences: {}",
            serde_json::to_string(&proof)?
        );
    }
    scenario.step(
        "Proof of balances: chain supply = -reserve = sum of holders, for every instrument",
        &[],
    );

    let count = scenario.steps_count();
    let summary = json!({
        "reconciliation": reconciliation,
        "proof": "ok",
        "instrument": parties.bond,
        "trades_settled": trades,
        "users": { "issuer": parties.issuer, "alice": parties.alice, "bob": parties.bob },
        "steps": scenario.into_steps(),
    });
    if demo.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        println!(
            "\n{count} steps, {trades} trades settled, reconciliation {reconciliation}, proof ok."
        );
    }
    Ok(())
}

/// Each user deposits roubles through the fast payment system and gets CFA-RUB.
async fn deposits(scenario: &mut Scenario, parties: &Participants) -> anyhow::Result<()> {
    for (name, user, amount) in [
        ("Alice", &parties.alice, "100000.00"),
        ("Bob", &parties.bob, "50000.00"),
        ("The issuer", &parties.issuer, "5000.00"),
    ] {
        let payment_id = deposit(scenario, user, amount).await?;
        scenario.balance_is(user, CFA_RUB, amount).await?;
        scenario.step(
            &format!(
                "{name} paid RUB {amount} by QR code; the bank's webhook was verified and CFA-RUB \
                 minted on chain and in the ledger"
            ),
            &[("payment_id", &payment_id), ("user_id", user)],
        );
    }
    Ok(())
}

/// Makes one deposit and waits until its CFA-RUB are issued; returns the payment id.
pub async fn deposit(scenario: &Scenario, user: &str, amount: &str) -> anyhow::Result<String> {
    let intent = scenario
        .call(
            &format!("sandbox.investor.{user}"),
            "dfa.payments.v1.PaymentsService/CreatePaymentIntent",
            json!({ "userId": user, "method": "PAYMENT_METHOD_SBP_QR",
                    "amount": { "currencyCode": "RUB", "amount": { "value": amount } } }),
        )
        .await?;
    let payment_id = text(&intent, "/intent/paymentId")?.to_owned();
    let qr = text(&intent, "/intent/qrPayload")?;
    scenario
        .call(
            "sandbox.operator",
            "dfa.sandbox.v1.SandboxBankService/Pay",
            json!({ "qrPayload": qr }),
        )
        .await?;
    scenario
        .until(
            "the deposit to be issued",
            "sandbox.auditor",
            "dfa.cfa.v1.CfaRegistryService/ListOperations",
            json!({ "userId": user, "externalRef": payment_id }),
            |answer| {
                answer.pointer("/operations/0/status") == Some(&json!("OPERATION_STATUS_FINALIZED"))
            },
        )
        .await?;
    Ok(payment_id)
}

/// Bob offers to buy 20 bonds.
async fn subscribe(scenario: &mut Scenario, parties: &Participants) -> anyhow::Result<()> {
    let subscribed = scenario
        .call(
            &format!("sandbox.investor.{}", parties.bob),
            "dfa.cfa.v1.CfaRegistryService/Subscribe",
            json!({
                "instrumentId": parties.bond, "investorId": parties.bob,
                "amount": { "currencyCode": parties.bond, "amount": { "value": "20" } },
                "payment": { "currencyCode": "CFA-RUB", "amount": { "value": "20000.00" } },
            }),
        )
        .await?;
    let subscription = text(&subscribed, "/subscription/subscriptionId")?.to_owned();
    scenario.step(
        "Bob subscribed to 20 bonds; his 20000.00 CFA-RUB are held",
        &[("subscription_id", &subscription)],
    );
    Ok(())
}

/// Registers a bond, deploys its contract and sells it to Bob.
async fn issue(scenario: &mut Scenario, parties: &Participants) -> anyhow::Result<()> {
    scenario
        .call(
            "sandbox.operator",
            "dfa.cfa.v1.CfaRegistryService/RegisterInstrument",
            json!({
                "symbol": parties.bond, "name": "Demonstration bond", "type": "INSTRUMENT_TYPE_CFA_BOND", "decimals": 0,
                "issuerId": parties.issuer, "currencyCode": "RUB",
                "issueLimit": { "value": "1000" }, "nominal": { "value": "1000.00" },
                "coupons": [{ "paysAt": participants::now(), "amount": { "value": "50.00" } }],
                "maturesAt": parties.matures_at, "tickSize": { "value": "0.01" }, "lotSize": { "value": "1" },
                "priceBandLow": { "value": "500.00" }, "priceBandHigh": { "value": "1500.00" },
            }),
        )
        .await?;
    let active = scenario.activate(&parties.bond, &parties.issuer).await?;
    let address = text(&active, "/smartContractAddress")?.to_owned();
    scenario.step(
        "The bond was registered, its decision signed by the issuer, and activated by two persons",
        &[("instrument_id", &parties.bond), ("contract", &address)],
    );

    subscribe(scenario, parties).await?;
    let issued = scenario
        .call(
            "sandbox.operator",
            "dfa.cfa.v1.CfaRegistryService/IssueInvestmentCfa",
            json!({
                "instrumentId": parties.bond, "investorId": parties.bob, "bookbuildingId": "demo",
                "amount": { "currencyCode": parties.bond, "amount": { "value": "20" } },
                "payment": { "currencyCode": "CFA-RUB", "amount": { "value": "20000.00" } },
            }),
        )
        .await?;
    let operation = text(&issued, "/operation/operationId")?.to_owned();
    scenario
        .until(
            "the issue to be final",
            "sandbox.auditor",
            "dfa.cfa.v1.CfaRegistryService/GetOperation",
            json!({ "operationId": operation }),
            |answer| {
                answer.pointer("/operation/status") == Some(&json!("OPERATION_STATUS_FINALIZED"))
            },
        )
        .await?;
    scenario
        .balance_is(&parties.bob, &parties.bond, "20")
        .await?;
    scenario
        .balance_is(&parties.bob, CFA_RUB, "30000.00")
        .await?;
    scenario
        .balance_is(&parties.issuer, CFA_RUB, "25000.00")
        .await?;
    scenario.step(
        "20 bonds were issued to Bob against 20000.00 CFA-RUB, in one exchange",
        &[("operation_id", &operation)],
    );
    Ok(())
}

/// Alice redeems 10000 CFA-RUB to her bank account.
async fn redemption(scenario: &mut Scenario, parties: &Participants) -> anyhow::Result<()> {
    let (operation, payout) = redeem(scenario, &parties.alice, "10000.00").await?;
    let done = wait_final(scenario, &operation, "OPERATION_STATUS_FINALIZED").await?;
    let hold = text(&done, "/operation/holdId")?.to_owned();
    let hold_state = scenario
        .call(
            "sandbox.auditor",
            "dfa.ledger.v1.LedgerService/GetHold",
            json!({ "holdId": hold }),
        )
        .await?;
    if hold_state.pointer("/hold/status") != Some(&json!("HOLD_STATUS_CONSUMED")) {
        bail!("the hold of the redemption is not consumed: {hold_state}");
    }
    scenario
        .balance_is(&parties.alice, CFA_RUB, "80880.89")
        .await?;
    scenario.step(
        "Alice redeemed 10000.00 CFA-RUB: blocked, burned, paid out by the bank, confirmed",
        &[("operation_id", &operation), ("payout_id", &payout)],
    );
    Ok(())
}

/// The bank refuses Bob's account: the burned tokens are returned.
async fn refused_redemption(scenario: &mut Scenario, parties: &Participants) -> anyhow::Result<()> {
    let fault = |fault: &str| json!({ "fault": fault, "account": parties.bob_account });
    scenario
        .call(
            "sandbox.operator",
            "dfa.sandbox.v1.SandboxBankService/SetFault",
            fault("BANK_FAULT_REFUSE_TRANSFER"),
        )
        .await?;
    let (operation, payout) = redeem(scenario, &parties.bob, "5000.00").await?;
    let failed = wait_final(scenario, &operation, "OPERATION_STATUS_FAILED").await?;
    scenario
        .call(
            "sandbox.operator",
            "dfa.sandbox.v1.SandboxBankService/SetFault",
            fault("BANK_FAULT_NONE"),
        )
        .await?;
    let message = text(&failed, "/operation/rejectionMessage")?;
    if message != "Payout failed, tokens returned" {
        bail!("the refused redemption has the message `{message}`");
    }
    scenario
        .balance_is(&parties.bob, CFA_RUB, "39110.00")
        .await?;
    scenario.step(
        "The bank refused Bob's payout of 5000.00: status FAILED, tokens returned on chain, hold released",
        &[("operation_id", &operation), ("payout_id", &payout)],
    );
    Ok(())
}

async fn redeem(scenario: &Scenario, user: &str, amount: &str) -> anyhow::Result<(String, String)> {
    let payout = uuid::Uuid::now_v7().to_string();
    let answer = scenario
        .call(
            &format!("sandbox.investor.{user}"),
            "dfa.cfa.v1.CfaRegistryService/RedeemCfaRub",
            json!({ "userId": user, "payoutId": payout,
                    "amount": { "currencyCode": "RUB", "amount": { "value": amount } } }),
        )
        .await?;
    Ok((text(&answer, "/operation/operationId")?.to_owned(), payout))
}

async fn wait_final(scenario: &Scenario, operation: &str, status: &str) -> anyhow::Result<Value> {
    scenario
        .until(
            &format!("operation {operation} to become {status}"),
            "sandbox.auditor",
            "dfa.cfa.v1.CfaRegistryService/GetOperation",
            json!({ "operationId": operation }),
            |answer| answer.pointer("/operation/status").and_then(Value::as_str) == Some(status),
        )
        .await
}

/// Two persons redeem the bond early: holders receive nominal and coupon, the tokens are burned.
async fn early_redemption(scenario: &mut Scenario, parties: &Participants) -> anyhow::Result<()> {
    scenario
        .approved(
            "dfa.cfa.v1.CfaRegistryService/StartRedemption",
            json!({
                "instrumentId": parties.bond,
                "reason": "REDEMPTION_REASON_BUYBACK",
                "recordDate": participants::now(),
            }),
        )
        .await?;
    let done = scenario
        .until(
            "the bond to be redeemed",
            "sandbox.auditor",
            "dfa.cfa.v1.CfaRegistryService/GetRedemption",
            json!({ "instrumentId": parties.bond }),
            |answer| {
                answer.pointer("/redemption/status") == Some(&json!("REDEMPTION_STATUS_FINALIZED"))
            },
        )
        .await?;
    let redemption_id = text(&done, "/redemption/redemptionId")?.to_owned();
    let total = done
        .pointer("/redemption/total/amount/value")
        .unwrap_or(&Value::Null);
    if !same_number(total, "21000.00") {
        bail!("20 bonds at 1050.00 are 21000.00, the redemption reports {total}");
    }
    scenario
        .balance_is(&parties.alice, CFA_RUB, "90330.89")
        .await?;
    scenario
        .balance_is(&parties.bob, CFA_RUB, "50660.00")
        .await?;
    scenario
        .balance_is(&parties.issuer, CFA_RUB, "4000.00")
        .await?;
    scenario
        .balance_is(&parties.alice, &parties.bond, "0")
        .await?;
    scenario
        .balance_is(&parties.bob, &parties.bond, "0")
        .await?;
    scenario.step(
        "Two persons redeemed the bond before its maturity: 21000.00 CFA-RUB from the issuer to \
         the holders, all bonds burned",
        &[("redemption_id", &redemption_id)],
    );
    Ok(())
}

async fn reconcile(scenario: &mut Scenario) -> anyhow::Result<String> {
    let report = scenario
        .call(
            "sandbox.treasury",
            "dfa.payments.v1.PaymentsService/Reconcile",
            json!({ "businessDate": participants::now() }),
        )
        .await
        .context("reconciliation")?;
    let notes = text(&report, "/report/notes")?.to_owned();
    if notes != "Balanced" {
        bail!("bank and supply do not balance: {report}");
    }
    let report_id = text(&report, "/report/reportId")?.to_owned();
    scenario.step(
        "Bank balance equals the supply of CFA-RUB: Balanced",
        &[("report_id", &report_id)],
    );
    Ok(notes)
}
