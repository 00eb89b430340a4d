//! Watches the free space on the disks of the data folder. Below the reserve the market refuses new
//! orders, while the stores can still write. Cancels, settlement and payments continue and may use
//! the reserve (`design.md` 7).

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sequencer::Backlog;
use tokio_util::sync::CancellationToken;

/// Pause between two checks.
const INTERVAL: Duration = Duration::from_secs(1);
/// Part of the market's health.
const PART: &str = "disk";

/// A file system, represented by the first folder found on it.
struct Disk {
    name: String,
    folder: PathBuf,
}

impl Disk {
    /// Bytes that the platform can still write.
    fn free(&self) -> io::Result<u64> {
        let found = rustix::fs::statvfs(&self.folder)?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }
}

/// The disks of the data folder and of the folders directly in it, which may be mounted separately.
fn disks(data_dir: &Path) -> io::Result<Vec<Disk>> {
    let name = "data".to_owned();
    let folder = data_dir.to_owned();
    let mut seen = HashSet::from([folder.metadata()?.dev()]);
    let mut found = vec![Disk { name, folder }];
    for entry in std::fs::read_dir(data_dir)? {
        let entry = entry?;
        // Follows links. Skips an entry that was removed meanwhile.
        let Ok(metadata) = std::fs::metadata(entry.path()) else {
            continue;
        };
        if metadata.is_dir() && seen.insert(metadata.dev()) {
            let name = entry.file_name().to_string_lossy().into_owned();
            let folder = entry.path();
            found.push(Disk { name, folder });
        }
    }
    Ok(found)
}

/// Decides from the free space whether the market accepts new orders.
struct Reserve {
    bytes: u64,
    is_low: bool,
}

impl Reserve {
    /// The reason to refuse new orders; `None` while they are accepted. After a refusal they are
    /// accepted again once a quarter more than the reserve is free.
    fn judge<'a>(&mut self, free: impl IntoIterator<Item = (&'a str, u64)>) -> Option<String> {
        let needed = match self.is_low {
            true => self.bytes.saturating_add(self.bytes / 4),
            false => self.bytes,
        };
        let short = free.into_iter().find(|(_, bytes)| *bytes < needed);
        self.is_low = short.is_some();
        let mib = self.bytes.saturating_add(self.bytes / 4) >> 20;
        let text = |name| {
            format!("the disk of {name} is low: new orders are accepted again above {mib} MiB free")
        };
        short.map(|(name, _)| text(name))
    }
}

/// Closes the market to new orders while a disk has fewer than `reserve` free bytes, until
/// shutdown. A read error fails the part in `health` and leaves the market as it is.
pub async fn watch(
    data_dir: PathBuf,
    reserve: u64,
    backlog: Arc<Backlog>,
    health: rpc::Health,
    shutdown: CancellationToken,
) {
    let mut reserve = Reserve {
        bytes: reserve,
        is_low: false,
    };
    while !shutdown.is_cancelled() {
        let folder = data_dir.clone();
        // The call may block on a network file system.
        let measured = tokio::task::spawn_blocking(move || {
            let disks = disks(&folder)?;
            let free = |disk: Disk| Ok((disk.free()?, disk.name));
            disks.into_iter().map(free).collect::<io::Result<Vec<_>>>()
        });
        match measured.await.map_err(io::Error::other).flatten() {
            Ok(free) => {
                for (bytes, name) in &free {
                    metrics::gauge!("disk_free_bytes", "folder" => name.clone()).set(*bytes as f64);
                }
                let trouble = reserve.judge(free.iter().map(|(bytes, name)| (&**name, *bytes)));
                backlog.set_disk_low(reserve.is_low);
                health.set(PART, trouble.as_deref());
            }
            Err(error) => health.set_failing(PART, format!("free space is unknown: {error}")),
        }
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = shutdown.cancelled() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_stop_below_the_reserve_and_pass_again_a_quarter_above_it() {
        let mut reserve = Reserve {
            bytes: 400 << 20,
            is_low: false,
        };
        let mut judge = |data: u64, journal: u64| {
            reserve.judge([("data", data << 20), ("journal", journal << 20)])
        };
        assert_eq!(judge(400, 9_000), None);
        let low = "the disk of journal is low: new orders are accepted again above 500 MiB free";
        assert_eq!(judge(9_000, 399).as_deref(), Some(low));
        assert_eq!(judge(9_000, 499).as_deref(), Some(low));
        assert_eq!(judge(500, 500), None);
        assert_eq!(judge(400, 400), None);
    }

    /// Watches the folder until `is_there` is true; returns whether the disk then counts as low.
    async fn watched(
        folder: &Path,
        reserve: u64,
        was_low: bool,
        is_there: impl Fn(&Backlog, &rpc::Health) -> bool,
    ) -> bool {
        let (backlog, health) = (Arc::new(Backlog::default()), rpc::Health::new("market"));
        backlog.set_disk_low(was_low);
        let until = CancellationToken::new();
        let (data_dir, shown) = (folder.to_owned(), health.clone());
        let watching = watch(data_dir, reserve, backlog.clone(), shown, until.clone());
        let watching = tokio::spawn(watching);
        let waiting = async {
            while !is_there(&backlog, &health) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(60), waiting).await;
        waited.expect("the expected state");
        until.cancel();
        watching.await.expect("the watch ends");
        backlog.is_disk_low()
    }

    #[tokio::test]
    async fn a_low_disk_closes_the_market_and_shows_in_its_health() {
        let folder = tempfile::tempdir().expect("folder");
        std::fs::create_dir(folder.path().join("journal")).expect("folder");
        let found = disks(folder.path()).expect("disks");
        assert_eq!(found.len(), 1, "one file system");
        let more = found[0].free().expect("free space").saturating_mul(4);

        let reason = |health: &rpc::Health| health.failing().get(PART).cloned();
        let is_low = watched(folder.path(), more, false, |backlog, health| {
            backlog.is_disk_low() && reason(health).is_some()
        });
        assert!(is_low.await);
        let is_low = watched(folder.path(), 1, true, |backlog, _| !backlog.is_disk_low());
        assert!(!is_low.await);
        let lost = folder.path().join("lost");
        let is_low = watched(&lost, 1, true, |_, health| {
            reason(health).is_some_and(|text| text.contains("unknown"))
        });
        assert!(is_low.await, "an unknown state changes nothing");
    }
}
