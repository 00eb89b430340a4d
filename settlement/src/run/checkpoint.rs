//! The fold written down now and then, so that a start does not read the journal from its first record.
//!
//! A checkpoint is taken when everything folded is posted. It names the ledger's position of that moment: a ledger that is behind it (an older copy put
//! back) needs records that are in the checkpoint already, and passes it over.

use std::path::PathBuf;

use rkyv::rancor::Error as RkyvError;
use sequencer::{CheckpointError, CheckpointKeeper, Checkpoints, Older, Proven, SnapshotConfig};
use types::{NodeId, Sequence};

use crate::batch::Settler;
use crate::fold::{Fold, FoldImage};

/// Of the format: another one is passed over.
const VERSION: u32 = 1;
/// Name of this reader of the journal.
const READER: &str = "settlement";

#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct Image {
    version: u32,
    /// The ledger's position.
    settled: Sequence,
    fold: FoldImage,
}

/// Where checkpoints are and when they are made.
pub(super) struct Keeping {
    dir: PathBuf,
    /// None are made without.
    config: Option<SnapshotConfig>,
    proven: Proven,
    keeper: Option<CheckpointKeeper>,
}

/// The folds that are written down.
pub(super) struct Saved {
    checkpoints: Checkpoints,
    node: NodeId,
    /// Of the journal.
    end: Sequence,
}

impl Saved {
    /// The newest good one that a ledger at `settled` is not behind; `None` without. Blocks.
    ///
    /// # Errors
    /// [`CheckpointError`].
    pub fn newest(&self, settled: Sequence) -> Result<Option<Fold>, CheckpointError> {
        self.checkpoints.refuse_ahead(self.end)?;
        Ok(self.checkpoints.newest(self.end, |sequence, payload| {
            let image = rkyv::from_bytes::<Image, RkyvError>(payload);
            let image = image.map_err(|error| error.to_string())?;
            if image.version != VERSION {
                return Err(format!("version {} of the format", image.version));
            }
            if image.settled > settled {
                return Err(format!("the ledger was at {} then", image.settled));
            }
            let fold = Fold::restore(image.fold, self.node)?;
            match fold.position() == sequence {
                true => Ok(fold),
                false => Err(format!("it stands at {}", fold.position())),
            }
        })?)
    }
}

impl Keeping {
    /// What is written and begun with is noted in `proven`.
    pub fn new(dir: PathBuf, config: Option<SnapshotConfig>, proven: Proven) -> Self {
        Self {
            dir,
            config,
            proven,
            keeper: None,
        }
    }

    /// What is there for a journal that ends at `end`.
    pub fn saved(&self, node: NodeId, end: Sequence) -> Saved {
        Saved {
            checkpoints: Checkpoints::new(&self.dir),
            node,
            end,
        }
    }

    /// Settlement goes on from this fold: checkpoints are made of it from now on.
    pub fn begin(&mut self, fold: &Fold) {
        let from = fold.position();
        self.proven.note(from);
        self.keeper = self.config.map(|config| {
            CheckpointKeeper::new(READER, &self.dir, config, from, self.proven.clone())
        });
    }

    /// Writes a checkpoint if one is due and nothing folded is left to be posted.
    pub fn take(&mut self, settler: &Settler) {
        let position = settler.fold().position();
        let Some(keeper) = self.keeper.as_mut().filter(|_| settler.is_empty()) else {
            return;
        };
        if keeper.is_due(position) {
            let image = Image {
                version: VERSION,
                settled: settler.sealed(),
                fold: settler.fold().image(),
            };
            keeper.write(position, Older::Few, move || {
                rkyv::to_bytes::<RkyvError>(&image)
            });
        }
    }
}
