//! Keys and certificates for documents, from the configured files.

use std::path::Path;

use signatures::{CmsSigner, CmsVerifier, Verifier};

use crate::{CfaConfig, Error};

/// What the service verifies and signs documents with.
pub struct Signing {
    /// `None`: issue decisions cannot be signed.
    pub verifier: Option<Box<dyn Verifier>>,
    /// Signs extracts. `None`: no extract is made.
    pub signer: Option<CmsSigner>,
}

impl Signing {
    /// # Errors
    /// `Config`: a configured file cannot be read.
    pub fn open(config: &CfaConfig) -> Result<Self, Error> {
        let verifier = match &config.ca_file {
            None => None,
            Some(file) => {
                let opened = CmsVerifier::from_pem(&read(file)?);
                let opened = opened.map_err(|error| unreadable(file, &error))?;
                Some(Box::new(opened) as Box<dyn Verifier>)
            }
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

fn read(file: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(file).map_err(|error| unreadable(file, &error))
}

fn unreadable(file: &Path, error: &dyn std::error::Error) -> Error {
    Error::Config(format!("{}: {error}", file.display()))
}
