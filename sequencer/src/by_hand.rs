//! A node without a hot thread: whoever owns it turns it, on his own thread. The same path, turn by turn: what
//! a command costs without anything beside it, or a simulation that decides when what happens. Not for a
//! market: nothing happens while nobody turns.

use std::sync::Arc;

use crate::backlog::Backlog;
use crate::config::Config;
use crate::handle::{self, Commit, SequencerHandle};
use crate::hot::Hot;
use crate::port::Port;
use crate::recover::StartError;

/// A node that its owner turns.
pub struct ByHand {
    /// Before the journal it writes to.
    hot: Option<Hot>,
    port: Port,
    /// The journal, if there is one.
    kept: Option<SequencerHandle>,
}

impl ByHand {
    /// Recovers from the journal in `config.dir`, as [`SequencerHandle::start`] does; the journal's thread runs.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: Config, backlog: Arc<Backlog>) -> Result<Self, StartError> {
        let (hot, kept) = handle::prepare(config, backlog)?;
        Ok(Self::new(hot, kept.port(), Some(kept)))
    }

    /// Empty books and no journal; `config` names folders that are not touched.
    pub fn volatile(config: Config, backlog: Arc<Backlog>) -> Self {
        let (hot, port, _) = handle::prepare_volatile(config, backlog);
        Self::new(hot, port, None)
    }

    fn new(mut hot: Hot, port: Port, kept: Option<SequencerHandle>) -> Self {
        hot.begin();
        Self {
            hot: Some(hot),
            port,
            kept,
        }
    }

    pub fn port(&self) -> Port {
        self.port.clone()
    }

    /// The commit position, if there is a journal.
    pub fn commit(&self) -> Option<Commit> {
        self.kept.as_ref().map(SequencerHandle::commit)
    }

    /// One turn: takes what was asked, matches, answers, hands over to the journal. True when there was anything to do.
    // Found by this name in a profile.
    #[inline(never)]
    pub fn turn(&mut self) -> bool {
        self.hot.as_mut().is_some_and(Hot::step)
    }
}

impl Drop for ByHand {
    fn drop(&mut self) {
        self.port.gate.stop();
        if let Some(hot) = self.hot.take() {
            hot.end();
        }
        drop(self.kept.take());
    }
}
