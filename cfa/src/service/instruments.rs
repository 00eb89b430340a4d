//! Life cycle of an issue: registration with its token contract, changes, halts (specification 1.1,
//! 2.3, 4.1; D07, T32).

use std::time::Duration;

use types::{Decimal, DecimalError, InstrumentId, InstrumentParams, InstrumentSpec, SpecError};

use super::decision::{DRAFTS_MAX, check_immutable, document_hash};
use super::{RequestMeta, Service, units};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::model::{Coupon, Instrument, InstrumentStatus, InstrumentType, IssueDecision};
use crate::peers::SOURCE;
use crate::plan;
use chain::{Action, Address, ReceiptStatus};

/// Longest wait of ActivateInstrument for the contract before it returns a DRAFT.
const DEPLOY_WAIT: Duration = Duration::from_secs(8);
const CURRENCY: &str = "RUB";
/// Name of the call under which answers are stored (D50).
const UPDATE: &str = "UpdateInstrument";

#[derive(Debug, Clone)]
pub struct NewInstrument {
    pub symbol: String,
    pub name: String,
    pub kind: InstrumentType,
    pub decimals: u8,
    pub issuer_id: String,
    /// Empty: the service deploys a contract.
    pub contract_address: String,
    pub currency_code: String,
    pub issue_limit: Option<Decimal>,
    pub nominal: Option<Decimal>,
    pub coupons: Vec<Coupon>,
    pub issued_at_us: Option<i64>,
    pub matures_at_us: Option<i64>,
    pub tick_size: Option<Decimal>,
    pub lot_size: Option<Decimal>,
    pub price_band_low: Option<Decimal>,
    pub price_band_high: Option<Decimal>,
    pub document_hash: String,
    pub document_uri: String,
    /// Empty: only the hash is registered.
    pub document: Vec<u8>,
}

/// Unset fields stay unchanged.
#[derive(Debug, Clone, Default)]
pub struct InstrumentChange {
    pub status: Option<InstrumentStatus>,
    pub issue_limit: Option<Decimal>,
    pub price_band_low: Option<Decimal>,
    pub price_band_high: Option<Decimal>,
    pub matures_at_us: Option<i64>,
    pub name: Option<String>,
    pub document_hash: Option<String>,
    pub document_uri: Option<String>,
}

impl Service {
    /// Registers an issue as a DRAFT. True for a repeat, which returns the issue as it is.
    ///
    /// # Errors
    /// An invalid field; `InstrumentExists`; `TooManyDrafts` of the issuer; `ContractUnfit`;
    /// `UserNotFound` for the issuer.
    pub async fn register_instrument(
        &self,
        meta: &RequestMeta,
        request: NewInstrument,
    ) -> Result<(Instrument, bool), Error> {
        let instrument_id = request.symbol.to_uppercase();
        let key = &meta.idempotency_key;
        let instrument = draft_of(&request, instrument_id, key, self.now_us());
        let known = self.repo.instrument_by_key(&request.issuer_id, key);
        if let Some(known) = known.await? {
            let is_same = |asked: &Instrument| is_same_issue(&known, asked);
            if !instrument.as_ref().is_ok_and(is_same) {
                rpc::context::note_difference("RegisterInstrument", key);
            }
            return Ok((known, true));
        }
        let instrument = instrument?;
        let now_us = self.clock.now_us();
        if instrument
            .matures_at_us
            .is_some_and(|at_us| at_us <= now_us)
        {
            return Err(Refusal::field("matures_at", "must be in the future").into());
        }
        self.peers
            .profile(&meta.correlation_id, &request.issuer_id)
            .await?;
        if self
            .repo
            .instrument(&instrument.instrument_id)
            .await?
            .is_some()
        {
            return Err(Refusal::InstrumentExists.into());
        }
        if !request.contract_address.is_empty() {
            self.check_adoptable(&instrument, &request.contract_address)
                .await?;
        }
        let decision = IssueDecision::of(&instrument.instrument_id, request.document);
        let events = [
            publish::instrument_registered(&instrument, &meta.correlation_id),
            publish::audit(
                "instrument.registered",
                &instrument.instrument_id,
                &meta.actor,
                "",
                instrument.status.as_str(),
                &instrument.document_hash,
                &meta.correlation_id,
                instrument.updated_at_us,
            ),
        ];
        let mut tx = self.repo.begin().await?;
        if !self
            .repo
            .insert_instrument_in_tx(&mut tx, &instrument)
            .await?
        {
            return Err(Refusal::InstrumentExists.into());
        }
        let issuer = &instrument.issuer_id;
        if self.repo.count_drafts_in_tx(&mut tx, issuer).await? > DRAFTS_MAX {
            return Err(Refusal::TooManyDrafts.into());
        }
        self.repo.save_decision_in_tx(&mut tx, &decision).await?;
        self.repo.publish_in_tx(&mut tx, &events).await?;
        tx.commit().await?;
        Ok((instrument, false))
    }

    /// Makes an activated DRAFT active: deploys its contract, if it has none, and publishes the
    /// event. Ignores other issues.
    pub(super) async fn complete_instrument(
        &self,
        instrument: Instrument,
    ) -> Result<Instrument, Error> {
        let _lock = self.object_locks.lock(&instrument.instrument_id).await;
        let mut instrument = self.require_instrument(&instrument.instrument_id).await?;
        if instrument.status != InstrumentStatus::Draft || !instrument.activated {
            return Ok(instrument);
        }
        let issuer = instrument.issuer_id.as_str();
        self.ensure_registered(&[issuer], &instrument.instrument_id)
            .await?;
        // An adopted contract may have transfers from any block.
        let mut from_block = 0;
        if instrument.contract_address.is_empty() {
            let action = Action::DeployToken {
                name: instrument.name.clone(),
                symbol: instrument.instrument_id.clone(),
                decimals: instrument.decimals,
                registry: self.contracts.registry,
                agents: vec![self.contracts.settlement, self.contracts.redemption],
            };
            let deployed = self.deploy(&instrument.instrument_id, &action).await?;
            let Some((contract, block)) = deployed else {
                return Ok(instrument);
            };
            instrument.contract_address = contract.to_string();
            from_block = block;
        }
        let decision = self.repo.issue_decision(&instrument.instrument_id).await?;
        instrument.status = InstrumentStatus::Active;
        instrument.updated_at_us = self.now_us();
        let mut tx = self.repo.begin().await?;
        self.repo
            .save_instrument_in_tx(&mut tx, &instrument)
            .await?;
        self.repo
            .add_token_in_tx(&mut tx, &instrument.contract_address, from_block)
            .await?;
        let key = &instrument.idempotency_key;
        let mut events = vec![
            publish::instrument_updated(&instrument, key),
            publish::audit(
                "instrument.active",
                &instrument.instrument_id,
                SOURCE,
                InstrumentStatus::Draft.as_str(),
                instrument.status.as_str(),
                &instrument.contract_address,
                key,
                instrument.updated_at_us,
            ),
        ];
        // An earlier version registered it and has published nothing.
        if decision.is_none() {
            events.insert(0, publish::instrument_registered(&instrument, key));
        }
        self.repo.publish_in_tx(&mut tx, &events).await?;
        tx.commit().await?;
        Ok(instrument)
    }

    /// Deploys the token and returns its address and block. `None` until it is in a block. A
    /// reverted deployment is retried under another key, a limited number of times.
    async fn deploy(
        &self,
        instrument_id: &str,
        action: &Action,
    ) -> Result<Option<(Address, u64)>, Error> {
        loop {
            let attempt = self.repo.deploy_attempts(instrument_id).await?;
            if attempt >= self.config.submit_attempts_max {
                tracing::error!(
                    instrument_id,
                    attempt,
                    severity = "critical",
                    "the contract of an issue cannot be deployed"
                );
                return Err(Error::Damaged(format!(
                    "deployment of {instrument_id} reverted {attempt} times"
                )));
            }
            let key = match attempt {
                0 => format!("instrument:{instrument_id}"),
                _ => format!("instrument:{instrument_id}:{attempt}"),
            };
            let submitted = self.chain.submit(&key, &action.call()).await?;
            let receipt = self.chain.wait_receipt(&submitted.tx_hash, DEPLOY_WAIT);
            let Some(receipt) = receipt.await? else {
                return Ok(None);
            };
            if receipt.status == ReceiptStatus::Success {
                let contract = receipt.contract_address.ok_or_else(|| {
                    Error::Damaged(format!("deployment of {instrument_id} without an address"))
                })?;
                return Ok(Some((contract, receipt.block_number)));
            }
            tracing::error!(instrument_id, attempt, tx_hash = %receipt.tx_hash,
                "deployment reverted, retrying");
            self.repo
                .set_deploy_attempts(instrument_id, attempt + 1)
                .await?;
        }
    }

    /// Checks code, decimals and symbol at the address, and that the platform's operator and
    /// contracts are its agents (T32).
    pub(super) async fn check_adoptable(
        &self,
        instrument: &Instrument,
        address: &str,
    ) -> Result<(), Error> {
        let address: Address = address.parse().map_err(|_| {
            Refusal::field("smart_contract_address", "must be `0x` and 40 hex digits")
        })?;
        let unfit = |why: &str| Error::from(Refusal::ContractUnfit(why.to_owned()));
        if !self.chain.has_code(&address).await? {
            return Err(unfit("no code at the address"));
        }
        let metadata = self
            .chain
            .token_metadata(&address)
            .await
            .map_err(|_| unfit("not a token"))?;
        if metadata.decimals != instrument.decimals || metadata.symbol != instrument.instrument_id {
            return Err(unfit("symbol or decimals differ"));
        }
        for agent in [
            self.chain.operator(),
            self.contracts.settlement,
            self.contracts.redemption,
        ] {
            if !self
                .chain
                .is_agent(&address, &agent)
                .await
                .map_err(|_| unfit("not a permissioned token"))?
            {
                return Err(unfit("the platform is not its agent"));
            }
        }
        Ok(())
    }

    /// Changes an issue, once per key. True for a repeat.
    pub async fn update_instrument(
        &self,
        meta: &RequestMeta,
        instrument_id: &str,
        change: InstrumentChange,
    ) -> Result<(Instrument, bool), Error> {
        let _lock = self.object_locks.lock(instrument_id).await;
        if let Some(changed) = self.stored_answer(meta, UPDATE).await? {
            return Ok((self.require_instrument(&changed).await?, true));
        }
        let before = self.require_instrument(instrument_id).await?;
        let mut instrument = self.changed(&before, change).await?;
        let mut tx = self.repo.begin().await?;
        if instrument != before {
            instrument.updated_at_us = self.now_us();
            self.repo
                .save_instrument_in_tx(&mut tx, &instrument)
                .await?;
            let events = [
                publish::instrument_updated(&instrument, &meta.correlation_id),
                publish::audit(
                    "instrument.updated",
                    instrument_id,
                    &meta.actor,
                    before.status.as_str(),
                    instrument.status.as_str(),
                    "",
                    &meta.correlation_id,
                    instrument.updated_at_us,
                ),
            ];
            self.repo.publish_in_tx(&mut tx, &events).await?;
        }
        self.store_call_in_tx(&mut tx, meta, UPDATE, instrument_id)
            .await?;
        tx.commit().await?;
        Ok((instrument, false))
    }

    /// Applies a change to a copy of the instrument, if it is allowed.
    async fn changed(
        &self,
        before: &Instrument,
        change: InstrumentChange,
    ) -> Result<Instrument, Error> {
        let mut instrument = before.clone();
        if instrument.status == InstrumentStatus::Draft {
            return Err(Refusal::InstrumentNotActive.into());
        }
        if let Some(status) = change.status
            && status != instrument.status
        {
            // A redemption ends an issue. Callers make all other transitions.
            let is_manual = !matches!(status, InstrumentStatus::Redeemed | InstrumentStatus::Draft);
            if !is_manual || !instrument.status.may_become(status) {
                return Err(Refusal::OperationState.into());
            }
            if status == InstrumentStatus::Active {
                self.require_not_quarantined(&instrument.contract_address)
                    .await?;
            }
            instrument.status = status;
        }
        if let Some(limit) = change.issue_limit {
            let limit = units("issue_limit", limit, instrument.decimals)?;
            if limit < instrument.issued_minor {
                return Err(
                    Refusal::field("issue_limit", "is below what is issued already").into(),
                );
            }
            instrument.issue_limit_minor = Some(limit);
        }
        instrument.price_band_low = change.price_band_low.or(instrument.price_band_low);
        instrument.price_band_high = change.price_band_high.or(instrument.price_band_high);
        check_band(instrument.price_band_low, instrument.price_band_high)?;
        if let Some(matures_at_us) = change.matures_at_us {
            // The sweep redeems an issue past its maturity at once.
            if matures_at_us <= self.clock.now_us() {
                return Err(Refusal::field("matures_at", "must be in the future").into());
            }
            instrument.matures_at_us = Some(matures_at_us);
        }
        instrument.name = change.name.unwrap_or(instrument.name);
        instrument.document_hash = change.document_hash.unwrap_or(instrument.document_hash);
        instrument.document_uri = change.document_uri.unwrap_or(instrument.document_uri);
        // Only changed terms are checked, so an issue that is older than a rule can still be
        // halted.
        check_name(&instrument.name)?;
        let band = |of: &Instrument| (of.price_band_low, of.price_band_high);
        if band(&instrument) != band(before) {
            check_tradable(&instrument)?;
        }
        let terms = |of: &Instrument| (of.issue_limit_minor, of.matures_at_us);
        if terms(&instrument) != terms(before) {
            check_terms(&instrument)?;
        }
        check_immutable(before, &instrument)?;
        Ok(instrument)
    }
}

fn check_band(low: Option<Decimal>, high: Option<Decimal>) -> Result<(), Refusal> {
    let not_positive = |bound: Option<Decimal>| bound.is_some_and(|bound| !bound.is_positive());
    if not_positive(low) || not_positive(high) {
        return Err(Refusal::field(
            "price_band_low",
            "band limits must be greater than zero",
        ));
    }
    match (low, high) {
        (Some(low), Some(high)) if low >= high => Err(Refusal::field(
            "price_band_high",
            "must be above price_band_low",
        )),
        _ => Ok(()),
    }
}

/// Parses an optional address and returns its canonical text; empty if none is given.
fn contract_address(given: &str) -> Result<String, Refusal> {
    if given.is_empty() {
        return Ok(String::new());
    }
    match given.parse::<Address>() {
        Ok(address) => Ok(address.to_string()),
        Err(_) => Err(Refusal::field(
            "smart_contract_address",
            "must be `0x` and 40 hex digits",
        )),
    }
}

/// Checks the request without other services and builds the DRAFT.
fn draft_of(
    request: &NewInstrument,
    instrument_id: String,
    key: &str,
    now_us: i64,
) -> Result<Instrument, Refusal> {
    let fits = (3..=32).contains(&instrument_id.len())
        && instrument_id
            .bytes()
            .all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'-');
    if !fits {
        return Err(Refusal::field(
            "symbol",
            "must have 3 to 32 letters A-Z, digits or hyphens",
        ));
    }
    check_name(&request.name)?;
    if request.kind == InstrumentType::MoneyClaim {
        return Err(Refusal::field("type", "MONEY_CLAIM is CFA-RUB alone"));
    }
    if request.decimals > 18 {
        return Err(Refusal::field("decimals", "must be at most 18"));
    }
    if request.issuer_id.is_empty() || request.issuer_id.contains(':') {
        let why = "must not be empty or contain `:`";
        return Err(Refusal::field("issuer_id", why));
    }
    if !matches!(request.currency_code.as_str(), "" | CURRENCY) {
        return Err(Refusal::field("currency_code", "must be RUB"));
    }
    let tick_size = request.tick_size.unwrap_or(Decimal::from_minor(1, 2));
    let lot_size = request.lot_size.unwrap_or(Decimal::from_integer(1));
    if !tick_size.is_positive() {
        return Err(Refusal::field("tick_size", "must be greater than zero"));
    }
    if !lot_size.is_positive() {
        return Err(Refusal::field("lot_size", "must be greater than zero"));
    }
    units("lot_size", lot_size, request.decimals)?;
    // Quantity times price must be exact in kopecks (D35).
    if tick_size
        .checked_mul(lot_size)
        .and_then(|value| value.to_minor(2))
        .is_err()
    {
        return Err(Refusal::field(
            "tick_size",
            "tick_size times lot_size must be a multiple of 0.01",
        ));
    }
    check_band(request.price_band_low, request.price_band_high)?;
    if request
        .nominal
        .is_some_and(|nominal| !nominal.is_positive())
    {
        return Err(Refusal::field("nominal", "must be greater than zero"));
    }
    if request
        .coupons
        .iter()
        .any(|coupon| coupon.amount.is_negative())
    {
        return Err(Refusal::field("coupons.amount", "must not be negative"));
    }
    let issue_limit_minor = match request.issue_limit {
        Some(limit) if !limit.is_positive() => {
            return Err(Refusal::field("issue_limit", "must be greater than zero"));
        }
        Some(limit) => Some(units("issue_limit", limit, request.decimals)?),
        None => None,
    };
    let contract_address = contract_address(&request.contract_address)?;
    let instrument = Instrument {
        instrument_id,
        name: request.name.clone(),
        kind: request.kind,
        decimals: request.decimals,
        issuer_id: request.issuer_id.clone(),
        contract_address,
        currency_code: CURRENCY.to_owned(),
        status: InstrumentStatus::Draft,
        issue_limit_minor,
        issued_minor: 0,
        nominal: request.nominal,
        coupons: request.coupons.clone(),
        issued_at_us: request.issued_at_us,
        matures_at_us: request.matures_at_us,
        tick_size,
        lot_size,
        price_band_low: request.price_band_low,
        price_band_high: request.price_band_high,
        document_hash: document_hash(&request.document_hash, &request.document)?,
        document_uri: request.document_uri.clone(),
        idempotency_key: key.to_owned(),
        registered_at_us: now_us,
        updated_at_us: now_us,
        activated: false,
    };
    check_tradable(&instrument)?;
    check_terms(&instrument)?;
    Ok(instrument)
}

/// Whether two registrations agree in their terms, except those that an earlier version could
/// change. The document may be given with its signature.
fn is_same_issue(known: &Instrument, asked: &Instrument) -> bool {
    let terms = |of: &Instrument| {
        (
            of.instrument_id.clone(),
            (of.kind, of.decimals, of.nominal, of.coupons.clone()),
            (of.issued_at_us, of.tick_size, of.lot_size),
        )
    };
    let is_same_document =
        asked.document_hash.is_empty() || asked.document_hash == known.document_hash;
    is_same_document && terms(known) == terms(asked)
}

fn check_name(name: &str) -> Result<(), Refusal> {
    match name.len() {
        1..=256 => Ok(()),
        _ => Err(Refusal::field("name", "must have 1 to 256 bytes")),
    }
}

/// Applies the market's rules, so the registry lists no instrument that cannot be traded (D49).
fn check_tradable(instrument: &Instrument) -> Result<(), Refusal> {
    let id = InstrumentId::new(&instrument.instrument_id);
    let id = id.map_err(|error| Refusal::field("symbol", error.to_string()))?;
    let band = (instrument.price_band_low, instrument.price_band_high);
    let (tick_size, lot_size) = (Some(instrument.tick_size), Some(instrument.lot_size));
    let params = InstrumentParams::listed(id, instrument.decimals, tick_size, lot_size, band);
    let checked = params.and_then(|params| InstrumentSpec::new(&params));
    checked.map(drop).map_err(|error| {
        let field = match error {
            SpecError::Decimals => "decimals",
            SpecError::LotTooFine => "lot_size",
            SpecError::Band if band.1.is_none() => "price_band_low",
            SpecError::Band => "price_band_high",
            _ => "tick_size",
        };
        Refusal::field(field, error.to_string())
    })
}

/// Checks that the dates are in order and that the issue can be paid: at least a kopeck per lot,
/// and for the whole issue a number of kopecks that fits 64 bits (D49).
fn check_terms(instrument: &Instrument) -> Result<(), Refusal> {
    let (issued_at, matures_at) = (instrument.issued_at_us, instrument.matures_at_us);
    if issued_at.is_some() && matures_at.is_some() && issued_at >= matures_at {
        return Err(Refusal::field("matures_at", "must be after issued_at"));
    }
    for coupon in &instrument.coupons {
        let pays_at = coupon.pays_at_us;
        let is_early = issued_at.is_some_and(|issued_at| pays_at < issued_at);
        if is_early || matures_at.is_some_and(|matures_at| pays_at > matures_at) {
            let why = "must be between issued_at and matures_at";
            return Err(Refusal::field("coupons.pays_at", why));
        }
    }
    let lot_minor = units("lot_size", instrument.lot_size, instrument.decimals)?;
    let most_minor = instrument.issue_limit_minor.unwrap_or(lot_minor);
    if lot_minor > most_minor {
        return Err(Refusal::field("lot_size", "is above issue_limit"));
    }
    let nominal = instrument.nominal.unwrap_or(Decimal::ZERO);
    let pays = |units, worth| plan::payment_minor(units, instrument.decimals, worth);
    let too_large = |field| move |_: DecimalError| Refusal::field(field, "is too large");
    let of_lot = pays(lot_minor, nominal).map_err(too_large("nominal"))?;
    if instrument.nominal.is_some() && of_lot == 0 {
        return Err(Refusal::field(
            "nominal",
            "must pay at least 0.01 for a lot",
        ));
    }
    pays(most_minor, nominal).map_err(too_large("nominal"))?;
    let worth = plan::worth_per_unit(nominal, &instrument.coupons, i64::MAX);
    let worth = worth.and_then(|worth| pays(most_minor, worth));
    worth.map(drop).map_err(too_large("coupons.amount"))
}
