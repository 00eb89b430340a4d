//! Regression tests of faults that a review of the trading path found.

use std::sync::Arc;

use admission::{NewRequest, Request, SessionRequest};
use client::{Connection, Reports};
use proto::common::v1::KycStatus;
use proto::ledger::v1::HoldStatus;
use proto::market::v1::market_service_client::MarketServiceClient;
use proto::market::v1::*;
use rpc::{CallRateConfig, CallRates, Channel, Limits};
use sequencer::{Parker, Report, RingPort, Submission};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};
use types::{Id128, InstrumentIx, Lots, RejectReason, SessionIx, Side, Ticks, UserId};
use wire::ServerMessage;

use crate::checkpoints::cancel_own;
use crate::kyc::set_kyc;
use crate::world::*;

/// Blocks identity's answers to limit checks until the returned latch is closed.
fn block_limit_checks(world: &World) -> Arc<Semaphore> {
    let latch = Arc::new(Semaphore::new(0));
    world
        .identity
        .with(|state| state.limit_latch = Some(latch.clone()));
    latch
}

async fn until_identity_is_asked(world: &World) {
    let is_asked = async || !world.identity.take_limit_checks().is_empty();
    until_true("identity is asked", is_asked).await;
}

/// M6: an order with a negative price does not increase a session's budget.
#[tokio::test]
async fn m6_a_negative_price_leaves_the_budget_as_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    world.identity.take_limit_checks();
    for (id, price, quantity) in [(1, -1_000_000, 1_000_000), (2, -1, 1)] {
        let order = wire_order(id, Side::Buy, price, quantity);
        ann.send(0, order).await.unwrap();
        let rejected = until(&mut of_ann, |message| match message {
            ServerMessage::Rejected(rejected) => Some(*rejected),
            _ => None,
        });
        assert_eq!(rejected.await.reason, RejectReason::PriceTick);
    }
    // 20.00 of 25.00 pass without a question to identity. The next 10.00 need one.
    for id in 3..=4 {
        let order = wire_order(id, Side::Buy, 100, 10);
        ann.send(0, order).await.unwrap();
        until(&mut of_ann, ack).await;
    }
    assert!(world.identity.take_limit_checks().is_empty());
    let order = wire_order(5, Side::Buy, 100, 10);
    ann.send(0, order).await.unwrap();
    until(&mut of_ann, ack).await;
    assert_eq!(world.identity.take_limit_checks().len(), 1);
    world.stop().await;
}

/// M9: an order that waits for identity delays only its own session.
#[tokio::test]
async fn m9_an_order_that_waits_for_identity_delays_no_other_session() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world.user("bob", "100000", "0").await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let (connection, mut reports) = world.session(with_money("ann", "a")).await;
    connection.login(1, with_money("bob", "b")).await.unwrap();
    world.identity.take_limit_checks();
    let latch = block_limit_checks(&world);
    let past_budget = wire_order(1, Side::Buy, 100, 30);
    connection.send(0, past_budget).await.unwrap();
    until_identity_is_asked(&world).await;
    // The session's next request stays after the waiting one.
    let next = wire_order(2, Side::Buy, 100, 1);
    connection.send(0, next).await.unwrap();
    for id in 1..=100 {
        let order = wire_order(id, Side::Buy, 100, 1);
        connection.send(1, order).await.unwrap();
        loop {
            let report = next_report(&mut reports).await;
            let Some(acked) = ack(&report.message) else {
                continue;
            };
            assert_eq!((report.channel, acked.client_order_id), (1, id));
            break;
        }
    }
    latch.close();
    for id in [1, 2] {
        let acked = until(&mut reports, ack).await;
        assert_eq!(acked.client_order_id, id, "in the session's order");
    }
    world.stop().await;
}

/// The outcome of an order: its client order id, or why it is refused.
fn outcome(message: &ServerMessage) -> Option<Result<u64, RejectReason>> {
    match rejected(message) {
        Some(refusal) => Some(Err(refusal.reason)),
        None => ack(message).map(|ack| Ok(ack.client_order_id)),
    }
}

/// M9: a cancel passes at once while an order of its session waits for identity. That order and the
/// one after it are refused and may be sent again; identity's late answer releases neither them nor
/// a later order.
#[tokio::test]
async fn m9_a_cancel_passes_an_order_that_waits_for_identity() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    for id in [1, 2] {
        ann.send(0, wire_order(id, Side::Buy, 100, 1))
            .await
            .unwrap();
        assert_eq!(until(&mut of_ann, outcome).await, Ok(id));
    }
    world.identity.take_limit_checks();
    let latch = block_limit_checks(&world);
    let past_budget = |id| wire_order(id, Side::Buy, 100, 30);
    let checked = ann.send(0, past_budget(3)).await.unwrap();
    until_identity_is_asked(&world).await;
    let next = wire_order(4, Side::Buy, 100, 1);
    let next = ann.send(0, next).await.unwrap();
    ann.send(0, cancel_own(1)).await.unwrap();
    for (client_seq, id) in [(checked, 3), (next, 4)] {
        let refusal = until(&mut of_ann, rejected).await;
        assert_eq!(
            (refusal.client_seq, refusal.client_order_id),
            (client_seq, id)
        );
        let is = (refusal.reason, refusal.node_sequence);
        assert_eq!(is, (RejectReason::Busy, 0), "it was not seen");
    }
    assert_eq!(until(&mut of_ann, cancelled).await.client_order_id, 1);
    // Identity is not asked again before it has answered, and the session waits for nothing.
    ann.send(0, past_budget(5)).await.unwrap();
    assert_eq!(until(&mut of_ann, outcome).await, Err(RejectReason::Busy));
    assert!(world.identity.take_limit_checks().is_empty());
    ann.send(0, wire_order(6, Side::Buy, 100, 1)).await.unwrap();
    assert_eq!(until(&mut of_ann, outcome).await, Ok(6));
    latch.close();
    let sending_again = async {
        loop {
            ann.send(0, past_budget(3)).await.unwrap();
            let outcome = until(&mut of_ann, outcome).await;
            if outcome != Err(RejectReason::Busy) {
                return outcome;
            }
        }
    };
    let again = in_time("identity answers about the refused order", sending_again).await;
    assert_eq!(again, Ok(3));
    assert_eq!(world.identity.take_limit_checks().len(), 1);
    // Orders 2, 6 and 3: nothing else has entered the book.
    assert_eq!(world.book().await.0, [("1.00".to_owned(), "32".to_owned())]);
    world.stop().await;
}

/// M9: a mass cancel and the dead man's switch pass as a cancel does.
#[tokio::test]
async fn m9_a_mass_cancel_and_a_switch_pass_an_order_that_waits_for_identity() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let mass_cancel = wire::MassCancel {
        scope: 0,
        instrument: wire::ALL_INSTRUMENTS,
        side: wire::BOTH_SIDES,
    };
    let switch = wire::CancelAllAfter { timeout_s: 60 };
    let requests: [wire::ClientMessage; 2] = [mass_cancel.into(), switch.into()];
    let logins = [with_money("ann", "a"), login("ann", "b")];
    for (request, login) in requests.into_iter().zip(logins) {
        let (ann, mut of_ann) = world.session(login).await;
        world.identity.take_limit_checks();
        let latch = block_limit_checks(&world);
        let past_budget = wire_order(1, Side::Buy, 100, 30);
        ann.send(0, past_budget).await.unwrap();
        until_identity_is_asked(&world).await;
        let client_seq = ann.send(0, request).await.unwrap();
        assert_eq!(until(&mut of_ann, outcome).await, Err(RejectReason::Busy));
        let done = until(&mut of_ann, |m| match m {
            ServerMessage::MassCancelled(done) => Some(done.client_seq),
            ServerMessage::CancelAllAfterSet(set) => Some(set.client_seq),
            _ => None,
        });
        assert_eq!(done.await, client_seq);
        latch.close();
    }
    world.stop().await;
}

/// The order that waits for identity and the requests after it report when they were read, not when
/// the wait was over. A member sees the wait in its latency. All of them are refused if the user's
/// KYC level has dropped meanwhile.
// rows: R146
#[tokio::test]
async fn requests_that_wait_for_identity_report_when_they_were_read() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "100000", "0").await;
    world
        .identity
        .upsert_user("ann", |ann| ann.trading_remaining_minor = 2_500);
    let (ann, mut of_ann) = world.session(with_money("ann", "a")).await;
    world.identity.take_limit_checks();
    let latch = block_limit_checks(&world);
    let past_budget = wire_order(1, Side::Buy, 100, 30);
    ann.send(0, past_budget).await.unwrap();
    until_identity_is_asked(&world).await;
    ann.send(0, wire_order(2, Side::Buy, 100, 1)).await.unwrap();
    until_read(&ann, &mut of_ann).await;
    let read_by = world.port().clock().now_ns();
    latch.close();
    let first = until(&mut of_ann, ack).await;
    let next = until(&mut of_ann, ack).await;
    let times = [first.received_ns, next.received_ns];
    assert!(times[0] <= times[1] && times[1] <= read_by, "{times:?}");
    assert!(read_by <= first.time_ns);
    for id in [1, 2] {
        ann.send(0, cancel_own(id)).await.unwrap();
        assert_eq!(until(&mut of_ann, cancelled).await.client_order_id, id);
    }

    // Refusals after the wait, which are not journalled. Identity allows the first order.
    let latch = block_limit_checks(&world);
    ann.send(0, past_budget).await.unwrap();
    until_identity_is_asked(&world).await;
    ann.send(0, wire_order(2, Side::Buy, 100, 1)).await.unwrap();
    until_read(&ann, &mut of_ann).await;
    let read_by = world.port().clock().now_ns();
    set_kyc(&world, "ann", KycStatus::Simplified, 4_000).await;
    latch.close();
    for id in [1, 2] {
        let refusal = until(&mut of_ann, rejected).await;
        assert_eq!(refusal.reason, RejectReason::KycRequired);
        assert_eq!((refusal.client_order_id, refusal.node_sequence), (id, 0));
        assert!(refusal.received_ns <= read_by && read_by < refusal.time_ns);
    }
    assert!(world.book().await.0.is_empty());
    world.stop().await;
}

/// Waits until the exchange has read every message that was sent: it answers a list of orders while
/// the session's requests wait.
async fn until_read(connection: &Connection, reports: &mut Reports) {
    let list = wire::OpenOrders {
        request_id: 1,
        scope: 0,
    };
    connection.send(0, list).await.unwrap();
    let is_end = |m: &ServerMessage| matches!(m, ServerMessage::OpenOrdersEnd(_));
    until(reports, |m| is_end(m).then_some(())).await;
}

/// A front with one session, whose ring is not read while the session's orders end.
struct SilentFront {
    ring: RingPort,
    session: SessionIx,
}

impl SilentFront {
    /// Polls the ring until `pick` returns a value.
    fn wait_for<T>(&mut self, pick: impl Fn(&Report) -> Option<T>) -> T {
        let since = std::time::Instant::now();
        let mut found = None;
        while found.is_none() {
            assert!(since.elapsed() < testkit::PATIENCE, "no report");
            let read = |report: &Report| found = found.take().or_else(|| pick(report));
            if !self.ring.poll(read).expect("the node runs") {
                std::thread::yield_now();
            }
        }
        found.expect("just found")
    }

    fn submit(&mut self, request: &Request) {
        let submission = Submission::default();
        self.ring.submit(submission, request).expect("room");
    }
}

/// Opens a session of `user_id` and enters `orders` sells of one unit.
async fn silent_front(world: &World, user_id: &str, orders: u64) -> SilentFront {
    let port = world.port();
    let id = UserId::new(user_id).unwrap();
    let user = world
        .replica()
        .read(|state| state.core().admission().user_ix(&id));
    let user = user.expect("the user has a trading hold");
    let ring = port.rings(8, Arc::new(Parker::default())).unwrap();
    let session = SessionIx::NONE;
    let mut front = SilentFront { ring, session };
    front.submit(&Request::OpenSession(SessionRequest {
        key: Id128::from_u128(7),
        user,
        stp_group: None,
        cancel_on_disconnect: false,
    }));
    front.session = front.wait_for(|report| match report {
        Report::Opened(opened) => Some(opened.session),
        _ => None,
    });
    for client_seq in 1..=orders {
        front.submit(&Request::New(NewRequest {
            session: front.session,
            client_seq,
            limit_checked: true,
            ..NewRequest::limit(InstrumentIx(0), user, Side::Sell, Ticks(5_000), Lots(1))
        }));
        front.wait_for(|report| match report {
            Report::SessionMessage(..) => Some(()),
            Report::NotSubmitted { reason, .. } => panic!("{reason:?}"),
            _ => None,
        });
    }
    front
}

/// M4: a call that is refused `BUSY` keeps the order's own hold. A repeat under the same key enters
/// one order. The market is busy here because a front reads no reports.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn m4_busy_keeps_the_hold_for_the_repeat_under_the_same_key() {
    /// More than half of the reports that the hot thread queues for a front.
    const REPORTS: u64 = 33_500;
    let folder = tempfile::tempdir().unwrap();
    let mut settings = Settings::unsettled();
    settings.gateway.open_orders_per_instrument = settings.gateway.open_orders_per_user;
    let mut world = World::with(folder.path(), settings).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "0", "100000").await;
    world.open_hold("bob", BOND, "100000").await;
    // A login reads the budget of the day. Identity is then asked only if the call needs a hold.
    drop(world.session(login("ann", "a")).await);
    let mut front = silent_front(&world, "bob", REPORTS).await;
    let latch = block_limit_checks(&world);
    let order = buy("ann", "10", "1");
    let request = PlaceOrderRequest {
        context: context("key-1"),
        order: Some(order.clone()),
    };
    let mut client = world.trader("ann");
    let first = tokio::spawn(async move { client.place_order(request).await });
    // Admission has refused the order without a hold. Identity is asked before the hold is placed.
    until_identity_is_asked(&world).await;
    let cancel = MassCancelRequest {
        context: context("cancel-all"),
        user_id: "bob".to_owned(),
        ..Default::default()
    };
    let cancelled = world.trader("bob").mass_cancel(cancel).await.unwrap();
    assert_eq!(u64::from(cancelled.into_inner().cancelled), REPORTS);
    latch.close();
    let busy = in_time("the first call", first).await.unwrap();
    let busy = refused(busy.map(drop).unwrap_err());
    assert_eq!((busy.0, busy.2.as_str()), (Code::ResourceExhausted, "BUSY"));
    let hold = world.holds("ann", "CFA-RUB").await.remove(0);
    assert_eq!(hold.status(), HoldStatus::Active, "kept for the repeat");
    // The front reads again. The next sweep, a minute later, would release the hold.
    while front.ring.poll(|_| ()).expect("the node runs") {
        tokio::task::yield_now().await;
    }
    let placed = async {
        loop {
            match world.place_with("ann", "key-1", order.clone()).await {
                Err(status) if status.code() == Code::ResourceExhausted => {
                    front.ring.poll(|_| ()).expect("the node runs");
                    tokio::task::yield_now().await;
                }
                outcome => return outcome.unwrap(),
            }
        }
    };
    let placed = in_time("the repeat", placed).await;
    assert_eq!(placed.status(), OrderStatus::Open);
    let again = world.place_with("ann", "key-1", order.clone()).await;
    assert_eq!(again.unwrap().order_id, placed.order_id, "one order");
    assert_eq!(world.balance("ann", "CFA-RUB").await.1, "10.01", "one hold");
    world.stop().await;
}

/// D33: a caller above its rate is refused with a retry delay. Calls that cancel its open orders
/// pass, and calls that would cancel nothing are refused. Other callers pass.
// rows: R341
#[tokio::test]
async fn d33_a_caller_over_its_rate_cancels_and_others_order() {
    let folder = tempfile::tempdir().unwrap();
    let mut world = World::new(folder.path()).await;
    world.user("ann", "1000", "0").await;
    world.user("bob", "1000", "0").await;
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = CancellationToken::new();
    let limits = Limits {
        rates: CallRates::new(CallRateConfig {
            writes_per_s: 1,
            reads_per_s: 1,
        }),
        ..testkit::ports::patient()
    };
    let serving = tokio::spawn(rpc::serve::serve_within(
        listener,
        vec![world.gateway.service()],
        rpc::Authenticator::Sandbox,
        rpc::metrics_init(),
        limits,
        stop.clone(),
    ));
    let caller = |token: &str| MarketServiceClient::new(Channel::remote(&url, token).unwrap());
    let place = async |mut client: MarketServiceClient<Channel>, order: Order| {
        let request = PlaceOrderRequest {
            context: context(&unique()),
            order: Some(order),
        };
        let answer = client.place_order(request).await?;
        Ok::<_, Status>(answer.into_inner().order.unwrap())
    };
    let over_rate = caller("sandbox.trader.ann");
    let resting = world.place(buy("ann", "10", "1")).await.unwrap();
    world.place(buy("ann", "10", "2")).await.unwrap();
    // The rate is one call per second, so some of these 20 calls are above it.
    let calls = (0..20).map(|_| place(over_rate.clone(), buy("ann", "10", "1")));
    let answers = futures::future::join_all(calls).await;
    let refusals: Vec<Status> = answers.into_iter().filter_map(Result::err).collect();
    assert!(!refusals.is_empty());
    for refusal in refusals {
        let details = tonic_types::StatusExt::get_details_retry_info(&refusal);
        assert!(details.unwrap().retry_delay.unwrap().as_millis() > 0);
        let refusal = refused(refusal);
        let expected = (Code::ResourceExhausted, "RATE_LIMIT");
        assert_eq!((refusal.0, refusal.2.as_str()), expected);
    }
    let cancel = async || {
        let cancel = CancelOrderRequest {
            context: context(&unique()),
            order_id: resting.order_id.clone(),
        };
        over_rate.clone().cancel_order(cancel).await.map(drop)
    };
    let mass_cancel = async || {
        let request = MassCancelRequest {
            context: context(&unique()),
            ..Default::default()
        };
        over_rate.clone().mass_cancel(request).await.map(drop)
    };
    let kill = async || {
        let request = SetKillSwitchRequest {
            context: context(&unique()),
            user_id: "ann".to_owned(),
            engaged: true,
            reason: String::new(),
        };
        over_rate.clone().set_kill_switch(request).await.map(drop)
    };
    cancel().await.expect("a cancel of an open order passes");
    mass_cancel()
        .await
        .expect("a mass cancel of a user with orders passes");
    kill().await.expect("engaging a kill switch passes");
    let cancels = futures::future::join_all((0..20).map(|_| cancel())).await;
    let mass_cancels = futures::future::join_all((0..20).map(|_| mass_cancel())).await;
    let kills = futures::future::join_all((0..20).map(|_| kill())).await;
    for answers in [cancels, mass_cancels, kills] {
        let is_over_rate = |answer: &Result<(), Status>| {
            let refusal = answer.as_ref().err().cloned().map(refused);
            refusal.is_some_and(|refusal| refusal.2 == "RATE_LIMIT")
        };
        assert!(answers.iter().any(is_over_rate), "{answers:?}");
    }
    let other = place(caller("sandbox.trader.bob"), buy("bob", "10", "1")).await;
    assert_eq!(other.unwrap().status(), OrderStatus::Open);
    for _ in 0..20 {
        let asked = GetMarketStatusRequest { context: None };
        let service = caller("sandbox.service").get_market_status(asked).await;
        service.expect("services have no call rate");
    }
    stop.cancel();
    serving.await.unwrap().unwrap();
    world.stop().await;
}
