//! The book on generated flow makes the trades of the generator's plain book: for both shapes and
//! several seeds, one command at a time and in batches.

use std::collections::HashMap;

use benches::baseline_book::BaselineBook;
use benches::generate::{Shape, generate};
use benches::prepared::{Collect, PreparedFlow, new_book};
use benches::wire::reference::Reference;
use benches::xflow::{Flow, FlowError, HEADER_BYTES, Kind, Op, RECORD_BYTES};
use engine::EventSink;
use sequencer::Record;
use types::{
    CancelReason, Command, Envelope, Event, EventEnvelope, Handle, InstrumentIx, Quote, StpGroup,
    StpMode,
};

/// A deep book that is small enough for a test and large enough for the engine's look-ahead.
const DEEP: Shape = Shape {
    resting: 20_000,
    ..Shape::DEEP
};

struct Count(u64);

impl EventSink for Count {
    fn event(&mut self, _: &EventEnvelope) {
        self.0 += 1;
    }

    fn quote(&mut self, _: InstrumentIx, _: Quote) {}
}

fn check_tape(flow: &Flow) {
    let prepared = PreparedFlow::new(flow);
    assert!(
        prepared.tape_ok(flow),
        "seed {}: {:?}",
        flow.header.seed,
        prepared.result
    );
    assert_eq!(
        prepared.result.stp_checks, flow.header.trades,
        "a trade between orders of one user"
    );
    let (mut book, mut count) = (new_book(prepared.spec), Count(0));
    let commands: Vec<Envelope> = prepared
        .prefill
        .iter()
        .chain(&prepared.timed)
        .copied()
        .collect();
    for batch in commands.chunks(64) {
        let envelope: fn(&Envelope) -> Option<&Envelope> = |envelope| Some(envelope);
        book.each_of_batch(batch, envelope, |book, envelope| {
            book.apply(envelope, &mut count);
        });
    }
    book.check_invariants();
    assert_eq!(book.state_hash(), prepared.result.state_hash);
    assert_eq!(count.0, prepared.result.events);
}

// rows: R162 R163 R164 R165 R166 R167 R168 R169 R170 R171 R172 R173 R179
#[test]
fn r162_the_tape_of_a_book_that_fits_the_cache_is_the_plain_books() {
    for seed in 1..=4 {
        let flow = generate(Shape::SINGLE, seed, 40_000);
        assert!(flow.header.trades > 2_000, "the flow trades too little");
        check_tape(&flow);
    }
}

// rows: R162 R163 R179
#[test]
fn r162_the_tape_of_a_deep_book_is_the_plain_books() {
    for seed in 1..=2 {
        check_tape(&generate(DEEP, seed, 40_000));
    }
}

// rows: R180
#[test]
fn r180_a_seed_gives_the_same_file_and_the_file_says_so() {
    let flow = generate(Shape::SINGLE, 7, 5_000);
    let bytes = flow.write();
    assert_eq!(bytes, generate(Shape::SINGLE, 7, 5_000).write());
    assert_ne!(bytes, generate(Shape::SINGLE, 8, 5_000).write());
    assert_eq!(Flow::read(&bytes), Ok(flow));
}

#[test]
fn the_single_flow_trades_in_runs_and_as_often_as_the_reference_flow() {
    let flow = generate(Shape::SINGLE, 1, 100_000);
    let aggressive = flow.records.iter().filter(|record| match record.op {
        Op::New(kind) => kind != Kind::Gtc,
        _ => false,
    });
    let sides: Vec<u8> = aggressive.map(|record| record.side).collect();
    let repeated = sides.windows(2).filter(|pair| pair[0] == pair[1]).count();
    // Independent sides would repeat in half of the pairs.
    assert!(
        repeated * 10 > sides.len() * 6,
        "{repeated} of {}",
        sides.len()
    );
    let header = &flow.header;
    let trades_per_100 = header.trades as f64 * 100.0 / header.timed as f64;
    assert!((14.5..=17.5).contains(&trades_per_100), "{trades_per_100}");
    assert!(header.levels_mean > 130, "{}", header.levels_mean);
}

#[test]
fn baseline_book_makes_the_same_trades() {
    for shape in [Shape::SINGLE, DEEP] {
        let flow = generate(shape, 5, 30_000);
        let mut baseline = BaselineBook::new(&flow.header);
        let (prefill, timed) = flow.records.split_at(flow.header.prefill as usize);
        prefill.iter().for_each(|record| baseline.apply(record));
        (baseline.trades, baseline.quantity) = (0, 0);
        timed.iter().for_each(|record| baseline.apply(record));
        let header = &flow.header;
        assert_eq!(
            (baseline.trades, baseline.quantity, baseline.tape.0),
            (header.trades, header.quantity, header.tape)
        );
    }
}

#[test]
fn a_wrong_result_in_the_header_is_detected() {
    let mut flow = generate(Shape::SINGLE, 9, 3_000);
    flow.header.tape ^= 1;
    assert!(!PreparedFlow::new(&flow).tape_ok(&flow));
}

#[test]
fn invalid_files_are_refused() {
    let bytes = generate(Shape::SINGLE, 3, 100).write();
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.clone();
        bytes[at] = byte;
        Flow::read(&bytes)
    };
    assert_eq!(Flow::read(&bytes[..100]), Err(FlowError::Magic));
    assert_eq!(with(0, b'Y'), Err(FlowError::Magic));
    assert_eq!(with(8, 31), Err(FlowError::RecordSize(31)));
    assert_eq!(with(HEADER_BYTES, 9), Err(FlowError::Record(0)));
    let second = HEADER_BYTES + RECORD_BYTES;
    assert_eq!(with(second + 1, 2), Err(FlowError::Record(1)));
    assert_eq!(with(second + 14, 1), Err(FlowError::Record(1)));
    let records = (bytes.len() - HEADER_BYTES) / RECORD_BYTES;
    assert_eq!(
        Flow::read(&bytes[..bytes.len() - 1]),
        Err(FlowError::Length {
            announced: records as u64,
            found: records as u64 - 1
        })
    );
}

/// Journal records of a flow whose orders belong to 16 self-trade groups.
///
/// Each order has its own slot, because self-trade prevention changes which orders end, and the
/// flow would reuse a slot that is still taken.
fn journalled(flow: &Flow) -> Vec<Record> {
    let prepared = PreparedFlow::new(flow);
    let (mut book, mut events) = (new_book(prepared.spec), Collect::default());
    let (mut handles, mut last) = (HashMap::new(), 0);
    let record = |command: &Envelope| {
        let mut command = *command;
        match &mut command.command {
            Command::New(new) => {
                last += 1;
                let own = Handle {
                    slot: last,
                    generation: 1,
                };
                handles.insert(new.handle, own);
                new.handle = own;
                new.stp_group = StpGroup(last % 16);
                new.stp = StpMode::CancelNewest;
            }
            Command::Cancel(cancel) => cancel.handle = handles[&cancel.handle],
            Command::Amend(amend) => amend.handle = handles[&amend.handle],
            other => panic!("unexpected command in a flow: {other:?}"),
        }
        book.apply(&command, &mut events);
        let events = std::mem::take(&mut events.0);
        Record { command, events }
    };
    prepared
        .prefill
        .iter()
        .chain(&prepared.timed)
        .map(record)
        .collect()
}

#[test]
fn the_reference_book_makes_the_same_trades_and_detects_a_missing_one() {
    let records = journalled(&generate(Shape::SINGLE, 5, 40_000));
    let is_trade = |event: &&EventEnvelope| matches!(event.event, Event::Trade(_));
    let trades = records
        .iter()
        .flat_map(|r| r.events.iter().filter(is_trade));
    let prevented = records.iter().flat_map(|r| &r.events).filter(
        |event| matches!(&event.event, Event::Cancelled(c) if c.reason == CancelReason::SelfTrade),
    );
    assert!(
        prevented.count() > 100,
        "too few self-trades were prevented"
    );

    let mut reference = Reference::default();
    let reference_trades: u64 = records
        .iter()
        .map(|r| reference.apply(r).expect("equal trades"))
        .sum();
    assert_eq!(reference_trades, trades.count() as u64);

    let mut reference = Reference::default();
    let has_trade = |record: &&Record| record.events.iter().any(|event| is_trade(&event));
    let mut forged = records.iter().find(has_trade).expect("a trade").clone();
    forged.events.retain(|event| !is_trade(&event));
    let sequence = forged.command.sequence;
    for record in records.iter().take_while(|r| r.command.sequence < sequence) {
        reference.apply(record).expect("equal trades");
    }
    let error = reference.apply(&forged).expect_err("a trade is missing");
    assert!(
        error.to_string().contains("expected by the reference"),
        "{error}"
    );
}
