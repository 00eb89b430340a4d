//! Signed extracts from the register of holders, at a time, for a holder, a court or a bailiff
//! (259-FZ, F33).
//!
//! The figures are those of the chain: the history of the tokens' transfers. An extract is stored
//! with its signature, so a repeat of the call returns the same bytes.

use chain::Address;
use sha2::{Digest as _, Sha256};

use super::{RequestMeta, Service};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::extract::Facts;
use crate::model::{Extract, ExtractFormat, ExtractRecipient};

/// Name of the call under which answers are stored (D50).
const ISSUE: &str = "IssueExtract";
/// Limit of the freezes in an extract, the newest. It states that there are older ones.
const FREEZES_MAX: usize = 500;

/// Limit of a caller's extracts in a day: each is stored.
const DAY_MAX: i64 = 1_000;
const DAY_US: i64 = 24 * 3_600 * 1_000_000;

/// Arguments of `issue_extract`.
#[derive(Debug, Clone)]
pub struct NewExtract {
    pub instrument_id: String,
    pub holder_id: String,
    /// `None`: now.
    pub as_of_us: Option<i64>,
    pub format: ExtractFormat,
    pub recipient: ExtractRecipient,
    /// Request of the court or bailiff; empty for the holder.
    pub document: String,
}

impl Service {
    /// Issues and signs an extract. True for a repeat, which returns the stored one.
    ///
    /// # Errors
    /// `NoExtractKey`, `InstrumentNotFound`, `TokenQuarantined`, `TooManyExtracts`. An invalid
    /// field: a time in the future, or no document of a court or bailiff.
    pub async fn issue_extract(
        &self,
        meta: &RequestMeta,
        new: NewExtract,
    ) -> Result<(Extract, bool), Error> {
        let _lock = self.lock_key(meta, ISSUE).await;
        if let Some(known) = self.stored_answer(meta, ISSUE).await? {
            let stored = self.repo.extract(&known).await?;
            let stored = stored.ok_or_else(|| Error::Damaged(format!("extract {known}")))?;
            return Ok((stored, true));
        }
        let signer = self.signing.signer.as_ref();
        let signer = signer.ok_or(Refusal::NoExtractKey)?;
        let issued_at_us = self.now_us();
        let as_of_us = new.as_of_us.unwrap_or(issued_at_us);
        if as_of_us > issued_at_us {
            return Err(Refusal::field("as_of", "must not be in the future").into());
        }
        if new.recipient != ExtractRecipient::Holder && new.document.is_empty() {
            let why = "is required for a court or a bailiff";
            return Err(Refusal::field("document", why).into());
        }
        let facts = self.facts(&new, as_of_us, issued_at_us, signer.subject());
        let facts = facts.await?;
        let content = facts.content(new.format);
        let signed = signer.sign(&Sha256::digest(&content).into(), issued_at_us);
        let signature = signed.map_err(|error| Error::Config(error.to_string()))?;
        let extract = Extract {
            extract_id: facts.extract_id,
            instrument_id: new.instrument_id,
            holder_id: new.holder_id,
            as_of_us,
            format: new.format,
            recipient: new.recipient,
            document: new.document,
            content,
            signature,
            signer: facts.signer,
            actor: meta.actor.clone(),
            issued_at_us,
        };
        self.store_extract(meta, &extract).await?;
        Ok((extract, false))
    }

    async fn store_extract(&self, meta: &RequestMeta, extract: &Extract) -> Result<(), Error> {
        let record = publish::audit(
            "extract.issued",
            &extract.extract_id,
            &meta.actor,
            "",
            extract.recipient.as_str(),
            &format!(
                "{} of {}: {}",
                extract.instrument_id, extract.holder_id, extract.document
            ),
            &meta.correlation_id,
            extract.issued_at_us,
        );
        let mut tx = self.repo.begin().await?;
        let since_us = extract.issued_at_us - DAY_US;
        let issued = self
            .repo
            .count_extracts_in_tx(&mut tx, &meta.actor, since_us);
        if issued.await? >= DAY_MAX {
            return Err(Refusal::TooManyExtracts.into());
        }
        self.repo.insert_extract_in_tx(&mut tx, extract).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        self.store_call_in_tx(&mut tx, meta, ISSUE, &extract.extract_id)
            .await?;
        Ok(tx.commit().await?)
    }

    async fn facts(
        &self,
        new: &NewExtract,
        as_of_us: i64,
        issued_at_us: i64,
        signer: String,
    ) -> Result<Facts, Error> {
        let instrument = self.require_instrument(&new.instrument_id).await?;
        self.catch_up_registry().await?;
        let id = &instrument.instrument_id;
        let token = self.repo.token_at(id, as_of_us).await?;
        self.require_not_quarantined(&token).await?;
        let address = Address::of_user(&new.holder_id).to_string();
        let (units_minor, block_number) = self.repo.units_at(&token, &address, as_of_us).await?;
        let supply_minor = self.repo.registry_supply(&token, Some(as_of_us)).await?;
        let holder_id = &new.holder_id;
        let limit = FREEZES_MAX as i64 + 1;
        let freezes = self.repo.freezes_of(holder_id, id, as_of_us, limit);
        let mut freezes = freezes.await?;
        let has_older_freezes = freezes.len() > FREEZES_MAX;
        freezes.truncate(FREEZES_MAX);
        Ok(Facts {
            extract_id: uuid::Uuid::now_v7().to_string(),
            freezes,
            has_older_freezes,
            instrument,
            holder_id: new.holder_id.clone(),
            address,
            as_of_us,
            issued_at_us,
            recipient: new.recipient,
            document: new.document.clone(),
            units_minor,
            supply_minor,
            block_number,
            signer,
        })
    }
}
