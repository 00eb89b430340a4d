//! The synthetic members of a replay: who buys, who sells, who takes, and what each must have
//! blocked before the first row.

use anyhow::{Context, bail};
use serde_json::json;

use super::lobster::{Kind, Row};
use crate::demo::{Story, text};

/// Members of each kind. Buyers, sellers and takers are disjoint, so that no order ever meets one of its own user's.
pub const BUYERS: u64 = 4;
pub const SELLERS: u64 = 4;
pub const TAKERS: u64 = 4;

/// One member: a user with a session.
pub struct Member {
    pub user: String,
    /// CFA-RUB in kopecks, units of the instrument, that its orders can need at most.
    pub money_minor: i64,
    pub units: u64,
}

/// The channel of the member who sends a row.
pub fn channel_of(row: &Row) -> u16 {
    let member = match row.kind {
        Kind::Execute => BUYERS + SELLERS + row.order_id % TAKERS,
        _ if row.is_buy => row.order_id % BUYERS,
        _ => BUYERS + row.order_id % SELLERS,
    };
    u16::try_from(member).expect("a dozen members")
}

/// What the rows need, member by member, if nothing were ever returned: an upper bound that every order fits under.
pub fn needs(rows: &[Row]) -> anyhow::Result<Vec<(i64, u64)>> {
    let mut needs = vec![(0i128, 0u64); usize::try_from(BUYERS + SELLERS + TAKERS)?];
    for row in rows {
        let need = &mut needs[usize::from(channel_of(row))];
        let kopecks = i128::from(row.price_x10000 / 100) * i128::from(row.size);
        match row.kind {
            Kind::New if row.is_buy => need.0 += kopecks,
            Kind::New => need.1 += row.size,
            // The taker stands on the other side of the order that was executed.
            Kind::Execute if row.is_buy => need.1 += row.size,
            Kind::Execute => need.0 += kopecks,
            _ => {}
        }
    }
    needs
        .into_iter()
        .map(|(kopecks, units)| {
            // The fee reserve is a thousandth, rounded up an order.
            let with_fee = kopecks + kopecks / 1_000 + rows.len() as i128;
            Ok((
                i64::try_from(with_fee).context("the file's turnover is too large")?,
                units,
            ))
        })
        .collect()
}

/// Creates the members, brings money and units in through the front door, and blocks them for trading.
pub async fn enter(
    story: &mut Story,
    instrument: &str,
    rows: &[Row],
) -> anyhow::Result<Vec<Member>> {
    let mut members = Vec::new();
    for (at, (money_minor, units)) in needs(rows)?.into_iter().enumerate() {
        let answer = story
            .call(
                "sandbox.operator",
                "platform.identity.v1.IdentityService/CreateUser",
                json!({ "kycStatus": "KYC_STATUS_STANDARD", "fullName": format!("member {at}") }),
            )
            .await?;
        let member = Member {
            user: text(&answer, "/profile/userId")?.to_owned(),
            money_minor,
            units,
        };
        for limit in ["LIMIT_TYPE_DEPOSIT", "LIMIT_TYPE_TRADING"] {
            story
                .call(
                    "sandbox.operator",
                    "platform.identity.v1.IdentityService/SetLimit",
                    json!({ "userId": member.user, "limitType": limit,
                            "dailyLimit": { "currencyCode": "RUB", "amount": { "value": "1000000000000.00" } } }),
                )
                .await?;
        }
        members.push(member);
    }
    for member in &members {
        fund(story, instrument, member).await?;
    }
    Ok(members)
}

async fn fund(story: &mut Story, instrument: &str, member: &Member) -> anyhow::Result<()> {
    let user = &member.user;
    if member.money_minor > 0 {
        let amount = types::Decimal::from_minor(member.money_minor, 2).to_string();
        let payment = deposit(story, user, &amount).await?;
        story
            .balance_is(&format!("{user}:CFA-RUB"), &amount)
            .await?;
        open_hold(story, user, types::CFA_RUB, &amount).await?;
        story.step(
            &format!("A member deposited {amount} and blocked it for trading"),
            &[("user_id", user), ("payment_id", &payment)],
        );
    }
    if member.units > 0 {
        let units = member.units.to_string();
        let issued = story
            .call(
                "sandbox.operator",
                "platform.cfa.v1.CfaRegistryService/IssueInvestmentCfa",
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
        story
            .balance_is(&format!("{user}:{instrument}"), &units)
            .await?;
        open_hold(story, user, instrument, &units).await?;
        story.step(
            &format!("A member was issued {units} units and blocked them for trading"),
            &[("user_id", user)],
        );
    }
    Ok(())
}

async fn open_hold(
    story: &Story,
    user: &str,
    instrument: &str,
    amount: &str,
) -> anyhow::Result<()> {
    story
        .call(
            &format!("sandbox.trader.{user}"),
            "platform.market.v1.MarketService/OpenTradingHold",
            json!({ "userId": user, "instrumentId": instrument, "amount": { "value": amount } }),
        )
        .await
        .map(drop)
}

/// A large deposit comes by bank transfer.
async fn deposit(story: &Story, user: &str, amount: &str) -> anyhow::Result<String> {
    let intent = story
        .call(
            &format!("sandbox.investor.{user}"),
            "platform.payments.v1.PaymentsService/CreatePaymentIntent",
            json!({ "userId": user, "method": "PAYMENT_METHOD_BANK_TRANSFER",
                    "amount": { "currencyCode": "RUB", "amount": { "value": amount } } }),
        )
        .await?;
    let payment_id = text(&intent, "/intent/paymentId")?.to_owned();
    let payload = text(&intent, "/intent/qrPayload")?;
    story
        .call(
            "sandbox.operator",
            "platform.sandbox.v1.SandboxBankService/Pay",
            json!({ "qrPayload": payload }),
        )
        .await?;
    Ok(payment_id)
}
