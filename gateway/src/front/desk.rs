//! Queues between the front's thread and tokio. The front sends work that takes time or calls other
//! services as a request. Its result returns as a message to the front. All queues are bounded.
//! The front never waits. Look-ups in the journal have a queue of their own. Users and addresses
//! share the places of both queues.

use std::collections::HashMap;
use std::net::IpAddr;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use admission::NewRequest;
use bytes::Bytes;
use crossbeam::queue::ArrayQueue;
use futures::FutureExt;
use rpc::connections::source_of;
use sequencer::Parker;
use service_kit::rate::Rate;
use tokio::sync::Notify;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio_util::sync::CancellationToken;
use transport::Key;
use types::{InstrumentIx, InstrumentSpec, RejectReason, Sequence, SessionIx, UserIx};
use wire::{DisconnectCode, LedgerBalance, SetTradingHold, TradingHold};

use super::compare::Sample;
use super::failures::Failures;
use super::login::{self, Admitted};
use super::pieces::{self, Listing, Piece};
use super::requests::Received;
use super::session::{At, LoginRef, Member};
use super::shares::PlaceQueue;
use super::{hold, limit, resend};
use crate::budget::Budget;
use crate::market::{Market, monotonic_ns};
use crate::resend_source::SCANS_MAX;

/// Capacity of each request queue and of the queue to the front.
const FRONT_REQUESTS_MAX: usize = 4_096;
/// Maximum logins that wait for their answer. Addresses share them.
pub const LOGINS_WAITING_MAX: usize = FRONT_REQUESTS_MAX / 2;
/// Maximum requests answered concurrently, without look-ups. Users and addresses share them.
const CONCURRENT_MAX: usize = 512;
/// Pause before another attempt when the queue to the front is full.
const OFFER_PAUSE: Duration = Duration::from_millis(1);

/// Whose share of the desk a request uses. Before authentication only the address is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Share {
    /// An IPv6 /64 network is one address: see [`Share::of_address`].
    Address(IpAddr),
    User(UserIx),
}

impl Share {
    pub fn of_address(address: IpAddr) -> Self {
        Self::Address(source_of(address))
    }
}

/// A request with its share.
pub type QueuedRequest = (Share, FrontRequest);

/// Requests of the front. `session`: the session's index in the front, and the epoch of its login.
pub enum FrontRequest {
    Login {
        to: (Key, u16),
        address: IpAddr,
        login: Box<wire::Login>,
    },
    /// Checks an order that the budget estimate does not cover.
    Limit {
        session: (At, Sequence),
        user: UserIx,
        user_id: Arc<str>,
        budget: Arc<Budget>,
        new: Box<NewRequest>,
    },
    /// Executes a `SetTradingHold`.
    Hold {
        session: (At, Sequence),
        login: LoginRef,
        user_id: Arc<str>,
        wanted: SetTradingHold,
    },
    /// Reads messages of a session that have left its window, after one number and up to another.
    Messages {
        session: (At, Sequence),
        login: LoginRef,
        ix: SessionIx,
        after: u64,
        through: u64,
        is_retransmit: bool,
    },
    OpenOrders {
        session: (At, Sequence),
        listing: Box<Listing>,
    },
    /// Reads the message that answered a request and has left the window.
    Answer {
        session: (At, Sequence),
        login: LoginRef,
        ix: SessionIx,
        received: Received,
    },
}

impl FrontRequest {
    /// True if the login that made the request no longer owns the session: the request is not
    /// executed (`design.md` 2).
    fn is_over(&self) -> bool {
        match self {
            Self::Hold { login, .. }
            | Self::Messages { login, .. }
            | Self::Answer { login, .. } => login.has_ended(),
            Self::Login { .. } | Self::Limit { .. } | Self::OpenOrders { .. } => false,
        }
    }

    /// True for a request that scans the journal.
    fn is_look_up(&self) -> bool {
        matches!(self, Self::Messages { .. } | Self::Answer { .. })
    }

    /// The message to the front if a panic prevents the answer.
    fn failure(&self) -> FrontMessage {
        match self {
            Self::Login { to, address, .. } => FrontMessage::Login {
                to: *to,
                from: *address,
                outcome: Err(DisconnectCode::Internal),
            },
            Self::Limit { session, .. } => FrontMessage::Limit {
                session: *session,
                outcome: Err(RejectReason::NotReady),
            },
            Self::Hold {
                session, wanted, ..
            } => FrontMessage::Hold {
                session: *session,
                answer: hold::refused(wanted, RejectReason::NotReady, 0),
            },
            Self::Messages {
                session,
                after,
                is_retransmit,
                ..
            } => FrontMessage::Messages {
                session: *session,
                after: *after,
                is_retransmit: *is_retransmit,
                outcome: Err(DisconnectCode::Internal),
            },
            Self::OpenOrders { session, .. } => FrontMessage::OpenOrders {
                session: *session,
                piece: Err(RejectReason::NotReady),
            },
            Self::Answer {
                session, received, ..
            } => FrontMessage::Answer {
                session: *session,
                received: *received,
                message: None,
            },
        }
    }
}

/// Messages to the front.
pub enum FrontMessage {
    Login {
        to: (Key, u16),
        /// Address of the client, whose place among the waiting logins this answer returns.
        from: IpAddr,
        outcome: Result<Box<Admitted>, DisconnectCode>,
    },
    /// `Ok(checked)`: submit the order. `checked`: identity allowed it above the budget. `Err`:
    /// refuse it.
    Limit {
        session: (At, Sequence),
        outcome: Result<bool, RejectReason>,
    },
    Hold {
        session: (At, Sequence),
        answer: TradingHold,
    },
    /// Consecutive messages after `after`, or the reason why there are none.
    Messages {
        session: (At, Sequence),
        after: u64,
        is_retransmit: bool,
        outcome: Result<Vec<Bytes>, DisconnectCode>,
    },
    OpenOrders {
        session: (At, Sequence),
        piece: Result<Piece, RejectReason>,
    },
    /// The answer to a repeated request; `None` if it is no longer in the journal.
    Answer {
        session: (At, Sequence),
        received: Received,
        message: Option<Bytes>,
    },
    /// Compares a message in the window with the journal's.
    Compare(Sample),
    /// A new or changed instrument.
    Instrument(InstrumentSpec),
    /// Sends the sessions an instrument that has changed.
    Announce(InstrumentIx),
    /// Changed groups and rates, as of a sequence.
    Members(Sequence, Vec<Member>),
    /// Changed ledger balances and their users.
    Balances(Vec<(UserIx, LedgerBalance)>),
    /// The journal has forgotten an idle session.
    Forget(SessionIx),
    /// Ends every session of a user.
    EndUser(UserIx, DisconnectCode),
    Shutdown,
}

/// Queue of messages to the front. Any task may send.
#[derive(Clone)]
pub struct FrontQueue {
    queue: Arc<ArrayQueue<FrontMessage>>,
    parker: Arc<Parker>,
}

impl FrontQueue {
    pub fn new(parker: Arc<Parker>) -> Self {
        let queue = Arc::new(ArrayQueue::new(FRONT_REQUESTS_MAX));
        Self { queue, parker }
    }

    /// The parker of the front's thread.
    pub fn parker(&self) -> &Arc<Parker> {
        &self.parker
    }

    pub fn pop(&self) -> Option<FrontMessage> {
        self.queue.pop()
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Queues a message to the front. Waits while the queue is full.
    pub async fn send(&self, mut message: FrontMessage) {
        while let Err(back) = self.queue.push(message) {
            message = back;
            self.parker.unpark();
            tokio::time::sleep(OFFER_PAUSE).await;
        }
        self.parker.unpark();
    }
}

/// Answers the front's requests.
pub struct Desk {
    pub market: Arc<Market>,
    pub auth: rpc::Authenticator,
    pub failures: Arc<Failures>,
    pub front: FrontQueue,
    /// Login rate of each user.
    pub logins: Mutex<HashMap<UserIx, Rate>>,
}

/// The front's end of the request queues.
///
/// Look-ups have a queue of their own. Each waits for one of [`SCANS_MAX`] scans: in one queue
/// logins, limit checks and holds would wait too.
pub struct RequestSender {
    look_ups: mpsc::Sender<QueuedRequest>,
    others: mpsc::Sender<QueuedRequest>,
}

impl RequestSender {
    /// Queues a request; never waits.
    ///
    /// # Errors
    /// The request, if its queue is full or the desk has ended.
    pub fn try_send(&self, queued: QueuedRequest) -> Result<(), TrySendError<QueuedRequest>> {
        match queued.1.is_look_up() {
            true => self.look_ups.try_send(queued),
            false => self.others.try_send(queued),
        }
    }
}

/// The desk's end of the request queues.
pub struct RequestReceiver {
    look_ups: mpsc::Receiver<QueuedRequest>,
    others: mpsc::Receiver<QueuedRequest>,
}

pub fn request_channel() -> (RequestSender, RequestReceiver) {
    let (look_ups, received_look_ups) = mpsc::channel(FRONT_REQUESTS_MAX);
    let (others, received_others) = mpsc::channel(FRONT_REQUESTS_MAX);
    let sender = RequestSender { look_ups, others };
    let receiver = RequestReceiver {
        look_ups: received_look_ups,
        others: received_others,
    };
    (sender, receiver)
}

impl RequestReceiver {
    /// Answers requests until shutdown: up to [`SCANS_MAX`] look-ups and [`CONCURRENT_MAX`] others
    /// concurrently. Of two scans one user gets one at a time.
    async fn serve<F>(self, shutdown: CancellationToken, answer: impl Fn(FrontRequest) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        tokio::join!(
            serve_queue(self.look_ups, SCANS_MAX, &shutdown, &answer),
            serve_queue(self.others, CONCURRENT_MAX, &shutdown, &answer),
        );
    }
}

/// Answers the requests of a queue until shutdown, up to `concurrent_max` concurrently. One user's
/// or address's requests wait when it has its share in progress, and those of others start.
async fn serve_queue<F>(
    mut requests: mpsc::Receiver<QueuedRequest>,
    concurrent_max: usize,
    shutdown: &CancellationToken,
    answer: &impl Fn(FrontRequest) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let queue = Arc::new(RequestQueue {
        places: Mutex::new(PlaceQueue::new(concurrent_max)),
        has_ended: Notify::new(),
    });
    let start_next = || queue.places().start_next();
    loop {
        while let Some((share, request)) = start_next() {
            let queue = queue.clone();
            let (answering, place) = (answer(request), Place { queue, share });
            tokio::spawn(async move {
                let _place = place;
                answering.await;
            });
        }
        // Without space the request queue fills, and the front refuses requests.
        let has_space = queue.places().waiting() < FRONT_REQUESTS_MAX;
        tokio::select! {
            request = requests.recv(), if has_space => match request {
                Some((share, request)) => queue.places().push(share, request),
                None => return,
            },
            () = queue.has_ended.notified() => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Requests in progress, and those that wait for a place among them.
struct RequestQueue {
    places: Mutex<PlaceQueue<Share, FrontRequest>>,
    /// Notified when a request has ended.
    has_ended: Notify,
}

impl RequestQueue {
    fn places(&self) -> MutexGuard<'_, PlaceQueue<Share, FrontRequest>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place of a request in progress. Its drop returns it, also after a panic.
struct Place {
    queue: Arc<RequestQueue>,
    share: Share,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.queue.places().end(self.share);
        self.queue.has_ended.notify_one();
    }
}

impl Desk {
    /// False when the user exceeds `logins_per_s`: a login calls other services and is journalled.
    pub fn admits_login(&self, user: UserIx) -> bool {
        let mut logins = self.logins.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = logins.entry(user).or_default();
        rate.admit(monotonic_ns(), self.market.config.logins_per_s)
    }

    /// Answers requests until shutdown.
    pub async fn run(self, requests: RequestReceiver, shutdown: CancellationToken) {
        let desk = Arc::new(self);
        let answer = |request: FrontRequest| {
            let desk = desk.clone();
            async move {
                let failure = request.failure();
                let message = match request.is_over() {
                    true => failure,
                    false => answer_or(failure, desk.answer(request)).await,
                };
                desk.front.send(message).await;
            }
        };
        requests.serve(shutdown, answer).await;
    }

    async fn answer(&self, request: FrontRequest) -> FrontMessage {
        let market = &self.market;
        match request {
            FrontRequest::Login { to, address, login } => {
                let outcome = login::admit(self, address, &login).await.map(Box::new);
                FrontMessage::Login {
                    to,
                    from: address,
                    outcome,
                }
            }
            FrontRequest::Limit {
                session,
                user,
                user_id,
                budget,
                new,
            } => {
                let outcome = limit::check(market, user, &user_id, &budget, &new).await;
                FrontMessage::Limit { session, outcome }
            }
            FrontRequest::Hold {
                session,
                user_id,
                wanted,
                ..
            } => {
                let answer = hold::answer(market, &user_id, wanted).await;
                FrontMessage::Hold { session, answer }
            }
            FrontRequest::Messages {
                session,
                login,
                ix,
                after,
                through,
                is_retransmit,
            } => {
                let outcome = resend::messages(market, ix, after, through, login).await;
                FrontMessage::Messages {
                    session,
                    after,
                    is_retransmit,
                    outcome,
                }
            }
            FrontRequest::OpenOrders { session, listing } => {
                let piece = pieces::open_orders(market, &listing).await;
                FrontMessage::OpenOrders { session, piece }
            }
            FrontRequest::Answer {
                session,
                login,
                ix,
                received,
            } => {
                let message = resend::answer(market, ix, received.client_seq, login).await;
                FrontMessage::Answer {
                    session,
                    received,
                    message,
                }
            }
        }
    }
}

/// The answer to a request, or `failure` if it panics. Without a message the front would keep the
/// state of the request: the place of a login, or a session's look-up, check or change of a hold.
async fn answer_or(
    failure: FrontMessage,
    answering: impl Future<Output = FrontMessage>,
) -> FrontMessage {
    let answered = AssertUnwindSafe(answering).catch_unwind().await;
    answered.unwrap_or(failure)
}

#[cfg(test)]
mod tests {
    use admission::RequestName;
    use types::command::RequestKind;

    use super::*;

    const HANG: Duration = Duration::from_secs(15);

    /// A look-up of the user's only session.
    fn look_up(user: u32) -> QueuedRequest {
        look_up_of(user, LoginRef::default())
    }

    fn look_up_of(user: u32, login: LoginRef) -> QueuedRequest {
        let name = RequestName {
            kind: RequestKind::New,
            client_order_id: 0,
            engine_order_id: 0,
        };
        let request = FrontRequest::Answer {
            session: (0, Sequence(1)),
            login,
            ix: SessionIx(user),
            received: Received::new(1, name, 0),
        };
        (Share::User(UserIx(user)), request)
    }

    fn hold(user: u32) -> QueuedRequest {
        let request = FrontRequest::Hold {
            session: (0, Sequence(1)),
            login: LoginRef::default(),
            user_id: "ann".into(),
            wanted: SetTradingHold {
                request_id: 1,
                asset: 0,
                undrawn_minor: 1,
            },
        };
        (Share::User(UserIx(user)), request)
    }

    /// A look-up that waits while its login ends is not executed.
    #[test]
    fn requests_end_with_their_login() {
        let login = Arc::new(());
        let (_, request) = look_up_of(1, LoginRef::to(&login));
        assert!(!request.is_over());
        drop(login);
        assert!(request.is_over());
        assert!(hold(1).1.is_over());
    }

    /// 64 users with more look-ups than their queue has room for: all wait for scans that take
    /// long. A hold of one of these users does not.
    // rows: R341
    #[tokio::test]
    async fn r341_look_ups_that_wait_for_scans_delay_no_other_request() {
        let (requests, received) = request_channel();
        let (scanning_tx, mut scanning) = mpsc::channel(SCANS_MAX);
        let (answered_tx, mut answered) = mpsc::channel(1);
        let answer = move |request: FrontRequest| {
            let (scanning, answered) = (scanning_tx.clone(), answered_tx.clone());
            async move {
                if request.is_look_up() {
                    scanning.send(()).await.expect("the test reads");
                    std::future::pending::<()>().await;
                }
                answered.send(()).await.expect("the test reads");
            }
        };
        let shutdown = CancellationToken::new();
        let serving = tokio::spawn(received.serve(shutdown.clone(), answer));
        let mut queued = 0;
        while requests.try_send(look_up(queued % 64)).is_ok() {
            queued += 1;
            assert!(queued < 1_000_000, "the queue has an end");
        }
        assert!(queued >= 64 * 8);
        for _ in 0..SCANS_MAX {
            let scan = tokio::time::timeout(HANG, scanning.recv()).await;
            scan.expect("in time").expect("a look-up is served");
        }
        for _ in 0..2 {
            assert!(requests.try_send(hold(0)).is_ok());
            let answer = tokio::time::timeout(HANG, answered.recv()).await;
            answer.expect("in time").expect("an answer");
        }
        assert!(scanning.try_recv().is_err(), "no more look-ups than scans");
        shutdown.cancel();
        let ended = tokio::time::timeout(HANG, serving).await;
        ended
            .expect("the stop does not wait for look-ups")
            .expect("joins");
    }

    /// Scans take long. A user with the eight look-ups that it may have does not get both.
    // rows: R341
    #[tokio::test]
    async fn r341_look_ups_of_one_user_leave_a_scan_to_others() {
        let (requests, received) = request_channel();
        let (scanning_tx, mut scanning) = mpsc::channel(SCANS_MAX);
        let answer = move |request: FrontRequest| {
            let scanning = scanning_tx.clone();
            async move {
                if let FrontRequest::Answer { ix, .. } = request {
                    scanning.send(ix).await.expect("the test reads");
                }
                std::future::pending::<()>().await;
            }
        };
        for user in [0, 0, 0, 0, 0, 0, 0, 0, 1] {
            assert!(requests.try_send(look_up(user)).is_ok());
        }
        let shutdown = CancellationToken::new();
        let serving = tokio::spawn(received.serve(shutdown.clone(), answer));
        let mut users = Vec::new();
        for _ in 0..SCANS_MAX {
            let scan = tokio::time::timeout(HANG, scanning.recv()).await;
            users.push(scan.expect("in time").expect("a look-up is served"));
        }
        users.sort_unstable();
        assert_eq!(users, [SessionIx(0), SessionIx(1)]);
        shutdown.cancel();
        let ended = tokio::time::timeout(HANG, serving).await;
        ended.expect("in time").expect("joins");
    }

    #[tokio::test]
    async fn a_request_whose_answer_panics_is_answered_with_its_failure() {
        async fn panics() -> FrontMessage {
            panic!("the test's panic");
        }
        let (_, request) = hold(0);
        let message = answer_or(request.failure(), panics()).await;
        let FrontMessage::Hold { session, answer } = message else {
            panic!("the failure of another request");
        };
        assert_eq!(session, (0, Sequence(1)));
        let is = (answer.request_id, answer.outcome);
        assert_eq!(is, (1, RejectReason::NotReady.code()));
    }

    #[test]
    fn logins_from_an_ipv6_network_use_the_share_of_one_address() {
        let share = |text: &str| Share::of_address(text.parse().expect("an address"));
        assert_eq!(share("2001:db8::1"), share("2001:db8::2"));
        assert_ne!(share("2001:db8::1"), share("2001:db8:0:1::1"));
        assert_ne!(share("10.0.0.1"), share("10.0.0.2"));
    }
}
