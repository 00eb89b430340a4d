//! Detached signatures of documents: of issue decisions by their issuers, and of extracts from the
//! register by the operator.
//!
//! A signature is made of the SHA-256 digest of a document, so it is verified without the document.
//! [`CmsVerifier`] is CMS (RFC 5652) with ECDSA P-256 and RSA. GOST R 34.10 needs a certified
//! library, which implements [`Verifier`].
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
pub use detached::{CmsSigner, CmsVerifier};

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

/// Verifies detached signatures.
pub trait Verifier: Send + Sync {
    /// Returns the signer of a document.
    ///
    /// # Errors
    /// [`SignatureError`], unless the signature is of this document, by the owner of a certificate
    /// for signatures that a configured authority issued and that is valid at `now_us`
    /// (microseconds since 1970).
    fn verify(
        &self,
        document: &Digest,
        signature: &[u8],
        now_us: i64,
    ) -> Result<SignedBy, SignatureError>;
}
