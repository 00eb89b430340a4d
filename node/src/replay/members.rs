//! Synthetic members of a replay: buyers, sellers, takers, and the amounts to block before the
//! first row.

use anyhow::{Context, bail};
use serde_json::json;
use types::CFA_RUB;

use super::lobster::{Kind, Row};
use crate::demo::{Scenario, text};

/// Members of each kind. Buyers, sellers and takers are disjoint, so no order meets one of the same
/// user.
pub const BUYERS: u64 = 4;
pub const SELLERS: u64 = 4;
pub const TAKERS: u64 = 4;

/// Token for the setup. The calls of a service have no rate limit.
const SETUP: &str = "sandbox.service";

/// One member: a user with a session.
pub struct Member {
    pub user: String,
    /// Maximum that the member's orders need: CFA-RUB in kopecks, and units.
    pub money_minor: i64,
    pub units: u64,
}

/// The channel of the member that sends a row.
pub fn channel_of(row: &Row) -> u16 {
    let member = match row.kind {
        Kind::Execute => BUYERS + SELLERS + row.order_id % TAKERS,
        _ if row.is_buy => row.order_id % BUYERS,
        _ => BUYERS + row.order_id % SELLERS,
    };
    u16::try_from(member).expect("a dozen members")
}

/// Upper bounds of what the rows need per member: (kopecks, units). Cancels return nothing.
pub fn needs(rows: &[Row]) -> anyhow::Result<Vec<(i64, u64)>> {
    let mut needs = vec![(0i128, 0u64); usize::try_from(BUYERS + SELLERS + TAKERS)?];
    for row in rows {
        let need = &mut needs[usize::from(channel_of(row))];
        let kopecks = i128::from(row.price_x10000 / 100) * i128::from(row.size);
        match row.kind {
            Kind::New if row.is_buy => need.0 += kopecks,
            Kind::New => need.1 += row.size,
            // The taker has the opposite side of the executed order.
            Kind::Execute if row.is_buy => need.1 += row.size,
            Kind::Execute => need.0 += kopecks,
            _ => {}
        }
    }
    needs
        .into_iter()
        .map(|(kopecks, units)| {
            // The fee reserve is a thousandth, rounded up per order.
            let with_fee = kopecks + kopecks / 1_000 + rows.len() as i128;
            Ok((
                i64::try_from(with_fee).context("the file's turnover is too large")?,
                units,
            ))
        })
        .collect()
}

/// Registers an instrument and waits until its market is open; returns its id.
///
/// The tick is one kopeck and the lot one unit. `band` is the price band in kopecks.
pub async fn list(
    scenario: &mut Scenario,
    symbol: &str,
    name: &str,
    band: (i64, i64),
) -> anyhow::Result<String> {
    let decimal = |value: i64| types::Decimal::from_minor(value, 2).to_string();
    let issuer = scenario
        .call(
            SETUP,
            "dfa.identity.v1.IdentityService/CreateUser",
            json!({ "kycStatus": "KYC_STATUS_STANDARD", "fullName": "issuer" }),
        )
        .await?;
    let tag = uuid::Uuid::now_v7().simple().to_string()[22..].to_uppercase();
    let issuer = text(&issuer, "/profile/userId")?;
    let registered = scenario
        .call(
            SETUP,
            "dfa.cfa.v1.CfaRegistryService/RegisterInstrument",
            json!({
                "symbol": format!("{symbol}-{tag}"), "name": name, "type": "INSTRUMENT_TYPE_CFA_EQUITY",
                "decimals": 0, "issuerId": issuer, "currencyCode": "RUB",
                "tickSize": { "value": "0.01" }, "lotSize": { "value": "1" },
                "priceBandLow": { "value": decimal(band.0) }, "priceBandHigh": { "value": decimal(band.1) },
            }),
        )
        .await?;
    let instrument = text(&registered, "/instrumentId")?.to_owned();
    scenario.activate(&instrument, issuer).await?;
    scenario
        .until(
            "the market to know the instrument",
            "sandbox.auditor",
            "dfa.market.v1.MarketService/GetMarketStatus",
            json!({}),
            |answer| {
                answer["instruments"].as_array().is_some_and(|all| {
                    all.iter().any(|one| {
                        one["instrumentId"] == json!(instrument)
                            && one["phase"] == json!("TRADING_PHASE_OPEN")
                    })
                })
            },
        )
        .await?;
    scenario.step(
        "The instrument was registered; its band admits every price",
        &[("instrument_id", &instrument)],
    );
    Ok(instrument)
}

/// Creates and funds a member for each of `needs` (CFA-RUB in kopecks, units), over public calls.
///
/// The amounts are deposited, issued and blocked for trading.
pub async fn enter(
    scenario: &mut Scenario,
    instrument: &str,
    needs: &[(i64, u64)],
) -> anyhow::Result<Vec<Member>> {
    let mut members = Vec::new();
    for (at, (money_minor, units)) in needs.iter().copied().enumerate() {
        let answer = scenario
            .call(
                SETUP,
                "dfa.identity.v1.IdentityService/CreateUser",
                json!({ "kycStatus": "KYC_STATUS_STANDARD", "fullName": format!("member {at}"),
                        "qualifiedInvestor": true }),
            )
            .await?;
        let member = Member {
            user: text(&answer, "/profile/userId")?.to_owned(),
            money_minor,
            units,
        };
        for limit in ["LIMIT_TYPE_DEPOSIT", "LIMIT_TYPE_TRADING"] {
            scenario
                .call(
                    SETUP,
                    "dfa.identity.v1.IdentityService/SetLimit",
                    json!({ "userId": member.user, "limitType": limit,
                            "dailyLimit": { "currencyCode": "RUB", "amount": { "value": "1000000000000.00" } } }),
                )
                .await?;
        }
        members.push(member);
    }
    for member in &members {
        fund(scenario, instrument, member).await?;
    }
    Ok(members)
}

async fn fund(scenario: &mut Scenario, instrument: &str, member: &Member) -> anyhow::Result<()> {
    let user = &member.user;
    if member.money_minor > 0 {
        let amount = types::Decimal::from_minor(member.money_minor, 2).to_string();
        let payment = deposit(scenario, user, &amount).await?;
        scenario.balance_is(user, CFA_RUB, &amount).await?;
        open_hold(scenario, user, CFA_RUB, &amount).await?;
        scenario.step(
            &format!("A member deposited {amount} and blocked it for trading"),
            &[("user_id", user), ("payment_id", &payment)],
        );
    }
    if member.units > 0 {
        let units = member.units.to_string();
        let issued = scenario
            .call(
                SETUP,
                "dfa.cfa.v1.CfaRegistryService/IssueInvestmentCfa",
                json!({ "instrumentId": instrument, "investorId": user, "bookbuildingId": "replay",
                        "amount": { "currencyCode": instrument, "amount": { "value": units } } }),
            )
            .await?;
        let status = text(&issued, "/operation/status")?;
        if matches!(
            status,
            "OPERATION_STATUS_REJECTED" | "OPERATION_STATUS_FAILED"
        ) {
            bail!("units were not issued: {issued}");
        }
        scenario.balance_is(user, instrument, &units).await?;
        open_hold(scenario, user, instrument, &units).await?;
        scenario.step(
            &format!("A member was issued {units} units and blocked them for trading"),
            &[("user_id", user)],
        );
    }
    Ok(())
}

async fn open_hold(
    scenario: &Scenario,
    user: &str,
    instrument: &str,
    amount: &str,
) -> anyhow::Result<()> {
    scenario
        .call(
            &format!("sandbox.trader.{user}"),
            "dfa.market.v1.MarketService/OpenTradingHold",
            json!({ "userId": user, "instrumentId": instrument, "amount": { "value": amount } }),
        )
        .await
        .map(drop)
}

/// Makes a large deposit, by bank transfer; returns the payment id.
async fn deposit(scenario: &Scenario, user: &str, amount: &str) -> anyhow::Result<String> {
    let intent = scenario
        .call(
            &format!("sandbox.investor.{user}"),
            "dfa.payments.v1.PaymentsService/CreatePaymentIntent",
            json!({ "userId": user, "method": "PAYMENT_METHOD_BANK_TRANSFER",
                    "amount": { "currencyCode": "RUB", "amount": { "value": amount } } }),
        )
        .await?;
    let payment_id = text(&intent, "/intent/paymentId")?.to_owned();
    let payload = text(&intent, "/intent/qrPayload")?;
    scenario
        .call(
            SETUP,
            "dfa.sandbox.v1.SandboxBankService/Pay",
            json!({ "qrPayload": payload }),
        )
        .await?;
    Ok(payment_id)
}
