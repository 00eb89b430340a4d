//! Signatures in CMS (RFC 5652): detached, one signer, signed attributes with the digest of the
//! document. `openssl cms -sign -binary -md sha256 -outform DER` makes such signatures.

use std::time::Duration;

use cms::cert::{CertificateChoices, IssuerAndSerialNumber};
use cms::content_info::{CmsVersion, ContentInfo};
use cms::signed_data::{
    CertificateSet, EncapsulatedContentInfo, SignedAttributes, SignedData, SignerIdentifier,
    SignerInfo, SignerInfos,
};
use ring::rand::SystemRandom;
use ring::signature::{
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair,
    RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey, VerificationAlgorithm,
};
use x509_cert::Certificate;
use x509_cert::attr::Attribute;
use x509_cert::der::asn1::{ObjectIdentifier, OctetString, SetOfVec, UtcTime};
use x509_cert::der::{self, Any, Decode, Encode};
use x509_cert::spki::{AlgorithmIdentifierOwned, SubjectPublicKeyInfoOwned};

use crate::{Digest, SIGNATURE_BYTES_MAX, SignatureError, SignedBy, Verifier};

const SIGNED_DATA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.7.2");
const DATA: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.7.1");
const CONTENT_TYPE: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.9.3");
const MESSAGE_DIGEST: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.9.4");
const SIGNING_TIME: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.9.5");
const SHA_256: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.16.840.1.101.3.4.2.1");
const ECDSA_WITH_SHA_256: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.4.3.2");
const EC_KEY: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.10045.2.1");
const RSA_KEY: ObjectIdentifier = ObjectIdentifier::new_unwrap("1.2.840.113549.1.1.1");
const COMMON_NAME: ObjectIdentifier = ObjectIdentifier::new_unwrap("2.5.4.3");

impl From<der::Error> for SignatureError {
    fn from(error: der::Error) -> Self {
        Self::Format(error.to_string())
    }
}

/// Verifies signatures by the certificates that the given authorities issued themselves.
pub struct CmsVerifier {
    authorities: Vec<Certificate>,
}

impl CmsVerifier {
    /// Reads the authorities' certificates, one or more in PEM.
    ///
    /// # Errors
    /// [`SignatureError::Key`]: no certificate, or one that cannot be read.
    pub fn from_pem(authorities: &[u8]) -> Result<Self, SignatureError> {
        let missing = || SignatureError::Key("the file has no certificate".to_owned());
        // The parser does not expect an empty file.
        if authorities.trim_ascii().is_empty() {
            return Err(missing());
        }
        let authorities = Certificate::load_pem_chain(authorities);
        let authorities = authorities.map_err(|error| SignatureError::Key(error.to_string()))?;
        if authorities.is_empty() {
            return Err(missing());
        }
        Ok(Self { authorities })
    }

    /// Checks that a configured authority issued the certificate, and that both are valid.
    fn check_certificate(&self, of: &Certificate, now: Duration) -> Result<(), SignatureError> {
        let issuer = &of.tbs_certificate.issuer;
        let content = of.tbs_certificate.to_der()?;
        let authority = self.authorities.iter().find(|authority| {
            let key = &authority.tbs_certificate.subject_public_key_info;
            authority.tbs_certificate.subject == *issuer
                && verify(key, &content, of.signature.raw_bytes()).is_ok()
        });
        let authority = authority.ok_or(SignatureError::UnknownAuthority)?;
        for certificate in [authority, of] {
            let validity = &certificate.tbs_certificate.validity;
            let from = validity.not_before.to_unix_duration();
            if now < from || now > validity.not_after.to_unix_duration() {
                return Err(SignatureError::NotValidNow);
            }
        }
        Ok(())
    }
}

impl Verifier for CmsVerifier {
    fn verify(
        &self,
        document: &Digest,
        signature: &[u8],
        now_us: i64,
    ) -> Result<SignedBy, SignatureError> {
        if signature.len() > SIGNATURE_BYTES_MAX {
            return Err(SignatureError::Unfit("is longer than 65536 bytes"));
        }
        let content = ContentInfo::from_der(signature)?;
        if content.content_type != SIGNED_DATA {
            return Err(SignatureError::Unfit("must be SignedData"));
        }
        let signed: SignedData = content.content.decode_as()?;
        if signed.encap_content_info.econtent.is_some() {
            return Err(SignatureError::Unfit("must be detached from its document"));
        }
        let mut signers = signed.signer_infos.0.iter();
        let (Some(signer), None) = (signers.next(), signers.next()) else {
            return Err(SignatureError::Unfit("must have one signer"));
        };
        let certificate = certificate_of(signer, signed.certificates.as_ref())?;
        let content_type = signed.encap_content_info.econtent_type;
        let content = signed_content(signer, content_type, document)?;
        let key = &certificate.tbs_certificate.subject_public_key_info;
        verify(key, &content, signer.signature.as_bytes())?;
        let now = Duration::from_micros(u64::try_from(now_us).unwrap_or_default());
        self.check_certificate(certificate, now)?;
        owner(certificate)
    }
}

/// The certificate of the signer, out of those in the signature.
fn certificate_of<'a>(
    signer: &SignerInfo,
    certificates: Option<&'a CertificateSet>,
) -> Result<&'a Certificate, SignatureError> {
    let SignerIdentifier::IssuerAndSerialNumber(named) = &signer.sid else {
        let problem = "must name its signer by issuer and serial number";
        return Err(SignatureError::Unfit(problem));
    };
    let certificates = certificates.into_iter().flat_map(|set| set.0.iter());
    let mut named = certificates.filter_map(|choice| match choice {
        CertificateChoices::Certificate(one)
            if one.tbs_certificate.issuer == named.issuer
                && one.tbs_certificate.serial_number == named.serial_number =>
        {
            Some(one)
        }
        _ => None,
    });
    let missing = SignatureError::Unfit("must contain the signer's certificate");
    named.next().ok_or(missing)
}

/// The bytes that the signer has signed: the attributes, which contain the document's digest.
fn signed_content(
    signer: &SignerInfo,
    content_type: ObjectIdentifier,
    document: &Digest,
) -> Result<Vec<u8>, SignatureError> {
    if signer.digest_alg.oid != SHA_256 {
        return Err(SignatureError::Unfit("must use SHA-256"));
    }
    let missing = SignatureError::Unfit("must have signed attributes");
    let attributes = signer.signed_attrs.as_ref().ok_or(missing)?;
    let signed_type: ObjectIdentifier = attribute(attributes, CONTENT_TYPE)?.decode_as()?;
    if signed_type != content_type {
        return Err(SignatureError::Unfit("has two different content types"));
    }
    let digest: OctetString = attribute(attributes, MESSAGE_DIGEST)?.decode_as()?;
    if digest.as_bytes() != document.as_slice() {
        return Err(SignatureError::OtherDocument);
    }
    Ok(attributes.to_der()?)
}

/// The only value of the only attribute of this type.
fn attribute(attributes: &SignedAttributes, oid: ObjectIdentifier) -> Result<&Any, SignatureError> {
    let problem = || SignatureError::Unfit("must have one content type and one digest");
    let mut found = attributes.iter().filter(|attribute| attribute.oid == oid);
    let (Some(only), None) = (found.next(), found.next()) else {
        return Err(problem());
    };
    let mut values = only.values.iter();
    match (values.next(), values.next()) {
        (Some(value), None) => Ok(value),
        _ => Err(problem()),
    }
}

/// Verifies a signature with SHA-256. The kind of the key decides the algorithm.
fn verify(
    key: &SubjectPublicKeyInfoOwned,
    content: &[u8],
    signature: &[u8],
) -> Result<(), SignatureError> {
    let algorithm: &'static dyn VerificationAlgorithm = if key.algorithm.oid == EC_KEY {
        &ECDSA_P256_SHA256_ASN1
    } else if key.algorithm.oid == RSA_KEY {
        &RSA_PKCS1_2048_8192_SHA256
    } else {
        return Err(SignatureError::Unfit("must use ECDSA P-256 or RSA"));
    };
    let key = UnparsedPublicKey::new(algorithm, key.subject_public_key.raw_bytes());
    let verified = key.verify(content, signature);
    verified.map_err(|_| SignatureError::Wrong)
}

fn owner(certificate: &Certificate) -> Result<SignedBy, SignatureError> {
    let subject = &certificate.tbs_certificate.subject;
    let parts = subject.0.iter().flat_map(|part| part.0.iter());
    let mut names = parts.filter(|part| part.oid == COMMON_NAME);
    let problem = || SignatureError::Unfit("must be by a certificate with one common name");
    let (Some(name), None) = (names.next(), names.next()) else {
        return Err(problem());
    };
    let name = std::str::from_utf8(name.value.value()).map_err(|_| problem())?;
    Ok(SignedBy {
        common_name: name.to_owned(),
        subject: subject.to_string(),
        serial: hex::encode(certificate.tbs_certificate.serial_number.as_bytes()),
    })
}

/// Signs with an ECDSA P-256 key.
pub struct CmsSigner {
    key: EcdsaKeyPair,
    certificate: Certificate,
    random: SystemRandom,
}

impl CmsSigner {
    /// Takes a private key (PKCS#8, DER) and its certificate (DER).
    ///
    /// # Errors
    /// [`SignatureError::Key`]: one of them cannot be read.
    pub fn new(pkcs8: &[u8], certificate: &[u8]) -> Result<Self, SignatureError> {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, pkcs8, &random);
        let key = key.map_err(|error| SignatureError::Key(error.to_string()))?;
        let certificate = Certificate::from_der(certificate);
        let certificate = certificate.map_err(|error| SignatureError::Key(error.to_string()))?;
        Ok(Self {
            key,
            certificate,
            random,
        })
    }

    /// The subject of the signer's certificate.
    pub fn subject(&self) -> String {
        self.certificate.tbs_certificate.subject.to_string()
    }

    /// Signs a document at `now_us` (microseconds since 1970). Two signatures of one document
    /// differ.
    ///
    /// # Errors
    /// [`SignatureError::Key`] if the key cannot sign; [`SignatureError::Format`] if the time is
    /// outside 1970 to 2049.
    pub fn sign(&self, document: &Digest, now_us: i64) -> Result<Vec<u8>, SignatureError> {
        let time = Duration::from_secs(u64::try_from(now_us / 1_000_000).unwrap_or_default());
        let attributes = SetOfVec::try_from(vec![
            signed_attribute(CONTENT_TYPE, Any::encode_from(&DATA)?)?,
            signed_attribute(
                MESSAGE_DIGEST,
                Any::encode_from(&OctetString::new(document.as_slice())?)?,
            )?,
            signed_attribute(
                SIGNING_TIME,
                Any::encode_from(&UtcTime::from_unix_duration(time)?)?,
            )?,
        ])?;
        let made = self.key.sign(&self.random, &attributes.to_der()?);
        let made = made.map_err(|error| SignatureError::Key(error.to_string()))?;
        let signature: &[u8] = made.as_ref();
        let issued = &self.certificate.tbs_certificate;
        let signer = SignerInfo {
            version: CmsVersion::V1,
            sid: SignerIdentifier::IssuerAndSerialNumber(IssuerAndSerialNumber {
                issuer: issued.issuer.clone(),
                serial_number: issued.serial_number.clone(),
            }),
            digest_alg: algorithm(SHA_256),
            signed_attrs: Some(attributes),
            signature_algorithm: algorithm(ECDSA_WITH_SHA_256),
            signature: OctetString::new(signature)?,
            unsigned_attrs: None,
        };
        let certificate = CertificateChoices::Certificate(self.certificate.clone());
        let signed = SignedData {
            version: CmsVersion::V1,
            digest_algorithms: SetOfVec::try_from(vec![algorithm(SHA_256)])?,
            encap_content_info: EncapsulatedContentInfo {
                econtent_type: DATA,
                econtent: None,
            },
            certificates: Some(CertificateSet(SetOfVec::try_from(vec![certificate])?)),
            crls: None,
            signer_infos: SignerInfos(SetOfVec::try_from(vec![signer])?),
        };
        let content = ContentInfo {
            content_type: SIGNED_DATA,
            content: Any::encode_from(&signed)?,
        };
        Ok(content.to_der()?)
    }
}

fn signed_attribute(oid: ObjectIdentifier, value: Any) -> Result<Attribute, SignatureError> {
    let values = SetOfVec::try_from(vec![value])?;
    Ok(Attribute { oid, values })
}

fn algorithm(oid: ObjectIdentifier) -> AlgorithmIdentifierOwned {
    AlgorithmIdentifierOwned {
        oid,
        parameters: None,
    }
}

#[cfg(test)]
mod tests {
    use sha2::Digest as _;

    use super::*;
    use crate::Authority;

    const NOW_US: i64 = 1_795_000_000_000_000;

    fn digest(document: &str) -> Digest {
        sha2::Sha256::digest(document).into()
    }

    fn signer(authority: &Authority, name: &str) -> CmsSigner {
        let issued = authority.issue(name).expect("issued");
        CmsSigner::new(&issued.pkcs8, &issued.certificate).expect("signer")
    }

    fn verifier(authority: &Authority) -> CmsVerifier {
        CmsVerifier::from_pem(authority.certificate_pem().as_bytes()).expect("verifier")
    }

    #[test]
    fn a_signature_names_its_signer() {
        let authority = Authority::generate().expect("authority");
        let signature = signer(&authority, "issuer-1").sign(&digest("decision"), NOW_US);
        let signature = signature.expect("signed");
        let verified = verifier(&authority).verify(&digest("decision"), &signature, NOW_US);
        let signed_by = verified.expect("verified");
        assert_eq!(signed_by.common_name, "issuer-1");
        assert!(
            signed_by.subject.contains("CN=issuer-1"),
            "{}",
            signed_by.subject
        );
    }

    #[test]
    fn other_documents_authorities_times_and_bytes_are_refused() {
        let (authority, other) = (Authority::generate(), Authority::generate());
        let (authority, other) = (authority.expect("authority"), other.expect("other"));
        let document = digest("decision");
        let signature = signer(&authority, "issuer-1").sign(&document, NOW_US);
        let signature = signature.expect("signed");
        let refused = |verifier: &CmsVerifier, document: &Digest, signature: &[u8], now_us| {
            let verified = verifier.verify(document, signature, now_us);
            verified.expect_err("refused")
        };
        let own = verifier(&authority);
        let error = refused(&own, &digest("another"), &signature, NOW_US);
        assert!(matches!(error, SignatureError::OtherDocument), "{error}");
        let error = refused(&verifier(&other), &document, &signature, NOW_US);
        assert!(matches!(error, SignatureError::UnknownAuthority), "{error}");
        let error = refused(&own, &document, &signature, 0);
        assert!(matches!(error, SignatureError::NotValidNow), "{error}");
        // One changed byte anywhere never gives another signer.
        for at in 0..signature.len() {
            let mut altered = signature.clone();
            altered[at] ^= 1;
            if let Ok(signed_by) = own.verify(&document, &altered, NOW_US) {
                assert_eq!(signed_by.common_name, "issuer-1", "byte {at}");
            }
        }
        let mut wrong = signature.clone();
        *wrong.last_mut().expect("bytes") ^= 1;
        refused(&own, &document, &wrong, NOW_US);
        refused(&own, &document, &[], NOW_US);
        let long = vec![0; SIGNATURE_BYTES_MAX + 1];
        refused(&own, &document, &long, NOW_US);
    }
}
