//! Records: a command with all its events, as journalled.

use journal::{Appender, Frame, FrameKind, SMALL_BYTES};
use rkyv::rancor::{Error as RkyvError, Strategy};
use rkyv::ser::writer::Buffer;
use rkyv::util::Align;
use types::command::ArchivedCommand;
use types::{Command, Envelope, Event, EventEnvelope, InstrumentIx, Sequence};

use crate::codec::{self, COMMAND_WORDS, EVENT_WORDS, Put, WORDS_MAX};
use crate::varint::{PACKED_BYTES_MAX, Packer, unpack};

/// A journalled command with its events.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Record {
    #[serde(flatten)]
    pub command: Envelope,
    pub events: Vec<EventEnvelope>,
}

/// Assembles records from the frames of a log and reuses their memory.
#[derive(Default)]
pub(crate) struct RecordBuilder {
    record: Option<Record>,
    /// True while events of the record are missing.
    is_partial: bool,
}

impl RecordBuilder {
    /// Adds a frame; returns the record that it completes, whose events the caller may take.
    ///
    /// # Errors
    /// The frame is unreadable or does not follow the one before.
    pub fn add(&mut self, frame: &Frame) -> Result<Option<&mut Record>, String> {
        match (&mut self.record, frame.kind) {
            (Some(record), FrameKind::Event) if self.is_partial => {
                if record.command.sequence != Sequence(frame.sequence) {
                    return Err("frames out of order".to_owned());
                }
                record.events.push(decode_event(frame)?);
            }
            (_, FrameKind::Event) => return Err("an event without its command".to_owned()),
            (_, FrameKind::Command) if self.is_partial => {
                return Err("frames out of order".to_owned());
            }
            (Some(record), FrameKind::Command) => {
                record.command = decode_command(frame)?;
                record.events.clear();
            }
            (none, FrameKind::Command) => {
                let (command, events) = (decode_command(frame)?, Vec::new());
                *none = Some(Record { command, events });
            }
        }
        self.is_partial = !frame.unit_end;
        Ok(self.record.as_mut().filter(|_| frame.unit_end))
    }
}

impl Record {
    /// Moves the record out; the builder reuses what is left.
    pub(crate) fn take(&mut self) -> Self {
        Self {
            command: self.command,
            events: std::mem::take(&mut self.events),
        }
    }
}

/// Payload of an event frame: the fields that the frame's header does not contain.
#[derive(rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
struct EventBody {
    number: u64,
    instrument: InstrumentIx,
    index: u32,
    event: Event,
}

const COMMAND_BYTES: usize = size_of::<ArchivedCommand>();
const EVENT_BYTES: usize = size_of::<ArchivedEventBody>();

const _: () = assert!(COMMAND_BYTES == COMMAND_WORDS * 8 && EVENT_BYTES == EVENT_WORDS * 8);
/// Bytes before a command's archive: nanoseconds from the front's read to the command's time.
const WAITED_BYTES: usize = 4;

const _: () = assert!(WAITED_BYTES + PACKED_BYTES_MAX <= SMALL_BYTES);

/// Appends a command and its events as one unit, encoded in place in the journal's buffer.
pub fn append(appender: &mut Appender, command: &Envelope, events: &[EventEnvelope]) {
    let sequence = command.sequence.get();
    appender.append_small(
        FrameKind::Command,
        events.is_empty(),
        sequence,
        command.time_ns,
        |payload| {
            let (waited, payload) = payload.split_first_chunk_mut().expect("room for both");
            *waited = waited_ns(command).to_le_bytes();
            let mut packer = Packer::<COMMAND_WORDS>::new(payload);
            if !codec::encode_command(&command.command, &mut packer) {
                archive::<_, COMMAND_WORDS>(&command.command, &mut packer);
            }
            WAITED_BYTES + packer.finish()
        },
    );
    for (at, event) in events.iter().enumerate() {
        appender.append_small(
            FrameKind::Event,
            at + 1 == events.len(),
            sequence,
            command.time_ns,
            |payload| {
                let mut packer = Packer::<EVENT_WORDS>::new(payload);
                if !codec::encode_event(event, &mut packer) {
                    archive::<_, EVENT_WORDS>(&EventBody::from(event), &mut packer);
                }
                packer.finish()
            },
        );
    }
}

/// Nanoseconds from the read of the request by a front to the time of its command.
fn waited_ns(command: &Envelope) -> u32 {
    let waited = command.time_ns.saturating_sub(command.received_ns);
    u32::try_from(waited).unwrap_or(u32::MAX)
}

impl From<&EventEnvelope> for EventBody {
    fn from(event: &EventEnvelope) -> Self {
        Self {
            number: event.number,
            instrument: event.instrument,
            index: event.index,
            event: event.event,
        }
    }
}

/// Writes the first `COUNT` words of a value's archive, as rkyv encodes it.
#[cold]
#[inline(never)]
fn archive<T, const COUNT: usize>(value: &T, to: &mut impl Put)
where
    T: for<'a> rkyv::Serialize<Strategy<Buffer<'a>, RkyvError>>,
{
    let mut archive = Align([0; WORDS_MAX * 8]);
    let mut writer = Buffer::from(&mut *archive);
    rkyv::api::serialize_using::<_, RkyvError>(value, &mut writer)
        .expect("commands and events are plain data of fixed size");
    for bytes in &archive.as_chunks::<8>().0[..COUNT] {
        to.put(u64::from_le_bytes(*bytes));
    }
}

/// Decodes the command of a command frame.
///
/// # Errors
/// The payload is not a command of this version.
pub fn decode_command(frame: &Frame) -> Result<Envelope, String> {
    let (waited, archive) = frame
        .payload
        .split_first_chunk::<WAITED_BYTES>()
        .ok_or("unreadable command: its payload is too short")?;
    let command = decode::<Command, COMMAND_BYTES>(archive)
        .map_err(|error| format!("unreadable command: {error}"))?;
    let waited = u64::from(u32::from_le_bytes(*waited));
    Ok(Envelope {
        sequence: Sequence(frame.sequence),
        time_ns: frame.time_ns,
        command,
        received_ns: frame.time_ns.saturating_sub(waited),
    })
}

/// Decodes the event of an event frame.
///
/// # Errors
/// The payload is not an event of this version.
pub fn decode_event(frame: &Frame) -> Result<EventEnvelope, String> {
    let body = decode::<EventBody, EVENT_BYTES>(&frame.payload)
        .map_err(|error| format!("unreadable event: {error}"))?;
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
    let archive = unpack::<BYTES>(payload).ok_or("word lengths and payload size differ")?;
    rkyv::from_bytes::<T, RkyvError>(&*archive).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use types::command::{Amend, Cancel, New};
    use types::event::{Accepted, Amended, Cancelled, Rested, Trade};
    use types::{
        CancelReason, FeeRate, Handle, HoldIx, Id128, Lots, Minor, OrderType, Reserve, SessionIx,
        Side, StpGroup, StpMode, Ticks, TimeInForce, UserIx,
    };

    use super::*;

    /// SplitMix64.
    struct Random(u64);

    impl Random {
        fn long(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ (z >> 31)
        }

        fn word(&mut self) -> u32 {
            self.long() as u32
        }

        fn flag(&mut self) -> bool {
            self.long().is_multiple_of(2)
        }

        fn pick<T: Copy>(&mut self, all: &[T]) -> T {
            all[self.long() as usize % all.len()]
        }

        fn handle(&mut self) -> Handle {
            Handle {
                slot: self.word(),
                generation: self.word(),
            }
        }

        fn ticks(&mut self) -> Ticks {
            Ticks(self.long().cast_signed())
        }

        fn minor(&mut self) -> Minor {
            Minor(self.long().cast_signed())
        }

        fn reserve(&mut self) -> Reserve {
            Reserve {
                main: self.minor(),
                fee: self.minor(),
            }
        }

        fn key(&mut self) -> Id128 {
            if self.flag() {
                return Id128::NONE;
            }
            Id128::from_u128(u128::from(self.long()) << 64 | u128::from(self.long()))
        }

        fn command(&mut self) -> [Command; 3] {
            [
                Command::New(New {
                    post_only: self.flag(),
                    side: self.pick(Side::ALL),
                    order_type: self.pick(OrderType::ALL),
                    time_in_force: self.pick(TimeInForce::ALL),
                    stp: self.pick(StpMode::ALL),
                    handle: self.handle(),
                    price: self.ticks(),
                    quantity: Lots(self.long()),
                    instrument: InstrumentIx(self.word()),
                    stp_group: StpGroup(self.word()),
                    user: UserIx(self.word()),
                    session: SessionIx(self.word()),
                    expire_at_ns: self.long(),
                    hold: HoldIx(self.word()),
                    fee_rate: FeeRate(self.word()),
                    client_order_id: self.long(),
                    client_seq: self.long(),
                    draw: self.reserve(),
                    budget_minor: self.minor(),
                    key_hash: self.key(),
                }),
                Command::Cancel(Cancel {
                    handle: self.handle(),
                    instrument: InstrumentIx(self.word()),
                    user: UserIx(self.word()),
                    session: SessionIx(self.word()),
                    reason: self.pick(CancelReason::ALL),
                    client_seq: self.long(),
                    key_hash: self.key(),
                }),
                Command::Amend(Amend {
                    handle: self.handle(),
                    instrument: InstrumentIx(self.word()),
                    user: UserIx(self.word()),
                    session: SessionIx(self.word()),
                    budget_returns: self.flag(),
                    client_seq: self.long(),
                    new_client_order_id: self.long(),
                    price: self.flag().then(|| self.ticks()),
                    quantity: self.flag().then(|| Lots(self.long())),
                    draw: self.reserve(),
                    budget_minor: self.minor(),
                    key_hash: self.key(),
                }),
            ]
        }

        fn event(&mut self) -> [Event; 5] {
            [
                Event::Accepted(Accepted {
                    handle: self.handle(),
                    side: self.pick(Side::ALL),
                    rests: self.flag(),
                    price: self.ticks(),
                    open: Lots(self.long()),
                }),
                Event::Rested(Rested {
                    handle: self.handle(),
                    side: self.pick(Side::ALL),
                    price: self.ticks(),
                    open: Lots(self.long()),
                }),
                Event::Trade(Trade {
                    taker_side: self.pick(Side::ALL),
                    maker: self.handle(),
                    taker: self.handle(),
                    price: self.ticks(),
                    quantity: Lots(self.long()),
                    maker_open: Lots(self.long()),
                    taker_open: Lots(self.long()),
                    trade_number: self.long(),
                }),
                Event::Amended(Amended {
                    handle: self.handle(),
                    side: self.pick(Side::ALL),
                    kept_priority: self.flag(),
                    price: self.ticks(),
                    quantity: Lots(self.long()),
                    open: Lots(self.long()),
                }),
                Event::Cancelled(Cancelled {
                    handle: self.handle(),
                    reason: self.pick(CancelReason::ALL),
                    quantity: Lots(self.long()),
                }),
            ]
        }
    }

    /// Words in a row, followed by zeros.
    #[derive(Default, Debug, PartialEq)]
    struct Row {
        words: [u64; WORDS_MAX],
        count: usize,
    }

    impl Put for Row {
        fn put(&mut self, word: u64) {
            self.words[self.count] = word;
            self.count += 1;
        }
    }

    #[test]
    fn the_codec_writes_the_archive_of_rkyv() {
        let mut random = Random(1);
        for _ in 0..2_000 {
            for command in random.command() {
                let (mut encoded, mut archived) = (Row::default(), Row::default());
                assert!(codec::encode_command(&command, &mut encoded), "encoded");
                archive::<_, COMMAND_WORDS>(&command, &mut archived);
                assert_eq!(encoded.words, archived.words, "{command:?}");
            }
            for event in random.event() {
                let envelope = EventEnvelope {
                    sequence: Sequence(random.long()),
                    time_ns: random.long(),
                    number: random.long(),
                    instrument: InstrumentIx(random.word()),
                    index: random.word(),
                    event,
                };
                let (mut encoded, mut archived) = (Row::default(), Row::default());
                assert!(codec::encode_event(&envelope, &mut encoded), "encoded");
                archive::<_, EVENT_WORDS>(&EventBody::from(&envelope), &mut archived);
                assert_eq!(encoded.words, archived.words, "{event:?}");
            }
        }
    }
}
