//! Key files shared by the gateway and the bank: created on first use, never replaced.
//!
//! | file | content | used by |
//! |---|---|---|
//! | `gateway_ed25519.pk8` | private key of the gateway's requests | gateway |
//! | `gateway_ed25519.pub` | its public key, hex | bank |
//! | `webhook_secret` | `whsec_...`; further lines: secrets accepted during rotation | both |
//!
//! The gateway and the sandbox bank of one machine share the folder. With a remote bank an operator
//! exchanges the last two files.

use std::{fs, io, path::Path};

use events::files::{self, read_or_create};
use rand::RngCore;

use crate::{
    request_signature::{BadKey, Signer},
    webhook::Secret,
};

const PRIVATE: &str = "gateway_ed25519.pk8";
const PUBLIC: &str = "gateway_ed25519.pub";
const WEBHOOK: &str = "webhook_secret";

/// Why the keys cannot be loaded or created.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    #[error("key file: {0}")]
    File(#[from] io::Error),
    #[error("{file}: {source}")]
    Key { file: &'static str, source: BadKey },
    #[error("{WEBHOOK} has no line of the form whsec_<base64>")]
    Secret,
}

/// Keys of the gateway's side.
pub struct Keys {
    pub signer: Signer,
    /// Every secret verifies; the bank signs with the first.
    pub webhook_secrets: Vec<Secret>,
}

impl Keys {
    /// Reads the keys and creates the missing ones.
    ///
    /// # Errors
    /// [`KeysError`].
    pub fn load_or_create(folder: &Path) -> Result<Keys, KeysError> {
        let bad = |file| move |source| KeysError::Key { file, source };
        fs::create_dir_all(folder)?;
        let pkcs8 = read_or_create(&folder.join(PRIVATE), files::PRIVATE, || {
            Signer::generate().map_err(bad(PRIVATE))
        })?;
        let signer = Signer::from_pkcs8(&pkcs8).map_err(bad(PRIVATE))?;
        let public = hex::encode(signer.public_key());
        read_or_create(&folder.join(PUBLIC), files::PRIVATE, || {
            Ok::<_, KeysError>(public.into_bytes())
        })?;
        Ok(Keys {
            signer,
            webhook_secrets: webhook_secrets(folder)?,
        })
    }
}

/// The bank's keys: the gateway's public key and the webhook secrets. Creates them in an empty
/// folder, so that bank and gateway of one machine can start in any order.
///
/// # Errors
/// [`KeysError`].
pub fn load_bank_keys(folder: &Path) -> Result<(Vec<u8>, Vec<Secret>), KeysError> {
    // An interrupted start of an older version leaves an empty file.
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
    let bytes = read_or_create(&folder.join(WEBHOOK), files::PRIVATE, || {
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
    fn keys_are_created_once_and_both_sides_agree() {
        let folder = tempfile::tempdir().unwrap();
        let (public, secrets) = load_bank_keys(folder.path()).unwrap();
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
