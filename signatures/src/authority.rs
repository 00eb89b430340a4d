//! A certificate authority of the sandbox and of tests. A platform with real users configures the
//! certificates of accredited authorities instead.

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DistinguishedName, DnType, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};

use crate::SignatureError;

const NAME: &str = "Sandbox certificate authority";

/// Issues certificates with a key of its own.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate_pem: String,
    pkcs8: Vec<u8>,
}

/// A private key (PKCS#8, DER) and its certificate (DER).
pub struct Issued {
    pub pkcs8: Vec<u8>,
    pub certificate: Vec<u8>,
}

impl From<rcgen::Error> for SignatureError {
    fn from(error: rcgen::Error) -> Self {
        Self::Key(error.to_string())
    }
}

impl Authority {
    /// # Errors
    /// [`SignatureError::Key`]: no key can be made.
    pub fn generate() -> Result<Self, SignatureError> {
        let key = KeyPair::generate()?;
        let pkcs8 = key.serialize_der();
        let certified = CertifiedIssuer::self_signed(params(), key)?;
        Self::new(&pkcs8, certified.pem())
    }

    /// Takes a private key (PKCS#8, DER) and the certificate that `generate` made for it (PEM).
    ///
    /// # Errors
    /// [`SignatureError::Key`]: the key cannot be read.
    pub fn new(pkcs8: &[u8], certificate_pem: String) -> Result<Self, SignatureError> {
        let key = KeyPair::try_from(pkcs8)?;
        Ok(Self {
            issuer: Issuer::new(params(), key),
            certificate_pem,
            pkcs8: pkcs8.to_vec(),
        })
    }

    pub fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    /// Issues a certificate with this common name, for a new key.
    ///
    /// # Errors
    /// [`SignatureError::Key`]: the certificate cannot be made.
    pub fn issue(&self, common_name: &str) -> Result<Issued, SignatureError> {
        self.issue_for(common_name, KeyUsagePurpose::DigitalSignature)
    }

    pub(crate) fn issue_for(
        &self,
        common_name: &str,
        usage: KeyUsagePurpose,
    ) -> Result<Issued, SignatureError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = named(common_name);
        params.key_usages = vec![usage];
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Issued {
            pkcs8: key.serialize_der(),
            certificate: certificate.der().to_vec(),
        })
    }
}

/// The same at each start: only the key is stored.
fn params() -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = named(NAME);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn named(common_name: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, common_name);
    name
}
