//! Code that the benchmarks share. `benches/README.md` lists the benchmarks and their loads.

pub mod baseline;
pub mod baseline_book;
pub mod generate;
pub mod history;
pub mod hop;
pub mod inline;
pub mod ledger;
pub mod load;
pub mod open_loop;
#[cfg(feature = "peers")]
pub mod peers;
pub mod prepared;
pub mod settle;
pub mod wire;
pub mod xflow;

use types::command::{Cancel, New, SetInstrument};
use types::{
    CancelReason, Command, Envelope, Handle, Id128, InstrumentId, InstrumentIx, InstrumentParams,
    InstrumentSpec, Lots, Sequence, SessionIx, Side, Ticks, TimeInForce, UserIx,
};

/// An instrument with a tick of a cent, a lot of one and a wide band. Panics if `id` is invalid.
pub fn instrument(ix: InstrumentIx, id: &str) -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        ix,
        band_high: Ticks(1_000_000),
        ..InstrumentParams::new(InstrumentId::new(id).expect("an id"))
    })
    .expect("a consistent instrument")
}

/// Creates numbered commands. Assigns the slot freed last first, like admission.
pub struct CommandFactory {
    sequence: u64,
    generations: Vec<u32>,
    free: std::collections::VecDeque<u32>,
}

impl CommandFactory {
    pub fn new(slots: u32) -> Self {
        Self {
            sequence: 0,
            generations: vec![0; slots as usize],
            free: (0..slots).collect(),
        }
    }

    fn envelope(&mut self, command: Command) -> Envelope {
        self.sequence += 1;
        Envelope {
            sequence: Sequence(self.sequence),
            time_ns: self.sequence,
            received_ns: self.sequence,
            command,
        }
    }

    /// The command that creates the instrument of all orders.
    pub fn set_instrument(&mut self) -> Envelope {
        self.envelope(Command::SetInstrument(SetInstrument {
            spec: instrument(InstrumentIx(0), "BENCH"),
        }))
    }

    /// A new limit order and its handle. Panics if no slot is free.
    ///
    /// Each open order has its own user, so self-trade prevention runs at each match and never
    /// fires.
    pub fn order(
        &mut self,
        side: Side,
        time_in_force: TimeInForce,
        price: i64,
        quantity: u64,
    ) -> (Envelope, Handle) {
        let slot = self.free.pop_front().expect("a free slot");
        let generation = &mut self.generations[slot as usize];
        *generation += 1;
        let handle = Handle {
            slot,
            generation: *generation,
        };
        let user = UserIx(slot);
        let command = Command::New(New {
            time_in_force,
            ..New::limit(
                InstrumentIx(0),
                handle,
                user,
                side,
                Ticks(price),
                Lots(quantity),
            )
        });
        (self.envelope(command), handle)
    }

    pub fn cancel(&mut self, handle: Handle) -> Envelope {
        self.envelope(Command::Cancel(Cancel {
            handle,
            instrument: InstrumentIx(0),
            user: UserIx::NONE,
            session: SessionIx::NONE,
            reason: CancelReason::UserRequest,
            client_seq: 0,
            key_hash: Id128::NONE,
        }))
    }

    /// Frees the slot of an ended order.
    pub fn free_slot(&mut self, handle: Handle) {
        self.free.push_front(handle.slot);
    }
}

/// Median: the upper middle value of an even number of values, 0 for none.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
