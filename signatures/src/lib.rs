//! Detached signatures of documents: of issue decisions by their issuers, and of extracts from the
//! register by the operator.
//!
//! Signatures are CMS (RFC 5652). [`CmsVerifier`] verifies those with ECDSA P-256 or RSA and the
//! SHA-256 digest of a document, without the document. Those of other algorithms, as GOST R 34.10
//! with its own digest, are verified by other software; [`claimed_signer`] reads their signer.
//!
//! | module | content |
//! |---|---|
//! | `detached` | verifies and makes signatures in CMS |
//! | `authority` | a certificate authority of the sandbox and of tests |
//!
//! Known limitation: certificates are not looked up in revocation lists. The operator removes an
//! authority, or refuses the activation.

mod authority;
mod detached;

pub use authority::{Authority, Issued};
pub use detached::{CmsSigner, CmsVerifier, claimed_signer};

/// SHA-256 of a document.
pub type Digest = [u8; 32];

/// Longest signature, in bytes. The time to sort its sets grows with the square of its length.
pub const SIGNATURE_BYTES_MAX: usize = 16 * 1024;

/// The owner of a certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SignedBy {
    /// The only common name (CN) of the subject.
    pub common_name: String,
    /// The whole subject, in the form of RFC 4514.
    pub subject: String,
    /// Serial number of the certificate, hex.
    pub serial: String,
}

/// What a signature states about its signer. Nothing of it is verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimed {
    pub signer: SignedBy,
    /// The signer's certificate.
    pub certificate_pem: String,
}

/// Why a signature is not accepted.
#[derive(Debug, thiserror::Error)]
pub enum SignatureError {
    #[error("is no CMS SignedData in DER: {0}")]
    Format(String),
    #[error("{0}")]
    Unfit(&'static str),
    #[error("is the signature of another document")]
    OtherDocument,
    #[error("does not verify with the signer's key")]
    Wrong,
    #[error("the signer's certificate was not issued by a configured authority")]
    UnknownAuthority,
    #[error("the signer's certificate is not valid now")]
    NotValidNow,
    #[error("the key or certificate cannot be used: {0}")]
    Key(String),
}
