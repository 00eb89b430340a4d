//! From the journal to the books: every command is applied again, every event compared with the one in the journal.

use std::path::Path;
use std::sync::Arc;

use admission::AdmissionConfig;
use journal::{FileStorage, Frame, FrameKind, Journal, JournalError, Storage};
use types::{EventEnvelope, Sequence};

use crate::core::Core;
use crate::record::{decode_command, decode_event};

/// Why a node cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error("the hot thread cannot be started: {0}")]
    Thread(std::io::Error),
}

/// Applies frames and compares.
pub(crate) struct Replay {
    pub core: Core,
    expected: Vec<EventEnvelope>,
    compared: usize,
    until: Option<Sequence>,
}

impl Replay {
    pub fn new(core: Core, until: Option<Sequence>) -> Self {
        Self {
            core,
            expected: Vec::new(),
            compared: 0,
            until,
        }
    }

    /// # Errors
    /// A text: the journal does not continue, or says something else than the books now do.
    pub fn frame(&mut self, frame: &Frame) -> Result<(), String> {
        if self.until.is_some_and(|until| frame.sequence > until.get()) {
            return Ok(());
        }
        match frame.kind {
            FrameKind::Command => {
                let envelope = decode_command(frame)?;
                if envelope.sequence != self.core.sequence().next() {
                    return Err(format!(
                        "command {} does not follow {}",
                        envelope.sequence.get(),
                        self.core.sequence().get()
                    ));
                }
                self.expected.clear();
                self.expected.extend_from_slice(self.core.apply(&envelope));
                self.compared = 0;
            }
            FrameKind::Event => {
                let event = decode_event(frame)?;
                if self.expected.get(self.compared) != Some(&event) {
                    return Err(format!(
                        "command {} caused {:?} when it was journalled and causes {:?} now",
                        frame.sequence,
                        event,
                        self.expected.get(self.compared)
                    ));
                }
                self.compared += 1;
            }
        }
        if frame.unit_end && self.compared != self.expected.len() {
            return Err(format!(
                "command {} caused {} events when it was journalled and causes {} now",
                frame.sequence,
                self.compared,
                self.expected.len()
            ));
        }
        Ok(())
    }
}

/// Opens the journal and brings the core to its end.
pub(crate) fn open(
    storage: Arc<dyn Storage>,
    config: journal::Config,
    core: Core,
) -> Result<(Journal, Core), StartError> {
    let mut replay = Replay::new(core, None);
    let journal = Journal::open(storage, config, |frame| replay.frame(frame))?;
    Ok((journal, replay.core))
}

/// The state after command `until` (or at the end) of the journal in `dir`. The journal must not be in use.
///
/// # Errors
/// [`StartError`]: the journal is damaged or says something else than the books now do.
pub fn replay(dir: &Path, until: Option<Sequence>) -> Result<Core, StartError> {
    let storage = FileStorage::new(dir, true).map_err(JournalError::Io)?;
    let mut replay = Replay::new(Core::new(AdmissionConfig::default()), until);
    Journal::open(Arc::new(storage), journal::Config::default(), |frame| {
        replay.frame(frame)
    })?
    .close();
    Ok(replay.core)
}
