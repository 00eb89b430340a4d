//! The streams as they are written down, and read again: the fold, each session's last number and its window.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use rkyv::rancor::Error as RkyvError;
use rkyv::util::AlignedVec;
use tokio::sync::watch;
use types::{Handle, HoldPart, NodeId, Sequence, SessionIx, order_hold};

use super::{IDLE_MESSAGES_MAX, Idle, Kept, Resting, State, Stream, Streams};
use crate::fold::{Fold, FoldImage};

/// Of the format: another one is passed over.
const VERSION: u32 = 1;

/// Everything that the journal up to one sequence determines of the streams; who is logged in is no part of it.
#[derive(Clone, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct StreamsImage {
    version: u32,
    fold: FoldImage,
    streams: Vec<StreamImage>,
    /// Sessions by the time since when nobody has read them, longest first.
    idle: Vec<u32>,
    resting: Vec<Handle>,
}

/// One session's.
#[derive(Clone, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct StreamImage {
    /// Number of the last message.
    last: u64,
    /// The window: what each message answers, its length, and all of them behind each other.
    answers: Vec<u64>,
    lengths: Vec<u32>,
    bytes: Vec<u8>,
}

/// The streams at one sequence, taken in a moment and made an image elsewhere.
pub struct Taken {
    fold: FoldImage,
    streams: Vec<(u64, VecDeque<Kept>)>,
    idle: Vec<u32>,
    resting: Vec<Handle>,
}

/// A place in the past to read on from: the fold, and the last number of each session.
pub struct Place {
    pub fold: Fold,
    pub numbers: Vec<u64>,
}

impl Streams {
    /// Takes the state, with at most [`IDLE_MESSAGES_MAX`] messages: those that are kept when it is read again, with nobody logged in. Cost: a copy of the fold and of
    /// one reference a message, under the streams' lock.
    pub fn take(&self) -> Taken {
        let state = self.lock();
        let index = |at: usize| u32::try_from(at).expect("sessions are numbered by 32 bits");
        let mut idle: Vec<u32> = Vec::new();
        // Whoever is logged in now is the last to have left when this is read again.
        let queued = state.idle.queue.iter().copied();
        idle.extend(
            queued
                .filter(|at| state.streams[*at].live.is_none())
                .map(index),
        );
        let live = state.streams.iter().enumerate();
        idle.extend(
            live.filter(|(_, stream)| stream.live.is_some())
                .map(|(at, _)| index(at)),
        );
        let last = state.streams.iter().map(|stream| stream.last);
        let mut streams: Vec<_> = last.map(|last| (last, VecDeque::new())).collect();
        let mut room = IDLE_MESSAGES_MAX;
        for at in idle.iter().rev() {
            let window = &state.streams[*at as usize].window;
            let Some(left) = room.checked_sub(window.len()) else {
                break;
            };
            streams[*at as usize].1.clone_from(window);
            room = left;
        }
        Taken {
            fold: state.fold.image(),
            streams,
            idle,
            resting: state.resting.holds.keys().copied().collect(),
        }
    }

    /// The streams of an image with nobody logged in.
    ///
    /// # Errors
    /// A text: no journal of this node can have made it.
    pub fn restore(payload: &AlignedVec, node: NodeId) -> Result<Self, String> {
        let image = rkyv::from_bytes::<StreamsImage, RkyvError>(payload);
        let image = image.map_err(|error| error.to_string())?;
        refuse_version(image.version)?;
        let fold = Fold::restore(image.fold, node)?;
        if image.streams.len() != fold.sessions().len() {
            return Err("sessions have no streams".to_owned());
        }
        let streams = image.streams.into_iter().map(StreamImage::stream);
        let mut streams = streams.collect::<Result<Vec<_>, _>>()?;
        let mut idle = Idle::default();
        for at in image.idle {
            let at = at as usize;
            let stream = streams.get_mut(at).ok_or("an idle session is unknown")?;
            idle.note(at, stream);
        }
        idle.keep_bound(&mut streams, IDLE_MESSAGES_MAX);
        let sessions = fold.sessions().iter().map(|s| (s.key, s.session));
        let sequence = fold.sequence();
        Ok(Self {
            state: std::sync::Mutex::new(State {
                sessions: sessions.collect(),
                streams,
                idle,
                claim: 0,
                resting: Resting::of(&fold, &image.resting),
                facts: Vec::new(),
                fold,
            }),
            position: watch::Sender::new(sequence),
        })
    }
}

impl Taken {
    pub fn sequence(&self) -> Sequence {
        self.fold.sequence
    }

    pub fn image(mut self) -> StreamsImage {
        self.resting
            .sort_unstable_by_key(|handle| (handle.slot, handle.generation));
        StreamsImage {
            version: VERSION,
            fold: self.fold,
            streams: self.streams.iter().map(StreamImage::of).collect(),
            idle: self.idle,
            resting: self.resting,
        }
    }

    /// # Errors
    /// There is no memory for it.
    pub fn encode(self) -> Result<AlignedVec, RkyvError> {
        rkyv::to_bytes::<RkyvError>(&self.image())
    }
}

impl StreamImage {
    fn of((last, window): &(u64, VecDeque<Kept>)) -> Self {
        let length = |kept: &Kept| u32::try_from(kept.bytes.len()).expect("a message is short");
        Self {
            last: *last,
            answers: window.iter().map(|kept| kept.answers).collect(),
            lengths: window.iter().map(length).collect(),
            bytes: window.iter().flat_map(|kept| kept.bytes.clone()).collect(),
        }
    }

    fn stream(self) -> Result<Stream, String> {
        let mut bytes = Bytes::from(self.bytes);
        let mut window = VecDeque::with_capacity(self.lengths.len());
        let is_even = self.answers.len() == self.lengths.len()
            && self.lengths.len() as u64 <= self.last
            && self.lengths.iter().map(|len| *len as usize).sum::<usize>() == bytes.len();
        if !is_even {
            return Err("the window of a session does not add up".to_owned());
        }
        for (answers, length) in self.answers.into_iter().zip(self.lengths) {
            let bytes = bytes.split_to(length as usize);
            window.push_back(Kept { answers, bytes });
        }
        Ok(Stream {
            last: self.last,
            window,
            ..Stream::default()
        })
    }
}

impl Resting {
    fn of(fold: &Fold, handles: &[Handle]) -> Self {
        let orders: HashMap<Handle, _> = fold.orders().map(|o| (o.handle, o.id)).collect();
        let mut resting = Self::default();
        for handle in handles {
            // One that is not open has nothing to be asked for.
            if let Some(id) = orders.get(handle) {
                let hold_id = order_hold(*id, HoldPart::Main);
                resting.by_hold.insert(hold_id, *handle);
                resting.holds.insert(*handle, hold_id);
            }
        }
        resting
    }
}

impl Place {
    /// The place of an image, if `is_before` takes it: asked with each session's last number and last client sequence, zeros for one that was not there.
    ///
    /// # Errors
    /// A text: it is no image of this node, or not before what is looked for.
    pub fn of(
        payload: &AlignedVec,
        node: NodeId,
        is_before: impl Fn(&dyn Fn(SessionIx) -> (u64, u64)) -> bool,
    ) -> Result<Option<Self>, String> {
        let archived = rkyv::access::<ArchivedStreamsImage, RkyvError>(payload);
        let archived = archived.map_err(|error| error.to_string())?;
        refuse_version(archived.version.to_native())?;
        let told = |session: SessionIx| {
            let stream = archived.streams.get(session.index());
            let known = archived.fold.sessions.get(session.index());
            (
                stream.map_or(0, |stream| stream.last.to_native()),
                known.map_or(0, |known| known.client_seq.to_native()),
            )
        };
        if !is_before(&told) {
            return Ok(None);
        }
        let fold = rkyv::deserialize::<FoldImage, RkyvError>(&archived.fold);
        let fold = fold.map_err(|error| error.to_string())?;
        Ok(Some(Self {
            fold: Fold::restore(fold, node)?,
            numbers: archived
                .streams
                .iter()
                .map(|s| s.last.to_native())
                .collect(),
        }))
    }
}

fn refuse_version(version: u32) -> Result<(), String> {
    match version {
        VERSION => Ok(()),
        other => Err(format!("version {other} of the format")),
    }
}
