//! Life cycle of an issue: registration with its token contract, changes, halts (specification 1.1,
//! 2.3, 4.1; D07, T32).

use events::calls::CallKey;
use types::{Decimal, DecimalError, InstrumentId, InstrumentParams, InstrumentSpec, SpecError};

use super::decision::{DRAFTS_MAX, check_immutable, document_hash};
use super::{RequestMeta, Service, call_wait, units};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{
    CFA_RUB_DECIMALS, Coupon, Instrument, InstrumentStatus, InstrumentType, IssueDecision,
};
use crate::peers::SOURCE;
use crate::placement::{Allotment, Lot, PERIOD_US_MAX, Placement, PlacementTerms};
use crate::plan;
use chain::contracts::id_hash;
use chain::{Action, Address, ReceiptStatus, Terms, TokenCode, TxHash, Version};

const CURRENCY: &str = "RUB";
/// Limit of the coupons of an issue.
const COUPONS_MAX: usize = 1_000;
const AFTER_PLACEMENT: &str = "must be after the end of the placement";
/// Name of the call under which answers are stored (D50).
const UPDATE: &str = "UpdateInstrument";
/// Name of the call in logs and in the scope of its keys.
const REGISTER: &str = "RegisterInstrument";

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
    pub placement: Option<NewPlacement>,
}

/// Requested terms of a placement (F34).
#[derive(Debug, Clone)]
pub struct NewPlacement {
    pub opens_at_us: i64,
    pub closes_at_us: i64,
    /// Roubles per unit; unset: the nominal.
    pub price: Option<Decimal>,
    /// Roubles.
    pub minimum_sum: Option<Decimal>,
    /// Units.
    pub investor_minimum: Option<Decimal>,
    pub investor_maximum: Option<Decimal>,
    pub allotment: Allotment,
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
    /// A halt may be ended: by a service, or by two persons (D32).
    pub may_end_halt: bool,
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
        let scope = CallKey {
            call: REGISTER,
            subject: request.issuer_id.clone(),
            key: key.clone(),
        };
        let _key = self.call_locks.lock(scope).await;
        let drafted = draft_of(&request, instrument_id, key, self.now_us());
        let drafted = drafted.and_then(|instrument| {
            let terms = placement_terms(&request, &instrument)?;
            Ok((instrument, terms))
        });
        let known = self.repo.instrument_by_key(&request.issuer_id, key);
        if let Some(known) = known.await? {
            let placed = self.repo.placement(&known.instrument_id).await?;
            let placed = placed.map(|placement| placement.terms);
            let is_same = |(asked, terms): &(Instrument, Option<PlacementTerms>)| {
                is_same_issue(&known, asked) && placed == *terms
            };
            if !drafted.as_ref().is_ok_and(is_same) {
                rpc::context::note_difference(REGISTER, key);
            }
            return Ok((known, true));
        }
        let (instrument, terms) = drafted?;
        self.check_draft(meta, &instrument, terms.as_ref()).await?;
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
        if let Some(terms) = terms {
            let placement = Placement::new(&instrument.instrument_id, terms);
            self.repo
                .insert_placement_in_tx(&mut tx, &placement)
                .await?;
        }
        self.repo.save_decision_in_tx(&mut tx, &decision).await?;
        self.repo.publish_in_tx(&mut tx, &events).await?;
        tx.commit().await?;
        Ok((instrument, false))
    }

    /// Checks a new issue against the time, other issues, identity and the chain.
    async fn check_draft(
        &self,
        meta: &RequestMeta,
        instrument: &Instrument,
        placed: Option<&PlacementTerms>,
    ) -> Result<(), Error> {
        let now_us = self.clock.now_us();
        if placed.is_some_and(|terms| terms.closes_at_us <= now_us) {
            return Err(Refusal::field("placement.closes_at", "must be in the future").into());
        }
        if instrument
            .matures_at_us
            .is_some_and(|at_us| at_us <= now_us)
        {
            return Err(Refusal::field("matures_at", "must be in the future").into());
        }
        self.peers
            .profile(&meta.correlation_id, &instrument.issuer_id)
            .await?;
        if self
            .repo
            .instrument(&instrument.instrument_id)
            .await?
            .is_some()
        {
            return Err(Refusal::InstrumentExists.into());
        }
        let adopted = instrument.contract_address.as_str();
        if !adopted.is_empty() {
            self.check_adoptable(instrument, placed, adopted).await?;
        }
        Ok(())
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
        // The activation is recorded; nothing is sent to the chain.
        failpoint::reach("cfa.activation_recorded");
        let issuer = instrument.issuer_id.as_str();
        self.ensure_registered(&[issuer], &instrument.instrument_id)
            .await?;
        let placement = self.repo.placement(&instrument.instrument_id).await?;
        let placed = placement.as_ref().map(|placement| &placement.terms);
        let Some((contract, from_block)) = self.token_of_draft(&instrument, placed).await? else {
            return Ok(instrument);
        };
        // The chain has the token; the issue is a DRAFT.
        failpoint::reach("cfa.token_deployed");
        instrument.contract_address = contract;
        let decision = self.repo.issue_decision(&instrument.instrument_id).await?;
        // The period of its placement may have ended during the deployment.
        instrument.status = match placement.is_some_and(|placement| placement.failed) {
            true => InstrumentStatus::Halted,
            false => InstrumentStatus::Active,
        };
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
        // The issue is active; its event is in the outbox.
        failpoint::reach("cfa.issue_active");
        Ok(instrument)
    }

    /// The contract of an activated DRAFT, deployed or adopted, with the issue's terms, and the
    /// block from which its transfers are read. `None` until the chain has it.
    async fn token_of_draft(
        &self,
        instrument: &Instrument,
        placed: Option<&PlacementTerms>,
    ) -> Result<Option<(String, u64)>, Error> {
        let adopted = instrument.contract_address.as_str();
        if !adopted.is_empty() {
            // A draft may be older than a rule, and its token may have changed since.
            self.check_adoptable(instrument, placed, adopted).await?;
            // An adopted contract may have transfers from any block.
            let is_recorded = self.record_terms(instrument, placed).await?;
            return Ok(is_recorded.then(|| (adopted.to_owned(), 0)));
        }
        let action = Action::DeployToken {
            name: instrument.name.clone(),
            symbol: instrument.instrument_id.clone(),
            decimals: instrument.decimals,
            registry: self.contracts.registry,
            owner: self.chain.owner(),
            grants: self.contracts.token_grants(self.chain.operator()),
            terms: chain_terms(instrument, placed),
        };
        let deployed = self.deploy(&instrument.instrument_id, &action).await?;
        Ok(deployed.map(|(contract, block)| (contract.to_string(), block)))
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
            // The deployment is submitted; nothing of it is recorded.
            failpoint::reach("cfa.token_submitted");
            let receipt = self.chain.wait_receipt(&submitted.tx_hash, call_wait());
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

    /// Sets document and terms in an adopted token that has none (F31). False until they are in a
    /// block.
    async fn record_terms(
        &self,
        instrument: &Instrument,
        placed: Option<&PlacementTerms>,
    ) -> Result<bool, Error> {
        let Some(terms) = chain_terms(instrument, placed) else {
            return Ok(true);
        };
        let token = self.token(instrument)?;
        if self.chain.token_terms(&token).await?.is_some() {
            return Ok(true);
        }
        let instrument_id = &instrument.instrument_id;
        let action = Action::SetTerms { token, terms };
        let key = format!("instrument:{instrument_id}:terms");
        let submitted = self.chain.submit(&key, &action.call()).await?;
        let receipt = self.chain.wait_receipt(&submitted.tx_hash, call_wait());
        match receipt.await?.map(|receipt| receipt.status) {
            None => Ok(false),
            Some(ReceiptStatus::Success) => Ok(true),
            Some(ReceiptStatus::Reverted) => Err(Error::Damaged(format!(
                "transaction {} that sets the terms of {instrument_id} in its token reverted",
                submitted.tx_hash
            ))),
        }
    }

    /// Checks that the address has the code of the platform's tokens, the issue's symbol and
    /// decimals, the platform's allow-list and owner, no account with other roles than the platform
    /// gives, and no other terms than the issue's (T32, F31).
    /// `placed`: the terms of the issue's placement.
    pub(super) async fn check_adoptable(
        &self,
        instrument: &Instrument,
        placed: Option<&PlacementTerms>,
        address: &str,
    ) -> Result<(), Error> {
        let address: Address = address.parse().map_err(|_| {
            Refusal::field("smart_contract_address", "must be `0x` and 40 hex digits")
        })?;
        let unfit = |why: &str| Error::from(Refusal::ContractUnfit(why.to_owned()));
        match self.chain.token_code(&address).await? {
            TokenCode::None => return Err(unfit("no code at the address")),
            TokenCode::Unknown | TokenCode::Token(Version::V1) => {
                return Err(unfit("its code is not that of the platform's tokens"));
            }
            TokenCode::Token(Version::V2) => {}
        }
        // The code is known, so a failure is one of the node.
        let metadata = self.chain.token_metadata(&address).await?;
        if metadata.decimals != instrument.decimals || metadata.symbol != instrument.instrument_id {
            return Err(unfit("symbol or decimals differ"));
        }
        let rights = self.chain.token_rights(&address).await?;
        if rights.registry != self.contracts.registry {
            return Err(unfit("it has another allow-list"));
        }
        if rights.owner != self.chain.owner() || rights.pending_owner.is_some() {
            return Err(unfit("it has another owner"));
        }
        let mut wanted = self.contracts.token_grants(self.chain.operator());
        wanted.sort_unstable();
        if rights.grants != wanted {
            return Err(unfit("its roles are not those of the platform"));
        }
        let terms = self.chain.token_terms(&address).await?;
        if terms.is_some() && terms != chain_terms(instrument, placed) {
            return Err(unfit("its terms are those of another issue"));
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
        let _lock = self.lock_call(meta, UPDATE, instrument_id).await;
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
        let placement = self.repo.placement(&before.instrument_id).await?;
        if let Some(placement) = &placement {
            check_placed(placement, before, &change)?;
        }
        if let Some(status) = change.status
            && status != instrument.status
        {
            // Its maturity and its redemption end an issue: no call leads back.
            let is_manual = matches!(status, InstrumentStatus::Active | InstrumentStatus::Halted);
            if !is_manual || !instrument.status.may_become(status) {
                return Err(Refusal::OperationState.into());
            }
            if status == InstrumentStatus::Active {
                if !change.may_end_halt {
                    return Err(Refusal::ApprovalRequired.into());
                }
                self.require_not_quarantined(&instrument.contract_address)
                    .await?;
                self.require_no_break(&instrument.instrument_id).await?;
                self.require_not_moving(&instrument.instrument_id).await?;
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

/// Refuses changes of what a placement promises: its terms never change, and an issue whose
/// placement has failed does not trade.
fn check_placed(
    placement: &Placement,
    before: &Instrument,
    change: &InstrumentChange,
) -> Result<(), Refusal> {
    let limit = change
        .issue_limit
        .map(|limit| limit.to_minor(before.decimals));
    if limit.is_some_and(|limit| limit.ok() != before.issue_limit_minor) {
        return Err(Refusal::field("issue_limit", "is a term of the placement"));
    }
    let closes_at_us = placement.terms.closes_at_us;
    if change
        .matures_at_us
        .is_some_and(|at_us| at_us <= closes_at_us)
    {
        return Err(Refusal::field("matures_at", AFTER_PLACEMENT));
    }
    match change.status {
        Some(InstrumentStatus::Matured) if placement.is_under_way() => {
            Err(Refusal::PlacementUnderWay)
        }
        Some(InstrumentStatus::Active) if placement.failed => Err(Refusal::OperationState),
        _ => Ok(()),
    }
}

/// Checks the terms of a placement of the instrument. `None` if none is requested.
fn placement_terms(
    request: &NewInstrument,
    instrument: &Instrument,
) -> Result<Option<PlacementTerms>, Refusal> {
    let Some(new) = &request.placement else {
        return Ok(None);
    };
    let (opens_at_us, closes_at_us) = (new.opens_at_us, new.closes_at_us);
    if opens_at_us >= closes_at_us || closes_at_us - opens_at_us > PERIOD_US_MAX {
        let why = "must be after opens_at, at most a year";
        return Err(Refusal::field("placement.closes_at", why));
    }
    if instrument.is_mature(closes_at_us) {
        return Err(Refusal::field("matures_at", AFTER_PLACEMENT));
    }
    let price = new.price.or(instrument.nominal);
    let price =
        price.ok_or_else(|| Refusal::field("placement.price", "is required without a nominal"))?;
    let lot = Lot::new(instrument.lot_size, instrument.decimals, price)?;
    let size_minor = instrument
        .issue_limit_minor
        .ok_or_else(|| Refusal::field("issue_limit", "is required with a placement"))?;
    let lots = |field: &'static str, units_minor: i64| {
        let count = lot.count(units_minor);
        count.ok_or_else(|| Refusal::field(field, "must be a number of whole lots"))
    };
    let most = lot.payment(lots("issue_limit", size_minor)?);
    let most = most.ok_or_else(|| Refusal::field("placement.price", "is too large"))?;
    let bound = |field: &'static str, asked: Option<Decimal>| -> Result<i64, Refusal> {
        let Some(asked) = asked else { return Ok(0) };
        if !asked.is_positive() {
            return Err(Refusal::field(field, "must be greater than zero"));
        }
        let minor = units(field, asked, instrument.decimals)?;
        lots(field, minor).map(|_| minor)
    };
    let investor_min_minor = bound("placement.investor_minimum", new.investor_minimum)?;
    let investor_max_minor = bound("placement.investor_maximum", new.investor_maximum)?;
    let least = investor_min_minor.max(lot.units_minor);
    if least > size_minor || investor_max_minor != 0 && investor_max_minor < least {
        let field = "placement.investor_minimum";
        return Err(Refusal::field(
            field,
            "is above the maximum or the issue_limit",
        ));
    }
    let minimum = new.minimum_sum.unwrap_or(Decimal::ZERO);
    let minimum_minor = units("placement.minimum_sum", minimum, CFA_RUB_DECIMALS)?;
    if !(0..=most).contains(&minimum_minor) {
        let why = "must be at least zero and at most the price of the whole issue";
        return Err(Refusal::field("placement.minimum_sum", why));
    }
    Ok(Some(PlacementTerms {
        opens_at_us,
        closes_at_us,
        price,
        minimum_minor,
        investor_min_minor,
        investor_max_minor,
        allotment: new.allotment,
    }))
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

/// Document and terms of the issue for its token (F31). `None` without a document: they can be set
/// later, once. A document hash that is not 32 bytes in hex, or is zero, which contracts read as
/// no document, is recorded by the keccak256 of its text.
pub(super) fn chain_terms(
    instrument: &Instrument,
    placed: Option<&PlacementTerms>,
) -> Option<Terms> {
    let document = instrument.document_hash.as_str();
    let none = Terms::default().document_hash;
    let hash = document.parse::<TxHash>().ok().filter(|hash| *hash != none);
    (!document.is_empty()).then(|| Terms {
        document_hash: hash.unwrap_or_else(|| id_hash(document)),
        terms_hash: id_hash(&instrument.terms_text(placed)),
        document_uri: instrument.document_uri.clone(),
    })
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
    check_symbol(&instrument_id)?;
    check_request(request)?;
    let tick_size = request.tick_size.unwrap_or(Decimal::from_minor(1, 2));
    let lot_size = request.lot_size.unwrap_or(Decimal::from_integer(1));
    check_sizes(tick_size, lot_size, request.decimals)?;
    check_band(request.price_band_low, request.price_band_high)?;
    check_payments(request)?;
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

fn check_symbol(symbol: &str) -> Result<(), Refusal> {
    let is_allowed = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'-';
    if !(3..=32).contains(&symbol.len()) || !symbol.bytes().all(is_allowed) {
        let why = "must have 3 to 32 letters A-Z, digits or hyphens";
        return Err(Refusal::field("symbol", why));
    }
    Ok(())
}

fn check_request(request: &NewInstrument) -> Result<(), Refusal> {
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
    Ok(())
}

/// Quantity times price must be exact in kopecks (D35).
fn check_sizes(tick_size: Decimal, lot_size: Decimal, decimals: u8) -> Result<(), Refusal> {
    if !tick_size.is_positive() {
        return Err(Refusal::field("tick_size", "must be greater than zero"));
    }
    if !lot_size.is_positive() {
        return Err(Refusal::field("lot_size", "must be greater than zero"));
    }
    units("lot_size", lot_size, decimals)?;
    let step = tick_size.checked_mul(lot_size);
    if step.and_then(|value| value.to_minor(2)).is_err() {
        let why = "tick_size times lot_size must be a multiple of 0.01";
        return Err(Refusal::field("tick_size", why));
    }
    Ok(())
}

fn check_payments(request: &NewInstrument) -> Result<(), Refusal> {
    if (request.nominal).is_some_and(|nominal| !nominal.is_positive()) {
        return Err(Refusal::field("nominal", "must be greater than zero"));
    }
    let mut coupons = request.coupons.iter();
    if coupons.any(|coupon| coupon.amount.is_negative()) {
        return Err(Refusal::field("coupons.amount", "must not be negative"));
    }
    Ok(())
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
    if instrument.coupons.len() > COUPONS_MAX {
        let why = format!("must be at most {COUPONS_MAX}");
        return Err(Refusal::field("coupons", why));
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
    let worth = plan::total_per_unit(nominal, &instrument.coupons);
    let worth = worth.and_then(|worth| pays(most_minor, worth));
    worth.map(drop).map_err(too_large("coupons.amount"))
}
