//! Keys and certificates for documents, from the configured files, and the interface by which
//! signatures of issue decisions are verified.
//!
//! | module | content |
//! |---|---|
//! | `command` | verifies by a configured command |

mod command;

use std::path::Path;

use async_trait::async_trait;
use signatures::{CmsSigner, CmsVerifier, Digest, SignatureError, SignedBy};

use crate::CfaConfig;
use crate::error::{Error, Refusal};
use command::CommandVerifier;

/// What an issuer signs.
pub struct Signed<'a> {
    pub issuer_id: &'a str,
    /// SHA-256 of the document.
    pub hash: Digest,
    /// Empty if only its hash is known.
    pub document: &'a [u8],
}

/// Verifies detached signatures.
#[async_trait]
pub trait Verifier: Send + Sync {
    /// Returns the signer of a document.
    ///
    /// # Errors
    /// The invalid field `signature`, unless the signature is of this content, by the owner of a
    /// valid certificate of a configured authority; `Unavailable` if that cannot be found out now.
    /// `now_us` is in microseconds since 1970.
    async fn verify(
        &self,
        signed: Signed<'_>,
        signature: &[u8],
        now_us: i64,
    ) -> Result<SignedBy, Error>;
}

#[async_trait]
impl Verifier for CmsVerifier {
    async fn verify(
        &self,
        signed: Signed<'_>,
        signature: &[u8],
        now_us: i64,
    ) -> Result<SignedBy, Error> {
        self.verify(&signed.hash, signature, now_us)
            .map_err(invalid)
    }
}

fn invalid(error: SignatureError) -> Error {
    Refusal::field("signature", error.to_string()).into()
}

/// What the service verifies and signs documents with.
pub struct Signing {
    /// `None`: issue decisions cannot be signed.
    pub verifier: Option<Box<dyn Verifier>>,
    /// Signs extracts. `None`: no extract is made.
    pub signer: Option<CmsSigner>,
}

impl Signing {
    /// # Errors
    /// `Config`: a configured file cannot be read, or a setting is not complete.
    pub fn open(config: &CfaConfig, health: &rpc::Health) -> Result<Self, Error> {
        let verifier = match &config.ca_file {
            None if config.signature_command.is_empty() => None,
            None => {
                let problem = "cfa.signature_command needs cfa.ca_file";
                return Err(Error::Config(problem.to_owned()));
            }
            Some(file) => Some(verifier(config, file, health)?),
        };
        let signer = match (&config.extract_key_file, &config.extract_certificate_file) {
            (Some(key), Some(certificate)) => {
                let opened = CmsSigner::new(&read(key)?, &read(certificate)?);
                Some(opened.map_err(|error| unreadable(key, &error))?)
            }
            (None, None) => None,
            _ => {
                let problem =
                    "cfa.extract_key_file and cfa.extract_certificate_file need each other";
                return Err(Error::Config(problem.to_owned()));
            }
        };
        Ok(Self { verifier, signer })
    }
}

/// The configured command, or else the verifier of this platform.
fn verifier(
    config: &CfaConfig,
    ca_file: &Path,
    health: &rpc::Health,
) -> Result<Box<dyn Verifier>, Error> {
    let authorities = read(ca_file)?;
    if !config.signature_command.is_empty() {
        return Ok(Box::new(CommandVerifier::open(config, ca_file, health)?));
    }
    let opened = CmsVerifier::from_pem(&authorities);
    let opened = opened.map_err(|error| unreadable(ca_file, &error))?;
    Ok(Box::new(opened))
}

fn read(file: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(file).map_err(|error| unreadable(file, &error))
}

fn unreadable(file: &Path, error: &dyn std::error::Error) -> Error {
    Error::Config(format!("{}: {error}", file.display()))
}
