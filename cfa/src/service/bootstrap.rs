//! Deploys the contracts shared by all instruments on the first start, and registers CFA-RUB.
//!
//! One transaction deploys them with all their roles. It has a fixed idempotency key, so a restart
//! continues the deployment; after a revert the next start deploys again. The service stores the
//! addresses, so a replaced chain is detected at startup and not by a failing redemption. A
//! deployment of version 1 keeps its contracts.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use types::Decimal;

use crate::api::publish;
use crate::error::Error;
use crate::model::{
    CFA_RUB, CFA_RUB_DECIMALS, FEES, Instrument, InstrumentStatus, InstrumentType,
    PLACEMENT_ACCOUNT, REDEMPTION_ACCOUNT,
};
use crate::repo::Repo;
use chain::{Action, Address, ChainError, Connector, Contracts, ReceiptStatus, TokenCode, Version};

const SETTING: &str = "contracts";
/// Key of the deployment.
const KEY: &str = "bootstrap:platform";
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

    fn contracts(&self, version: Version) -> Option<Contracts> {
        Some(Contracts {
            version,
            registry: self.registry.parse().ok()?,
            money: self.money.parse().ok()?,
            settlement: self.settlement.parse().ok()?,
            redemption: self.redemption.parse().ok()?,
        })
    }
}

/// Returns the stored contracts, or deploys them and waits until they are in a block.
pub async fn contracts(repo: &Repo, chain: &Connector) -> Result<Contracts, Error> {
    if let Some(text) = repo.setting(SETTING).await? {
        return stored_contracts(chain, &text).await;
    }
    let contracts = deploy(chain).await?;
    let text = serde_json::to_string(&Stored::of(&contracts))
        .map_err(|error| Error::Damaged(error.to_string()))?;
    repo.set_setting(SETTING, &text).await?;
    let Contracts {
        registry,
        money,
        settlement,
        redemption,
        ..
    } = contracts;
    tracing::info!(%registry, %money, %settlement, %redemption, owner = %chain.owner(), "contracts deployed");
    Ok(contracts)
}

/// The stored contracts, with the version that the code on the chain has. The code of version 1 has
/// no known hash: its money token has the settlement contract as an agent.
async fn stored_contracts(chain: &Connector, text: &str) -> Result<Contracts, Error> {
    let stored: Stored =
        serde_json::from_str(text).map_err(|error| Error::Damaged(error.to_string()))?;
    let damaged = || Error::Damaged(SETTING.into());
    let money: Address = stored.money.parse().map_err(|_| damaged())?;
    let version = match chain.token_code(&money).await? {
        TokenCode::None => {
            return Err(Error::Damaged(format!(
                "no CFA-RUB contract at {money}: this store belongs to another chain"
            )));
        }
        TokenCode::Unknown => Version::V1,
        TokenCode::Token(version) => version,
    };
    let contracts = stored.contracts(version).ok_or_else(damaged)?;
    if version == Version::V1 {
        let settlement = &contracts.settlement;
        match chain.is_agent(&money, settlement).await {
            Ok(true) => {}
            Ok(false) | Err(ChainError::Refused(_) | ChainError::Malformed(_)) => {
                return Err(Error::Damaged(format!(
                    "the CFA-RUB contract at {money} is of an unknown version: start the version of \
                     the platform that deployed it, or a later one"
                )));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(contracts)
}

/// The first key whose deployment has not reverted. The cause of a revert, such as blocks with too
/// little gas, may be removed at the next start.
async fn deployment_key(chain: &Connector) -> Result<String, Error> {
    let mut key = KEY.to_owned();
    for attempt in 1_u32.. {
        let Some(known) = chain.submission(&key).await? else {
            break;
        };
        let receipt = chain.receipt(&known.tx_hash).await?;
        if receipt.is_none_or(|receipt| receipt.status == ReceiptStatus::Success) {
            break;
        }
        key = format!("{KEY}:{attempt}");
    }
    Ok(key)
}

async fn deploy(chain: &Connector) -> Result<Contracts, Error> {
    let fee_account = Address::of_user(FEES);
    let platform = Action::DeployPlatform {
        name: "Digital rouble claim".into(),
        symbol: CFA_RUB.into(),
        decimals: CFA_RUB_DECIMALS,
        owner: chain.owner(),
        operator: chain.operator(),
        fee_account,
        accounts: [FEES, REDEMPTION_ACCOUNT, PLACEMENT_ACCOUNT]
            .map(Address::of_user)
            .to_vec(),
    };
    let key = deployment_key(chain).await?;
    let submitted = chain.submit(&key, &platform.call()).await?;
    let receipt = chain
        .wait_receipt(&submitted.tx_hash, DEPLOY_TIMEOUT)
        .await?
        .ok_or(Error::Unavailable("Blockchain"))?;
    let failed = || {
        let hash = submitted.tx_hash;
        let text = format!("transaction {hash} did not deploy the platform's contracts");
        Error::from(ChainError::Refused(text))
    };
    let deployed = receipt
        .contract_address
        .filter(|_| receipt.status == ReceiptStatus::Success)
        .ok_or_else(failed)?;
    let contracts = Contracts::of_platform(&deployed);
    let known = chain.token_code(&contracts.money).await?;
    let is_complete = known == TokenCode::Token(contracts.version)
        && chain.has_code(&contracts.settlement).await?
        && chain.has_code(&contracts.redemption).await?
        && chain.is_verified(&contracts.registry, &fee_account).await?;
    if !is_complete {
        return Err(failed());
    }
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
