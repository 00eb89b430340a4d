//! A small market whose journal is the source of the seeds of commands and checkpoints.

use admission::{
    AdmissionConfig, AmendRequest, CancelRequest, MassCancelRequest, NewRequest, OrderRef, Request,
};
use replica::State;
use sequencer::Record;
use types::command::{BindUser, Fund, MassScope, OpenSession, SetInstrument};
use types::{
    AssetIx, CancelReason, Command, Envelope, Handle, HoldIx, HoldKind, Id128, InstrumentId,
    InstrumentIx, InstrumentParams, InstrumentSpec, Lots, Minor, NodeId, SessionIx, Side, StpGroup,
    StpMode, Ticks, TimeInForce, UserId, UserIx,
};

use crate::Random;

const USERS: u32 = 3;
const START_NS: u64 = 1_700_000_000_000_000_000;

pub struct Market {
    core: sequencer::Core,
    pub state: State,
    pub records: Vec<Record>,
    random: Random,
}

pub fn node() -> NodeId {
    NodeId::new(1).expect("a node")
}

/// Limits of a small node. They bound the allocations for a damaged state.
pub fn limits() -> AdmissionConfig {
    AdmissionConfig {
        orders_max: 1 << 10,
        ..AdmissionConfig::default()
    }
}

impl Market {
    /// Three users with money, units and a session each, then up to `commands` random commands.
    pub fn new(seed: u64, commands: usize) -> Self {
        let mut market = Self {
            core: sequencer::Core::new(limits()),
            state: State::new(node(), limits()),
            records: Vec::new(),
            random: Random(seed),
        };
        for user in 0..USERS {
            let id = UserId::new(&format!("user-{user}")).expect("an id");
            market.submit(Command::BindUser(BindUser {
                user: UserIx(user),
                id,
            }));
        }
        market.submit(Command::SetInstrument(SetInstrument { spec: instrument() }));
        for user in 0..USERS {
            market.fund(user, AssetIx::MONEY, 2 * user);
            market.fund(user, AssetIx::units(InstrumentIx(0)), 2 * user + 1);
            market.submit(Command::OpenSession(OpenSession {
                session: SessionIx(user),
                user: UserIx(user),
                stp_group: StpGroup::of_user(UserIx(user)),
                cancel_on_disconnect: user == 0,
                key: Id128::from_u128(u128::from(user) + 1),
            }));
        }
        for _ in 0..commands {
            market.submit_random();
        }
        market
    }

    fn fund(&mut self, user: u32, asset: AssetIx, hold: u32) {
        self.submit(Command::Fund(Fund {
            hold: HoldIx(hold),
            kind: HoldKind::Trading,
            user: UserIx(user),
            asset,
            amount_minor: Minor(1_000_000_000),
            funding_seq: u64::from(hold) + 1,
            hold_id: Id128::from_u128(0xfeed_0000 + u128::from(hold)),
            key_hash: Id128::NONE,
        }));
    }

    fn submit(&mut self, command: Command) {
        let sequence = self.state.sequence().next();
        let time_ns = START_NS + sequence.get() * 1_000_003;
        let command = Envelope {
            sequence,
            time_ns,
            received_ns: time_ns - sequence.get() % 50_000,
            command,
        };
        let events = self.core.apply(&command).to_vec();
        let record = Record { command, events };
        self.state
            .apply(&record)
            .expect("replica accepts the core's events");
        self.records.push(record);
    }

    /// Submits one random command if admission accepts it.
    fn submit_random(&mut self) {
        let open: Vec<Handle> = self.state.orders().map(|order| order.handle).collect();
        let request = match self.random.below(10) {
            pick @ 6.. if !open.is_empty() => {
                let handle = open[self.random.below(open.len())];
                self.order_change(pick, handle)
            }
            _ => self.new_order(),
        };
        let now_ns = START_NS + self.state.sequence().get() * 1_000_003;
        if let Ok(command) = self.state.core().admission().admit(&request, now_ns) {
            self.submit(command);
        }
    }

    fn new_order(&mut self) -> Request {
        let user = UserIx(self.random.below(USERS as usize) as u32);
        let client_order_id = [0, self.random.long()][self.random.below(2)];
        let stp = StpMode::ALL[self.random.below(StpMode::ALL.len())];
        let side = Side::ALL[self.random.below(2)];
        let time_in_force =
            [TimeInForce::Gtc, TimeInForce::Gtc, TimeInForce::Ioc][self.random.below(3)];
        let price = Ticks(9_990 + self.random.below(20) as i64);
        let quantity = Lots(1 + self.random.long() % 50);
        Request::New(NewRequest {
            client_order_id,
            stp,
            time_in_force,
            limit_checked: true,
            ..NewRequest::limit(InstrumentIx(0), user, side, price, quantity)
        })
    }

    fn order_change(&mut self, pick: usize, handle: Handle) -> Request {
        let user = self.state.order(handle).expect("order is open").user;
        let (session, client_seq, key_hash) = (SessionIx::NONE, 0, Id128::NONE);
        match pick {
            6 => Request::MassCancel(MassCancelRequest {
                scope: MassScope::User(user),
                instrument: InstrumentIx::NONE,
                side: Some(Side::Buy),
                reason: CancelReason::MassCancel,
                user,
                session,
                client_seq,
                key_hash,
            }),
            7 => Request::Cancel(CancelRequest {
                order: OrderRef::Handle(handle),
                user,
                session,
                client_seq,
                reason: CancelReason::UserRequest,
                key_hash,
            }),
            _ => Request::Amend(AmendRequest {
                order: OrderRef::Handle(handle),
                user,
                session,
                client_seq,
                price: Some(Ticks(9_990 + self.random.below(20) as i64)),
                quantity: Some(Lots(1 + self.random.long() % 80)),
                new_client_order_id: self.random.long() % 2 * 77,
                limit_checked: true,
                key_hash,
            }),
        }
    }
}

fn instrument() -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        ix: InstrumentIx(0),
        band_high: Ticks(1_000_000),
        ..InstrumentParams::new(InstrumentId::new("BOND").expect("an id"))
    })
    .expect("a consistent instrument")
}
