//! The manifest of the data folder. A start with a missing or replaced store or key fails, names
//! its path and does not recreate it. The next start completes an interrupted first start.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use tests::flow::Random;
use tests::process::{Finished, Platform};
use tests::shared::run;

const STORES: [&str; 14] = [
    "events/log.db",
    "events/offsets.db",
    "chain/chain.sqlite",
    "chain/connector.sqlite",
    "ledger/ledger.sqlite",
    "identity/identity.db",
    "bank/bank.db",
    "cfa/cfa.sqlite",
    "payments/payments.db",
    "approvals/approvals.db",
    "market/market.db",
    "market/acts.db",
    "settlement/settlement.db",
    "journal",
];
const KEYS: [&str; 20] = [
    "cfa/anchor_ed25519.pk8",
    "cfa/anchor_ed25519.pub",
    "cfa/cfa.sqlite.seal.key",
    "payments/payments.db.seal.key",
    "identity/identity.db.seal.key",
    "settlement/settlement.db.seal.key",
    "market/acts.db.seal.key",
    "chain/connector.sqlite.seal.key",
    "ledger/ledger.sqlite.seal.key",
    "approvals/approvals.db.seal.key",
    "chain/operator.key",
    "keys/ca.pk8",
    "keys/ca.pem",
    "keys/extracts.pk8",
    "keys/extracts.der",
    "keys/gateway_ed25519.pk8",
    "keys/gateway_ed25519.pub",
    "keys/webhook_secret",
    "market/tls/cert.der",
    "market/tls/key.der",
];
const MANIFEST: &str = "manifest.toml";
/// Number of killed first starts. A start takes less than a second, so kills within 1.2 s hit any
/// point of it.
const KILLS: u64 = 25;

/// Size and modification time of every file below the folder, except the lock.
fn files(folder: &Path) -> BTreeMap<PathBuf, (u64, SystemTime)> {
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let about = std::fs::metadata(&path).expect("metadata");
            if about.is_dir() {
                folders.push(path);
            } else if !path.ends_with("platform.lock") {
                found.insert(path, (about.len(), about.modified().expect("a time")));
            }
        }
    }
    found
}

/// Moves a file or folder away while `work` runs, then back. Asserts that `work` did not recreate
/// it.
async fn without(data: &Path, name: &str, work: impl AsyncFnOnce()) {
    let (path, aside) = (data.join(name), data.with_extension("aside"));
    std::fs::rename(&path, &aside).expect("moved away");
    work().await;
    assert!(!path.exists(), "{name} was recreated");
    std::fs::rename(&aside, &path).expect("moved back");
}

async fn accept(platform: &Platform) -> Finished {
    let data = platform.data_dir().display().to_string();
    let args = ["--json", "--data-dir", &data, "data", "accept"];
    platform.cli(&args).await
}

#[test]
fn a_missing_store_or_key_is_refused_by_its_path_and_nothing_is_made() {
    run(async {
        let mut platform = Platform::start().await;
        platform.stop().await;
        let data = platform.data_dir();
        for name in STORES.into_iter().chain(KEYS) {
            let path = data.join(name).display().to_string();
            without(&data, name, async || {
                let before = files(&data);
                let logged = platform.start_refused().await;
                let refusal = format!("{path} is missing or empty: restore");
                assert!(logged.contains(&refusal), "{name}: {logged}");
                assert_eq!(files(&data), before, "{name}");
                // `data accept` refuses it too.
                let accepted = accept(&platform).await;
                assert!(accepted.stderr.contains(&refusal), "{accepted:?}");
                assert_eq!(files(&data), before, "{name}");
            })
            .await;
        }
        // SQLite treats an empty file as a new store.
        let ledger = data.join("ledger/ledger.sqlite");
        let bytes = std::fs::read(&ledger).expect("read");
        std::fs::write(&ledger, "").expect("written");
        let logged = platform.start_refused().await;
        assert!(
            logged.contains("ledger/ledger.sqlite is missing or empty"),
            "{logged}"
        );
        std::fs::write(&ledger, bytes).expect("written");
        platform.restart().await;
        platform.stop().await;
    });
}

#[test]
fn every_store_and_key_that_a_start_makes_is_in_the_manifest() {
    run(async {
        let mut platform = Platform::start().await;
        platform.stop().await;
        let data = platform.data_dir();
        let text = std::fs::read_to_string(data.join(MANIFEST)).expect("a manifest");
        assert!(
            text.contains("format = ") && text.contains("pending = []"),
            "{text}"
        );
        for name in STORES.into_iter().chain(KEYS) {
            assert!(text.contains(&format!("\"{name}\"")), "{name}: {text}");
        }
        // Files that can be rebuilt from the others, and locks.
        let is_derived = |name: &str| {
            ["-wal", "-shm", ".snap", "lock", "fingerprint", MANIFEST]
                .iter()
                .any(|end| name.ends_with(end))
                || name.contains("checkpoints/")
                || name.contains("snapshots/")
                || name.starts_with("journal/")
        };
        for path in files(&data).into_keys() {
            let name = path
                .strip_prefix(&data)
                .expect("below")
                .display()
                .to_string();
            let is_listed = STORES.iter().chain(&KEYS).any(|listed| *listed == name);
            assert!(
                is_listed || is_derived(&name),
                "{name} is neither in the manifest nor derived"
            );
        }
    });
}

#[test]
fn another_key_is_refused_until_it_is_accepted() {
    run(async {
        let mut platform = Platform::start().await;
        platform.stop().await;
        let data = platform.data_dir();
        for name in KEYS {
            let path = data.join(name);
            let former = std::fs::read(&path).expect("a key");
            let mut other = former.clone();
            other.push(b'\n');
            std::fs::write(&path, other).expect("written");
            let before = files(&data);
            let logged = platform.start_refused().await;
            let refusal = format!("{} is another key than before", path.display());
            assert!(logged.contains(&refusal), "{name}: {logged}");
            assert!(logged.contains("platform data accept"), "{logged}");
            assert_eq!(files(&data), before, "{name}");
            std::fs::write(&path, former).expect("written");
        }
        // An operator rotates the secret of the bank's notices by an additional line.
        let path = data.join("keys/webhook_secret");
        let mut secrets = std::fs::read_to_string(&path).expect("a secret");
        secrets = format!("whsec_{}\n{secrets}", "QUJD".repeat(10));
        std::fs::write(&path, secrets).expect("written");
        platform.start_refused().await;
        let accepted = accept(&platform).await.success();
        let changed = accepted.json()["changed_keys"].clone();
        assert_eq!(changed, serde_json::json!(["keys/webhook_secret"]));
        platform.restart().await;
        platform.stop().await;
    });
}

#[test]
fn folder_without_manifest_is_adopted_once() {
    run(async {
        let mut platform = Platform::start().await;
        let user = platform.trader().await;
        platform.deposit(&user, "10.00").await;
        platform.stop().await;
        let (data, manifest) = (platform.data_dir(), platform.data_dir().join(MANIFEST));
        let written = std::fs::read_to_string(&manifest).expect("a manifest");

        let format = written.lines().find(|line| line.starts_with("format = "));
        let format = format.expect("a line with the format");
        let other = written.replace(format, "format = 77\nnew = true");
        std::fs::write(&manifest, other).expect("written");
        let before = files(&data);
        for logged in [
            platform.start_refused().await,
            accept(&platform).await.stderr,
        ] {
            assert!(logged.contains("format 77"), "{logged}");
            assert!(logged.contains("manifest.toml"), "{logged}");
        }
        std::fs::write(&manifest, "nonsense").expect("written");
        let logged = platform.start_refused().await;
        assert!(logged.contains("manifest.toml cannot be read"), "{logged}");

        std::fs::remove_file(&manifest).expect("removed");
        let logged = platform.start_refused().await;
        assert!(logged.contains("platform data accept"), "{logged}");
        assert!(!manifest.exists());
        assert!(before.keys().all(|path| *path == manifest || path.exists()));
        // A folder with a missing store is not adopted.
        without(&data, "cfa/cfa.sqlite", async || {
            let refused = accept(&platform).await;
            assert!(!refused.status.success(), "{refused:?}");
            assert!(
                refused.stderr.contains("cfa/cfa.sqlite is missing"),
                "{refused:?}"
            );
        })
        .await;
        accept(&platform).await.success();
        assert_eq!(
            std::fs::read_to_string(&manifest).expect("adopted"),
            written
        );
        platform.restart().await;
        assert_eq!(platform.balance(&user.cash()).await.to_string(), "10.00");
        // A folder in use is not adopted.
        let refused = accept(&platform).await;
        assert!(refused.stderr.contains("in use"), "{refused:?}");
        platform.stop().await;
    });
}

#[test]
fn a_store_that_the_configuration_turns_on_or_off_is_accepted_first() {
    run(async {
        let mut platform = Platform::start().await;
        platform.stop().await;
        let key = platform.folder().join("operator.key");
        std::fs::copy(platform.data_dir().join("chain/operator.key"), &key).expect("copied");
        let elsewhere = key.display().to_string();
        let env = [("PLATFORM_CHAIN__OPERATOR_KEY_FILE", elsewhere.as_str())];
        let logged = platform.start_refused_with(&env).await;
        assert!(
            logged.contains(&format!("{elsewhere} is used by the configuration")),
            "{logged}"
        );
        let unused = "chain/operator.key belongs to this folder, but";
        assert!(logged.contains(unused), "{logged}");

        // Without its files and manifest entries, the event log is a store that is new to the
        // folder.
        let (data, manifest) = (platform.data_dir(), platform.data_dir().join(MANIFEST));
        std::fs::remove_dir_all(data.join("events")).expect("removed");
        let written = std::fs::read_to_string(&manifest).expect("a manifest");
        let without_events: String = written
            .lines()
            .filter(|line| !line.contains("\"events/"))
            .map(|line| format!("{line}\n"))
            .collect();
        assert_ne!(written, without_events);
        std::fs::write(&manifest, without_events).expect("written");
        let logged = platform.start_refused().await;
        assert!(
            logged.contains("events/log.db is used by the configuration"),
            "{logged}"
        );
        let accepted = accept(&platform).await.success();
        let pending = accepted.json()["pending"].clone();
        assert_eq!(
            pending,
            serde_json::json!(["events/log.db", "events/offsets.db"])
        );
        platform.restart().await;
        platform.stop().await;
        assert_eq!(
            std::fs::read_to_string(&manifest).expect("a manifest"),
            written
        );
    });
}

/// A folder of a version without approvals gets their store at its next start, and keeps it.
#[test]
fn a_store_that_a_later_version_added_is_made_at_the_next_start() {
    run(async {
        let mut platform = Platform::start().await;
        platform.stop().await;
        let (data, manifest) = (platform.data_dir(), platform.data_dir().join(MANIFEST));
        let written = std::fs::read_to_string(&manifest).expect("a manifest");
        std::fs::remove_dir_all(data.join("approvals")).expect("removed");
        let older: String = written
            .lines()
            .filter(|line| !line.contains("\"approvals/"))
            .map(|line| format!("{line}\n"))
            .collect();
        assert_ne!(written, older);
        std::fs::write(&manifest, older).expect("written");
        platform.restart().await;
        platform.stop().await;
        let now = std::fs::read_to_string(&manifest).expect("a manifest");
        // The new store has a new key of its seals.
        let shown = |text: &str| -> Vec<String> {
            let lines = text.lines().map(|line| {
                let is_new_key = line.starts_with("\"approvals/") && line.contains("sha256:");
                line.split('=')
                    .next()
                    .filter(|_| is_new_key)
                    .unwrap_or(line)
            });
            lines.map(str::to_owned).collect()
        };
        assert_eq!(shown(&now), shown(&written));
        std::fs::remove_dir_all(data.join("approvals")).expect("removed");
        let logged = platform.start_refused().await;
        let refusal = "approvals/approvals.db is missing or empty";
        assert!(logged.contains(refusal), "{logged}");
    });
}

#[test]
fn a_first_start_that_was_killed_anywhere_is_repeated() {
    run(async {
        let mut random = Random::new(tests::seed::seed(20_260_112));
        let moments: Vec<Duration> = (0..KILLS)
            .map(|_| Duration::from_micros(random.below(1_200_000)))
            .collect();
        for moments in moments.chunks(5) {
            let mut platform = Platform::start_after_kills(moments).await;
            let user = platform.trader().await;
            platform.deposit(&user, "10.00").await;
            platform.stop().await;
            let left = files(&platform.data_dir()).into_keys();
            let drafts: Vec<_> = left
                .filter(|path| path.to_string_lossy().contains("draft"))
                .collect();
            assert!(drafts.is_empty(), "{moments:?}: {drafts:?}");
        }
    });
}

/// Draft of a key. That of seals has another name until the first seals are committed.
fn draft_of(name: &str) -> String {
    match name.ends_with(".seal.key") {
        true => format!("{name}.new.draft"),
        false => format!("{name}.draft"),
    }
}

/// An interrupted write of a key leaves a draft, and in older versions an empty file.
#[test]
fn half_made_keys_of_an_interrupted_first_start_are_made_again() {
    run(async {
        let mut platform = Platform::start().await;
        platform.stop().await;
        let data = platform.data_dir();
        let written = std::fs::read_to_string(data.join(MANIFEST)).expect("a manifest");
        std::fs::remove_dir_all(&data).expect("removed");
        let names = STORES
            .into_iter()
            .chain(KEYS)
            .map(|name| format!("\"{name}\""));
        let all = format!("pending = [{}]", names.collect::<Vec<_>>().join(", "));
        for with_manifest in [true, false] {
            for name in KEYS {
                let path = data.join(name);
                std::fs::create_dir_all(path.parent().expect("a folder")).expect("made");
                std::fs::write(&path, "").expect("written");
                std::fs::write(data.join(draft_of(name)), "half").expect("written");
            }
            if with_manifest {
                let pending = written.replace("pending = []", &all);
                std::fs::write(data.join(MANIFEST), pending).expect("written");
            }
            platform.restart().await;
            platform.stop().await;
            for name in KEYS {
                assert!(!data.join(draft_of(name)).exists(), "{name}");
            }
            std::fs::remove_dir_all(&data).expect("removed");
        }
    });
}
