//! Order flow for the whole trading path: users with sessions and trading holds, and a seeded mix
//! of requests with at most 2,000 open orders.
//!
//! The mix is 47 % new limit orders that do not cross, 38 % cancels, 8 % price amends and 7 %
//! crossing immediate-or-cancel orders.

use admission::{
    AmendRequest, CancelRequest, FundRequest, NewRequest, OrderRef, Report as Message, ReportBody,
    Request, SessionRequest,
};
use sequencer::{Outcome, Port, Report, RingPort, Submission, SubmitError};
use types::command::RequestKind;
use types::{
    AssetIx, CancelReason, Command, Handle, HoldKind, Id128, InstrumentIx, Lots, Minor, SessionIx,
    Side, Ticks, TimeInForce, UserId, UserIx,
};

/// Number of users. Each has one session.
pub const USERS: usize = 256;
/// Maximum number of orders that the flow keeps open.
const OPEN_ORDERS: usize = 2_000;
const MIDDLE: i64 = 10_000;

/// Blocks until a future of the port is ready. The hot thread completes it, so no runtime is
/// needed.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::task::Waker::from(std::sync::Arc::new(Unpark(std::thread::current())));
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(value) => return value,
            std::task::Poll::Pending => std::thread::park(),
        }
    }
}

/// A seeded random number generator.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((u128::from(z ^ (z >> 31)) * u128::from(bound)) >> 64) as u64
    }
}

/// An order of the flow that may still be open.
#[derive(Clone, Copy)]
struct OpenOrder {
    user: usize,
    /// Number among all orders of the flow.
    number: u64,
    /// Client order id.
    id: u64,
    side: Side,
}

/// Generates the requests of the flow and processes their reports.
pub struct Load {
    random: Random,
    instruments: Vec<InstrumentIx>,
    users: Vec<(UserIx, SessionIx)>,
    /// Last client sequence, by user.
    sequences: Vec<u64>,
    /// Number of the last order.
    count: u64,
    /// Last client order id, by user.
    ids: Vec<u64>,
    open: Vec<OpenOrder>,
    /// True if the order has ended, by order number modulo [`ORDER_NUMBERS`].
    ended: Vec<bool>,
    /// Order number, by slot.
    numbers: Vec<u64>,
    /// User, by session.
    by_session: Vec<usize>,
    /// Tag of the request, by user and client sequence modulo [`CLIENT_SEQS`].
    tags: Vec<Vec<u64>>,
    /// Order number, by user and client order id modulo [`CLIENT_SEQS`].
    orders: Vec<Vec<u64>>,
}

/// Client sequences, and client order ids, that are distinguished per user: a bound on the requests
/// of a user in flight.
const CLIENT_SEQS: usize = 1 << 12;

/// Order numbers that are distinguished at the same time.
const ORDER_NUMBERS: usize = 1 << 16;

impl Load {
    /// Sets up instruments, users, sessions and money in a node.
    ///
    /// # Errors
    /// The node rejects a request.
    pub fn open(
        port: &Port,
        ring: &mut RingPort,
        instruments: usize,
        seed: u64,
    ) -> Result<Self, SubmitError> {
        Self::open_by(
            |request| block_on(port.call(request)),
            ring,
            || (),
            instruments,
            seed,
        )
    }

    /// As [`Self::open`], with the caller's function for requests. `poll` is called repeatedly
    /// until a report arrives; an inline node makes progress in it.
    ///
    /// # Errors
    /// The node rejects a request.
    pub fn open_by(
        submit: impl Fn(Request) -> Outcome,
        ring: &mut RingPort,
        poll: impl Fn(),
        instruments: usize,
        seed: u64,
    ) -> Result<Self, SubmitError> {
        let mut load = Self {
            random: Random::new(seed),
            instruments: Vec::new(),
            users: Vec::new(),
            sequences: vec![0; USERS],
            count: 0,
            ids: vec![0; USERS],
            open: Vec::with_capacity(2 * OPEN_ORDERS),
            ended: vec![true; ORDER_NUMBERS],
            numbers: vec![0; 1 << 20],
            by_session: Vec::new(),
            tags: vec![vec![0; CLIENT_SEQS]; USERS],
            orders: vec![vec![0; CLIENT_SEQS]; USERS],
        };
        for number in 0..instruments {
            let spec = crate::instrument(InstrumentIx::NONE, &format!("BENCH-{number}"));
            if let Command::SetInstrument(set) =
                submit(Request::SetInstrument(spec))?.command.command
            {
                load.instruments.push(set.spec.ix);
            }
        }
        for number in 0..USERS {
            let id = UserId::new(&format!("user-{number}")).expect("an id");
            let Command::BindUser(bind) = submit(Request::BindUser(id))?.command.command else {
                continue;
            };
            let assets = load.instruments.iter().map(|ix| AssetIx::units(*ix));
            for (at, asset) in std::iter::once(AssetIx::MONEY).chain(assets).enumerate() {
                submit(Request::Fund(FundRequest {
                    hold_id: Id128::from_u128(1 + (number as u128) * 10_000 + at as u128),
                    kind: HoldKind::Trading,
                    user: bind.user,
                    asset,
                    amount_minor: Minor(1_000_000_000_000_000),
                    funding_seq: 1,
                    key_hash: Id128::NONE,
                }))?;
            }
            let open = Request::OpenSession(SessionRequest {
                key: Id128::from_u128(1 + number as u128),
                user: bind.user,
                stp_group: None,
                cancel_on_disconnect: false,
            });
            ring.submit(Submission::default(), &open)?;
            let mut opened = None;
            while opened.is_none() {
                poll();
                ring.poll(|report| match report {
                    Report::Opened(found) => opened = Some(*found),
                    other => panic!("expected Opened, received {other:?}"),
                })?;
            }
            let session = opened.expect("just opened").session;
            load.by_session.resize(session.index() + 1, number);
            load.by_session[session.index()] = number;
            load.users.push((bind.user, session));
        }
        Ok(load)
    }

    /// Processes a message to one of the load's sessions. Returns the tag of the request that the
    /// message answers, if any.
    pub fn on_report(&mut self, message: &Message) -> Option<u64> {
        let user = self.by_session[message.session.index()];
        let answered = match message.client_seq {
            0 => None,
            seq => Some(self.tags[user][seq as usize % CLIENT_SEQS]),
        };
        match message.body {
            ReportBody::Acknowledged { .. } => {
                let number = self.orders[user][message.client_order_id as usize % CLIENT_SEQS];
                self.numbers[message.handle.slot as usize] = number;
            }
            ReportBody::Filled { open, .. } if open.is_zero() => self.mark_ended(message.handle),
            ReportBody::Cancelled { .. } => self.mark_ended(message.handle),
            ReportBody::Rejected {
                request: RequestKind::New,
                ..
            } => {
                let number = self.orders[user][message.client_order_id as usize % CLIENT_SEQS];
                self.ended[number as usize % ORDER_NUMBERS] = true;
            }
            _ => {}
        }
        answered
    }

    /// Sets the tag that [`Self::on_report`] returns for the answer to this request.
    pub fn set_tag(&mut self, request: &Request, tag: u64) {
        let (session, seq) = request
            .client()
            .expect("requests of the load have sessions");
        let user = self.by_session[session.index()];
        self.tags[user][seq as usize % CLIENT_SEQS] = tag;
    }

    /// Closes every session. A restart closes open sessions by journalled commands; without them it
    /// journals nothing.
    ///
    /// # Errors
    /// The node rejects a request.
    pub fn close(&self, port: &Port) -> Result<(), SubmitError> {
        for (_, session) in &self.users {
            block_on(port.call(Request::CloseSession {
                session: *session,
                epoch: None,
                keep_orders: false,
            }))?;
        }
        Ok(())
    }

    /// Generates the next request.
    pub fn next_request(&mut self) -> Request {
        let kind = self.random.below(100);
        let aims_at_open = (47..93).contains(&kind);
        if self.open.len() >= OPEN_ORDERS || (aims_at_open && !self.open.is_empty()) {
            // At the maximum of open orders a cancel takes the place of a new order.
            let kind = if aims_at_open { kind } else { 47 };
            if let Some(request) = self.change_open_order(kind < 85) {
                return request;
            }
        }
        self.new_order(kind >= 93)
    }

    /// Cancels or amends a random open order; `None` if no order is open.
    fn change_open_order(&mut self, is_cancel: bool) -> Option<Request> {
        loop {
            let count = self.open.len() as u64;
            if count == 0 {
                return None;
            }
            let at = usize::try_from(self.random.below(count)).expect("small");
            let open = self.open[at];
            if self.ended[open.number as usize % ORDER_NUMBERS] {
                self.open.swap_remove(at);
                continue;
            }
            let (user, session) = self.users[open.user];
            let client_seq = self.next_client_seq(open.user);
            let order = OrderRef::Client(open.id);
            if is_cancel {
                self.open.swap_remove(at);
                return Some(Request::Cancel(CancelRequest {
                    order,
                    user,
                    session,
                    client_seq,
                    reason: CancelReason::UserRequest,
                    key_hash: Id128::NONE,
                }));
            }
            return Some(Request::Amend(AmendRequest {
                order,
                user,
                session,
                client_seq,
                price: Some(self.passive_price(open.side)),
                quantity: None,
                new_client_order_id: 0,
                limit_checked: true,
                key_hash: Id128::NONE,
            }));
        }
    }

    fn new_order(&mut self, is_aggressive: bool) -> Request {
        let at = usize::try_from(self.random.below(USERS as u64)).expect("small");
        let (user, session) = self.users[at];
        let client_seq = self.next_client_seq(at);
        let side = if self.random.below(2) == 0 {
            Side::Buy
        } else {
            Side::Sell
        };
        self.count += 1;
        let number = self.count;
        self.ended[number as usize % ORDER_NUMBERS] = false;
        self.ids[at] += 1;
        let id = self.ids[at];
        self.orders[at][id as usize % CLIENT_SEQS] = number;
        let (price, time_in_force) = if is_aggressive {
            let reach = match side {
                Side::Buy => 20,
                Side::Sell => -20,
            };
            (Ticks(MIDDLE + reach), TimeInForce::Ioc)
        } else {
            self.open.push(OpenOrder {
                user: at,
                number,
                id,
                side,
            });
            (self.passive_price(side), TimeInForce::Gtc)
        };
        // Orders are distributed over the instruments in turn.
        let instrument = self.instruments[number as usize % self.instruments.len()];
        let quantity = Lots(1 + self.random.below(100));
        Request::New(NewRequest {
            session,
            client_seq,
            client_order_id: id,
            time_in_force,
            limit_checked: true,
            ..NewRequest::limit(instrument, user, side, price, quantity)
        })
    }

    /// A price that does not cross. Prices near the middle are more frequent.
    fn passive_price(&mut self, side: Side) -> Ticks {
        let away = 1 + self.random.below(90).min(self.random.below(90));
        let away = i64::try_from(away).expect("small");
        Ticks(match side {
            Side::Buy => MIDDLE - away,
            Side::Sell => MIDDLE + away,
        })
    }

    fn next_client_seq(&mut self, user: usize) -> u64 {
        self.sequences[user] += 1;
        self.sequences[user]
    }

    /// Marks the order of this slot as ended.
    fn mark_ended(&mut self, handle: Handle) {
        let number = self.numbers[handle.slot as usize];
        self.ended[number as usize % ORDER_NUMBERS] = true;
    }
}
