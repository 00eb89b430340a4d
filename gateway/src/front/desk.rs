//! Queues between the front's thread and tokio. The front sends work that takes time or calls other
//! services as a request. Its result returns as a message to the front. All queues are bounded.
//! The front never waits. Look-ups in the journal have a queue of their own.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use admission::NewRequest;
use bytes::Bytes;
use crossbeam::queue::ArrayQueue;
use rpc::connections::source_of;
use sequencer::Parker;
use service_kit::rate::Rate;
use tokio::sync::Semaphore;
use tokio::sync::mpsc::{self, error::TrySendError};
use tokio_util::sync::CancellationToken;
use transport::Key;
use types::{InstrumentSpec, RejectReason, Sequence, SessionIx, UserIx};
use wire::{DisconnectCode, LedgerBalance, SetTradingHold, TradingHold};

use super::compare::Sample;
use super::login::{self, Admitted};
use super::pieces::{self, Listing, Piece};
use super::requests::Received;
use super::session::{At, Member};
use super::{hold, limit, resend};
use crate::budget::Budget;
use crate::market::{Market, monotonic_ns};
use crate::resend_source::SCANS_MAX;

/// Capacity of each request queue and of the queue to the front.
const FRONT_REQUESTS_MAX: usize = 4_096;
/// Maximum requests answered concurrently, without look-ups.
const CONCURRENT_MAX: usize = 512;
/// Window in which failed logins are counted.
const FAILURES_WINDOW: Duration = Duration::from_secs(60);
/// An address is locked out after this many times the failures that lock out a session name, so
/// that other users at the address can log in meanwhile.
const NAMES_PER_ADDRESS: u32 = 10;
/// Maximum number of failure counts. When it is reached, expired counts are dropped, at most once
/// per [`EXPIRE_PAUSE`]. While it is reached, new names and addresses are not counted.
const COUNTED_MAX: usize = 131_072;
const EXPIRE_PAUSE: Duration = Duration::from_secs(1);
/// Pause before another attempt when the queue to the front is full.
const OFFER_PAUSE: Duration = Duration::from_millis(1);

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
        user_id: Arc<str>,
        wanted: SetTradingHold,
    },
    /// Reads messages of a session after a number that have left its window.
    Messages {
        session: (At, Sequence),
        ix: SessionIx,
        after: u64,
        /// For a retransmission: the last message that the client asks for.
        retransmit_through: Option<u64>,
    },
    OpenOrders {
        session: (At, Sequence),
        listing: Box<Listing>,
    },
    /// Reads the message that answered a request and has left the window.
    Answer {
        session: (At, Sequence),
        ix: SessionIx,
        received: Received,
    },
}

impl FrontRequest {
    /// True for a request that scans the journal.
    fn is_look_up(&self) -> bool {
        matches!(self, Self::Messages { .. } | Self::Answer { .. })
    }
}

/// Messages to the front.
pub enum FrontMessage {
    Login {
        to: (Key, u16),
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

/// Counts failed authentications by address, and by address and session name (`design.md` 7). An
/// IPv6 /64 network counts as one address.
#[derive(Default)]
pub struct Failures(Mutex<Counts>);

#[derive(Default)]
struct Counts {
    rows: HashMap<(IpAddr, Option<String>), (u32, Instant)>,
    /// When expired counts were dropped last.
    expired_at: Option<Instant>,
}

impl Failures {
    /// True when logins from the address, under the session name if one is given, have failed too
    /// often within [`FAILURES_WINDOW`].
    pub fn is_locked_out(&self, address: IpAddr, name: Option<&str>, failures_max: u32) -> bool {
        let failures_max = match name {
            Some(_) => failures_max,
            None => failures_max.saturating_mul(NAMES_PER_ADDRESS),
        };
        let failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (source_of(address), name.map(str::to_owned));
        let failed = failures.rows.get(&key);
        failed.is_some_and(|(count, since)| {
            *count >= failures_max && since.elapsed() < FAILURES_WINDOW
        })
    }

    /// Counts a failed authentication.
    pub fn record(&self, address: IpAddr, name: &str) {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Counts { rows, expired_at } = &mut *failures;
        if rows.len() >= COUNTED_MAX && expired_at.is_none_or(|at| at.elapsed() >= EXPIRE_PAUSE) {
            rows.retain(|_, (_, since)| since.elapsed() < FAILURES_WINDOW);
            *expired_at = Some(Instant::now());
        }
        for name in [None, Some(name.to_owned())] {
            let key = (source_of(address), name);
            if rows.len() >= COUNTED_MAX && !rows.contains_key(&key) {
                continue;
            }
            let entry = rows.entry(key).or_insert((0, Instant::now()));
            if entry.1.elapsed() >= FAILURES_WINDOW {
                *entry = (0, Instant::now());
            }
            entry.0 += 1;
        }
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
    look_ups: mpsc::Sender<FrontRequest>,
    others: mpsc::Sender<FrontRequest>,
}

impl RequestSender {
    /// Queues a request; never waits.
    ///
    /// # Errors
    /// The request, if its queue is full or the desk has ended.
    pub fn try_send(&self, request: FrontRequest) -> Result<(), TrySendError<FrontRequest>> {
        match request.is_look_up() {
            true => self.look_ups.try_send(request),
            false => self.others.try_send(request),
        }
    }
}

/// The desk's end of the request queues.
pub struct RequestReceiver {
    look_ups: mpsc::Receiver<FrontRequest>,
    others: mpsc::Receiver<FrontRequest>,
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
    /// concurrently.
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

/// Answers the requests of a queue until shutdown, up to `concurrent_max` concurrently.
async fn serve_queue<F>(
    mut requests: mpsc::Receiver<FrontRequest>,
    concurrent_max: usize,
    shutdown: &CancellationToken,
    answer: &impl Fn(FrontRequest) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let room = Arc::new(Semaphore::new(concurrent_max));
    loop {
        let next = async { (room.clone().acquire_owned().await, requests.recv().await) };
        let next = tokio::select! {
            next = next => next,
            () = shutdown.cancelled() => return,
        };
        let (Ok(permit), Some(request)) = next else {
            return;
        };
        let answering = answer(request);
        tokio::spawn(async move {
            let _permit = permit;
            answering.await;
        });
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
                let message = desk.answer(request).await;
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
                FrontMessage::Login { to, outcome }
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
            } => {
                let answer = hold::answer(market, &user_id, wanted).await;
                FrontMessage::Hold { session, answer }
            }
            FrontRequest::Messages {
                session,
                ix,
                after,
                retransmit_through,
            } => {
                let through = retransmit_through.unwrap_or(u64::MAX);
                let outcome = resend::messages(market, ix, after, through).await;
                FrontMessage::Messages {
                    session,
                    after,
                    is_retransmit: retransmit_through.is_some(),
                    outcome,
                }
            }
            FrontRequest::OpenOrders { session, listing } => {
                let piece = pieces::open_orders(market, &listing).await;
                FrontMessage::OpenOrders { session, piece }
            }
            FrontRequest::Answer {
                session,
                ix,
                received,
            } => {
                let message = resend::answer(market, ix, received.client_seq).await;
                FrontMessage::Answer {
                    session,
                    received,
                    message,
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use admission::RequestName;
    use types::command::RequestKind;

    use super::*;

    const HANG: Duration = Duration::from_secs(15);

    fn look_up(client_seq: u64) -> FrontRequest {
        let name = RequestName {
            kind: RequestKind::New,
            client_order_id: 0,
            engine_order_id: 0,
        };
        FrontRequest::Answer {
            session: (0, Sequence(1)),
            ix: SessionIx(0),
            received: Received::new(client_seq, name, 0),
        }
    }

    fn hold() -> FrontRequest {
        FrontRequest::Hold {
            session: (0, Sequence(1)),
            user_id: "ann".into(),
            wanted: SetTradingHold {
                request_id: 1,
                asset: 0,
                undrawn_minor: 1,
            },
        }
    }

    /// 64 users with 8 look-ups each, and more of them than their queue has room for: all wait for
    /// scans that take long.
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
        let mut client_seq = 0;
        while requests.try_send(look_up(client_seq)).is_ok() {
            client_seq += 1;
            assert!(client_seq < 1_000_000, "the queue has an end");
        }
        assert!(client_seq >= 64 * 8);
        for _ in 0..SCANS_MAX {
            let scan = tokio::time::timeout(HANG, scanning.recv()).await;
            scan.expect("in time").expect("a look-up is served");
        }
        for _ in 0..2 {
            assert!(requests.try_send(hold()).is_ok());
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

    #[test]
    fn failed_logins_from_an_ipv6_network_count_as_those_of_one_address() {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let failures = Failures::default();
        for host in 1..=3 {
            failures.record(address(&format!("2001:db8::{host}")), "desk");
        }
        let is_locked_out = |text: &str| failures.is_locked_out(address(text), Some("desk"), 3);
        assert!(is_locked_out("2001:db8::4"));
        assert!(!is_locked_out("2001:db8:0:1::1"), "another network");
    }
}
