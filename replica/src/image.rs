//! Checkpoints: writes and restores the state of a node.

use std::path::Path;

use admission::AdmissionConfig;
use rkyv::rancor::Error as RkyvError;
use rkyv::util::AlignedVec;
use sequencer::image::CoreImage;
use sequencer::{CheckpointError, Checkpoints, Core};
use types::{HoldKind, NodeId, Sequence, SessionIx};

use crate::orders::OrderDetails;
use crate::state::{HoldDetails, SessionDetails, State, Tables};

/// The replica's own tables, stored in the core's image and under its version.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct TablesImage {
    node: u8,
    /// Details of open orders, in slot order.
    orders: Vec<OrderDetails>,
    holds: Vec<HoldDetails>,
    sessions: Vec<SessionDetails>,
}

/// Position of a session in a checkpoint; zeros before the session's first message and answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionPosition {
    /// Number of the session's last message.
    pub last_number: u64,
    /// Client sequence of the session's last answered request.
    pub client_seq: u64,
}

/// A checkpoint in memory.
pub struct Checkpoint {
    image: CoreImage,
    tables: TablesImage,
}

impl State {
    /// Copies the state into a checkpoint.
    pub fn checkpoint(&self) -> Checkpoint {
        let tables = self.tables();
        let open = self.core().admission().orders();
        let details = open.map(|order| *tables.orders.details(order.handle));
        Checkpoint {
            image: self.core().image(),
            tables: TablesImage {
                node: self.node().get(),
                orders: details.collect(),
                holds: tables.holds.clone(),
                sessions: tables.sessions.clone(),
            },
        }
    }

    /// Restores the state from a checkpoint.
    ///
    /// # Errors
    /// Why no journal of this node can have produced the checkpoint.
    fn restore(node: NodeId, limits: AdmissionConfig, found: &Checkpoint) -> Result<Self, String> {
        let core = Core::restore(&found.image, limits).map_err(|error| error.to_string())?;
        let tables = found.tables.restore(node, &core)?;
        Ok(Self::from_parts(node, core, tables))
    }
}

impl TablesImage {
    /// The tables, checked against the core.
    fn restore(&self, node: NodeId, core: &Core) -> Result<Tables, String> {
        if self.node != node.get() {
            return Err(format!("the checkpoint belongs to node {}", self.node));
        }
        let admission = core.admission();
        let mut tables = Tables {
            holds: self.holds.clone(),
            sessions: self.sessions.clone(),
            ..Tables::default()
        };
        let mut details = self.orders.iter();
        for order in admission.orders() {
            let found = details
                .next()
                .filter(|d| d.generation == order.handle.generation);
            let found = found.ok_or_else(|| format!("order {} has no details", order.handle))?;
            let by = (order.user, order.sequence);
            tables.orders.insert(order.handle.slot, by, *found, None);
        }
        let holds = admission.holds().count();
        let session = |at: usize| u32::try_from(at).ok().map(SessionIx);
        let has_session = |at| session(at).is_some_and(|ix| admission.session(ix).is_some());
        let sessions = self.sessions.len();
        let has_sessions = !has_session(sessions) && (sessions == 0 || has_session(sessions - 1));
        if details.next().is_some() || self.holds.len() != holds || !has_sessions {
            return Err("the replica's tables do not match the core".to_owned());
        }
        let trading = admission
            .holds()
            .filter(|(_, balance)| balance.kind == HoldKind::Trading);
        tables.trading = trading.map(|(hold, _)| hold).collect();
        Ok(tables)
    }
}

impl Checkpoint {
    /// Serializes the checkpoint.
    ///
    /// # Errors
    /// Out of memory.
    pub fn encode(self) -> Result<AlignedVec, RkyvError> {
        let tables = rkyv::to_bytes::<RkyvError>(&self.tables)?;
        self.image.with_replica_tables(tables.to_vec()).encode()
    }

    fn decode(payload: &AlignedVec) -> Result<Self, String> {
        let image = CoreImage::decode(payload).map_err(|error| error.to_string())?;
        let mut aligned = AlignedVec::<16>::with_capacity(image.replica_tables().len());
        aligned.extend_from_slice(image.replica_tables());
        let tables = rkyv::from_bytes::<TablesImage, RkyvError>(&aligned);
        let tables = tables.map_err(|error| error.to_string())?;
        Ok(Self { image, tables })
    }

    /// Position of a session in the checkpoint; zeros if unknown.
    pub fn session_position(&self, session: SessionIx) -> SessionPosition {
        let row = self.image.session(session);
        row.map_or_else(SessionPosition::default, |row| SessionPosition {
            last_number: row.last_number,
            client_seq: row.client_seq,
        })
    }
}

/// Restores the state from a checkpoint's payload, which may be arbitrary bytes.
///
/// # Errors
/// Why no journal of this node can have produced the payload.
pub fn restore(
    node: NodeId,
    limits: AdmissionConfig,
    payload: &AlignedVec,
) -> Result<State, String> {
    State::restore(node, limits, &Checkpoint::decode(payload)?)
}

/// Restores the newest checkpoint at or before `until` that `accepts` accepts. Blocks.
///
/// If there is none, returns the state at the beginning of the journal.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn restore_newest(
    dir: &Path,
    node: NodeId,
    limits: AdmissionConfig,
    until: Sequence,
    accepts: impl Fn(&Checkpoint) -> bool,
) -> Result<State, CheckpointError> {
    let newest = Checkpoints::new(dir).newest(until, |_, payload| {
        let found = Checkpoint::decode(payload)?;
        let restore = || State::restore(node, limits, &found);
        accepts(&found).then(restore).transpose()
    })?;
    Ok(newest.unwrap_or_else(|| State::new(node, limits)))
}

/// Restores the oldest checkpoint at or after `from`; `None` if there is none. Blocks.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn restore_oldest(
    dir: &Path,
    node: NodeId,
    limits: AdmissionConfig,
    from: Sequence,
) -> Result<Option<State>, CheckpointError> {
    let restored = Checkpoints::new(dir).oldest(from, |_, payload| restore(node, limits, payload));
    Ok(restored?)
}
