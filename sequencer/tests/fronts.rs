//! Fronts with rings of their own get every answer, in order, at any ring size and reading rate.
//!
//! Every message of a session has the number that follows from the journal.

mod desk;

use std::sync::Arc;
use std::time::{Duration, Instant};

use admission::{
    AdmissionConfig, AmendRequest, CancelAllAfterRequest, CancelRequest, FundRequest,
    MassCancelRequest, NewRequest, OrderRef, Reject, RejectDetails, Report as Message, ReportBody,
    Request, SessionRequest,
};
use desk::{Desk, HANG, Time, config, done, in_time, open_desk, start};
use journal::fault::MemoryStorage;
use replica::State;
use sequencer::{
    Backlog, Layout, Opened, Parker, Polled, Reply, Report, RingPort, SequencerHandle, Stamp,
    Submission, SubmitError, Volatile, run_polled,
};
use types::command::{
    BoundsOf, Bust, MassScope, OrderBounds, RequestKind, SetOrderBounds, TradeParty,
};
use types::{
    AssetIx, CancelReason, Handle, HoldIx, HoldKind, Id128, InstrumentId, InstrumentIx,
    InstrumentParams, InstrumentSpec, Lots, Minor, NodeId, RejectReason, Sequence, SessionIx, Side,
    StpGroup, Ticks, TimeInForce, UserIx,
};

/// Reports that a front received, in order.
#[derive(Default)]
struct Seen {
    numbered: Vec<(Stamp, Message)>,
    opened: Vec<Opened>,
    /// Tags of requests without a numbered answer.
    taken: Vec<(u64, Stamp)>,
    not_submitted: Vec<(u64, SubmitError)>,
    taken_over: Vec<SessionIx>,
    warned: Vec<SessionIx>,
}

impl Seen {
    fn note(&mut self, report: &Report) {
        match report {
            Report::SessionMessage(stamp, message) => self.numbered.push((*stamp, *message)),
            Report::Opened(opened) => self.opened.push(*opened),
            Report::Submitted { tag, stamp } => self.taken.push((*tag, *stamp)),
            Report::NotSubmitted { tag, reason, .. } => self.not_submitted.push((*tag, *reason)),
            Report::OrderToTrade(session, _) => self.warned.push(*session),
            Report::TakenOver { session, .. } => self.taken_over.push(*session),
        }
    }

    fn read(&mut self, front: &mut RingPort) -> bool {
        front
            .poll(|report| self.note(report))
            .expect("the node runs")
    }

    fn answers(&self) -> usize {
        let answered = |(_, message): &&(Stamp, Message)| message.client_seq != 0;
        let numbered = self.numbered.iter().filter(answered).count();
        numbered + self.opened.len() + self.taken.len() + self.not_submitted.len()
    }

    /// True once the request is answered, by a numbered message or by a refusal under its tag.
    fn has_answer(&self, session: SessionIx, client_seq: u64, tag: u64) -> bool {
        let is_answer = |(_, message): &(Stamp, Message)| {
            (message.session, message.client_seq) == (session, client_seq)
        };
        self.numbered.iter().rev().any(is_answer)
            || self
                .not_submitted
                .iter()
                .any(|(refused, _)| *refused == tag)
    }

    fn wait(&mut self, front: &mut RingPort, is_there: impl Fn(&Self) -> bool) {
        let since = Instant::now();
        while !is_there(self) {
            assert!(since.elapsed() < HANG, "no answer");
            if !self.read(front) {
                std::thread::yield_now();
            }
        }
    }
}

fn rings(desk: &Desk, capacity: usize) -> RingPort {
    let parker = Arc::new(Parker::default());
    desk.port.rings(capacity, parker).expect("rings")
}

fn tagged(tag: u64) -> Submission {
    Submission {
        tag,
        ..Submission::default()
    }
}

fn ask(front: &mut RingPort, seen: &mut Seen, asked: Submission, request: Request) {
    let since = Instant::now();
    while let Err(error) = front.submit(asked, &request) {
        assert_eq!(error, SubmitError::Busy);
        assert!(since.elapsed() < HANG, "the ring stays full");
        seen.read(front);
    }
}

/// Opens a session at the front.
fn open(front: &mut RingPort, seen: &mut Seen, desk: &Desk, user: usize, key: u128) -> Opened {
    let before = seen.opened.len();
    let request = Request::OpenSession(SessionRequest {
        key: Id128::from_u128(key),
        user: desk.users[user],
        stp_group: None,
        cancel_on_disconnect: true,
    });
    ask(front, seen, tagged(1 << 40), request);
    seen.wait(front, |seen| seen.opened.len() > before);
    seen.opened[before]
}

fn of_session(order: NewRequest, session: SessionIx, client_seq: u64) -> Request {
    Request::New(NewRequest {
        session,
        client_seq,
        ..order
    })
}

fn cancel(desk: &Desk, user: usize, session: SessionIx, seq: u64, handle: Handle) -> Request {
    Request::Cancel(CancelRequest {
        order: OrderRef::Handle(handle),
        user: desk.users[user],
        session,
        client_seq: seq,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    })
}

fn mass_cancel(scope: MassScope, user: UserIx, session: SessionIx, client_seq: u64) -> Request {
    Request::MassCancel(MassCancelRequest {
        scope,
        instrument: InstrumentIx::NONE,
        side: None,
        reason: CancelReason::MassCancel,
        user,
        session,
        client_seq,
        key_hash: Id128::NONE,
    })
}

/// The numbered messages that any reader of the journal makes from its records.
async fn rebuilt(handle: &SequencerHandle, through: Sequence) -> Vec<(Stamp, Message)> {
    handle.commit().wait(through).await.expect("durable");
    let node = NodeId::new(1).expect("a node");
    let mut state = State::new(node, AdmissionConfig::default());
    let mut reader = handle.reader(Sequence::ZERO);
    let mut all = Vec::new();
    while state.sequence() < through {
        let record = reader.try_next().expect("readable").expect("journalled");
        let applied = state.apply(&record).expect("agrees");
        let stamp = Stamp {
            sequence: applied.cause.sequence,
            time_ns: applied.cause.time_ns,
            received_ns: applied.cause.received_ns,
        };
        all.extend(applied.reports.iter().map(|report| (stamp, *report)));
    }
    all
}

/// Requests of funding, settlement and the registry between the sessions' orders.
fn platform_request(
    desk: &Desk,
    sessions: [SessionIx; 2],
    number: u64,
    seen: &Seen,
) -> Option<Request> {
    // The money hold of one of the users.
    let hold = HoldIx(u32::from(number % 40 > 20) * (1 + desk.instruments.len() as u32));
    let party = |session| TradeParty {
        session,
        handle: Handle::from_engine_id(number << 32),
        client_order_id: number,
    };
    let settled = |(stamp, _): &(Stamp, Message)| Request::Settled {
        posted: stamp.sequence,
        finalized: Sequence(stamp.sequence.get() / 2),
        trades_final: number,
    };
    match number % 20 {
        3 => Some(Request::Fund(FundRequest {
            hold_id: Id128::from_u128(1 + u128::from(number % 40 > 20) * 1_000),
            kind: HoldKind::Trading,
            user: desk.users[usize::from(number % 40 > 20)],
            asset: AssetIx::MONEY,
            amount_minor: Minor(1_000),
            funding_seq: 2 + number,
            key_hash: Id128::NONE,
        })),
        6 => {
            let banded = InstrumentSpec::new(&InstrumentParams {
                band_high: Ticks(10_018 + i64::try_from(number % 3).expect("small")),
                ..InstrumentParams::new(InstrumentId::new("BOND-0").expect("id"))
            });
            Some(Request::SetInstrument(banded.expect("consistent")))
        }
        9 => Some(Request::Defund {
            hold,
            amount_minor: Minor(700),
            funding_seq: 2 + number,
            key_hash: Id128::NONE,
        }),
        13 => seen.numbered.last().map(settled),
        17 => Some(Request::Bust(Bust {
            trade: Id128::from_u128(1 + u128::from(number)),
            trade_number: number,
            instrument: desk.instruments[0],
            buy: party(sessions[0]),
            sell: party(sessions[1]),
        })),
        _ => None,
    }
}

// rows: R343
#[tokio::test]
async fn r343_live_messages_are_those_of_the_journal_in_every_layout() {
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        let storage = Arc::new(MemoryStorage::default());
        let mut config = config(&Time::new());
        config.layout = layout;
        config.ring_capacity = 64;
        let handle = start(config, &storage);
        let desk = open_desk(handle.port(), 2).await;
        let mut front = rings(&desk, 16);
        let mut seen = Seen::default();
        let sessions = [0, 1].map(|user| {
            let key = 77 + user as u128;
            open(&mut front, &mut seen, &desk, user, key).session
        });
        let (mut seqs, count) = ([0u64; 2], 3_000u64);
        for number in 0..count {
            let user = usize::from(number % 2 == 0);
            seqs[user] += 1;
            let (session, seq) = (sessions[user], seqs[user]);
            let side = if number % 3 == 0 {
                Side::Buy
            } else {
                Side::Sell
            };
            let price = 10_000 + i64::try_from(number * 7 % 23).expect("small");
            let mut order = desk.order(user, side, price, number % 9 + 1);
            order.instrument = desk.instruments[usize::from(number % 5 == 0)];
            if number % 11 == 0 {
                order.time_in_force = TimeInForce::Ioc;
            }
            // Some exceed the funds: refused, journalled and reported.
            if number % 13 == 0 {
                order.quantity = Lots(1_000_000_000_000);
            }
            let own = desk.users[user];
            let request = match number % 100 {
                50 => mass_cancel(MassScope::User(own), own, session, seq),
                51 => cancel(
                    &desk,
                    user,
                    session,
                    seq,
                    Handle {
                        slot: 3,
                        generation: 1,
                    },
                ),
                _ => of_session(order, session, seq),
            };
            ask(&mut front, &mut seen, tagged(number), request);
            // While orders are in flight on both engines.
            if let Some(request) = platform_request(&desk, sessions, number, &seen) {
                desk.port.submit(request, Reply::None).expect("room");
            }
            // Fewer in flight than a ring of 64 holds: an engine that loses its core for long makes
            // no request BUSY.
            if number % 32 == 31 {
                seen.wait(&mut front, |seen| seen.has_answer(session, seq, number));
            }
        }
        let last = |seen: &Seen, user: usize| {
            let own = seen.numbered.iter().rev();
            let mut own = own.filter(|(_, message)| message.session == sessions[user]);
            own.any(|(_, message)| message.client_seq == seqs[user])
        };
        seen.wait(&mut front, |seen| last(seen, 0) && last(seen, 1));
        // A mass cancel answers once per instrument.
        let ended = |seen: &Seen| seen.numbered.last().map(|(stamp, _)| stamp.sequence);
        let through = ended(&seen).expect("some");
        let rebuilt = rebuilt(&handle, through).await;
        seen.wait(&mut front, |seen| seen.numbered.len() >= rebuilt.len());
        let busy = seen.not_submitted.len();
        assert!(busy < 300, "{layout:?}: {busy} BUSY");
        assert_eq!(seen.numbered[..rebuilt.len()], rebuilt, "{layout:?}");
        let count = |wanted: fn(&ReportBody) -> bool| {
            let bodies = rebuilt.iter().map(|(_, message)| &message.body);
            bodies.filter(|body| wanted(body)).count()
        };
        let counts = [
            count(|body| matches!(body, ReportBody::HoldChanged { .. })),
            count(|body| matches!(body, ReportBody::Settled { .. })),
            count(|body| matches!(body, ReportBody::Busted { .. })),
            count(|body| {
                matches!(
                    body,
                    ReportBody::Rejected {
                        limit: 10_018..10_021,
                        ..
                    }
                )
            }),
        ];
        assert!(counts.iter().all(|count| *count > 50), "{counts:?}");
        let mut numbers = [0, 0];
        for (_, message) in &seen.numbered {
            let user = usize::from(message.session == sessions[1]);
            numbers[user] += 1;
            assert_eq!(message.number, numbers[user], "{layout:?}");
        }
    }
}

/// Sends an order with client order id `first`, 199 amends that each set the next id, and two
/// requests that need the first id free and the last one in use. Returns the reports.
fn chained_amends(front: &mut RingPort, desk: &Desk, key: u128, first: u64) -> Seen {
    let mut seen = Seen::default();
    let session = open(front, &mut seen, desk, 0, key).session;
    let order = NewRequest {
        client_order_id: first,
        ..desk.order(0, Side::Buy, 10_000, 5)
    };
    let amend = |seq: u64| {
        Request::Amend(AmendRequest {
            order: OrderRef::Client(first + seq - 2),
            user: desk.users[0],
            session,
            client_seq: seq,
            price: None,
            quantity: None,
            new_client_order_id: first + seq - 1,
            limit_checked: true,
            key_hash: Id128::NONE,
        })
    };
    let last = CancelRequest {
        order: OrderRef::Client(first + 199),
        user: desk.users[0],
        session,
        client_seq: 202,
        reason: CancelReason::UserRequest,
        key_hash: Id128::NONE,
    };
    let requests = std::iter::once(of_session(order, session, 1))
        .chain((2..=200).map(amend))
        .chain([of_session(order, session, 201), Request::Cancel(last)]);
    for request in requests {
        ask(front, &mut seen, tagged(9), request);
    }
    seen.wait(front, |seen| {
        seen.numbered.len() + seen.not_submitted.len() >= 202
    });
    seen
}

/// Client order ids may be chained without waiting for an answer (D37): requests after a new id in
/// the ring find it in use, and the one before free, whichever thread runs the books.
#[tokio::test]
async fn requests_after_a_new_client_order_id_find_it() {
    for layout in [Layout::Fused, Layout::Pinned] {
        let storage = Arc::new(MemoryStorage::default());
        let mut config = config(&Time::new());
        config.layout = layout;
        let handle = start(config, &storage);
        let desk = open_desk(handle.port(), 1).await;
        let mut front = rings(&desk, 1_024);
        // Requests are BUSY when an engine loses its core for longer than the wait.
        let seen = (1..=20)
            .map(|attempt| chained_amends(&mut front, &desk, u128::from(attempt), attempt * 1_000))
            .find(|seen| seen.not_submitted.is_empty())
            .expect("one attempt of 20 without BUSY");
        let first = seen.numbered[0].1.client_order_id;
        for (at, (_, message)) in seen.numbered.iter().enumerate() {
            let (id, body) = (message.client_order_id - first, message.body);
            let is_right = match at {
                0 | 200 => matches!(body, ReportBody::Acknowledged { .. }) && id == 0,
                1..=199 => matches!(body, ReportBody::Amended { .. }) && id == at as u64,
                _ => matches!(body, ReportBody::Cancelled { .. }) && id == 199,
            };
            assert!(is_right, "{layout:?} {at}: {id} {body:?}");
        }
        handle.stop();
    }
}

#[tokio::test]
async fn a_front_gets_the_reports_of_its_sessions_orders() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(config(&Time::new()), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let mut front = rings(&desk, 64);
    let mut seen = Seen::default();
    let opened = open(&mut front, &mut seen, &desk, 0, 7);
    assert_eq!((opened.client_seq, opened.last_number), (0, 0));
    let (session, user) = (opened.session, desk.users[0]);
    let mut say = |request: Request, messages: usize| {
        let before = seen.numbered.len();
        ask(&mut front, &mut seen, tagged(9), request);
        seen.wait(&mut front, |seen| seen.numbered.len() >= before + messages);
        seen.numbered[before..]
            .iter()
            .map(|(_, m)| *m)
            .collect::<Vec<_>>()
    };
    let order = desk.order(0, Side::Buy, 10_000, 5);
    let acked = say(of_session(order, session, 1), 1)[0];
    let open_lots = |message: &Message| match message.body {
        ReportBody::Acknowledged { open, .. } | ReportBody::Amended { open, .. } => open,
        other => panic!("{other:?}"),
    };
    assert_eq!((open_lots(&acked), acked.client_seq), (Lots(5), 1));
    let dear = desk.order(0, Side::Buy, 10_000, 1_000_000_000_000);
    let refused = say(of_session(dear, session, 2), 1)[0];
    assert!(matches!(
        refused.body,
        ReportBody::Rejected {
            request: RequestKind::New,
            reason: RejectReason::InsufficientBalance | RejectReason::QuantityLot,
            ..
        }
    ));
    let amend = AmendRequest {
        order: OrderRef::Handle(acked.handle),
        user,
        session,
        client_seq: 3,
        price: None,
        quantity: Some(Lots(3)),
        new_client_order_id: 0,
        limit_checked: true,
        key_hash: Id128::NONE,
    };
    let amended = say(Request::Amend(amend), 1)[0];
    assert_eq!(open_lots(&amended), Lots(3));
    // Another front's order meets it: the maker's session gets a report without a request.
    done(
        &desk.port,
        Request::New(desk.order(1, Side::Sell, 10_000, 1)),
    )
    .await;
    let cancelled = say(cancel(&desk, 0, session, 4, acked.handle), 2);
    let filled = cancelled[0];
    assert!(matches!(
        filled.body,
        ReportBody::Filled {
            is_taker: false,
            quantity: Lots(1),
            open: Lots(2),
            ..
        }
    ));
    assert_eq!((filled.client_seq, filled.handle), (0, acked.handle));
    assert_eq!(
        cancelled[1].body,
        ReportBody::Cancelled {
            reason: CancelReason::UserRequest,
            quantity: Lots(2)
        }
    );
    assert_eq!(cancelled[1].client_seq, 4);
    // An order that trades in part and leaves no rest.
    done(
        &desk.port,
        Request::New(desk.order(1, Side::Sell, 9_000, 2)),
    )
    .await;
    let mut order = desk.order(0, Side::Buy, 9_000, 5);
    order.time_in_force = TimeInForce::Ioc;
    let swept = say(of_session(order, session, 5), 3);
    assert!(matches!(swept[0].body, ReportBody::Acknowledged { .. }));
    assert!(matches!(
        swept[1].body,
        ReportBody::Filled { is_taker: true, .. }
    ));
    assert_eq!(
        swept[2].body,
        ReportBody::Cancelled {
            reason: CancelReason::IocRemainder,
            quantity: Lots(3)
        }
    );
    let numbers: Vec<u64> = seen.numbered.iter().map(|(_, m)| m.number).collect();
    assert_eq!(numbers, (1..=numbers.len() as u64).collect::<Vec<_>>());
}

// rows: R343
#[tokio::test]
async fn r343_a_request_of_an_earlier_login_is_not_carried_out() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(config(&Time::new()), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let (mut old, mut new) = (rings(&desk, 64), rings(&desk, 64));
    let (mut of_old, mut of_new) = (Seen::default(), Seen::default());
    let first = open(&mut old, &mut of_old, &desk, 0, 7);
    let second = open(&mut new, &mut of_new, &desk, 0, 7);
    assert_eq!(first.session, second.session);
    assert!(second.epoch > first.epoch);
    of_old.wait(&mut old, |seen| !seen.taken_over.is_empty());
    let order = of_session(desk.order(0, Side::Buy, 100, 1), first.session, 1);
    let with = |epoch| Submission {
        epoch,
        ..Submission::default()
    };
    ask(&mut old, &mut of_old, with(first.epoch), order);
    of_old.wait(&mut old, |seen| !seen.not_submitted.is_empty());
    assert!(matches!(
        of_old.not_submitted[0].1,
        SubmitError::Refused(reject) if reject.reason == RejectReason::UnknownSession
    ));
    ask(&mut new, &mut of_new, with(second.epoch), order);
    of_new.wait(&mut new, |seen| !seen.numbered.is_empty());
    assert_eq!(of_new.numbered[0].1.client_seq, 1);
    // The end of the old connection does not close the session of the new one.
    let close = |epoch| Request::CloseSession {
        session: first.session,
        epoch: Some(epoch),
        keep_orders: false,
    };
    ask(&mut old, &mut of_old, tagged(5), close(first.epoch));
    of_old.wait(&mut old, |seen| seen.not_submitted.len() > 1);
    ask(&mut new, &mut of_new, tagged(6), close(second.epoch));
    of_new.wait(&mut new, |seen| !seen.taken.is_empty());
    assert_eq!(of_new.taken[0].0, 6);
}

/// The answer to a dead man's switch contains its own deadline, live and in a replay, even if later
/// requests are applied before it completes.
#[tokio::test]
async fn each_dead_mans_switch_is_answered_with_its_own_deadline() {
    let storage = Arc::new(MemoryStorage::default());
    let mut config = config(&Time::new());
    config.layout = Layout::Pinned;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let mut front = rings(&desk, 2_048);
    let mut seen = Seen::default();
    let session = open(&mut front, &mut seen, &desk, 0, 7).session;
    let timeouts = [5, 300, 0, 600];
    let rounds = 200;
    for round in 0..rounds {
        let first_seq = round * 5 + 1;
        let order = of_session(desk.order(0, Side::Buy, 10_000, 5), session, first_seq);
        ask(&mut front, &mut seen, tagged(9), order);
        for (at, timeout_s) in (1..).zip(timeouts) {
            let switch = Request::CancelAllAfter(CancelAllAfterRequest {
                user: desk.users[0],
                session,
                client_seq: first_seq + at,
                timeout_s,
            });
            ask(&mut front, &mut seen, tagged(9), switch);
        }
    }
    let answers = rounds as usize * 5;
    seen.wait(&mut front, |seen| seen.answers() > answers);
    let mut checked = 0;
    for (stamp, message) in &seen.numbered {
        let ReportBody::CancelAllAfter { at_ns } = message.body else {
            continue;
        };
        let timeout_s = timeouts[(message.client_seq as usize - 1) % 5 - 1];
        let expected = match timeout_s {
            0 => 0,
            timeout_s => stamp.time_ns + u64::from(timeout_s) * 1_000_000_000,
        };
        assert_eq!(at_ns, expected, "request {}", message.client_seq);
        checked += 1;
    }
    assert!(checked > 0);
}

/// A mass cancel inspects also the orders that it leaves, and sessions without any: inspections in
/// vain are bounded per user. A mass cancel of all orders always passes, and other users are not
/// affected.
// rows: R345
#[tokio::test]
async fn r345_empty_mass_cancels_are_throttled_by_scan_cost() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(config(&Time::new()), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let mut front = rings(&desk, 256);
    let mut seen = Seen::default();
    // The third is another session of the first user.
    let opened =
        [(0, 7), (1, 8), (0, 9)].map(|(user, key)| open(&mut front, &mut seen, &desk, user, key));
    let mut next_seq = [0; 3];
    let mut say = |at: usize, request: &dyn Fn(SessionIx, u64) -> Request| {
        next_seq[at] += 1;
        let (answers, refusals) = (seen.answers(), seen.not_submitted.len());
        let request = request(opened[at].session, next_seq[at]);
        ask(&mut front, &mut seen, tagged(1), request);
        seen.wait(&mut front, |seen| seen.answers() > answers);
        seen.not_submitted.get(refusals).map(|(_, reason)| *reason)
    };
    for price in 1..=1_000 {
        let order = desk.order(0, Side::Buy, price, 1);
        say(0, &|session, seq| of_session(order, session, seq));
    }
    let mass_cancel = |user: usize, side| {
        move |session, seq| {
            Request::MassCancel(MassCancelRequest {
                scope: MassScope::User(UserIx(user as u32)),
                instrument: InstrumentIx::NONE,
                side,
                reason: CancelReason::MassCancel,
                user: UserIx(user as u32),
                session,
                client_seq: seq,
                key_hash: Id128::NONE,
            })
        }
    };
    // A mass cancel of a session without orders inspects none.
    let of_session = |session, seq| {
        Request::MassCancel(MassCancelRequest {
            scope: MassScope::Session(session),
            instrument: InstrumentIx::NONE,
            side: Some(Side::Sell),
            reason: CancelReason::MassCancel,
            user: UserIx(0),
            session,
            client_seq: seq,
            key_hash: Id128::NONE,
        })
    };
    assert!((0..1_500).all(|_| say(2, &of_session).is_none()));
    let sells = mass_cancel(0, Some(Side::Sell));
    let taken = (0..2_000).take_while(|_| say(0, &sells).is_none()).count();
    assert_eq!(
        taken, 1_000,
        "a million orders and a thousand times the session without any"
    );
    let (reason, details) = (RejectReason::Throttle, RejectDetails::Max(1_000));
    let waits = SubmitError::Refused(Reject { reason, details });
    assert_eq!(say(0, &sells), Some(waits), "for a thousand microseconds");
    assert_eq!(say(1, &mass_cancel(1, Some(Side::Sell))), None);
    say(0, &mass_cancel(0, None));
    let (count, remaining) = (1_000, 0);
    let complete = ReportBody::MassCancelled { count, remaining };
    let is_complete = |(_, message): &(Stamp, Message)| message.body == complete;
    seen.wait(&mut front, |seen| seen.numbered.iter().any(is_complete));
}

/// A fill-or-kill order that an own order keeps from being filled inspects every order before that
/// one: such inspections are bounded per member, and other orders pass (H3).
// rows: R172
#[tokio::test]
async fn r172_unfillable_fok_orders_are_throttled_by_scan_cost() {
    for layout in [Layout::Fused, Layout::Shared] {
        unfillable_fok_orders_are_throttled(layout).await;
    }
}

async fn unfillable_fok_orders_are_throttled(layout: Layout) {
    let storage = Arc::new(MemoryStorage::default());
    let mut config = config(&Time::new());
    config.layout = layout;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let mut front = rings(&desk, 256);
    let mut seen = Seen::default();
    let opened = [0, 1].map(|user| open(&mut front, &mut seen, &desk, user, 7 + user as u128));
    let mut next_seq = [0; 2];
    let mut say = |user: usize, order: NewRequest| {
        next_seq[user] += 1;
        let (answers, refusals) = (seen.answers(), seen.not_submitted.len());
        let request = of_session(order, opened[user].session, next_seq[user]);
        ask(&mut front, &mut seen, tagged(1), request);
        seen.wait(&mut front, |seen| seen.answers() > answers);
        seen.not_submitted.get(refusals).map(|(_, reason)| *reason)
    };
    for price in 100..1_099 {
        assert_eq!(say(0, desk.order(0, Side::Sell, price, 1)), None);
    }
    assert_eq!(say(1, desk.order(1, Side::Sell, 1_099, 1)), None);
    let all_or_nothing = |user| NewRequest {
        time_in_force: TimeInForce::Fok,
        ..desk.order(user, Side::Buy, 1_099, 1_000)
    };
    // A thousand levels and a thousand orders each.
    let taken = (0..600).take_while(|_| say(1, all_or_nothing(1)).is_none());
    assert_eq!(
        taken.count(),
        501,
        "a million inspections, and those that pass the bound"
    );
    let (reason, details) = (RejectReason::Throttle, RejectDetails::Max(2_000));
    let waits = SubmitError::Refused(Reject { reason, details });
    assert_eq!(say(1, all_or_nothing(1)), Some(waits));
    assert_eq!(say(1, desk.order(1, Side::Buy, 1, 1)), None);
    assert_eq!(say(0, all_or_nothing(0)), None, "another member's budget");
}

/// A member that does not wait for answers gets no more fill-or-kill orders into a book than one
/// that does: while they wait in the engine's ring, each counts as the most that it can inspect.
// rows: R172
#[tokio::test]
async fn r172_unfillable_fok_orders_in_flight_count_towards_the_scan_limit() {
    for layout in [Layout::Fused, Layout::Shared] {
        let storage = Arc::new(MemoryStorage::default());
        let mut config = config(&Time::new());
        config.layout = layout;
        // None of them is BUSY.
        config.ring_capacity = 2_048;
        let handle = start(config, &storage);
        let desk = open_desk(handle.port(), 1).await;
        let mut front = rings(&desk, 2_048);
        let mut seen = Seen::default();
        let session = open(&mut front, &mut seen, &desk, 1, 7).session;
        for price in 100..1_099 {
            done(
                &desk.port,
                Request::New(desk.order(0, Side::Sell, price, 1)),
            )
            .await;
        }
        done(
            &desk.port,
            Request::New(desk.order(1, Side::Sell, 1_099, 1)),
        )
        .await;
        let all_or_nothing = NewRequest {
            time_in_force: TimeInForce::Fok,
            ..desk.order(1, Side::Buy, 1_099, 1_000)
        };
        let count = 600;
        for seq in 1..=count {
            let request = of_session(all_or_nothing, session, seq);
            ask(&mut front, &mut seen, tagged(seq), request);
        }
        let last = of_session(desk.order(1, Side::Buy, 1, 1), session, count + 1);
        ask(&mut front, &mut seen, tagged(count + 1), last);
        // It completes after all of them.
        let is_last = |(_, message): &(Stamp, Message)| message.client_seq == count + 1;
        seen.wait(&mut front, |seen| seen.numbered.iter().any(is_last));
        // `BUSY` while those in flight may inspect too much.
        let is_refused = |(_, error): &(u64, SubmitError)| match error {
            SubmitError::Refused(reject) => reject.reason == RejectReason::Throttle,
            error => *error == SubmitError::Busy,
        };
        assert!(seen.not_submitted.iter().all(is_refused), "{layout:?}");
        let taken = count - seen.not_submitted.len() as u64;
        // A thousand levels and a thousand orders each, and twice the number of those in flight.
        assert!((415..=501).contains(&taken), "{layout:?}: {taken}");
    }
}

/// A stalled disk delays durability but not *accepted*, up to the bound on the bytes that wait for
/// the disk.
#[tokio::test]
async fn a_stalled_disk_delays_no_report_until_the_bound() {
    let storage = Arc::new(MemoryStorage::default());
    let mut config = config(&Time::new());
    // A second of the rate below, and the reserve.
    config.pending_bytes_max = 1_200 << 10;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let (mut front, mut seen) = (rings(&desk, 64), Seen::default());
    let opened = open(&mut front, &mut seen, &desk, 0, 7);
    let commit = handle.commit();
    let opened_at = opened.epoch;
    in_time("the login", commit.wait(opened_at))
        .await
        .expect("durable");
    storage.stall(true);
    let mut last = 0;
    for seq in 1..=5_000 {
        let order = of_session(desk.order(0, Side::Buy, 100, 1), opened.session, seq);
        ask(&mut front, &mut seen, tagged(seq), order);
        seen.wait(&mut front, |seen| seen.numbered.len() as u64 == seq);
        last = seen.numbered[seq as usize - 1].0.sequence.get();
    }
    let (durable, refused) = (commit.position(), seen.not_submitted.len());
    // An order without room is refused, and the market continues after the stall.
    let mut seq = 5_000;
    while seen.not_submitted.is_empty() {
        seq += 1;
        assert!(seq < 100_000, "what waits for the disk has no bound");
        let (answers, order) = (seen.answers(), desk.order(0, Side::Buy, 100, 1));
        let order = of_session(order, opened.session, seq);
        ask(&mut front, &mut seen, tagged(seq), order);
        seen.wait(&mut front, |seen| seen.answers() > answers);
    }
    // Before the checks: a node whose disk is stalled does not stop.
    storage.stall(false);
    assert!(durable <= opened_at && durable.get() < last, "{durable}");
    assert_eq!(refused, 0);
    assert_eq!(seen.not_submitted, [(seq, SubmitError::Busy)]);
    let taken = seen.numbered.last().expect("many").0.sequence;
    in_time("the rest", commit.wait(taken))
        .await
        .expect("durable");
}

/// `design.md` 7: journal bytes per user and minute, and order messages per trade and day.
// rows: R341
#[tokio::test]
async fn r341_member_above_journal_quota_or_otr_may_cancel() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(config(&Time::new()), &storage);
    let desk = open_desk(handle.port(), 2).await;
    let mut front = rings(&desk, 64);
    let mut seen = Seen::default();
    let sessions = [0, 1].map(|user| open(&mut front, &mut seen, &desk, user, 7 + user as u128));
    let bounds = |user: usize, journal_bytes_per_minute, messages_per_trade| {
        Request::SetOrderBounds(SetOrderBounds {
            of: BoundsOf::User(desk.users[user]),
            bounds: Some(OrderBounds {
                journal_bytes_per_minute,
                messages_per_trade,
                ..OrderBounds::NONE
            }),
            key_hash: Id128::NONE,
        })
    };
    done(&desk.port, bounds(0, 4_096, u32::MAX)).await;
    done(&desk.port, bounds(1, u64::MAX, 10)).await;
    let mut seq = 0;
    let mut say = |user: usize, request: &dyn Fn(SessionIx, u64) -> Request| {
        seq += 1;
        let before = (seen.numbered.len(), seen.not_submitted.len());
        let request = request(sessions[user].session, seq);
        ask(&mut front, &mut seen, Submission::default(), request);
        seen.wait(&mut front, |t| {
            (t.numbered.len(), t.not_submitted.len()) != before
        });
        let warned = seen.warned.len();
        match seen.not_submitted.len() > before.1 {
            true => (Err(seen.not_submitted[before.1].1), warned),
            false => (Ok(seen.numbered.last().expect("one").1), warned),
        }
    };
    let order = |user| {
        move |desk: &Desk, session, seq| {
            of_session(desk.order(user, Side::Buy, 100, 1), session, seq)
        }
    };
    let (first, second) = (order(0), order(1));
    let refused = |outcome: (Result<Message, SubmitError>, usize)| match outcome.0 {
        Err(SubmitError::Refused(reject)) => (reject.reason, reject.limit()),
        other => panic!("{other:?}"),
    };
    // Each order takes some hundred bytes.
    let acked = say(0, &|session, seq| first(&desk, session, seq)).0;
    let acked = acked.expect("taken");
    let mut count = 1;
    let refusal = loop {
        let outcome = say(0, &|session, seq| first(&desk, session, seq));
        if outcome.0.is_err() {
            break refused(outcome);
        }
        count += 1;
    };
    assert!((10..60).contains(&count), "{count}");
    assert_eq!(refusal.0, RejectReason::JournalQuota);
    assert!((1..=60_000_000).contains(&refusal.1), "{}", refusal.1);
    let cancelled = say(0, &|session, seq| {
        cancel(&desk, 0, session, seq, acked.handle)
    });
    let body = cancelled.0.expect("what reduces risk passes").body;
    assert!(matches!(body, ReportBody::Cancelled { .. }));
    let again = say(0, &|session, seq| {
        cancel(&desk, 0, session, seq, acked.handle)
    });
    assert_eq!(refused(again).0, RejectReason::JournalQuota, "it is gone");
    // A request that was seen is never reported as unseen: the client would send it as a new one.
    let repeated = say(0, &|session, _| first(&desk, session, acked.client_seq));
    assert_eq!(refused(repeated).0, RejectReason::AlreadySeen);
    // The other member has its own quota, and a ratio: 100,000 messages without a trade.
    let acked = say(1, &|session, seq| second(&desk, session, seq)).0;
    let acked = acked.expect("taken");
    let nothing = Handle {
        slot: acked.handle.slot,
        generation: 99,
    };
    let in_vain = |session, seq| cancel(&desk, 1, session, seq, nothing);
    let warned: Vec<usize> = (0..99_999).map(|_| say(1, &in_vain).1).collect();
    assert_eq!((warned[79_998], warned[79_999]), (0, 1), "at 80 % of them");
    assert_eq!(warned.last(), Some(&1), "once");
    say(1, &|session, seq| second(&desk, session, seq))
        .0
        .expect("one passes");
    let slow = refused(say(1, &|session, seq| second(&desk, session, seq)));
    assert_eq!(slow, (RejectReason::OrderToTrade, 100_000));
    let cancelled = say(1, &|session, seq| {
        cancel(&desk, 1, session, seq, acked.handle)
    });
    cancelled.0.expect("cancels are not slowed down");
}

fn throttled() -> SubmitError {
    SubmitError::Refused(RejectReason::Throttle.into())
}

// rows: R345
#[tokio::test]
async fn r345_what_reduces_risk_passes_beyond_the_rate() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(config(&Time::new()), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let mut front = rings(&desk, 64);
    let mut seen = Seen::default();
    let opened = open(&mut front, &mut seen, &desk, 0, 7);
    let (session, user) = (opened.session, desk.users[0]);
    let over = Submission {
        tag: 1,
        is_over_rate: true,
        ..Submission::default()
    };
    let order = |seq| of_session(desk.order(0, Side::Buy, 100, 1), session, seq);
    let mut say = |asked, request| {
        let before = (seen.numbered.len(), seen.not_submitted.len());
        ask(&mut front, &mut seen, asked, request);
        seen.wait(&mut front, |t| {
            (t.numbered.len(), t.not_submitted.len()) != before
        });
        match seen.not_submitted.len() > before.1 {
            true => Err(seen.not_submitted[before.1].1),
            false => Ok(seen.numbered.last().expect("one").1),
        }
    };
    let throttled = throttled();
    let acked = say(Submission::default(), order(1)).expect("taken");
    assert_eq!(say(over, order(2)), Err(throttled), "a new order waits");
    let unknown = Handle {
        slot: acked.handle.slot,
        generation: 99,
    };
    assert_eq!(
        say(over, cancel(&desk, 0, session, 3, unknown)),
        Err(throttled),
        "a cancel of no open order counts as any request"
    );
    let done = say(over, cancel(&desk, 0, session, 4, acked.handle)).expect("passes");
    assert!(matches!(done.body, ReportBody::Cancelled { .. }));
    let all = |seq| mass_cancel(MassScope::User(user), user, session, seq);
    assert_eq!(say(over, all(5)), Err(throttled), "nothing is open");
    let (own, group) = (MassScope::User(user), StpGroup::of_user(user));
    let mut seq = 6;
    for (scope, instrument, side, passes) in [
        (own, InstrumentIx::NONE, Some(Side::Sell), false),
        (own, InstrumentIx(1), None, false),
        (own, InstrumentIx::NONE, Some(Side::Buy), true),
        (own, InstrumentIx(0), None, true),
        (MassScope::Group(group), InstrumentIx::NONE, None, true),
        (own, InstrumentIx::NONE, None, true),
    ] {
        say(Submission::default(), order(seq)).expect("taken");
        let some = Request::MassCancel(MassCancelRequest {
            scope,
            instrument,
            side,
            reason: CancelReason::MassCancel,
            user,
            session,
            client_seq: seq + 1,
            key_hash: Id128::NONE,
        });
        seq += 2;
        match passes {
            true => {
                let done = say(over, some).expect("it ends orders");
                assert!(matches!(
                    done.body,
                    ReportBody::MassCancelled { count: 1.., .. }
                ));
            }
            false => assert_eq!(say(over, some), Err(throttled), "it ends no order"),
        }
    }
}

async fn until_traded(desk: &Desk, trades: u64) {
    let made = async || desk.port.inspect(|core| core.trades()).await.expect("runs");
    let trading = async { while made().await < trades {} };
    in_time("the orders trade", trading).await;
}

#[tokio::test]
async fn a_front_that_reads_nothing_delays_only_itself() {
    let storage = Arc::new(MemoryStorage::default());
    let mut config = config(&Time::new());
    config.spin_us = 20;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let makers = 2_000;
    for _ in 0..makers {
        done(&desk.port, Request::New(desk.order(0, Side::Sell, 100, 1))).await;
    }
    let mut front = rings(&desk, 8);
    let mut seen = Seen::default();
    let session = open(&mut front, &mut seen, &desk, 1, 7).session;
    // Many more reports than its ring holds, and further requests.
    let sweep = of_session(desk.order(1, Side::Buy, 100, makers), session, 1);
    front.submit(tagged(0), &sweep).expect("room");
    let mut more = 0;
    let small = |seq| of_session(desk.order(1, Side::Buy, 50, 1), session, seq);
    while front.submit(tagged(0), &small(2 + more)).is_ok() {
        more += 1;
        assert!(more <= 80, "the ring has an end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    for _ in 0..200 {
        done(&desk.port, Request::New(desk.order(0, Side::Sell, 200, 1))).await;
    }
    let all = makers as usize + 1 + more as usize;
    seen.wait(&mut front, |seen| seen.numbered.len() == all);
    assert!(seen.not_submitted.is_empty());

    // The front is dropped with a request in flight: the answer is dropped.
    let last = of_session(desk.order(1, Side::Buy, 200, 200), session, 2 + more);
    front.submit(tagged(0), &last).expect("room");
    drop(front);
    until_traded(&desk, makers + 200).await;
    done(&desk.port, Request::New(desk.order(0, Side::Sell, 200, 1))).await;
    // A front that is gone does not keep the node awake: it sleeps for half a second at a time, not
    // for a millisecond as with a front that is behind.
    let parks = || {
        let stats = handle.stats();
        stats.parks.load(std::sync::atomic::Ordering::Relaxed)
    };
    let asleep = async {
        loop {
            let before = parks();
            tokio::time::sleep(Duration::from_millis(600)).await;
            if (1..=3).contains(&(parks() - before)) {
                return;
            }
        }
    };
    in_time("the node sleeps", asleep).await;
    handle.stop();
}

#[tokio::test]
async fn a_front_learns_that_the_node_has_ended() {
    let config = config(&Time::new());
    let node = Volatile::start(config, Arc::new(Backlog::default())).expect("starts");
    let desk: Desk = open_desk(node.port(), 1).await;
    let mut front = rings(&desk, 8);
    let order = Request::New(desk.order(0, Side::Sell, 100, 1));
    front.submit(tagged(1), &order).expect("room");
    let mut seen = Seen::default();
    seen.wait(&mut front, |seen| !seen.taken.is_empty());
    assert_ne!(seen.taken[0].1.sequence, Sequence::ZERO);
    drop(node);
    assert_eq!(front.submit(tagged(2), &order), Err(SubmitError::Stopping));
    assert_eq!(front.poll(|_| {}), Err(SubmitError::Stopping));
    let rings = desk.port.rings(8, Arc::new(Parker::default()));
    assert!(matches!(rings, Err(SubmitError::Stopping)));
}

/// Reads until the node reports that it has ended.
fn read_out(front: &mut RingPort, seen: &mut Seen) {
    let since = Instant::now();
    loop {
        assert!(since.elapsed() < HANG, "the end is not reported");
        match front.poll(|report| seen.note(report)) {
            Ok(true) => {}
            Ok(false) => std::thread::yield_now(),
            Err(error) => return assert_eq!(error, SubmitError::Stopping),
        }
    }
}

#[tokio::test]
async fn a_front_that_lags_when_the_node_stops_gets_every_report() {
    let storage = Arc::new(MemoryStorage::default());
    let handle = start(config(&Time::new()), &storage);
    let desk = open_desk(handle.port(), 1).await;
    let makers = 700;
    for _ in 0..makers {
        done(&desk.port, Request::New(desk.order(0, Side::Sell, 100, 1))).await;
    }
    let mut front = rings(&desk, 8);
    let mut seen = Seen::default();
    let session = open(&mut front, &mut seen, &desk, 1, 7).session;
    let sweep = of_session(desk.order(1, Side::Buy, 100, makers), session, 1);
    front.submit(tagged(0), &sweep).expect("room");
    // After the sweep reports wait for room; later requests stay in the ring.
    until_traded(&desk, makers).await;
    let mut asked = 1;
    let small = |seq| of_session(desk.order(1, Side::Buy, 50, 1), session, seq);
    while front.submit(tagged(asked), &small(1 + asked)).is_ok() {
        asked += 1;
        assert!(asked <= 80, "the ring has an end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(asked > 8, "the ring is full");
    handle.stop();
    read_out(&mut front, &mut seen);
    let fills = seen.numbered.iter();
    let fills = fills.filter(|(_, m)| matches!(m.body, ReportBody::Filled { .. }));
    assert_eq!(fills.count() as u64, makers);
    assert_eq!(
        seen.answers() as u64,
        asked + 1,
        "an answer for each, and the login's"
    );
    let stopped = |(_, reason): &(u64, SubmitError)| *reason == SubmitError::Stopping;
    assert!(seen.not_submitted.iter().all(stopped));
    assert_eq!(front.poll(|_| {}), Err(SubmitError::Stopping));
    let again = start(config(&Time::new()), &storage);
    let last = seen.numbered.last().expect("the sweep").0.sequence;
    assert_eq!(again.recovered(), last, "what is journalled was reported");
}

// A front's request before, during or after the stop is answered, or is not in the journal.
#[test]
fn a_front_that_races_with_the_stop_knows_what_was_taken() {
    for round in 0..60u64 {
        let storage = Arc::new(MemoryStorage::default());
        let mut config = config(&Time::new());
        config.layout = [Layout::Fused, Layout::Shared][usize::from(round % 2 == 1)];
        let handle = start(config.clone(), &storage);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .expect("a runtime");
        let desk = runtime.block_on(open_desk(handle.port(), 1));
        let begun = runtime
            .block_on(desk.port.inspect(|core| core.sequence()))
            .expect("inspected");
        let mut front = rings(&desk, 16);
        let asking = std::thread::spawn(move || {
            let (mut asked, mut seen) = (0, Seen::default());
            loop {
                let order = desk.order(usize::from(asked % 2 == 0), Side::Sell, 100, 1);
                match front.submit(tagged(asked), &Request::New(order)) {
                    Ok(()) => asked += 1,
                    // Some fronts read at times, some only at the end.
                    Err(SubmitError::Busy) if round % 3 > 0 && !seen.taken.is_empty() => {}
                    Err(SubmitError::Busy) => drop(front.poll(|report| seen.note(report))),
                    Err(error) => {
                        assert_eq!(error, SubmitError::Stopping);
                        break;
                    }
                }
            }
            read_out(&mut front, &mut seen);
            (asked, seen)
        });
        for _ in 0..round * 2_000 {
            std::hint::spin_loop();
        }
        handle.stop();
        let (asked, seen) = asking.join().expect("joins");
        let mut tags: Vec<u64> = seen.taken.iter().map(|(tag, _)| *tag).collect();
        tags.extend(seen.not_submitted.iter().map(|(tag, _)| *tag));
        tags.sort_unstable();
        let answered = tags.len() as u64;
        assert!(
            answered <= asked && asked - answered <= 1,
            "round {round}: {asked} asked, {answered} answered"
        );
        assert_eq!(tags, (0..answered).collect::<Vec<_>>(), "round {round}");
        let last = seen.taken.last().map_or(begun, |(_, stamp)| stamp.sequence);
        let again = start(config, &storage);
        assert_eq!(
            again.recovered(),
            last,
            "round {round}: journalled and reported"
        );
    }
}

/// A front with a bug, and its rings.
struct Broken {
    socket: std::net::UdpSocket,
    _rings: RingPort,
}

impl Polled for Broken {
    fn round(&mut self) -> bool {
        panic!("a bug of the front's");
    }

    fn has_work(&self) -> bool {
        true
    }

    fn next_deadline(&self) -> Option<Instant> {
        None
    }

    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.socket)
    }

    fn is_over(&self) -> bool {
        false
    }
}

// rows: R345
#[tokio::test]
async fn r345_front_panic_disconnects_only_its_sessions() {
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        front_panic_disconnects_its_sessions(layout).await;
    }
}

async fn front_panic_disconnects_its_sessions(layout: Layout) {
    let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
    let mut config = config(&time);
    config.layout = layout;
    let handle = start(config, &storage);
    let desk = open_desk(handle.port(), 1).await;
    let (mut broken, mut other) = (rings(&desk, 64), rings(&desk, 64));
    let mut seen = Seen::default();
    let lost = open(&mut broken, &mut seen, &desk, 0, 7).session;
    let order = of_session(desk.order(0, Side::Buy, 9_000, 1), lost, 1);
    ask(&mut broken, &mut seen, tagged(1), order);
    seen.wait(&mut broken, |seen| !seen.numbered.is_empty());
    let kept = open(&mut other, &mut Seen::default(), &desk, 1, 8).session;
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").expect("a socket");
    let front = Box::new(Broken {
        socket,
        _rings: broken,
    });
    match layout {
        Layout::Fused => desk.port.host(front).expect("taken"),
        Layout::Shared | Layout::Pinned => {
            let polling = move || run_polled(front, &Parker::default(), Duration::ZERO);
            let ended = std::thread::spawn(polling).join();
            ended.expect_err("the front panics");
        }
    }
    let are_open = move |core: &sequencer::Core| {
        [lost, kept].map(|session| {
            let row = core.admission().session(session);
            row.is_some_and(|row| row.open)
        })
    };
    let closing = async { while desk.port.inspect(are_open).await != Ok([false, true]) {} };
    in_time("the front's session is closed, and no other", closing).await;
    time.advance_ms(60_000);
    let open_orders = |core: &sequencer::Core| core.admission().orders().count();
    let cancelling = async { while desk.port.inspect(open_orders).await != Ok(0) {} };
    in_time("cancel-on-disconnect", cancelling).await;
    done(&desk.port, Request::New(desk.order(0, Side::Sell, 100, 1))).await;
}

/// A front that stops closes its sessions itself: the end of its rings adds no record, and the
/// orders of a session that logged out stay.
#[tokio::test]
async fn the_end_of_a_front_whose_sessions_are_closed_adds_no_record() {
    for layout in [Layout::Fused, Layout::Shared, Layout::Pinned] {
        let (time, storage) = (Time::new(), Arc::new(MemoryStorage::default()));
        let mut config = config(&time);
        config.layout = layout;
        let handle = start(config.clone(), &storage);
        let desk = open_desk(handle.port(), 1).await;
        let (mut front, mut seen) = (rings(&desk, 64), Seen::default());
        let session = open(&mut front, &mut seen, &desk, 0, 7).session;
        let order = of_session(desk.order(0, Side::Buy, 9_000, 1), session, 1);
        ask(&mut front, &mut seen, tagged(1), order);
        let log_out = Request::CloseSession {
            session,
            epoch: None,
            keep_orders: true,
        };
        ask(&mut front, &mut seen, tagged(2), log_out);
        seen.wait(&mut front, |seen| !seen.taken.is_empty());
        let last = seen.taken[0].1.sequence;
        drop(front);
        handle.stop();
        let again = start(config, &storage);
        assert_eq!(again.recovered(), last, "{layout:?}");
        let open_orders = |core: &sequencer::Core| core.admission().orders().count();
        assert_eq!(again.port().inspect(open_orders).await, Ok(1), "{layout:?}");
    }
}
