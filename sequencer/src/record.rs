//! A command with all its events, as the journal keeps it: the unit of everything that happens behind the hot thread.

use journal::{Appender, Frame, FrameKind};
use rkyv::rancor::{Error as RkyvError, Strategy};
use rkyv::ser::writer::Buffer;
use rkyv::util::Align;
use types::command::ArchivedCommand;
use types::{Command, Envelope, Event, EventEnvelope, InstrumentIx, Sequence};

use crate::pack::{ARCHIVE_BYTES_MAX, PACKED_BYTES_MAX, pack, unpack};

/// A journalled command and what it caused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
}

/// An event as a payload: what its frame's header does not say.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct EventBody {
    number: u64,
    instrument: InstrumentIx,
    index: u32,
    event: Event,
}

const COMMAND_BYTES: usize = size_of::<ArchivedCommand>();
const EVENT_BYTES: usize = size_of::<ArchivedEventBody>();

const _: () = assert!(COMMAND_BYTES <= ARCHIVE_BYTES_MAX && COMMAND_BYTES.is_multiple_of(8));
const _: () = assert!(EVENT_BYTES <= ARCHIVE_BYTES_MAX && EVENT_BYTES.is_multiple_of(8));

/// Writes records into the journal's buffer; keeps the scratch space.
pub struct Encoder {
    archive: Align<[u8; ARCHIVE_BYTES_MAX]>,
    packed: [u8; PACKED_BYTES_MAX],
}

impl Default for Encoder {
    fn default() -> Self {
        Self {
            archive: Align([0; ARCHIVE_BYTES_MAX]),
            packed: [0; PACKED_BYTES_MAX],
        }
    }
}

impl Encoder {
    /// Appends a command and its events as one unit.
    pub fn append(
        &mut self,
        appender: &mut Appender,
        command: &Envelope,
        events: &[EventEnvelope],
    ) {
        let sequence = command.sequence.get();
        appender.append(
            FrameKind::Command,
            events.is_empty(),
            sequence,
            command.time_ns,
            self.encode(&command.command),
        );
        for (at, event) in events.iter().enumerate() {
            appender.append(
                FrameKind::Event,
                at + 1 == events.len(),
                sequence,
                command.time_ns,
                self.encode(&EventBody {
                    number: event.number,
                    instrument: event.instrument,
                    index: event.index,
                    event: event.event,
                }),
            );
        }
    }

    fn encode<T>(&mut self, value: &T) -> &[u8]
    where
        T: for<'a> rkyv::Serialize<Strategy<Buffer<'a>, RkyvError>>,
    {
        let mut writer = Buffer::from(&mut *self.archive);
        rkyv::api::serialize_using::<_, RkyvError>(value, &mut writer)
            .expect("commands and events are plain data of fixed size");
        let length = writer.len();
        pack(&self.archive[..length], &mut self.packed)
    }
}

/// Reads the command of a command frame.
///
/// # Errors
/// A text: the payload is no command of this version.
pub fn decode_command(frame: &Frame) -> Result<Envelope, String> {
    let command = decode::<Command, COMMAND_BYTES>(&frame.payload)
        .map_err(|error| format!("no readable command: {error}"))?;
    Ok(Envelope {
        sequence: Sequence(frame.sequence),
        time_ns: frame.time_ns,
        command,
    })
}

/// Reads the event of an event frame.
///
/// # Errors
/// A text: the payload is no event of this version.
pub fn decode_event(frame: &Frame) -> Result<EventEnvelope, String> {
    let body = decode::<EventBody, EVENT_BYTES>(&frame.payload)
        .map_err(|error| format!("no readable event: {error}"))?;
    Ok(EventEnvelope {
        sequence: Sequence(frame.sequence),
        time_ns: frame.time_ns,
        number: body.number,
        instrument: body.instrument,
        index: body.index,
        event: body.event,
    })
}

fn decode<T, const BYTES: usize>(payload: &[u8]) -> Result<T, String>
where
    T: rkyv::Archive,
    T::Archived: for<'a> rkyv::bytecheck::CheckBytes<rkyv::api::high::HighValidator<'a, RkyvError>>
        + rkyv::Deserialize<T, rkyv::api::high::HighDeserializer<RkyvError>>,
{
    let archive = unpack::<BYTES>(payload).ok_or("its lengths do not add up")?;
    rkyv::from_bytes::<T, RkyvError>(&*archive).map_err(|error| error.to_string())
}
