//! A command with all its events, as the journal keeps it: the unit of everything that happens behind the hot thread.

use journal::{Appender, Frame, FrameKind};
use rkyv::rancor::Error as RkyvError;
use rkyv::util::AlignedVec;
use types::{Command, Envelope, EventEnvelope, Sequence};

/// A journalled command and what it caused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
}

/// Writes records into the journal's buffer; keeps the scratch space.
#[derive(Default)]
pub struct Encoder {
    scratch: AlignedVec<8>,
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
        self.encode(&command.command);
        appender.append(
            FrameKind::Command,
            events.is_empty(),
            sequence,
            command.time_ns,
            &self.scratch,
        );
        for (at, event) in events.iter().enumerate() {
            self.encode(event);
            appender.append(
                FrameKind::Event,
                at + 1 == events.len(),
                sequence,
                command.time_ns,
                &self.scratch,
            );
        }
    }

    fn encode<T>(&mut self, value: &T)
    where
        T: for<'a> rkyv::Serialize<
                rkyv::api::high::HighSerializer<
                    AlignedVec<8>,
                    rkyv::ser::allocator::ArenaHandle<'a>,
                    RkyvError,
                >,
            >,
    {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        self.scratch = rkyv::api::high::to_bytes_in::<_, RkyvError>(value, scratch)
            .expect("commands and events are plain data of fixed size");
    }
}

/// Reads the command of a command frame.
///
/// # Errors
/// A text: the payload is no command of this version.
pub fn decode_command(frame: &Frame) -> Result<Envelope, String> {
    let command: Command =
        decode(&frame.payload).map_err(|error| format!("no readable command: {error}"))?;
    Ok(Envelope {
        sequence: Sequence(frame.sequence),
        time_ns: frame.time_ns,
        command,
    })
}

/// Reads the event of an event frame.
///
/// # Errors
/// A text: the payload is no event of this version, or of another command.
pub fn decode_event(frame: &Frame) -> Result<EventEnvelope, String> {
    let event: EventEnvelope =
        decode(&frame.payload).map_err(|error| format!("no readable event: {error}"))?;
    if event.sequence.get() != frame.sequence {
        return Err("the event names another command than its frame".to_owned());
    }
    Ok(event)
}

fn decode<T>(payload: &[u8]) -> Result<T, RkyvError>
where
    T: rkyv::Archive,
    T::Archived: for<'a> rkyv::bytecheck::CheckBytes<rkyv::api::high::HighValidator<'a, RkyvError>>
        + rkyv::Deserialize<T, rkyv::api::high::HighDeserializer<RkyvError>>,
{
    let mut aligned = AlignedVec::<8>::with_capacity(payload.len());
    aligned.extend_from_slice(payload);
    rkyv::from_bytes::<T, RkyvError>(&aligned)
}
