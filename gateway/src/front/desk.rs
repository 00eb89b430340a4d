//! Queues between the front's thread and tokio. The front sends work that takes time or calls other
//! services as a request. Its result returns as a message to the front. Both queues are bounded.
//! The front never waits.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use admission::{NewRequest, RequestName};
use bytes::Bytes;
use crossbeam::queue::ArrayQueue;
use sequencer::Parker;
use service_kit::rate::Rate;
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;
use transport::Key;
use types::{InstrumentSpec, RejectReason, Sequence, SessionIx, UserIx};
use wire::{DisconnectCode, LedgerBalance, SetTradingHold, TradingHold};

use super::compare::Sample;
use super::failures::Failures;
use super::login::{self, Admitted};
use super::pieces::{self, Listing, Piece};
use super::session::{At, Member};
use super::{hold, limit, resend};
use crate::budget::Budget;
use crate::market::{Market, monotonic_ns};

/// Capacity of the request queue and of the queue to the front.
const FRONT_REQUESTS_MAX: usize = 4_096;
/// Maximum requests answered concurrently.
const CONCURRENT_MAX: usize = 512;
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
        client_seq: u64,
        request: RequestName,
    },
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
        client_seq: u64,
        request: RequestName,
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

/// Answers the front's requests.
pub struct Desk {
    pub market: Arc<Market>,
    pub auth: rpc::Authenticator,
    pub failures: Arc<Failures>,
    pub front: FrontQueue,
    /// Login rate of each user.
    pub logins: Mutex<HashMap<UserIx, Rate>>,
}

pub fn request_channel() -> (mpsc::Sender<FrontRequest>, mpsc::Receiver<FrontRequest>) {
    mpsc::channel(FRONT_REQUESTS_MAX)
}

impl Desk {
    /// False when the user exceeds `logins_per_s`: a login calls other services and is journalled.
    pub fn admits_login(&self, user: UserIx) -> bool {
        let mut logins = self.logins.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = logins.entry(user).or_default();
        rate.admit(monotonic_ns(), self.market.config.logins_per_s)
    }

    /// Answers requests until shutdown, up to [`CONCURRENT_MAX`] concurrently.
    pub async fn run(
        self,
        mut requests: mpsc::Receiver<FrontRequest>,
        shutdown: CancellationToken,
    ) {
        let desk = Arc::new(self);
        let room = Arc::new(Semaphore::new(CONCURRENT_MAX));
        loop {
            let request = tokio::select! {
                request = requests.recv() => request,
                () = shutdown.cancelled() => return,
            };
            let (Some(request), Ok(permit)) = (request, room.clone().acquire_owned().await) else {
                return;
            };
            let desk = desk.clone();
            tokio::spawn(async move {
                let _permit = permit;
                let message = desk.answer(request).await;
                desk.front.send(message).await;
            });
        }
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
                client_seq,
                request,
            } => {
                let message = resend::answer(market, ix, client_seq).await;
                FrontMessage::Answer {
                    session,
                    client_seq,
                    request,
                    message,
                }
            }
        }
    }
}
