//! The decision on an issue (259-FZ): its document, the issuer's signature, the operator's
//! activation.
//!
//! An issue is a DRAFT until it is activated. A DRAFT has no contract, is not listed by the market
//! and is refused by every call but reads, SignIssueDecision and ActivateInstrument. The activation
//! is stored before the contract is deployed; the sweep continues a deployment after a crash.

use sha2::{Digest as _, Sha256};
use signatures::{Digest, SIGNATURE_BYTES_MAX, SignedBy};

use super::{RequestMeta, Service};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::model::{Instrument, IssueDecision};
use crate::placement::PlacementTerms;
use crate::signing::Signed;

/// Names of the calls under which answers are stored (D50).
const SIGN: &str = "SignIssueDecision";
const ACTIVATE: &str = "ActivateInstrument";
/// Longest document, in bytes.
const DOCUMENT_BYTES_MAX: usize = 256 * 1024;
/// Limit of an issuer's drafts.
pub(super) const DRAFTS_MAX: i64 = 100;
/// State of a signed decision in audit records.
const SIGNED: &str = "SIGNED";

/// An issuer's signature of the decision.
#[derive(Debug, Clone)]
pub struct NewSignature {
    pub instrument_id: String,
    /// Empty: the registered one.
    pub document_hash: String,
    pub signature: Vec<u8>,
    /// Empty: the registered one.
    pub document_uri: String,
}

impl Service {
    /// Stores the issuer's signature of the decision on a DRAFT. A later signature replaces it.
    /// True for a repeat.
    ///
    /// # Errors
    /// `NoAuthority`; `OperationState` once the issue is activated; an invalid field: the hash is
    /// not that of the registered document or is that of another issue, or the signature is not the
    /// issuer's; `Unavailable` if the configured command cannot verify it.
    pub async fn sign_decision(
        &self,
        meta: &RequestMeta,
        new: NewSignature,
    ) -> Result<(Instrument, IssueDecision, bool), Error> {
        let _lock = self.lock_call(meta, SIGN, &new.instrument_id).await;
        if let Some(signed) = self.stored_answer(meta, SIGN).await? {
            let (instrument, decision) = self.decision(&signed).await?;
            return Ok((instrument, decision, true));
        }
        let (mut instrument, mut decision) = self.decision(&new.instrument_id).await?;
        if instrument.activated {
            return Err(Refusal::OperationState.into());
        }
        let document_hash = hash_field(&new.document_hash)?;
        if instrument.document_hash.is_empty() {
            instrument.document_hash = document_hash;
        } else if !document_hash.is_empty() && document_hash != instrument.document_hash {
            let why = "is not that of the registered issue decision";
            return Err(Refusal::field("document_hash", why).into());
        }
        if !new.document_uri.is_empty() {
            instrument.document_uri = new.document_uri;
        }
        let signed_by = self
            .check_signature(&instrument, &decision.document, &new.signature)
            .await?;
        let now_us = self.now_us();
        instrument.updated_at_us = now_us;
        let before = if decision.signature.is_empty() {
            ""
        } else {
            SIGNED
        };
        decision.signature = new.signature;
        decision.signer = signed_by.subject;
        decision.certificate_serial = signed_by.serial;
        decision.signed_by = meta.actor.clone();
        decision.signed_at_us = Some(now_us);
        let record = publish::audit(
            "instrument.signed",
            &instrument.instrument_id,
            &meta.actor,
            before,
            SIGNED,
            &format!("{} {}", instrument.document_hash, decision.signer),
            &meta.correlation_id,
            now_us,
        );
        let mut tx = self.repo.begin().await?;
        // A decision is readable, so its signature could be given for another issue.
        if self.repo.is_decided_in_tx(&mut tx, &instrument).await? {
            let why = "is that of the decision on another issue";
            return Err(Refusal::field("document_hash", why).into());
        }
        self.repo
            .save_instrument_in_tx(&mut tx, &instrument)
            .await?;
        self.repo.save_decision_in_tx(&mut tx, &decision).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        self.store_call_in_tx(&mut tx, meta, SIGN, &instrument.instrument_id)
            .await?;
        tx.commit().await?;
        Ok((instrument, decision, false))
    }

    /// Activates a DRAFT whose decision is signed, and deploys its contract. True for a repeat.
    /// Unless the chain deploys it at once, the issue stays a DRAFT until the sweep has done so.
    ///
    /// # Errors
    /// `DecisionUnsigned`; `NoAuthority`; `OperationState` once the issue is activated;
    /// `ContractUnfit`; `PlacementNotOpen` after the end of the placement's period; an invalid
    /// field: the hash is not that of the signed document, the signature is not valid any more, or
    /// the maturity has passed; `Unavailable` if the configured command cannot verify it.
    pub async fn activate_instrument(
        &self,
        meta: &RequestMeta,
        instrument_id: &str,
        document_hash: &str,
    ) -> Result<(Instrument, bool), Error> {
        let lock = self.lock_call(meta, ACTIVATE, instrument_id).await;
        if let Some(activated) = self.stored_answer(meta, ACTIVATE).await? {
            drop(lock);
            let instrument = self.require_instrument(&activated).await?;
            return Ok((self.complete_best_effort(instrument).await, true));
        }
        let (mut instrument, mut decision) = self.decision(instrument_id).await?;
        if instrument.activated {
            return Err(Refusal::OperationState.into());
        }
        if decision.signature.is_empty() {
            return Err(Refusal::DecisionUnsigned.into());
        }
        if hash_field(document_hash)? != instrument.document_hash {
            let why = "is not that of the signed issue decision";
            return Err(Refusal::field("document_hash", why).into());
        }
        // The authority may have been removed, or the certificate expired, since it was stored.
        self.check_signature(&instrument, &decision.document, &decision.signature)
            .await?;
        if instrument.is_mature(self.clock.now_us()) {
            return Err(Refusal::field("matures_at", "must be in the future").into());
        }
        let placement = self.repo.placement(instrument_id).await?;
        let has_ended = |terms: &PlacementTerms| terms.closes_at_us <= self.clock.now_us();
        let placed = placement.as_ref().map(|placement| &placement.terms);
        if placed.is_some_and(has_ended) {
            return Err(Refusal::PlacementNotOpen.into());
        }
        // The rights of an adopted contract may have changed since the registration.
        if !instrument.contract_address.is_empty() {
            self.check_adoptable(&instrument, placed, &instrument.contract_address)
                .await?;
        }
        let now_us = self.now_us();
        instrument.activated = true;
        instrument.updated_at_us = now_us;
        decision.activated_by = meta.actor.clone();
        decision.activated_at_us = Some(now_us);
        let record = publish::audit(
            "instrument.activated",
            instrument_id,
            &meta.actor,
            SIGNED,
            "ACTIVATED",
            &instrument.document_hash,
            &meta.correlation_id,
            now_us,
        );
        let mut tx = self.repo.begin().await?;
        self.repo
            .save_instrument_in_tx(&mut tx, &instrument)
            .await?;
        self.repo.save_decision_in_tx(&mut tx, &decision).await?;
        self.repo.insert_coupons_in_tx(&mut tx, &instrument).await?;
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        self.store_call_in_tx(&mut tx, meta, ACTIVATE, instrument_id)
            .await?;
        tx.commit().await?;
        drop(lock);
        Ok((self.complete_best_effort(instrument).await, false))
    }

    /// Completes an activated issue, or leaves it to the sweep and returns it as it is: the
    /// activation is stored, so no failure after it is the answer of the call.
    async fn complete_best_effort(&self, instrument: Instrument) -> Instrument {
        match self.complete_instrument(instrument.clone()).await {
            Ok(completed) => completed,
            Err(error) => {
                tracing::warn!(instrument_id = instrument.instrument_id, %error, "deployment is left to the sweep");
                instrument
            }
        }
    }

    /// An issue and its decision. An issue of an earlier version has an empty one.
    ///
    /// # Errors
    /// `InstrumentNotFound`.
    pub async fn decision(
        &self,
        instrument_id: &str,
    ) -> Result<(Instrument, IssueDecision), Error> {
        let instrument = self.require_instrument(instrument_id).await?;
        let stored = self.repo.issue_decision(instrument_id).await?;
        let decision = stored.unwrap_or_else(|| IssueDecision::of(instrument_id, Vec::new()));
        Ok((instrument, decision))
    }

    /// Checks that the signature is the issuer's, of the instrument's document. `document` is empty
    /// if only its hash is known.
    async fn check_signature(
        &self,
        instrument: &Instrument,
        document: &[u8],
        signature: &[u8],
    ) -> Result<SignedBy, Error> {
        let verifier = self.signing.verifier.as_ref();
        let verifier = verifier.ok_or(Refusal::NoAuthority)?;
        let mut hash: Digest = [0; 32];
        if hex::decode_to_slice(&instrument.document_hash, &mut hash).is_err() {
            return Err(Refusal::field("document_hash", "is required").into());
        }
        let invalid = |why: String| Refusal::field("signature", why);
        if signature.is_empty() || signature.len() > SIGNATURE_BYTES_MAX {
            let why = format!("must have 1 to {SIGNATURE_BYTES_MAX} bytes");
            return Err(invalid(why).into());
        }
        let signed = Signed {
            issuer_id: &instrument.issuer_id,
            hash,
            document,
        };
        let signed_by = verifier.verify(signed, signature, self.now_us()).await?;
        if signed_by.common_name != instrument.issuer_id {
            let why = format!(
                "the certificate's common name must be the issuer's user id, it is {}",
                signed_by.common_name
            );
            return Err(invalid(why).into());
        }
        Ok(signed_by)
    }
}

/// Refuses a change of an issue's terms, which are those of the issue decision. Status and price
/// band are not terms.
///
/// # Errors
/// `TermsImmutable`.
pub(super) fn check_immutable(before: &Instrument, after: &Instrument) -> Result<(), Refusal> {
    let terms = |of: &Instrument| {
        (
            of.name.clone(),
            (of.issue_limit_minor, of.matures_at_us),
            (of.document_hash.clone(), of.document_uri.clone()),
        )
    };
    match terms(before) == terms(after) {
        true => Ok(()),
        false => Err(Refusal::TermsImmutable),
    }
}

/// The document's hash in lower case: the given one, or that of the given document. Empty without
/// both.
pub(super) fn document_hash(given: &str, document: &[u8]) -> Result<String, Refusal> {
    let given = hash_field(given)?;
    if document.is_empty() {
        return Ok(given);
    }
    if document.len() > DOCUMENT_BYTES_MAX {
        let why = format!("must have at most {DOCUMENT_BYTES_MAX} bytes");
        return Err(Refusal::field("document", why));
    }
    let hash = hex::encode(Sha256::digest(document));
    match given.is_empty() || given == hash {
        true => Ok(hash),
        false => Err(Refusal::field(
            "document_hash",
            "is not the SHA-256 of the document",
        )),
    }
}

/// Checks an optional hash and returns it in lower case.
fn hash_field(given: &str) -> Result<String, Refusal> {
    let is_hash = given.len() == 64 && given.bytes().all(|byte| byte.is_ascii_hexdigit());
    match given.is_empty() || is_hash {
        true => Ok(given.to_ascii_lowercase()),
        false => Err(Refusal::field("document_hash", "must be 64 hex digits")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_that_of_the_document() {
        let hash = hex::encode(Sha256::digest(b"decision"));
        assert_eq!(document_hash("", b"").expect("none"), "");
        assert_eq!(document_hash("", b"decision").expect("computed"), hash);
        let upper = hash.to_uppercase();
        assert_eq!(document_hash(&upper, b"").expect("given"), hash);
        assert_eq!(document_hash(&upper, b"decision").expect("both"), hash);
        assert!(document_hash(&hash, b"another").is_err());
        assert!(document_hash("abc", b"").is_err());
        assert!(document_hash("", &vec![0; DOCUMENT_BYTES_MAX]).is_ok());
        assert!(document_hash("", &vec![0; DOCUMENT_BYTES_MAX + 1]).is_err());
    }
}
