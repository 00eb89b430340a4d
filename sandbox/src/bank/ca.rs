//! The certificate authority of the sandbox: signs documents for users, and issues the operator's
//! key for extracts.
//!
//! | file | content | used by |
//! |---|---|---|
//! | `ca.pk8` | private key of the authority | bank |
//! | `ca.pem` | its certificate | CFA service |
//! | `extracts.pk8`, `extracts.der` | key and certificate for extracts | CFA service |

use std::{fs, io, path::Path};

use events::files::{self, read_or_create};
use signatures::{Authority, CmsSigner, Digest, SignatureError};

const KEY: &str = "ca.pk8";
const CERTIFICATE: &str = "ca.pem";
const EXTRACTS_KEY: &str = "extracts.pk8";
const EXTRACTS_CERTIFICATE: &str = "extracts.der";
/// Common name of the operator's certificate. The authority signs for no user with this id.
pub const OPERATOR: &str = "operator";

/// Why the authority cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("file of the certificate authority: {0}")]
    File(#[from] io::Error),
    #[error("certificate authority: {0}")]
    Signature(#[from] SignatureError),
    #[error("{0} is missing: restore it, or remove {1} to make both again")]
    Missing(&'static str, &'static str),
}

/// Signs for any user, with a new certificate for each signature.
pub struct Ca {
    authority: Authority,
}

impl Ca {
    /// Reads the files in the folder and creates them if none exists.
    ///
    /// # Errors
    /// [`CaError`].
    pub fn open(folder: &Path) -> Result<Self, CaError> {
        fs::create_dir_all(folder)?;
        let (pkcs8, pem) = pair(folder, (KEY, CERTIFICATE), || {
            let made = Authority::generate()?;
            let pem = made.certificate_pem().as_bytes().to_vec();
            Ok((made.pkcs8().to_vec(), pem))
        })?;
        let pem = String::from_utf8_lossy(&pem).into_owned();
        let authority = Authority::new(&pkcs8, pem)?;
        pair(folder, (EXTRACTS_KEY, EXTRACTS_CERTIFICATE), || {
            let issued = authority.issue(OPERATOR)?;
            Ok((issued.pkcs8, issued.certificate))
        })?;
        Ok(Self { authority })
    }

    /// Signs a document for a user.
    ///
    /// # Errors
    /// [`SignatureError`].
    pub fn sign(&self, user_id: &str, document: &Digest) -> Result<Vec<u8>, SignatureError> {
        let issued = self.authority.issue(user_id)?;
        let signer = CmsSigner::new(&issued.pkcs8, &issued.certificate)?;
        signer.sign(document, service_kit::clock::now_us())
    }
}

/// Reads a key and its certificate. The certificate is written first, so a key without one means
/// that the certificate was removed.
fn pair(
    folder: &Path,
    (key, certificate): (&'static str, &'static str),
    make: impl FnOnce() -> Result<(Vec<u8>, Vec<u8>), CaError>,
) -> Result<(Vec<u8>, Vec<u8>), CaError> {
    let (key_file, certificate_file) = (folder.join(key), folder.join(certificate));
    let pkcs8 = read_or_create(&key_file, files::PRIVATE, || {
        let (pkcs8, issued) = make()?;
        files::replace(&certificate_file, &issued, files::PUBLIC)?;
        Ok::<_, CaError>(pkcs8)
    })?;
    match fs::read(&certificate_file) {
        Ok(issued) => Ok((pkcs8, issued)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            Err(CaError::Missing(certificate, key))
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use signatures::CmsVerifier;

    use super::*;

    #[test]
    fn an_opened_authority_signs_as_the_created_one() {
        let folder = tempfile::tempdir().unwrap();
        let document = [7; 32];
        let first = Ca::open(folder.path()).unwrap();
        let pem = fs::read(folder.path().join(CERTIFICATE)).unwrap();
        let again = Ca::open(folder.path()).unwrap();
        let verifier = CmsVerifier::from_pem(&pem).unwrap();
        let now_us = service_kit::clock::now_us();
        for ca in [first, again] {
            let signature = ca.sign("issuer-1", &document).unwrap();
            let signed_by = verifier.verify(&document, &signature, now_us).unwrap();
            assert_eq!(signed_by.common_name, "issuer-1");
        }
        fs::remove_file(folder.path().join(CERTIFICATE)).unwrap();
        assert!(matches!(Ca::open(folder.path()), Err(CaError::Missing(..))));
    }
}
