//! Manifest of a data folder: `manifest.toml` lists its stores and keys.
//!
//! Stores are opened with "create if missing", so a lost file would silently become an empty ledger
//! or another key. The manifest records what existed. At a start each listed part must exist
//! unchanged, or be *pending*: the start may create a pending part. Otherwise the start is refused.
//!
//! The first start writes a manifest with all parts pending, creates them, and clears the marks
//! before the RPC ports answer. So a killed first start can be repeated. `platform data accept`
//! writes a manifest for a folder that has none, and after an intended change of keys or configured
//! stores.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use events::files;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::check;
use crate::config::Config;

/// Name of the file in the data folder.
pub const FILE: &str = "manifest.toml";
/// Version of the folder's layout and of the manifest.
const LAYOUT: u32 = 1;
/// Version of the data folder. It changes with the layout and with the format of journalled
/// commands.
const FORMAT: u32 = LAYOUT + types::command::FORMAT;
/// Parts that a later version added. A folder without one gets it at its next start. So does one
/// without the keys of row seals ([`events::seal`]) and of anchors ([`cfa::anchor`]).
const ADDED: [&str; 6] = [
    "approvals/approvals.db",
    "market/acts.db",
    "keys/ca.pk8",
    "keys/ca.pem",
    "keys/extracts.pk8",
    "keys/extracts.der",
];
const SEAL_KEY: &str = ".seal.key";
const ANCHOR_KEY: &str = "anchor_ed25519.";

const HEADER: &str = "\
# Stores and keys of this data folder, checked at each start. Written by the platform at its first
# start and by `platform data accept`; do not edit.
";

fn is_added(name: &str) -> bool {
    ADDED.contains(&name) || name.ends_with(SEAL_KEY) || name.contains(ANCHOR_KEY)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A file with changing content.
    Store,
    /// The journal: a folder with segments.
    Journal,
    /// A file with constant content.
    Key,
}

#[derive(Clone, Debug)]
struct Part {
    /// Below the data folder, or as configured.
    path: PathBuf,
    /// Name in the manifest: the path, relative to the data folder if below it.
    name: String,
    kind: Kind,
}

/// All parts that a start opens or creates. Excludes what can be rebuilt: snapshots, checkpoints,
/// the text of the certificate's fingerprint.
fn parts(config: &Config) -> Vec<Part> {
    use Kind::{Journal, Key, Store};
    let mut parts = Vec::new();
    let mut add = |is_used: bool, kind, path: PathBuf| {
        let below = path.strip_prefix(&config.data_dir).unwrap_or(&path);
        let name = below.display().to_string();
        parts.extend(is_used.then_some(Part { path, name, kind }));
    };
    let is_embedded = config.events.kafka_brokers.is_none();
    add(is_embedded, Store, config.data_dir.join("events/log.db"));
    add(
        is_embedded,
        Store,
        config.data_dir.join("events/offsets.db"),
    );
    let chain = &config.chain.data_dir;
    let is_own_chain = config.chain.rpc_url.is_none();
    add(is_own_chain, Store, chain.join("chain.sqlite"));
    add(true, Store, chain.join("connector.sqlite"));
    let is_own_ledger = config.ledger.url.is_empty();
    add(
        is_own_ledger,
        Store,
        config.ledger.data_dir.join("ledger.sqlite"),
    );
    add(true, Store, config.identity.data_dir.join("identity.db"));
    add(true, Store, config.bank.data_dir.join("bank.db"));
    add(true, Store, config.cfa.data_dir.join("cfa.sqlite"));
    add(true, Store, config.payments.data_dir.join("payments.db"));
    let has_own_approvals = config.approvals.url.is_empty();
    add(
        has_own_approvals,
        Store,
        config.approvals.data_dir.join("approvals.db"),
    );
    add(true, Store, config.market.data_dir.join("market.db"));
    add(true, Store, config.market.data_dir.join("acts.db"));
    add(
        true,
        Store,
        config.settlement.data_dir.join("settlement.db"),
    );
    add(true, Journal, config.journal_dir());
    let operator_key = config.chain.operator_key_file.clone();
    let has_key_file = config.chain.remote_signer_url.is_none();
    add(
        has_key_file,
        Key,
        operator_key.unwrap_or_else(|| chain.join("operator.key")),
    );
    for store in check::sealed_stores(config) {
        add(true, Key, events::seal::key_file(&store.path));
    }
    for path in cfa::anchor::key_files(&config.cfa.data_dir) {
        add(true, Key, path);
    }
    for name in [
        "gateway_ed25519.pk8",
        "gateway_ed25519.pub",
        "webhook_secret",
    ] {
        add(true, Key, config.payments.keys_dir.join(name));
    }
    for name in ["ca.pk8", "ca.pem", "extracts.pk8", "extracts.der"] {
        add(true, Key, config.bank.keys_dir.join(name));
    }
    for name in ["cert.der", "key.der"] {
        add(true, Key, config.market.data_dir.join("tls").join(name));
    }
    parts
}

impl Part {
    fn is_seal_key(&self) -> bool {
        self.name.ends_with(SEAL_KEY)
    }

    /// Whether the part exists and is not empty. An empty file counts as missing: SQLite would
    /// accept it as a new store.
    fn is_there(&self) -> bool {
        match self.kind {
            Kind::Store | Kind::Key => {
                std::fs::metadata(&self.path).is_ok_and(|file| file.is_file() && file.len() > 0)
            }
            Kind::Journal => std::fs::read_dir(&self.path).is_ok_and(|mut entries| {
                let is_segment = |path: PathBuf| path.extension().is_some_and(|end| end == "log");
                entries.any(|entry| entry.is_ok_and(|entry| is_segment(entry.path())))
            }),
        }
    }

    fn fingerprint(&self) -> anyhow::Result<String> {
        let bytes = std::fs::read(&self.path).with_context(|| self.path.display().to_string())?;
        Ok(format!("sha256:{}", hex::encode(Sha256::digest(bytes))))
    }
}

/// Content of the manifest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: u32,
    /// Parts that the next start may create.
    #[serde(default)]
    pending: BTreeSet<String>,
    stores: BTreeSet<String>,
    /// Name to fingerprint; empty while the key is pending.
    keys: BTreeMap<String, String>,
}

impl Content {
    /// `None` if there is no manifest.
    fn read(dir: &Path) -> anyhow::Result<Option<Self>> {
        let path = dir.join(FILE);
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error).with_context(|| path.display().to_string()),
        };
        let damaged = || {
            format!(
                "{} cannot be read: restore it from a backup, or remove it and run `platform data accept`",
                path.display()
            )
        };
        let table: toml::Table = text.parse().with_context(damaged)?;
        let format = table.get("format").and_then(toml::Value::as_integer);
        if let Some(other) = format.filter(|format| *format != i64::from(FORMAT)) {
            bail!(
                "{}: format {other} of the data folder, this version of the platform reads format {FORMAT}: \
                 start the version that wrote it",
                path.display()
            );
        }
        Ok(Some(table.try_into().with_context(damaged)?))
    }

    fn write(&self, dir: &Path) -> anyhow::Result<()> {
        let path = dir.join(FILE);
        let text = format!("{HEADER}{}", toml::to_string_pretty(self).context(FILE)?);
        files::replace(&path, text.as_bytes(), files::PRIVATE)
            .with_context(|| path.display().to_string())
    }

    /// The parts as they are on disk. Missing parts are pending.
    fn of(parts: &[Part]) -> anyhow::Result<Self> {
        let mut content = Content {
            format: FORMAT,
            ..Content::default()
        };
        for part in parts {
            let is_there = part.is_there();
            if !is_there {
                content.pending.insert(part.name.clone());
            }
            if part.kind != Kind::Key {
                content.stores.insert(part.name.clone());
                continue;
            }
            let fingerprint = match is_there {
                true => part.fingerprint()?,
                false => String::new(),
            };
            content.keys.insert(part.name.clone(), fingerprint);
        }
        Ok(content)
    }

    /// Adds, as pending, the parts that a later version added and that do not exist yet. True if
    /// there are any.
    fn add_new(&mut self, parts: &[Part]) -> bool {
        let is_new =
            |part: &&Part| is_added(&part.name) && !self.has(&part.name) && !part.is_there();
        let new: Vec<&Part> = parts.iter().filter(is_new).collect();
        for part in &new {
            match part.kind {
                Kind::Key => {
                    self.keys.insert(part.name.clone(), String::new());
                }
                Kind::Store | Kind::Journal => {
                    self.stores.insert(part.name.clone());
                }
            }
            self.pending.insert(part.name.clone());
        }
        !new.is_empty()
    }

    fn has(&self, name: &str) -> bool {
        self.stores.contains(name) || self.keys.contains_key(name)
    }

    fn names(&self) -> impl Iterator<Item = &String> {
        self.stores.iter().chain(self.keys.keys())
    }
}

/// A checked data folder: its stores may be opened.
#[derive(Debug)]
pub struct Manifest {
    dir: PathBuf,
    parts: Vec<Part>,
    content: Content,
}

impl Manifest {
    /// Checks the folder before anything in it is opened. A new folder gets a manifest with all
    /// parts pending. The caller holds the folder's lock.
    ///
    /// # Errors
    /// Each missing or changed part, by its path, with the remedy.
    pub fn check(config: &Config) -> anyhow::Result<Self> {
        let dir = config.data_dir.clone();
        let parts = parts(config);
        let Some(mut content) = Content::read(&dir)? else {
            let has_data = parts
                .iter()
                .find(|part| part.kind != Kind::Key && part.is_there());
            if let Some(part) = has_data {
                bail!(
                    "data folder {}: {} exists, but there is no {FILE}: if the folder is of an older \
                     version and was stopped with no open order and every trade final, run \
                     `platform data accept` once; if the file was lost, restore it from a backup",
                    dir.display(),
                    part.path.display()
                );
            }
            // Keys may exist: an operator may have installed them. [`Self::complete`] records their
            // fingerprints.
            let mut content = Content::of(&parts)?;
            content.pending = content.names().cloned().collect();
            content.write(&dir)?;
            return Ok(Self {
                dir,
                parts,
                content,
            });
        };
        let is_grown = content.add_new(&parts);
        let mut faults = Vec::new();
        for part in &parts {
            let path = part.path.display();
            if !content.has(&part.name) {
                faults.push(format!(
                    "{path} is used by the configuration, but does not belong to this folder: \
                     change the configuration back, or run `platform data accept` to add it"
                ));
                continue;
            }
            if content.pending.contains(&part.name) {
                continue;
            }
            if !part.is_there() {
                faults.push(missing(part));
            } else if part.kind == Kind::Key
                && content.keys.get(&part.name) != Some(&part.fingerprint()?)
            {
                faults.push(format!(
                    "{path} is another key than before: put the former one back, or run \
                     `platform data accept` if it was changed on purpose"
                ));
            }
        }
        for name in content.names().filter(|name| !is_named(&parts, name)) {
            faults.push(format!(
                "{} belongs to this folder, but the configuration does not use it: change the \
                 configuration back, or run `platform data accept` to leave it out",
                dir.join(name).display()
            ));
        }
        refuse(&dir, &faults)?;
        if is_grown {
            content.write(&dir)?;
        }
        Ok(Self {
            dir,
            parts,
            content,
        })
    }

    /// Clears the pending marks. Called once every store is open: from then on a missing part is
    /// lost.
    ///
    /// # Errors
    /// A part was not created, or the manifest cannot be written.
    pub fn complete(self) -> anyhow::Result<()> {
        if self.content.pending.is_empty() {
            return Ok(());
        }
        for part in &self.parts {
            ensure!(part.is_there(), "{} was not created", part.path.display());
            // The directory entries of new files must be durable before the manifest lists them.
            let folders = part.path.ancestors().skip(1);
            for folder in folders.take_while(|folder| folder.starts_with(&self.dir)) {
                File::open(folder)
                    .and_then(|folder| folder.sync_all())
                    .with_context(|| folder.display().to_string())?;
            }
        }
        Content::of(&self.parts)?.write(&self.dir)
    }
}

/// Requires a data folder of the platform, before a check opens its stores.
///
/// # Errors
/// The folder does not exist or has no manifest.
pub fn require(dir: &Path) -> anyhow::Result<()> {
    let folder = dir.display();
    ensure!(dir.is_dir(), "data folder {folder} does not exist");
    ensure!(
        dir.join(FILE).is_file(),
        "{folder} is not a data folder of the platform: it has no {FILE}; name the folder with \
         --data-dir, or restore the file from a backup if it was lost"
    );
    Ok(())
}

/// Result of [`accept`].
#[derive(Debug, Serialize)]
pub struct Accepted {
    pub manifest: PathBuf,
    /// The folder had no manifest.
    pub is_adopted: bool,
    /// Parts accepted as they are.
    pub parts: BTreeSet<String>,
    /// Parts that the next start creates.
    pub pending: BTreeSet<String>,
    /// Keys with a different fingerprint than before.
    pub changed_keys: BTreeSet<String>,
    /// Parts no longer used; their files remain.
    pub left_out: BTreeSet<String>,
}

/// Writes the manifest from the folder's contents. A missing part is accepted only if it was
/// pending or is new in the configuration. The caller holds the folder's lock.
///
/// # Errors
/// There is nothing to accept, or parts are missing; the error names each path.
pub fn accept(config: &Config) -> anyhow::Result<Accepted> {
    let dir = &config.data_dir;
    let parts = parts(config);
    let before = Content::read(dir)?;
    let content = Content::of(&parts)?;
    if before.is_none() && !parts.iter().any(Part::is_there) {
        bail!("data folder {}: there is nothing to accept", dir.display());
    }
    let may_be_made = |name: &str| match &before {
        // In a folder of an older version every part that it knew must exist.
        None => is_added(name),
        Some(before) => before.pending.contains(name) || !before.has(name),
    };
    let mut faults: Vec<String> = parts
        .iter()
        .filter(|part| content.pending.contains(&part.name) && !may_be_made(&part.name))
        .map(missing)
        .collect();
    if before.is_none() && !faults.is_empty() {
        faults.push(
            "if a first start was interrupted here, remove the folder and start again".to_owned(),
        );
    }
    refuse(dir, &faults)?;
    content.write(dir)?;
    let is_adopted = before.is_none();
    let before = before.unwrap_or_default();
    let is_changed = |name: &&String| {
        let former = before.keys.get(*name).filter(|former| !former.is_empty());
        former.is_some_and(|former| *former != content.keys[*name])
    };
    let is_there = |name: &&String| !content.pending.contains(*name);
    Ok(Accepted {
        manifest: dir.join(FILE),
        is_adopted,
        parts: content.names().filter(is_there).cloned().collect(),
        changed_keys: content.keys.keys().filter(is_changed).cloned().collect(),
        left_out: (before.names())
            .filter(|name| !is_named(&parts, name))
            .cloned()
            .collect(),
        pending: content.pending,
    })
}

/// Marks missing keys of row seals as pending: the next start makes them, and seals all rows with
/// them. The caller holds the folder's lock.
///
/// # Errors
/// The manifest cannot be read or written.
pub fn renew_seal_keys(config: &Config) -> anyhow::Result<()> {
    let Some(mut content) = Content::read(&config.data_dir)? else {
        return Ok(());
    };
    for part in parts(config) {
        if part.is_seal_key() && content.has(&part.name) && !part.is_there() {
            content.keys.insert(part.name.clone(), String::new());
            content.pending.insert(part.name);
        }
    }
    content.write(&config.data_dir)
}

fn missing(part: &Part) -> String {
    let path = part.path.display();
    let or = match part.is_seal_key() {
        true => ", or run `platform data accept-rows` if the key is lost",
        false => "",
    };
    format!("{path} is missing or empty: restore the data folder from a backup{or}")
}

fn is_named(parts: &[Part], name: &str) -> bool {
    parts.iter().any(|part| part.name == name)
}

fn refuse(dir: &Path, faults: &[String]) -> anyhow::Result<()> {
    ensure!(
        faults.is_empty(),
        "data folder {}: nothing was changed\n  {}",
        dir.display(),
        faults.join("\n  ")
    );
    Ok(())
}
