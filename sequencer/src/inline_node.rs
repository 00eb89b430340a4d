//! Driver without a hot thread: the caller polls the pipeline. Only the journal and the preparation
//! of price windows have threads. For benchmarks and simulation only.

use std::sync::Arc;

use crate::backlog::Backlog;
use crate::config::Config;
use crate::handle::{self, Commit, SequencerHandle};
use crate::hot::Hot;
use crate::port::Port;
use crate::recover::StartError;

/// A node without a hot thread.
pub struct InlineNode {
    /// Dropped before the journal it writes to.
    hot: Option<Hot>,
    port: Port,
    /// Owns the journal, if there is one.
    journalled: Option<SequencerHandle>,
}

impl InlineNode {
    /// Recovers as [`SequencerHandle::start`] does, and starts the journal's thread.
    ///
    /// # Errors
    /// [`StartError`].
    pub fn start(config: Config, backlog: Arc<Backlog>) -> Result<Self, StartError> {
        let (hot, handle) = handle::prepare(config, backlog)?;
        Ok(Self::new(hot, handle.port(), Some(handle)))
    }

    /// Starts with empty books and no journal. The folders in `config` are not touched.
    pub fn volatile(config: Config, backlog: Arc<Backlog>) -> Self {
        let (hot, port, _) = handle::prepare_volatile(config, backlog);
        Self::new(hot, port, None)
    }

    fn new(mut hot: Hot, port: Port, journalled: Option<SequencerHandle>) -> Self {
        hot.begin();
        Self {
            hot: Some(hot),
            port,
            journalled,
        }
    }

    pub fn port(&self) -> Port {
        self.port.clone()
    }

    /// The commit position, if there is a journal.
    pub fn commit(&self) -> Option<Commit> {
        self.journalled.as_ref().map(SequencerHandle::commit)
    }

    /// One iteration of the hot loop: requests, matching, answers, journal. True when it did work.
    /// Records may wait for the journal until an iteration without work.
    // Not inlined, so that profiles show it.
    #[inline(never)]
    pub fn poll(&mut self) -> bool {
        self.hot.as_mut().is_some_and(Hot::step)
    }
}

impl Drop for InlineNode {
    fn drop(&mut self) {
        self.port.gate.stop();
        // After a panic the last command may be incomplete, and must not reach the journal.
        if let Some(hot) = self.hot.take() {
            match std::thread::panicking() {
                true => self.port.gate.close(),
                false => hot.end(),
            }
        }
        drop(self.journalled.take());
    }
}
