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
    ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair,
    RSA_PKCS1_2048_8192_SHA256, UnparsedPublicKey, VerificationAlgorithm,
};
use x509_cert::attr::Attribute;
use x509_cert::der::asn1::{ObjectIdentifier, OctetString, SetOfVec, UtcTime};
use x509_cert::der::pem::LineEnding;
use x509_cert::der::{self, Any, Decode, Encode, EncodePem, Tag, Tagged};
use x509_cert::ext::pkix::{BasicConstraints, KeyUsage};
use x509_cert::spki::{AlgorithmIdentifierOwned, SubjectPublicKeyInfoOwned};
use x509_cert::{Certificate, TbsCertificate};

use crate::{Claimed, Digest, SIGNATURE_BYTES_MAX, SignatureError, SignedBy};

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
/// Extensions that are checked here. RFC 5280 refuses a certificate with another critical one.
const CHECKED_EXTENSIONS: [ObjectIdentifier; 2] = [
    ObjectIdentifier::new_unwrap("2.5.29.15"),
    ObjectIdentifier::new_unwrap("2.5.29.19"),
];
/// Longest text of a certificate's subject, in bytes: it is part of answers and audit records.
const SUBJECT_BYTES_MAX: usize = 1_024;

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
    /// [`SignatureError::Key`]: no certificate, one that cannot be read, or one that may not issue
    /// certificates.
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
        for authority in &authorities {
            let content = &authority.tbs_certificate;
            if !may_issue(content)? {
                let problem = format!("{} is no certificate authority", content.subject);
                return Err(SignatureError::Key(problem));
            }
        }
        Ok(Self { authorities })
    }

    /// Checks that a configured authority issued the certificate, that both are valid, and that the
    /// certificate may sign documents.
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
        check_signer(&of.tbs_certificate)
    }

    /// Returns the signer of a document.
    ///
    /// # Errors
    /// [`SignatureError`], unless the signature is of this document, by the owner of a certificate
    /// for signatures that a configured authority issued and that is valid at `now_us`
    /// (microseconds since 1970).
    pub fn verify(
        &self,
        document: &Digest,
        signature: &[u8],
        now_us: i64,
    ) -> Result<SignedBy, SignatureError> {
        let signed = signed_data(signature)?;
        let (signer, certificate) = signer_of(&signed)?;
        let content = signed_content(signer, document)?;
        let key = &certificate.tbs_certificate.subject_public_key_info;
        verify(key, &content, signer.signature.as_bytes())?;
        let now = Duration::from_micros(u64::try_from(now_us).unwrap_or_default());
        self.check_certificate(certificate, now)?;
        owner(certificate)
    }
}

/// Reads the signer of a detached signature of any algorithm, and verifies nothing.
///
/// # Errors
/// [`SignatureError`]: the signature is not detached or has not one signer with its certificate, or
/// another certificate in it has the same serial number. Software could then verify the signature
/// by the certificate that is not returned here.
pub fn claimed_signer(signature: &[u8]) -> Result<Claimed, SignatureError> {
    let signed = signed_data(signature)?;
    let (_, certificate) = signer_of(&signed)?;
    let serial = &certificate.tbs_certificate.serial_number;
    let has_serial = |choice: &&CertificateChoices| match choice {
        CertificateChoices::Certificate(one) => one.tbs_certificate.serial_number == *serial,
        CertificateChoices::Other(_) => false,
    };
    let certificates = signed.certificates.iter().flat_map(|set| set.0.iter());
    // Names of issuers are equal in more ways than their bytes, so only the number counts.
    if certificates.filter(has_serial).count() > 1 {
        let problem = "must contain one certificate with the signer's serial number";
        return Err(SignatureError::Unfit(problem));
    }
    Ok(Claimed {
        signer: owner(certificate)?,
        certificate_pem: certificate.to_pem(LineEnding::LF)?,
    })
}

/// The content of a detached signature of data.
fn signed_data(signature: &[u8]) -> Result<SignedData, SignatureError> {
    if signature.len() > SIGNATURE_BYTES_MAX {
        return Err(SignatureError::Unfit("is longer than 16384 bytes"));
    }
    let content = ContentInfo::from_der(signature)?;
    if content.content_type != SIGNED_DATA {
        return Err(SignatureError::Unfit("must be SignedData"));
    }
    let signed: SignedData = content.content.decode_as()?;
    if signed.encap_content_info.econtent.is_some() {
        return Err(SignatureError::Unfit("must be detached from its document"));
    }
    if signed.encap_content_info.econtent_type != DATA {
        return Err(SignatureError::Unfit("must be of data"));
    }
    Ok(signed)
}

/// The only signer and its certificate.
fn signer_of(signed: &SignedData) -> Result<(&SignerInfo, &Certificate), SignatureError> {
    let mut signers = signed.signer_infos.0.iter();
    let (Some(signer), None) = (signers.next(), signers.next()) else {
        return Err(SignatureError::Unfit("must have one signer"));
    };
    let certificate = certificate_of(signer, signed.certificates.as_ref())?;
    Ok((signer, certificate))
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
fn signed_content(signer: &SignerInfo, document: &Digest) -> Result<Vec<u8>, SignatureError> {
    if signer.digest_alg.oid != SHA_256 {
        return Err(SignatureError::Unfit("must use SHA-256"));
    }
    let missing = SignatureError::Unfit("must have signed attributes");
    let attributes = signer.signed_attrs.as_ref().ok_or(missing)?;
    let signed_type: ObjectIdentifier = attribute(attributes, CONTENT_TYPE)?.decode_as()?;
    if signed_type != DATA {
        return Err(SignatureError::Unfit("must be of data"));
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

/// Whether the certificate is of an authority that issues certificates (RFC 5280, 4.2.1).
fn may_issue(of: &TbsCertificate) -> Result<bool, SignatureError> {
    let is_authority = of.get::<BasicConstraints>()?.is_some_and(|(_, is)| is.ca);
    let usage = of.get::<KeyUsage>()?;
    Ok(is_authority && usage.is_none_or(|(_, usage)| usage.key_cert_sign()))
}

/// Checks that the certificate is for signatures and has no unknown critical extension.
fn check_signer(of: &TbsCertificate) -> Result<(), SignatureError> {
    let mut extensions = of.extensions.iter().flatten();
    if extensions.any(|one| one.critical && !CHECKED_EXTENSIONS.contains(&one.extn_id)) {
        let problem = "must be by a certificate without unknown critical extensions";
        return Err(SignatureError::Unfit(problem));
    }
    let usage = of.get::<KeyUsage>()?;
    let signs = usage.is_some_and(|(_, of)| of.digital_signature() || of.non_repudiation());
    if !signs {
        let problem =
            "must be by a certificate with the key usage digitalSignature or nonRepudiation";
        return Err(SignatureError::Unfit(problem));
    }
    Ok(())
}

fn owner(certificate: &Certificate) -> Result<SignedBy, SignatureError> {
    let subject = &certificate.tbs_certificate.subject;
    let parts = subject.0.iter().flat_map(|part| part.0.iter());
    let mut names = parts.filter(|part| part.oid == COMMON_NAME);
    let problem = || SignatureError::Unfit("must be by a certificate with one common name");
    let (Some(name), None) = (names.next(), names.next()) else {
        return Err(problem());
    };
    // Other kinds of text are not UTF-8: their bytes could be those of another name.
    if !matches!(name.value.tag(), Tag::Utf8String | Tag::PrintableString) {
        return Err(problem());
    }
    let name = std::str::from_utf8(name.value.value()).map_err(|_| problem())?;
    let text = subject.to_string();
    if text.len() > SUBJECT_BYTES_MAX {
        let problem = "must be by a certificate with a subject of at most 1024 bytes";
        return Err(SignatureError::Unfit(problem));
    }
    Ok(SignedBy {
        common_name: name.to_owned(),
        subject: text,
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
    /// [`SignatureError::Key`]: one of them cannot be read, or the certificate is of another key.
    pub fn new(pkcs8: &[u8], certificate: &[u8]) -> Result<Self, SignatureError> {
        let random = SystemRandom::new();
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, pkcs8, &random);
        let key = key.map_err(|error| SignatureError::Key(error.to_string()))?;
        let certificate = Certificate::from_der(certificate);
        let certificate = certificate.map_err(|error| SignatureError::Key(error.to_string()))?;
        let certified = &certificate.tbs_certificate.subject_public_key_info;
        let public: &[u8] = key.public_key().as_ref();
        if certified.subject_public_key.raw_bytes() != public {
            let problem = "the certificate is of another key";
            return Err(SignatureError::Key(problem.to_owned()));
        }
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

    use rcgen::KeyUsagePurpose;

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
        for now_us in [0, i64::MAX] {
            let error = refused(&own, &document, &signature, now_us);
            assert!(matches!(error, SignatureError::NotValidNow), "{error}");
        }
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

    #[test]
    fn a_certificate_for_another_use_signs_nothing() {
        let authority = Authority::generate().expect("authority");
        let document = digest("decision");
        for (usage, is_accepted) in [
            (KeyUsagePurpose::DigitalSignature, true),
            (KeyUsagePurpose::ContentCommitment, true),
            (KeyUsagePurpose::KeyEncipherment, false),
            (KeyUsagePurpose::KeyCertSign, false),
        ] {
            let issued = authority.issue_for("issuer-1", usage).expect("issued");
            let signer = CmsSigner::new(&issued.pkcs8, &issued.certificate).expect("signer");
            let signature = signer.sign(&document, NOW_US).expect("signed");
            let verified = verifier(&authority).verify(&document, &signature, NOW_US);
            assert_eq!(verified.is_ok(), is_accepted, "{usage:?}");
        }
    }

    /// The signature with one more certificate in it.
    fn with_certificate(signature: &[u8], certificate: Certificate) -> Vec<u8> {
        let content = ContentInfo::from_der(signature).expect("content");
        let mut signed: SignedData = content.content.decode_as().expect("signed data");
        let mut certificates = signed.certificates.take().expect("certificates").0;
        let one = CertificateChoices::Certificate(certificate);
        certificates.insert(one).expect("inserted");
        signed.certificates = Some(CertificateSet(certificates));
        let content = ContentInfo {
            content_type: SIGNED_DATA,
            content: Any::encode_from(&signed).expect("encoded"),
        };
        content.to_der().expect("DER")
    }

    #[test]
    fn a_claimed_signer_has_the_only_certificate_of_its_serial_number() {
        let authority = Authority::generate().expect("authority");
        let signer = signer(&authority, "issuer-1");
        let signature = signer.sign(&digest("decision"), NOW_US).expect("signed");
        let claimed = claimed_signer(&signature).expect("claimed");
        assert_eq!(claimed.signer.common_name, "issuer-1");
        let pem = signer.certificate.to_pem(LineEnding::LF).expect("PEM");
        assert_eq!(claimed.certificate_pem, pem);

        let issued = authority.issue("issuer-2").expect("issued");
        let other = Certificate::from_der(&issued.certificate).expect("certificate");
        let both = with_certificate(&signature, other.clone());
        assert_eq!(claimed_signer(&both).expect("another number"), claimed);
        // The same number, by an issuer whose name only looks different.
        let mut same_number = other;
        let number = signer.certificate.tbs_certificate.serial_number.clone();
        same_number.tbs_certificate.serial_number = number;
        same_number.tbs_certificate.issuer = same_number.tbs_certificate.subject.clone();
        let both = with_certificate(&signature, same_number);
        let refused = claimed_signer(&both).expect_err("two certificates");
        assert!(matches!(refused, SignatureError::Unfit(_)), "{refused}");
        assert!(claimed_signer(b"no signature").is_err());
    }

    #[test]
    fn a_users_certificate_issues_no_other() {
        let authority = Authority::generate().expect("authority");
        let issued = authority.issue("issuer-1").expect("issued");
        let certificate = Certificate::from_der(&issued.certificate).expect("certificate");
        let pem = certificate.to_pem(LineEnding::LF).expect("PEM");
        let refused = CmsVerifier::from_pem(pem.as_bytes())
            .err()
            .expect("refused");
        assert!(matches!(refused, SignatureError::Key(_)), "{refused}");
    }

    #[test]
    fn a_signer_has_the_key_of_its_certificate() {
        let authority = Authority::generate().expect("authority");
        let [one, other] = ["one", "other"].map(|name| authority.issue(name).expect("issued"));
        let refused = CmsSigner::new(&one.pkcs8, &other.certificate).err();
        assert!(matches!(refused, Some(SignatureError::Key(_))));
    }
}
