//! Payloads of journalled commands and events.

use std::sync::Arc;

use journal::fault::MemoryStorage;
use journal::{Config, Frame, FrameKind, Journal, visit_frames};
use sequencer::record::{append, decode_command, decode_event};
use types::command::Cancel;
use types::{
    CancelReason, Command, Envelope, EventEnvelope, Handle, Id128, InstrumentIx, Sequence,
    SessionIx, UserIx,
};

use crate::market::Market;

const SEQUENCE: u64 = 1;
/// Later than the longest wait before a command, counted from 1970.
const TIME_NS: u64 = 8_000_000_000;

/// Decodes any bytes as the payload of a command and of an event. They are rejected with a reason,
/// or the value can be formatted and survives a journal round trip.
pub fn check(bytes: &[u8]) {
    let event = decode_event(&frame(FrameKind::Event, bytes));
    let command = decode_command(&frame(FrameKind::Command, bytes));
    for reason in [event.as_ref().err(), command.as_ref().err()]
        .into_iter()
        .flatten()
    {
        assert!(!reason.is_empty());
    }
    if event.is_err() && command.is_err() {
        return;
    }
    // An event follows a command in the journal.
    let command = command.unwrap_or_else(|_| cancel());
    let events: Vec<EventEnvelope> = event.into_iter().collect();
    assert!(!format!("{command:?} {events:?}").is_empty());
    assert_eq!(journalled(&command, &events), (command, events));
}

fn frame(kind: FrameKind, payload: &[u8]) -> Frame {
    Frame {
        kind,
        unit_end: true,
        sequence: SEQUENCE,
        time_ns: TIME_NS,
        durable: 0,
        crc: 0,
        prev: 0,
        payload: payload.to_vec(),
    }
}

fn cancel() -> Envelope {
    Envelope {
        sequence: Sequence(SEQUENCE),
        time_ns: TIME_NS,
        received_ns: TIME_NS,
        command: Command::Cancel(Cancel {
            handle: Handle::NONE,
            instrument: InstrumentIx(0),
            user: UserIx(0),
            session: SessionIx::NONE,
            reason: CancelReason::UserRequest,
            client_seq: 0,
            key_hash: Id128::NONE,
        }),
    }
}

/// A command and its events after a journal round trip.
fn journalled(command: &Envelope, events: &[EventEnvelope]) -> (Envelope, Vec<EventEnvelope>) {
    let (mut first, mut rest) = (None, Vec::new());
    for frame in frames(command, events) {
        match frame.kind {
            FrameKind::Command => {
                first = Some(decode_command(&frame).expect("a written command decodes"))
            }
            FrameKind::Event => rest.push(decode_event(&frame).expect("a written event decodes")),
        }
    }
    (first.expect("a command"), rest)
}

/// The frames of a log with one record.
fn frames(command: &Envelope, events: &[EventEnvelope]) -> Vec<Frame> {
    let storage = Arc::new(MemoryStorage::default());
    let config = Config {
        segment_bytes: 8 << 10,
        pending_bytes_max: 1 << 16,
        recent_bytes: 64 << 10,
    };
    let journal =
        Journal::open(Arc::new(storage.clone()), config, |_| Ok(())).expect("an empty log");
    let mut appender = journal.appender();
    append(&mut appender, command, events);
    appender.flush();
    journal.close();
    let mut frames = Vec::new();
    visit_frames(&storage, |frame| {
        frames.push(frame.clone());
        Ok(())
    })
    .expect("a whole log");
    frames
}

/// Payloads of a small market. The files in `fuzz/seeds/commands` cover every kind.
pub fn seeds() -> Vec<Vec<u8>> {
    let payloads = |command: &Envelope, events: &[EventEnvelope]| {
        let first = Envelope {
            sequence: Sequence(SEQUENCE),
            ..*command
        };
        frames(&first, events)
            .into_iter()
            .map(|frame| frame.payload)
    };
    let records = Market::new(2, 60).records;
    records
        .iter()
        .flat_map(|record| payloads(&record.command, &record.events))
        .collect()
}
