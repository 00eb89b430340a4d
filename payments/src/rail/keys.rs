//! Keys between the gateway and the bank, as files: made on first use, kept for ever.
//!
//! | file | what | who needs it |
//! |---|---|---|
//! | `gateway_ed25519.pk8` | private key of the gateway's requests | gateway |
//! | `gateway_ed25519.pub` | its public half, hex | bank |
//! | `webhook_secret` | `whsec_...`; further lines are secrets still accepted during rotation | both |
//!
//! The folder is shared by the gateway and the sandbox bank of one machine; with a bank elsewhere the last two files are exchanged by hand.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    path::Path,
};

use rand::RngCore;

use super::{
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
        let pkcs8 = read_or_create(&folder.join(PRIVATE), || {
            Signer::generate().map_err(bad(PRIVATE))
        })?;
        let signer = Signer::from_pkcs8(&pkcs8).map_err(bad(PRIVATE))?;
        let public = hex::encode(signer.public_key());
        read_or_create(&folder.join(PUBLIC), || Ok(public.into_bytes()))?;
        Ok(Keys {
            signer,
            webhook_secrets: webhook_secrets(folder)?,
        })
    }
}

/// What the bank needs: the gateway's public key and the webhook secrets. Makes a pair when the folder has none, so that bank and gateway
/// of one machine may start in any order.
///
/// # Errors
/// [`KeysError`].
pub fn bank_side(folder: &Path) -> Result<(Vec<u8>, Vec<Secret>), KeysError> {
    if !folder.join(PUBLIC).exists() {
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
    let bytes = read_or_create(&folder.join(WEBHOOK), || {
        let mut secret = vec![0; 32];
        rand::rng().fill_bytes(&mut secret);
        Ok(Secret::new(secret).to_text().into_bytes())
    })?;
    let text = String::from_utf8_lossy(&bytes);
    let secrets: Vec<_> = text.lines().filter_map(Secret::parse).collect();
    if secrets.is_empty() {
        return Err(KeysError::Secret);
    }
    Ok(secrets)
}

/// The file's bytes. Made whole or not at all, and never over a file of somebody faster.
fn read_or_create(
    path: &Path,
    make: impl FnOnce() -> Result<Vec<u8>, KeysError>,
) -> Result<Vec<u8>, KeysError> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        read => return Ok(read?),
    }
    let draft = path.with_extension(format!("draft-{}", std::process::id()));
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(&draft)?;
    file.write_all(&make()?)?;
    file.sync_all()?;
    let linked = fs::hard_link(&draft, path);
    fs::remove_file(&draft)?;
    match linked {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error.into()),
        _ => Ok(fs::read(path)?),
    }
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
