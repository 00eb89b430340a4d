//! Shared parts of the benchmarks. Each states its load; run one with `cargo bench -p benches
//! --bench book`.

pub mod baseline;
pub mod baseline_book;
pub mod drive;
pub mod generate;
pub mod history;
pub mod hop;
pub mod inline;
pub mod ledger;
pub mod load;
#[cfg(feature = "peers")]
pub mod peers;
pub mod wire;
pub mod xflow;

use types::command::{Cancel, New, SetInstrument};
use types::{
    CancelReason, Command, Envelope, FeeRate, Handle, HoldIx, Id128, InstrumentId, InstrumentIx,
    InstrumentParams, InstrumentSpec, Lots, Minor, OrderType, Phase, Reserve, Sequence, SessionIx,
    Side, StpGroup, StpMode, Ticks, TimeInForce, UserIx,
};

/// An instrument with a tick of a cent, a lot of one and a wide band. Panics if `id` is invalid.
pub fn instrument(ix: InstrumentIx, id: &str) -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        ix,
        id: InstrumentId::new(id).expect("an id"),
        decimals: 0,
        tick_size: "0.01".parse().expect("a number"),
        lot_size: "1".parse().expect("a number"),
        fee_rate: FeeRate::TRADING,
        band_low: Ticks(1),
        band_high: Ticks(1_000_000),
        collar_ppm: 50_000,
        velocity: types::VelocityRule::OFF,
        phase: Phase::Open,
    })
    .expect("a consistent instrument")
}

/// Numbers commands and assigns slots as admission would: the one freed last.
pub struct Desk {
    sequence: u64,
    generations: Vec<u32>,
    free: std::collections::VecDeque<u32>,
}

impl Desk {
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

    pub fn open(&mut self) -> Envelope {
        self.envelope(Command::SetInstrument(SetInstrument {
            spec: instrument(InstrumentIx(0), "BENCH"),
        }))
    }

    /// A limit order of its own user, so that self-trade prevention compares and never fires.
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
            ..limit(handle, user, side, Ticks(price), Lots(quantity))
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
    pub fn closed(&mut self, handle: Handle) {
        self.free.push_front(handle.slot);
    }
}

/// A good-till-cancelled limit order of the first instrument without a draw: for a book alone.
pub fn limit(handle: Handle, user: UserIx, side: Side, price: Ticks, quantity: Lots) -> New {
    New {
        handle,
        instrument: InstrumentIx(0),
        user,
        session: SessionIx::NONE,
        stp_group: StpGroup::of_user(user),
        hold: HoldIx(0),
        fee_rate: FeeRate::TRADING,
        side,
        order_type: OrderType::Limit,
        time_in_force: TimeInForce::Gtc,
        post_only: false,
        stp: StpMode::CancelNewest,
        client_order_id: 0,
        client_seq: 0,
        expire_at_ns: 0,
        price,
        quantity,
        draw: Reserve::ZERO,
        budget_minor: Minor::ZERO,
        key_hash: Id128::NONE,
    }
}

/// Median, the upper one of two; 0 for no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
