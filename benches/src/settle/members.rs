//! Members of a new platform: users, money and units on chain, trading holds in the ledger.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use proto::cfa::v1 as cfa;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use proto::common::v1::{InstrumentType, KycStatus};
use proto::convert::{to_monetary_amount_minor, to_money};
use proto::identity::v1::CreateUserRequest;
use proto::identity::v1::identity_service_client::IdentityServiceClient;
use proto::ledger::v1 as ledger;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use testkit::messages::context;
use types::{Decimal, subaccount};

use super::flow::{INSTRUMENT, MONEY, UNITS, hold_id, member};
use super::platform::Platform;

const ISSUER: &str = "issuer";
/// Calls in flight.
const CALLS: usize = 16;
/// Longest wait for the issued assets of all members.
const WAIT: Duration = Duration::from_secs(600);

/// Creates the members with money, units and trading holds.
///
/// # Errors
/// A service refuses a call, or the assets do not arrive.
pub async fn create(platform: &Platform, members: u32) -> anyhow::Result<()> {
    create_user(platform, ISSUER).await?;
    list(platform).await.context("instrument")?;
    let issues = stream::iter(0..members).map(|number| issue(platform, number));
    let issues = issues.buffer_unordered(CALLS);
    issues.try_collect::<Vec<()>>().await.context("issue")?;
    let holds = stream::iter(0..members).map(|number| open_holds(platform, number));
    let holds = holds.buffer_unordered(CALLS);
    holds.try_collect::<Vec<()>>().await.context("holds")?;
    Ok(())
}

/// Registers the instrument, signs its decision as the issuer and activates it.
async fn list(platform: &Platform) -> anyhow::Result<()> {
    let mut client = CfaRegistryServiceClient::new(platform.channels.cfa.clone());
    client
        .register_instrument(cfa::RegisterInstrumentRequest {
            context: context("register"),
            symbol: INSTRUMENT.to_owned(),
            name: "Settle".to_owned(),
            r#type: InstrumentType::CfaBond.into(),
            decimals: 0,
            issuer_id: ISSUER.to_owned(),
            currency_code: "RUB".to_owned(),
            ..Default::default()
        })
        .await?;
    let (document, document_hash) = ([1; 32], "01".repeat(32));
    let signature = platform.ca.sign(ISSUER, &document)?;
    client
        .sign_issue_decision(cfa::SignIssueDecisionRequest {
            context: context("sign"),
            instrument_id: INSTRUMENT.to_owned(),
            document_hash: document_hash.clone(),
            signature: signature.into(),
            ..Default::default()
        })
        .await?;
    let activated = client
        .activate_instrument(cfa::ActivateInstrumentRequest {
            context: context("activate"),
            instrument_id: INSTRUMENT.to_owned(),
            document_hash,
        })
        .await?;
    let activated = activated.into_inner().instrument.context("instrument")?;
    ensure!(
        activated.status() == cfa::InstrumentStatus::Active,
        "the instrument is not active"
    );
    Ok(())
}

async fn create_user(platform: &Platform, user_id: &str) -> anyhow::Result<()> {
    IdentityServiceClient::new(platform.channels.identity.clone())
        .create_user(CreateUserRequest {
            context: context(&format!("user-{user_id}")),
            user_id: user_id.to_owned(),
            kyc_status: KycStatus::Standard.into(),
            qualified_investor: true,
            ..Default::default()
        })
        .await?;
    Ok(())
}

async fn issue(platform: &Platform, number: u32) -> anyhow::Result<()> {
    let user_id = member(number);
    create_user(platform, &user_id).await?;
    let payment_id = format!("payment-{number}");
    let paid = Decimal::from_minor(MONEY, 2).to_string();
    platform.payments.paid(&payment_id, &user_id, &paid);
    let mut client = CfaRegistryServiceClient::new(platform.channels.cfa.clone());
    client
        .issue_cfa_rub(cfa::IssueCfaRubRequest {
            context: context(&format!("money-{number}")),
            user_id: user_id.clone(),
            amount: Some(to_money(MONEY)),
            payment_id,
        })
        .await?;
    client
        .issue_investment_cfa(cfa::IssueInvestmentCfaRequest {
            context: context(&format!("units-{number}")),
            instrument_id: INSTRUMENT.to_owned(),
            investor_id: user_id,
            amount: Some(to_monetary_amount_minor(INSTRUMENT, UNITS, 0)),
            bookbuilding_id: format!("book-{number}"),
            payment: None,
        })
        .await?;
    Ok(())
}

/// Opens the trading holds of a member once its assets are available.
async fn open_holds(platform: &Platform, number: u32) -> anyhow::Result<()> {
    let assets = [("CFA-RUB", MONEY, 2, true), (INSTRUMENT, UNITS, 0, false)];
    for (instrument, amount, decimals, is_money) in assets {
        let subaccount_id = subaccount::of_user(&member(number), instrument);
        let began = Instant::now();
        let all = Decimal::from_minor(amount, decimals);
        while available(platform, &subaccount_id).await != Some(all) {
            ensure!(began.elapsed() < WAIT, "{subaccount_id} has no {all}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let id = hold_id(number, is_money);
        LedgerServiceClient::new(platform.channels.ledger.clone())
            .create_hold(ledger::CreateHoldRequest {
                context: context(&format!("hold-{id}")),
                hold: Some(ledger::Hold {
                    hold_id: id.to_string(),
                    subaccount_id,
                    amount: Some(to_monetary_amount_minor(instrument, amount, decimals)),
                    reason: format!("Trading hold {id}"),
                    owner: "market".to_owned(),
                    ..Default::default()
                }),
            })
            .await?;
    }
    Ok(())
}

/// `None` if the sub-account does not exist yet.
async fn available(platform: &Platform, subaccount_id: &str) -> Option<Decimal> {
    let request = ledger::GetBalanceRequest {
        subaccount_id: subaccount_id.to_owned(),
        ..Default::default()
    };
    let mut client = LedgerServiceClient::new(platform.channels.ledger.clone());
    let answer = client.get_balance(request).await.ok()?.into_inner();
    answer.available?.value.parse().ok()
}
