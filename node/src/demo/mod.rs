//! `platform demo`: an asset's life cycle over public interfaces alone. Each step is checked; the
//! first difference is an error.

mod cast;
mod story;
mod trading;

use anyhow::{Context, bail};
use serde_json::{Value, json};

pub use cast::Cast;
pub use story::{Story, same_number, text};

use crate::cli::call::Target;

/// Target of the demonstration.
pub struct Stage {
    pub target: Target,
    /// `host:port` of the trading gateway.
    pub trading: std::net::SocketAddr,
    pub json: bool,
}

/// Runs all steps and prints the summary.
///
/// # Errors
/// Any difference from the expected result.
pub async fn run(stage: Stage) -> anyhow::Result<()> {
    let mut story = Story::new(stage.target.clone(), stage.json);
    let cast = Cast::enter(&mut story).await?;
    deposits(&mut story, &cast).await?;
    issue(&mut story, &cast).await?;
    let trades = trading::play(&mut story, &cast, stage.trading).await?;
    redemption(&mut story, &cast).await?;
    refused_redemption(&mut story, &cast).await?;
    maturity(&mut story, &cast).await?;
    let reconciliation = reconcile(&mut story).await?;
    let proof = crate::proof::take(&stage.target).await?;
    if !proof.ok {
        bail!(
            "the proof of balances has differences: {}",
            serde_json::to_string(&proof)?
        );
    }
    story.step(
        "Proof of balances: chain supply = -reserve = sum of holders, for every instrument",
        &[],
    );

    let count = story.steps_count();
    let summary = json!({
        "reconciliation": reconciliation,
        "proof": "ok",
        "instrument": cast.bond,
        "trades_settled": trades,
        "users": { "issuer": cast.issuer, "alice": cast.alice, "bob": cast.bob },
        "steps": story.into_steps(),
    });
    if stage.json {
        println!("{}", serde_json::to_string_pretty(&summary)?);
    } else {
        println!(
            "\n{count} steps, {trades} trades settled, reconciliation {reconciliation}, proof ok."
        );
    }
    Ok(())
}

/// Roubles in through the fast payment system, CFA-RUB issued by the contract.
async fn deposits(story: &mut Story, cast: &Cast) -> anyhow::Result<()> {
    for (name, user, amount) in [
        ("Alice", &cast.alice, "100000.00"),
        ("Bob", &cast.bob, "50000.00"),
        ("The issuer", &cast.issuer, "5000.00"),
    ] {
        let payment_id = deposit(story, user, amount).await?;
        story.balance_is(&format!("{user}:CFA-RUB"), amount).await?;
        story.step(
            &format!(
                "{name} paid RUB {amount} by QR code; the bank's webhook was verified and CFA-RUB \
                 minted on chain and in the ledger"
            ),
            &[("payment_id", &payment_id), ("user_id", user)],
        );
    }
    Ok(())
}

/// One deposit from intent to final issue; returns the payment id.
pub async fn deposit(story: &Story, user: &str, amount: &str) -> anyhow::Result<String> {
    let intent = story
        .call(
            &format!("sandbox.investor.{user}"),
            "dfa.payments.v1.PaymentsService/CreatePaymentIntent",
            json!({ "userId": user, "method": "PAYMENT_METHOD_SBP_QR",
                    "amount": { "currencyCode": "RUB", "amount": { "value": amount } } }),
        )
        .await?;
    let payment_id = text(&intent, "/intent/paymentId")?.to_owned();
    let qr = text(&intent, "/intent/qrPayload")?;
    story
        .call(
            "sandbox.operator",
            "dfa.sandbox.v1.SandboxBankService/Pay",
            json!({ "qrPayload": qr }),
        )
        .await?;
    story
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

/// Registers a bond, deploys its contract and sells it to Bob.
async fn issue(story: &mut Story, cast: &Cast) -> anyhow::Result<()> {
    let registered = story
        .call(
            "sandbox.operator",
            "dfa.cfa.v1.CfaRegistryService/RegisterInstrument",
            json!({
                "symbol": cast.bond, "name": "Demonstration bond", "type": "INSTRUMENT_TYPE_CFA_BOND", "decimals": 0,
                "issuerId": cast.issuer, "currencyCode": "RUB",
                "issueLimit": { "value": "1000" }, "nominal": { "value": "1000.00" },
                "coupons": [{ "paysAt": cast::now(), "amount": { "value": "50.00" } }],
                "maturesAt": cast.matures_at, "tickSize": { "value": "0.01" }, "lotSize": { "value": "1" },
                "priceBandLow": { "value": "500.00" }, "priceBandHigh": { "value": "1500.00" },
            }),
        )
        .await?;
    let address = text(&registered, "/instrument/smartContractAddress")?.to_owned();
    if registered.pointer("/instrument/status") != Some(&json!("INSTRUMENT_STATUS_ACTIVE")) {
        story
            .call(
                "sandbox.operator",
                "dfa.cfa.v1.CfaRegistryService/UpdateInstrument",
                json!({ "instrumentId": cast.bond, "status": "INSTRUMENT_STATUS_ACTIVE" }),
            )
            .await?;
    }
    story.step(
        "The bond was registered and its contract deployed",
        &[("instrument_id", &cast.bond), ("contract", &address)],
    );

    let issued = story
        .call(
            "sandbox.operator",
            "dfa.cfa.v1.CfaRegistryService/IssueInvestmentCfa",
            json!({
                "instrumentId": cast.bond, "investorId": cast.bob, "bookbuildingId": "demo",
                "amount": { "currencyCode": cast.bond, "amount": { "value": "20" } },
                "payment": { "currencyCode": "CFA-RUB", "amount": { "value": "20000.00" } },
            }),
        )
        .await?;
    let operation = text(&issued, "/operation/operationId")?.to_owned();
    story
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
    story
        .balance_is(&format!("{}:{}", cast.bob, cast.bond), "20")
        .await?;
    story
        .balance_is(&format!("{}:CFA-RUB", cast.bob), "30000.00")
        .await?;
    story
        .balance_is(&format!("{}:CFA-RUB", cast.issuer), "25000.00")
        .await?;
    story.step(
        "20 bonds were issued to Bob against 20000.00 CFA-RUB, in one exchange",
        &[("operation_id", &operation)],
    );
    Ok(())
}

/// Alice redeems 10000 roubles to her bank account.
async fn redemption(story: &mut Story, cast: &Cast) -> anyhow::Result<()> {
    let (operation, payout) = redeem(story, &cast.alice, "10000.00").await?;
    let done = wait_final(story, &operation, "OPERATION_STATUS_FINALIZED").await?;
    let hold = text(&done, "/operation/holdId")?.to_owned();
    let hold_state = story
        .call(
            "sandbox.auditor",
            "dfa.ledger.v1.LedgerService/GetHold",
            json!({ "holdId": hold }),
        )
        .await?;
    if hold_state.pointer("/hold/status") != Some(&json!("HOLD_STATUS_CONSUMED")) {
        bail!("the hold of the redemption is not consumed: {hold_state}");
    }
    story
        .balance_is(&format!("{}:CFA-RUB", cast.alice), "80880.89")
        .await?;
    story.step(
        "Alice redeemed 10000.00 CFA-RUB: blocked, burned, paid out by the bank, confirmed",
        &[("operation_id", &operation), ("payout_id", &payout)],
    );
    Ok(())
}

/// The bank refuses Bob's account: the burned tokens are returned.
async fn refused_redemption(story: &mut Story, cast: &Cast) -> anyhow::Result<()> {
    let fault = |fault: &str| json!({ "fault": fault, "account": cast.bob_account });
    story
        .call(
            "sandbox.operator",
            "dfa.sandbox.v1.SandboxBankService/SetFault",
            fault("BANK_FAULT_REFUSE_TRANSFER"),
        )
        .await?;
    let (operation, payout) = redeem(story, &cast.bob, "5000.00").await?;
    let failed = wait_final(story, &operation, "OPERATION_STATUS_FAILED").await?;
    story
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
    story
        .balance_is(&format!("{}:CFA-RUB", cast.bob), "39110.00")
        .await?;
    story.step(
        "The bank refused Bob's payout of 5000.00: status FAILED, tokens returned on chain, hold released",
        &[("operation_id", &operation), ("payout_id", &payout)],
    );
    Ok(())
}

async fn redeem(story: &Story, user: &str, amount: &str) -> anyhow::Result<(String, String)> {
    let payout = uuid::Uuid::now_v7().to_string();
    let answer = story
        .call(
            &format!("sandbox.investor.{user}"),
            "dfa.cfa.v1.CfaRegistryService/RedeemCfaRub",
            json!({ "userId": user, "payoutId": payout,
                    "amount": { "currencyCode": "RUB", "amount": { "value": amount } } }),
        )
        .await?;
    Ok((text(&answer, "/operation/operationId")?.to_owned(), payout))
}

async fn wait_final(story: &Story, operation: &str, status: &str) -> anyhow::Result<Value> {
    story
        .until(
            &format!("operation {operation} to become {status}"),
            "sandbox.auditor",
            "dfa.cfa.v1.CfaRegistryService/GetOperation",
            json!({ "operationId": operation }),
            |answer| answer.pointer("/operation/status").and_then(Value::as_str) == Some(status),
        )
        .await
}

/// The bond matures: holders receive nominal and coupon, the tokens are burned.
async fn maturity(story: &mut Story, cast: &Cast) -> anyhow::Result<()> {
    let started = story
        .call(
            "sandbox.operator",
            "dfa.cfa.v1.CfaRegistryService/StartRedemption",
            json!({ "instrumentId": cast.bond, "reason": "REDEMPTION_REASON_MATURITY", "recordDate": cast::now() }),
        )
        .await?;
    let redemption_id = text(&started, "/redemption/redemptionId")?.to_owned();
    let done = story
        .until(
            "the bond to be redeemed",
            "sandbox.auditor",
            "dfa.cfa.v1.CfaRegistryService/GetRedemption",
            json!({ "redemptionId": redemption_id }),
            |answer| {
                answer.pointer("/redemption/status") == Some(&json!("REDEMPTION_STATUS_FINALIZED"))
            },
        )
        .await?;
    let total = done
        .pointer("/redemption/total/amount/value")
        .unwrap_or(&Value::Null);
    if !same_number(total, "21000.00") {
        bail!("20 bonds at 1050.00 are 21000.00, the redemption reports {total}");
    }
    story
        .balance_is(&format!("{}:CFA-RUB", cast.alice), "90330.89")
        .await?;
    story
        .balance_is(&format!("{}:CFA-RUB", cast.bob), "50660.00")
        .await?;
    story
        .balance_is(&format!("{}:CFA-RUB", cast.issuer), "4000.00")
        .await?;
    story
        .balance_is(&format!("{}:{}", cast.alice, cast.bond), "0")
        .await?;
    story
        .balance_is(&format!("{}:{}", cast.bob, cast.bond), "0")
        .await?;
    story.step(
        "The bond matured: 21000.00 CFA-RUB from the issuer to the holders, all bonds burned",
        &[("redemption_id", &redemption_id)],
    );
    Ok(())
}

async fn reconcile(story: &mut Story) -> anyhow::Result<String> {
    let report = story
        .call(
            "sandbox.treasury",
            "dfa.payments.v1.PaymentsService/Reconcile",
            json!({ "businessDate": cast::now() }),
        )
        .await
        .context("reconciliation")?;
    let notes = text(&report, "/report/notes")?.to_owned();
    if notes != "Balanced" {
        bail!("bank and supply do not balance: {report}");
    }
    let report_id = text(&report, "/report/reportId")?.to_owned();
    story.step(
        "Bank balance equals the supply of CFA-RUB: Balanced",
        &[("report_id", &report_id)],
    );
    Ok(notes)
}
