//! Checkpoints: the state of a node as it is written down, and read again.

use std::path::Path;

use admission::AdmissionConfig;
use rkyv::rancor::Error as RkyvError;
use rkyv::util::AlignedVec;
use sequencer::image::CoreImage;
use sequencer::{CheckpointError, Checkpoints, Core};
use types::{NodeId, PoolKind, Sequence, SessionIx};

use crate::state::{HoldDetails, OrderDetails, SessionDetails, State, Tables};

/// The replica's own tables, beside the image of the machine, under whose version they are too.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct Beside {
    node: u8,
    /// Of open orders, in slot order.
    orders: Vec<OrderDetails>,
    holds: Vec<HoldDetails>,
    sessions: Vec<SessionDetails>,
}

/// A checkpoint as it is written and read: the state is made of it where it is wanted.
pub struct Checkpoint {
    image: CoreImage,
    beside: Beside,
}

impl State {
    /// Cost: a copy of the state.
    pub fn take(&self) -> Checkpoint {
        let tables = self.tables();
        let open = self.core().admission().orders();
        let details = open.map(|order| {
            let details = tables.orders[order.handle.slot as usize];
            details.expect("an open order has details")
        });
        Checkpoint {
            image: self.core().image(),
            beside: Beside {
                node: self.node().get(),
                orders: details.collect(),
                holds: tables.holds.clone(),
                sessions: tables.sessions.clone(),
            },
        }
    }

    /// The state of a checkpoint's payload.
    ///
    /// # Errors
    /// A text: no journal of this node can have made it.
    fn restore(node: NodeId, limits: AdmissionConfig, found: &Checkpoint) -> Result<Self, String> {
        let core = Core::restore(&found.image, limits).map_err(|error| error.to_string())?;
        let tables = found.beside.tables(node, &core)?;
        Ok(Self::from_parts(node, core, tables))
    }
}

impl Beside {
    fn tables(&self, node: NodeId, core: &Core) -> Result<Tables, String> {
        if self.node != node.get() {
            return Err(format!("it is of node {}", self.node));
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
            let slot = order.handle.slot as usize;
            tables.orders.resize(slot + 1, None);
            tables.orders[slot] = Some(*found);
        }
        let holds = admission.pools().count();
        let session = |at: usize| u32::try_from(at).ok().map(SessionIx);
        let has_session = |at| session(at).is_some_and(|ix| admission.session(ix).is_some());
        let sessions = self.sessions.len();
        let has_sessions = !has_session(sessions) && (sessions == 0 || has_session(sessions - 1));
        if details.next().is_some() || self.holds.len() != holds || !has_sessions {
            return Err("its tables are not those of the machine".to_owned());
        }
        let trading = admission
            .pools()
            .filter(|(_, pool)| pool.kind == PoolKind::Trading);
        tables.trading = trading.map(|(hold, _)| hold).collect();
        Ok(tables)
    }
}

impl Checkpoint {
    /// The payload of a checkpoint.
    ///
    /// # Errors
    /// There is no memory for it.
    pub fn encode(self) -> Result<AlignedVec, RkyvError> {
        let beside = rkyv::to_bytes::<RkyvError>(&self.beside)?;
        self.image.with_beside(beside.to_vec()).encode()
    }

    fn decode(payload: &AlignedVec) -> Result<Self, String> {
        let image = CoreImage::decode(payload).map_err(|error| error.to_string())?;
        let mut aligned = AlignedVec::<16>::with_capacity(image.beside().len());
        aligned.extend_from_slice(image.beside());
        let beside = rkyv::from_bytes::<Beside, RkyvError>(&aligned);
        let beside = beside.map_err(|error| error.to_string())?;
        Ok(Self { image, beside })
    }

    /// Number of the last message of a session, and the last request of it that was answered; zeros
    /// for one that was not there.
    pub fn told(&self, session: SessionIx) -> (u64, u64) {
        let row = self.image.session(session);
        row.map_or((0, 0), |row| (row.last_number, row.client_seq))
    }
}

/// The state of a checkpoint's payload, whose bytes may be anything.
///
/// # Errors
/// A text: no journal of this node can have made it.
pub fn restore(
    node: NodeId,
    limits: AdmissionConfig,
    payload: &AlignedVec,
) -> Result<State, String> {
    State::restore(node, limits, &Checkpoint::decode(payload)?)
}

/// The newest state at or before `until` that is written down and that `is_wanted` takes; the
/// beginning of the journal without. Blocks.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn newest(
    dir: &Path,
    node: NodeId,
    limits: AdmissionConfig,
    until: Sequence,
    is_wanted: impl Fn(&Checkpoint) -> bool,
) -> Result<State, CheckpointError> {
    let newest = Checkpoints::new(dir).newest(until, |_, payload| {
        let found = Checkpoint::decode(payload)?;
        let restore = || State::restore(node, limits, &found);
        is_wanted(&found).then(restore).transpose()
    })?;
    Ok(newest.unwrap_or_else(|| State::new(node, limits)))
}

/// The oldest state at or behind `from`; `None` without one. Blocks.
///
/// # Errors
/// The folder cannot be read.
pub(crate) fn oldest(
    dir: &Path,
    node: NodeId,
    limits: AdmissionConfig,
    from: Sequence,
) -> Result<Option<State>, CheckpointError> {
    let restored = Checkpoints::new(dir).oldest(from, |_, payload| restore(node, limits, payload));
    Ok(restored?)
}
