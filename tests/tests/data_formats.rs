//! Data folders of earlier versions open in this one.
//!
//! From format 8 on, a change of the journal's format requires a migration, and a folder of the
//! previous format in `tests/data`. To make one, run `platform` on a new folder and `platform demo
//! --connect`, stop the platform cleanly, and pack the folder with `tar` and `gzip`.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::json;
use tests::process::Platform;
use tests::shared::run;

/// Oldest format that has a folder.
const OLDEST: u32 = 8;
/// Number of trades that `platform demo` makes.
const TRADES: u64 = 3;

/// Unpacks the data folder of a format into a new working folder; returns the latter.
fn unpacked(format: u32) -> PathBuf {
    let archive = Path::new(env!("CARGO_MANIFEST_DIR")).join("data");
    let archive = archive.join(format!("format-{format}.tar.gz"));
    let folder = tempfile::tempdir().expect("a folder").keep();
    let mut tar = Command::new("tar");
    tar.arg("-xzf").arg(&archive).arg("-C").arg(&folder);
    let status = tar.status().expect("tar runs");
    assert!(status.success(), "cannot unpack {}", archive.display());
    folder
}

#[test]
fn a_data_folder_of_every_format_since_the_eighth_opens_and_goes_on() {
    run(async {
        for format in OLDEST..=types::command::FORMAT {
            let mut platform = Platform::start_in(unpacked(format), &[]).await;
            let proof = platform.proof().await;
            assert_ne!(proof["instruments"], json!([]), "format {format}: {proof}");
            let user = platform.trader().await;
            platform.deposit(&user, "10.00").await;
            platform.stop().await;

            let data = platform.data_dir().display().to_string();
            let replay = ["--json", "--data-dir", &data, "journal", "replay"];
            let replayed = platform.cli(&replay).await.success().json();
            assert_eq!(replayed["trades"], json!(TRADES), "format {format}");
            platform.restart().await;
            platform.proof().await;
            platform.stop().await;
        }
    });
}
