//! Keys between the gateway and the bank, as files: made on first use, kept for ever.
//!
//! | file | what | who needs it |
//! |---|---|---|
//! | `gateway_ed25519.pk8` | private key of the gateway's requests | gateway |
//! | `gateway_ed25519.pub` | its public half, hex | bank |
//! | `webhook_secret` | `whsec_...`; further lines are secrets still accepted during rotation | both |
//!
//! The folder is shared by the gateway and the sandbox bank of one machine; with a bank elsewhere
//! the last two files are exchanged by hand.

use std::{fs, io, path::Path};

use events::files::{self, read_or_make};
use rand::RngCore;

use crate::{
    request_signature::{BadKey, Signer},
    webhook::Secret,
};

const PRIVATE: &str = "gateway_ed25519.pk8";
const PUBLIC: &str = "gateway_ed25519.pub";
const WEBHOOK: &str = "webhook_secret";

/// Why keys cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("key file: {0}")]
    File(#[from] io::Error),
    #[error("{file}: {source}")]
    Key { file: &'static str, source: BadKey },
    #[error("{WEBHOOK} has no line of the form whsec_<base64>")]
    Secret,
}

/// What the two sides share.
pub struct Keys {
    pub signer: Signer,
    /// First one signs; all of them verify.
    pub webhook_secrets: Vec<Secret>,
}

impl Keys {
    /// Reads the keys, making those that are not there yet.
    ///
    /// # Errors
    /// [`KeysError`].
    pub fn load_or_create(folder: &Path) -> Result<Keys, KeysError> {
        let bad = |file| move |source| KeysError::Key { file, source };
        fs::create_dir_all(folder)?;
        let pkcs8 = read_or_make(&folder.join(PRIVATE), files::PRIVATE, || {
            Signer::generate().map_err(bad(PRIVATE))
        })?;
        let signer = Signer::from_pkcs8(&pkcs8).map_err(bad(PRIVATE))?;
        let public = hex::encode(signer.public_key());
        read_or_make(&folder.join(PUBLIC), files::PRIVATE, || {
            Ok::<_, KeysError>(public.into_bytes())
        })?;
        Ok(Keys {
            signer,
            webhook_secrets: webhook_secrets(folder)?,
        })
    }
}

/// What the bank needs: the gateway's public key and the webhook secrets. Makes a pair when the
/// folder has none, so that bank and gateway of one machine may start in any order.
///
/// # Errors
/// [`KeysError`].
pub fn bank_side(folder: &Path) -> Result<(Vec<u8>, Vec<Secret>), KeysError> {
    // An empty one is what an interrupted start of an older version has left.
    if !fs::metadata(folder.join(PUBLIC)).is_ok_and(|file| file.len() > 0) {
        Keys::load_or_create(folder)?;
    }
    let text = fs::read_to_string(folder.join(PUBLIC))?;
    let public = hex::decode(text.trim()).map_err(|_| KeysError::Key {
        file: PUBLIC,
        source: BadKey,
    })?;
    Ok((public, webhook_secrets(folder)?))
}

fn webhook_secrets(folder: &Path) -> Result<Vec<Secret>, KeysError> {
    let bytes = read_or_make(&folder.join(WEBHOOK), files::PRIVATE, || {
        let mut secret = vec![0; 32];
        rand::rng().fill_bytes(&mut secret);
        Ok::<_, KeysError>(Secret::new(secret).to_text().into_bytes())
    })?;
    let text = String::from_utf8_lossy(&bytes);
    let secrets: Vec<_> = text.lines().filter_map(Secret::parse).collect();
    if secrets.is_empty() {
        return Err(KeysError::Secret);
    }
    Ok(secrets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_made_once_and_both_sides_agree() {
        let folder = tempfile::tempdir().unwrap();
        let (public, secrets) = bank_side(folder.path()).unwrap();
        let keys = Keys::load_or_create(folder.path()).unwrap();
        assert_eq!(keys.signer.public_key(), public);
        assert_eq!(keys.webhook_secrets[0].to_text(), secrets[0].to_text());
        let again = Keys::load_or_create(folder.path()).unwrap();
        assert_eq!(again.signer.key_id(), keys.signer.key_id());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn a_rotated_secret_is_a_further_line() {
        let folder = tempfile::tempdir().unwrap();
        let old = Secret::new(vec![1; 32]).to_text();
        let new = Secret::new(vec![2; 32]).to_text();
        fs::write(folder.path().join(WEBHOOK), format!("{new}\n{old}\n")).unwrap();
        let keys = Keys::load_or_create(folder.path()).unwrap();
        assert_eq!(keys.webhook_secrets.len(), 2);
        fs::write(folder.path().join(WEBHOOK), "nonsense").unwrap();
        assert!(matches!(
            Keys::load_or_create(folder.path()),
            Err(KeysError::Secret)
        ));
    }
}
