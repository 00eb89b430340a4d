//! Answers of many messages, sent in pieces as fast as the client reads: open orders, and
//! retransmissions. A session has at most one of each in progress. Each is charged as
//! [`RESEND_COST`] messages in the session's rate.
//!
//! Sessions take turns (`fair_queue`). A session has no turn while its piece is being read.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use types::{Handle, RejectReason, SessionIx, UserIx};
use wire::{
    DisconnectCode, OpenOrder, OpenOrders, OpenOrdersEnd, REQUEST_DONE, Retransmit, RetransmitEnd,
    ServerMessage, encode,
};

use super::connection::send_pulled;
use super::desk::{FrontRequest, Share};
use super::fair_queue::Turn;
use super::session::At;
use super::state::State;
use super::{Front, RESEND_COST, RESUME_MESSAGES};
use crate::market::Market;

/// Maximum messages per retransmission. Bounds the memory for a range, which is read from the
/// journal in one piece.
pub const RANGE_MAX: u64 = 4_096;
/// Maximum sessions per user with a listing or a retransmission in progress.
const LONG_ANSWERS_PER_USER: usize = 4;

/// Open orders per piece.
const PIECE_ORDERS: usize = 1_024;

/// A client's request for its open orders.
#[derive(Clone, Debug)]
pub struct Listing {
    request_id: u32,
    /// Scope: the orders of the user, or of the session alone.
    user: UserIx,
    session: Option<SessionIx>,
    /// The orders to list, determined by the first piece.
    handles: Option<Arc<[Handle]>>,
    /// Sequence of the first piece: the list has the orders that were open after it.
    as_of: u64,
    /// Index of the next order in `handles`.
    next: usize,
    /// Number of orders sent.
    count: u32,
    is_fetching: bool,
}

/// A client's request for a retransmission.
#[derive(Debug)]
pub struct Range {
    request_id: u32,
    first: u64,
    last: u64,
    next: u64,
    is_fetching: bool,
    /// Messages read from the journal and not sent yet, starting with number `next`. Until they are
    /// sent, their look-up counts as in progress.
    fetched: VecDeque<Bytes>,
}

/// The answer to a refused request for open orders, with the limit value of the reason.
pub fn listing_refused(wanted: &OpenOrders, reason: RejectReason, limit: u64) -> OpenOrdersEnd {
    OpenOrdersEnd {
        request_id: wanted.request_id,
        count: 0,
        outcome: reason.code(),
        limit,
        node_sequence: 0,
    }
}

/// The answer to a refused retransmission, with the limit value of the reason.
pub fn retransmit_refused(wanted: &Retransmit, reason: RejectReason, limit: u64) -> RetransmitEnd {
    RetransmitEnd {
        request_id: wanted.request_id,
        first: wanted.first,
        last: wanted.last,
        outcome: reason.code(),
        limit,
    }
}

/// A piece of a listing.
pub struct Piece {
    handles: Arc<[Handle]>,
    next: usize,
    /// Encoded for channel 0.
    messages: Vec<Bytes>,
    node_sequence: u64,
}

/// The next open orders of a listing, from the replica.
///
/// # Errors
/// `NOT_READY`: the replica lags too far.
pub async fn open_orders(market: &Market, listing: &Listing) -> Result<Piece, RejectReason> {
    let read = market.query(|state| {
        let core = state.core();
        let handles = listing.handles.clone().unwrap_or_else(|| {
            let admission = core.admission();
            match listing.session {
                Some(session) => admission.handles_of_session(session).collect(),
                None => admission.handles_of_user(listing.user).collect(),
            }
        });
        let through = handles.len().min(listing.next + PIECE_ORDERS);
        let node_sequence = core.sequence().0;
        // An order that has ended since the first piece is skipped: its own messages report the
        // end.
        let orders = handles[listing.next..through]
            .iter()
            .filter_map(|handle| state.order(*handle))
            .map(|order| encoded(listing.request_id, node_sequence, &order));
        let messages = orders.collect();
        Piece {
            next: through,
            messages,
            node_sequence,
            handles,
        }
    });
    read.await.map_err(|_| RejectReason::NotReady)
}

fn encoded(request_id: u32, node_sequence: u64, order: &replica::Order) -> Bytes {
    let message = OpenOrder {
        request_id,
        client_order_id: order.client_order_id,
        engine_order_id: order.handle.engine_id(),
        order_id: order.id,
        instrument: order.instrument.0,
        side: order.side,
        time_in_force: order.terms.time_in_force,
        price_ticks: order.price.0,
        quantity_lots: order.quantity.0,
        open_lots: order.open.0,
        expire_at_ns: order.terms.expire_at_ns,
        node_sequence,
    };
    let mut bytes = BytesMut::new();
    encode(&ServerMessage::from(message), 0, 0, &mut bytes);
    bytes.freeze()
}

impl State {
    /// Begins a listing of open orders. Returns the reason of a refusal.
    pub fn list_orders(&mut self, at: At, wanted: &OpenOrders) -> Option<RejectReason> {
        let reason = self.admit_long_answer(at);
        let session = self.sessions.row(at);
        if reason.is_some() || session.listing.is_some() {
            return reason.or(Some(RejectReason::Busy));
        }
        session.listing = Some(Listing {
            request_id: wanted.request_id,
            user: session.user,
            session: (wanted.scope == 0).then_some(session.ix),
            handles: None,
            as_of: 0,
            next: 0,
            count: 0,
            is_fetching: false,
        });
        self.begin_pieces(at);
        None
    }

    /// Begins a retransmission. Returns the reason of a refusal.
    pub fn retransmit(&mut self, at: At, wanted: &Retransmit) -> Option<RejectReason> {
        let reason = self.admit_long_answer(at);
        let session = self.sessions.row(at);
        if reason.is_some() || session.range.is_some() {
            return reason.or(Some(RejectReason::Busy));
        }
        // Messages after `sent` will be sent to this client anyway.
        let is_range = (1..=wanted.last).contains(&wanted.first) && wanted.last <= session.sent;
        if !is_range || wanted.last - wanted.first >= RANGE_MAX {
            return Some(RejectReason::Malformed);
        }
        session.range = Some(Range {
            request_id: wanted.request_id,
            first: wanted.first,
            last: wanted.last,
            next: wanted.first,
            is_fetching: false,
            fetched: VecDeque::new(),
        });
        self.begin_pieces(at);
        None
    }

    /// Checks the session's rate and the user's limit, then charges the session. Returns the reason
    /// of a refusal.
    fn admit_long_answer(&mut self, at: At) -> Option<RejectReason> {
        if !self.is_in_rate(at) {
            self.stats.throttled.increment(1);
            return Some(RejectReason::Throttle);
        }
        if !self.sessions.begin_long_answer(at, LONG_ANSWERS_PER_USER) {
            return Some(RejectReason::Busy);
        }
        self.sessions.charge(at, self.monotonic_ns, RESEND_COST);
        None
    }

    /// Queues a session with a piece to request or to send.
    fn begin_pieces(&mut self, at: At) {
        let session = self.sessions.row(at);
        if !std::mem::replace(&mut session.is_in_pieces, true) {
            self.in_pieces.push(at);
        }
    }

    /// True if the next messages of a retransmission have left the window and are not read yet.
    fn lacks_messages(&self, at: At) -> bool {
        let session = self.sessions.get(at);
        let range = session.range.as_ref();
        range.is_some_and(|range| range.fetched.is_empty() && range.next < session.window.first())
    }

    /// Requests the next messages of a retransmission from the journal.
    fn fetch_range(&mut self, at: At) -> Turn {
        let session = self.sessions.row(at);
        let Some(range) = &session.range else {
            return Turn::Over;
        };
        let front_request = FrontRequest::Messages {
            session: (at, session.epoch),
            login: session.login(),
            ix: session.ix,
            after: range.next - 1,
            through: range.last,
            is_retransmit: true,
        };
        let is_fetching = self.look_up(at, front_request);
        if let Some(range) = &mut self.sessions.row(at).range {
            range.is_fetching = is_fetching;
        }
        match is_fetching {
            true => Turn::Over,
            false => Turn::Waits,
        }
    }
}

impl Front {
    /// Sends the next pieces to clients that have read the previous ones. True while another round
    /// may send something.
    pub(super) fn send_pieces(&mut self, now: Instant) -> bool {
        let mut in_pieces = std::mem::take(&mut self.state.in_pieces);
        let may_send = in_pieces.round(|at| {
            let turn = self.list_more(now, at).max(self.retransmit_more(now, at));
            if turn == Turn::Over {
                self.state.sessions.row(at).is_in_pieces = false;
            }
            turn
        });
        self.state.in_pieces = in_pieces;
        may_send
    }

    /// Whether the client has read enough for the next piece; `None` when it is gone.
    fn owner_has_space(&mut self, now: Instant, at: At) -> Option<bool> {
        let owner = self.state.sessions.get(at).owner?;
        self.has_space(now, owner.connection)
    }

    /// Requests the next piece of a listing.
    fn list_more(&mut self, now: Instant, at: At) -> Turn {
        let listing = &self.state.sessions.get(at).listing;
        if listing.as_ref().is_none_or(|one| one.is_fetching) {
            return Turn::Over;
        }
        let has_space = self.owner_has_space(now, at);
        let session = self.state.sessions.row(at);
        let Some(listing) = &mut session.listing else {
            return Turn::Over;
        };
        match has_space {
            None => session.listing = None,
            Some(false) => {}
            Some(true) => {
                let front_request = FrontRequest::OpenOrders {
                    session: (at, session.epoch),
                    listing: Box::new(listing.clone()),
                };
                let queued = (Share::User(session.user), front_request);
                listing.is_fetching = self.state.front_requests.try_send(queued).is_ok();
            }
        }
        let listing = &self.state.sessions.get(at).listing;
        match listing.as_ref().is_some_and(|one| !one.is_fetching) {
            true => Turn::Waits,
            false => Turn::Over,
        }
    }

    /// Sends a piece of the open orders, and the end of the listing after the last piece.
    pub(super) fn on_open_orders(
        &mut self,
        now: Instant,
        at: At,
        piece: Result<Piece, RejectReason>,
    ) {
        let Some(listing) = &mut self.state.sessions.row(at).listing else {
            return;
        };
        listing.is_fetching = false;
        let (is_over, outcome, messages) = match piece {
            Ok(piece) => {
                if listing.handles.is_none() {
                    listing.as_of = piece.node_sequence;
                }
                listing.next = piece.next;
                listing.count += piece.messages.len() as u32;
                let is_over = piece.next == piece.handles.len();
                listing.handles = Some(piece.handles);
                (is_over, REQUEST_DONE, piece.messages)
            }
            Err(reason) => {
                listing.as_of = 0;
                (true, reason.code(), Vec::new())
            }
        };
        let end = OpenOrdersEnd {
            request_id: listing.request_id,
            count: listing.count,
            outcome,
            limit: 0,
            node_sequence: listing.as_of,
        };
        self.with_owner(at, |link, owner| {
            send_pulled(
                link,
                now,
                owner.channel,
                messages.iter().map(|bytes| &bytes[..]),
            );
        });
        if is_over {
            self.state.sessions.row(at).listing = None;
            self.send(now, at, &end.into());
        } else {
            self.state.begin_pieces(at);
        }
    }

    /// Requests the next messages of a retransmission, or sends those that are there.
    fn retransmit_more(&mut self, now: Instant, at: At) -> Turn {
        let range = &self.state.sessions.get(at).range;
        if range.as_ref().is_none_or(|range| range.is_fetching) {
            return Turn::Over;
        }
        match self.owner_has_space(now, at) {
            None => {
                self.state.drop_pieces(at);
                Turn::Over
            }
            Some(false) => Turn::Waits,
            Some(true) => match self.state.lacks_messages(at) {
                true => self.state.fetch_range(at),
                false => self.send_range(now, at),
            },
        }
    }

    /// Sends the next messages of a retransmission, which were read or are in the window.
    fn send_range(&mut self, now: Instant, at: At) -> Turn {
        let (session, pool) = self.state.sessions.parts(at);
        let (Some(range), Some(owner)) = (&mut session.range, session.owner) else {
            return Turn::Over;
        };
        let Some(link) = self.endpoint.link(owner.connection) else {
            return Turn::Over;
        };
        let is_fetched = !range.fetched.is_empty();
        let next = if is_fetched {
            let count = range.fetched.len().min(RESUME_MESSAGES);
            let messages = range.fetched.range(..count).map(|bytes| &bytes[..]);
            send_pulled(link, now, owner.channel, messages);
            drop(range.fetched.drain(..count));
            range.next + count as u64
        } else {
            let through = range.last.min(range.next + RESUME_MESSAGES as u64 - 1);
            let messages = (range.next..=through).map(|number| session.window.get(pool, number));
            send_pulled(link, now, owner.channel, messages);
            through + 1
        };
        if is_fetched && range.fetched.is_empty() {
            self.state.end_look_up(at);
        }
        self.advance(now, at, next)
    }

    /// Keeps messages of the range that were read from the journal until they are sent.
    pub(super) fn on_retransmit_messages(
        &mut self,
        now: Instant,
        at: At,
        after: u64,
        outcome: Result<Vec<Bytes>, DisconnectCode>,
    ) {
        let session = self.state.sessions.row(at);
        let range = session.range.as_mut();
        let Some(range) = range.filter(|range| range.next == after + 1) else {
            return self.state.end_look_up(at);
        };
        range.is_fetching = false;
        match outcome {
            Ok(messages) => {
                let lacks = usize::try_from(range.last - after).unwrap_or(usize::MAX);
                range.fetched = messages.into();
                range.fetched.truncate(lacks);
                self.state.begin_pieces(at);
            }
            Err(code) => {
                let end = range.end(match code {
                    DisconnectCode::MessagesRemoved => RejectReason::AlreadySeen.code(),
                    _ => RejectReason::NotReady.code(),
                });
                session.range = None;
                self.state.end_look_up(at);
                self.send(now, at, &end.into());
            }
        }
    }

    /// Continues the range at `next`, or ends it.
    fn advance(&mut self, now: Instant, at: At, next: u64) -> Turn {
        let session = self.state.sessions.row(at);
        let Some(range) = &mut session.range else {
            return Turn::Over;
        };
        range.next = next;
        if next <= range.last {
            return Turn::Sent;
        }
        let end = range.end(REQUEST_DONE);
        session.range = None;
        self.send(now, at, &end.into());
        Turn::Over
    }
}

impl Range {
    /// The messages that were read and not sent.
    pub fn into_fetched(self) -> VecDeque<Bytes> {
        self.fetched
    }

    fn end(&self, outcome: u8) -> RetransmitEnd {
        RetransmitEnd {
            request_id: self.request_id,
            first: self.first,
            last: self.last,
            outcome,
            limit: 0,
        }
    }
}
