//! Deploys the contracts shared by all instruments on the first start, and registers CFA-RUB.
//!
//! Every transaction has a fixed idempotency key, so a restart continues the deployment. The
//! service stores the addresses, so a replaced chain is detected at startup and not by a failing
//! redemption.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use types::Decimal;

use crate::api::publish;
use crate::error::Error;
use crate::model::{
    CFA_RUB, CFA_RUB_DECIMALS, FEES, Instrument, InstrumentStatus, InstrumentType,
    REDEMPTION_ACCOUNT,
};
use crate::repo::Repo;
use chain::{Action, Address, ChainError, Connector, Contracts, ReceiptStatus};

const SETTING: &str = "contracts";
const DEPLOY_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Serialize, Deserialize, PartialEq, Eq)]
struct Stored {
    registry: String,
    money: String,
    settlement: String,
    redemption: String,
}

impl Stored {
    fn of(contracts: &Contracts) -> Self {
        Self {
            registry: contracts.registry.to_string(),
            money: contracts.money.to_string(),
            settlement: contracts.settlement.to_string(),
            redemption: contracts.redemption.to_string(),
        }
    }

    fn contracts(&self) -> Option<Contracts> {
        Some(Contracts {
            registry: self.registry.parse().ok()?,
            money: self.money.parse().ok()?,
            settlement: self.settlement.parse().ok()?,
            redemption: self.redemption.parse().ok()?,
        })
    }
}

async fn deploy(chain: &Connector, name: &str, action: &Action) -> Result<Address, Error> {
    let submitted = chain
        .submit(&format!("bootstrap:{name}"), &action.call())
        .await?;
    Ok(submitted.contract.expect("a deployment has an address"))
}

/// Returns the stored contracts, or deploys them and waits until they are in blocks.
pub async fn contracts(repo: &Repo, chain: &Connector) -> Result<Contracts, Error> {
    if let Some(text) = repo.setting(SETTING).await? {
        let stored: Stored =
            serde_json::from_str(&text).map_err(|error| Error::Damaged(error.to_string()))?;
        let contracts = stored
            .contracts()
            .ok_or_else(|| Error::Damaged(SETTING.into()))?;
        if !chain.has_code(&contracts.money).await? {
            return Err(Error::Damaged(format!(
                "no CFA-RUB contract at {}: this store belongs to another chain",
                contracts.money
            )));
        }
        return Ok(contracts);
    }
    let fee_account = Address::of_user(FEES);
    let registry = deploy(chain, "registry", &Action::DeployRegistry).await?;
    let token = Action::DeployToken {
        name: "Digital rouble claim".into(),
        symbol: CFA_RUB.into(),
        decimals: CFA_RUB_DECIMALS,
        registry,
        agents: Vec::new(),
    };
    let money = deploy(chain, "money", &token).await?;
    let settlement = deploy(
        chain,
        "settlement",
        &Action::DeploySettlement { money, fee_account },
    )
    .await?;
    let redemption = deploy(chain, "redemption", &Action::DeployRedemption { money }).await?;
    for (name, agent) in [
        ("settlement-agent", settlement),
        ("redemption-agent", redemption),
    ] {
        chain
            .submit(
                &format!("bootstrap:{name}"),
                &Action::AddAgent {
                    contract: money,
                    agent,
                }
                .call(),
            )
            .await?;
    }
    let system_accounts = Action::RegisterIdentities {
        registry,
        accounts: vec![fee_account, Address::of_user(REDEMPTION_ACCOUNT)],
    };
    let last = chain
        .submit("bootstrap:house-accounts", &system_accounts.call())
        .await?;
    let receipt = chain
        .wait_receipt(&last.tx_hash, DEPLOY_TIMEOUT)
        .await?
        .ok_or(Error::Unavailable("Blockchain"))?;
    let contracts = Contracts {
        registry,
        money,
        settlement,
        redemption,
    };
    let is_complete = receipt.status == ReceiptStatus::Success
        && chain.is_agent(&money, &settlement).await?
        && chain.is_agent(&money, &redemption).await?
        && chain.is_verified(&registry, &fee_account).await?;
    if !is_complete {
        return Err(
            ChainError::Refused("the platform's contracts could not be deployed".into()).into(),
        );
    }
    let text = serde_json::to_string(&Stored::of(&contracts))
        .map_err(|error| Error::Damaged(error.to_string()))?;
    repo.set_setting(SETTING, &text).await?;
    tracing::info!(%registry, %money, %settlement, %redemption, "contracts deployed");
    Ok(contracts)
}

/// Stores the addresses of the system accounts, and on the first start CFA-RUB as an instrument
/// (R023).
pub async fn money_instrument(
    repo: &Repo,
    contracts: &Contracts,
    now_us: i64,
) -> Result<(), Error> {
    for account in [FEES, REDEMPTION_ACCOUNT] {
        repo.store_address(account, &Address::of_user(account).to_string(), now_us)
            .await?;
    }
    repo.mark_registered(&[FEES, REDEMPTION_ACCOUNT]).await?;
    if repo.instrument(CFA_RUB).await?.is_some() {
        return Ok(());
    }
    let kopeck = Decimal::from_minor(1, CFA_RUB_DECIMALS);
    let instrument = Instrument {
        instrument_id: CFA_RUB.into(),
        name: "Digital rouble claim".into(),
        kind: InstrumentType::MoneyClaim,
        decimals: CFA_RUB_DECIMALS,
        issuer_id: "platform".into(),
        contract_address: contracts.money.to_string(),
        currency_code: "RUB".into(),
        status: InstrumentStatus::Active,
        issue_limit_minor: None,
        issued_minor: 0,
        nominal: Some(Decimal::from_integer(1)),
        coupons: Vec::new(),
        issued_at_us: Some(now_us),
        matures_at_us: None,
        tick_size: kopeck,
        lot_size: kopeck,
        price_band_low: None,
        price_band_high: None,
        document_hash: String::new(),
        document_uri: String::new(),
        idempotency_key: "bootstrap".into(),
        registered_at_us: now_us,
        updated_at_us: now_us,
        activated: true,
    };
    let mut tx = repo.begin().await?;
    if repo.insert_instrument_in_tx(&mut tx, &instrument).await? {
        repo.publish_in_tx(
            &mut tx,
            &[publish::instrument_registered(&instrument, "bootstrap")],
        )
        .await?;
    }
    Ok(tx.commit().await?)
}
