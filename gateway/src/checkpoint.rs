//! The state behind the journal written down now and then, so that a start reads neither sessions nor history from the first record, and the past from
//! somewhere near.
//!
//! One checkpoint serves both readers: the streams write it, and only once the history holds everything up to it, durable in its own store. Older
//! ones stay, the further back the fewer: what has left the windows is told from the nearest one before it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use sequencer::{CheckpointError, CheckpointKeeper, Checkpoints, Older, Proven, SnapshotConfig};
use tokio_util::sync::CancellationToken;
use types::{NodeId, Sequence, SessionIx};

use crate::fold::Fold;
use crate::market::Market;
use crate::streams::{Place, Streams};

/// Name of this reader of the journal.
const READER: &str = "market";
/// How often it is looked whether one is due.
const INTERVAL: Duration = Duration::from_millis(100);

/// What a start goes on from.
pub struct Saved {
    pub streams: Streams,
    /// The fold behind the history's rows.
    pub history: Fold,
}

/// Folder of the checkpoints in the room's data folder.
pub fn folder(data_dir: &Path) -> PathBuf {
    data_dir.join("checkpoints")
}

/// The newest good states: of the streams at or before `end`, the end of the journal, and behind the rows at or before `written` too. Blocks.
///
/// # Errors
/// The folder cannot be read, or says more than the journal.
pub fn load(
    data_dir: &Path,
    node: NodeId,
    end: Sequence,
    written: Sequence,
) -> Result<Saved, CheckpointError> {
    let checkpoints = Checkpoints::new(&folder(data_dir));
    checkpoints.refuse_ahead(end)?;
    let streams = checkpoints.newest(end, |_, payload| Streams::restore(payload, node))?;
    let history = checkpoints.newest(end.min(written), |_, payload| {
        let place = Place::of(payload, node, |_| true)?;
        Ok(place.expect("any place is taken").fold)
    })?;
    Ok(Saved {
        streams: streams.unwrap_or_else(|| Streams::new(node)),
        history: history.unwrap_or_else(|| Fold::new(node)),
    })
}

/// The newest place that `is_before` takes, see [`Place::of`]; the beginning of the journal without. Blocks.
///
/// # Errors
/// The folder cannot be read.
pub fn place_before(
    data_dir: &Path,
    node: NodeId,
    is_before: impl Fn(&dyn Fn(SessionIx) -> (u64, u64)) -> bool,
) -> Result<Place, CheckpointError> {
    let checkpoints = Checkpoints::new(&folder(data_dir));
    let mut until = Sequence(u64::MAX);
    loop {
        let found = checkpoints.newest(until, |sequence, payload| {
            Ok((sequence, Place::of(payload, node, &is_before)?))
        })?;
        match found {
            Some((_, Some(place))) => return Ok(place),
            Some((sequence, None)) if sequence > Sequence(1) => {
                until = Sequence(sequence.get() - 1)
            }
            _ => {
                return Ok(Place {
                    fold: Fold::new(node),
                    numbers: Vec::new(),
                });
            }
        }
    }
}

/// The oldest place behind which the journal goes on, when everything up to `removed` has left it; `None` without one. Blocks.
///
/// # Errors
/// The folder cannot be read.
pub fn oldest_place(
    data_dir: &Path,
    node: NodeId,
    removed: Sequence,
) -> Result<Option<Place>, CheckpointError> {
    let checkpoints = Checkpoints::new(&folder(data_dir));
    let place = checkpoints.oldest(removed, |_, payload| {
        let place = Place::of(payload, node, |_| true)?;
        Ok(place.expect("any place is taken"))
    });
    Ok(place?)
}

/// Writes checkpoints until shutdown, and notes them in `proven`.
pub async fn run(
    market: Arc<Market>,
    config: SnapshotConfig,
    proven: Proven,
    shutdown: CancellationToken,
) {
    let saved = market.streams.position();
    let folder = folder(&market.config.data_dir);
    let mut keeper = CheckpointKeeper::new(READER, &folder, config, saved, proven);
    loop {
        tokio::select! {
            () = tokio::time::sleep(INTERVAL) => {}
            () = shutdown.cancelled() => return,
        }
        if !keeper.is_due(market.streams.position()) {
            continue;
        }
        let taken = market.streams.take();
        let sequence = taken.sequence();
        tokio::select! {
            () = market.projection.wait(sequence) => {}
            () = shutdown.cancelled() => return,
        }
        let reader = market.read_journal(sequence);
        let older = Older::past(move || reader.removed_through());
        keeper.write(sequence, older, move || taken.encode());
    }
}

#[cfg(test)]
mod tests;
