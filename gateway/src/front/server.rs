//! Assembles the front: socket, certificate, rings, and the tasks that answer its requests.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use replica::Names;
use sequencer::{Layout, Parker, Polled, priority, run_polled};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::oneshot;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use transport::Endpoint;
use transport::proto::{IdleTimeout, ServerConfig, TransportConfig};
use types::command::BoundsOf;
use types::{InstrumentSpec, Sequence, UserIx};

use super::desk::{Desk, FrontMessage, FrontQueue, request_channel};
use super::failures::Failures;
use super::session::Member;
use super::state::{RING_CAPACITY, State};
use super::{Conn, Front, tls};
use crate::Error;
use crate::market::Market;

/// Time limit for connections to close.
pub const GOODBYE: Duration = Duration::from_secs(2);
/// Unread request bytes per connection.
const RECEIVE_WINDOW: u32 = 512 << 10;
/// Maximum bytes per connection that are sent and not acknowledged.
const SEND_WINDOW: u64 = 4 << 20;
/// Users per message to the front, which may run on the hot thread.
const MEMBERS_MAX: usize = 256;
const MEMBERS_PAUSE: Duration = Duration::from_millis(1);
/// Time between two changed instruments that every session is sent. 64 sessions on one connection
/// get 1.7 MB per second.
const ANNOUNCE_EVERY: Duration = Duration::from_millis(4);
/// How long a front on its own thread spins after the last work before it parks.
const SPIN: Duration = Duration::from_millis(2);

/// A bound socket, before it accepts connections.
pub struct Bound {
    endpoint: Endpoint<Conn>,
    address: SocketAddr,
    fingerprint: String,
}

/// A front that signals its end: dropping it drops `_ended`.
struct Watched {
    front: Front,
    _ended: oneshot::Sender<()>,
}

impl Polled for Watched {
    fn round(&mut self) -> bool {
        self.front.round()
    }

    fn has_work(&self) -> bool {
        self.front.has_work()
    }

    fn next_deadline(&self) -> Option<std::time::Instant> {
        self.front.next_deadline()
    }

    fn fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.front.fd()
    }

    fn is_over(&self) -> bool {
        self.front.is_over()
    }
}

impl Bound {
    /// Binds the socket.
    ///
    /// # Errors
    /// The certificate cannot be read or made, or the address is taken.
    pub fn bind(config: &crate::GatewayConfig) -> Result<Self, Error> {
        let identity = tls::load_or_make(&config.data_dir.join("tls"))?;
        let crypto = tls::server_crypto(&identity)?;
        let mut server = ServerConfig::with_crypto(Arc::new(crypto));
        server.transport_config(transport(config.heartbeat_ms));
        let endpoint = Endpoint::bind(config.quic_listen, Some(server))?;
        Ok(Self {
            address: endpoint.local_address()?,
            fingerprint: identity.fingerprint,
            endpoint,
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// SHA-256 of the certificate, 64 hexadecimal digits.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Serves until shutdown: on the hot thread in layout `fused`, else on the front's own thread.
    ///
    /// # Errors
    /// The trading path has ended, or no thread can be spawned.
    pub async fn run(
        self,
        market: Arc<Market>,
        auth: rpc::Authenticator,
        front_queue: FrontQueue,
        shutdown: CancellationToken,
    ) -> Result<(), Error> {
        let parker = front_queue.parker().clone();
        let failures = Arc::new(Failures::default());
        let (requests, received) = request_channel();
        let ring = market
            .port
            .rings(RING_CAPACITY, parker.clone())
            .map_err(ended)?;
        market.commit.wake(parker.clone());
        let (ended_tx, mut has_ended) = oneshot::channel();
        let state = State::new(market.clone(), requests, ring, failures.clone());
        let specs = state.specs.clone();
        // Subscribed before the first login, so that no change after an opening is missed.
        let changes = market.replica.names().member_changes();
        let front = Front {
            endpoint: self.endpoint,
            state,
            commit: market.commit.clone(),
            queue: front_queue.clone(),
            actions: Vec::new(),
            ended_at: None,
            has_flushed: false,
            did_work: false,
            sends_first: false,
        };
        let watched = Box::new(Watched {
            front,
            _ended: ended_tx,
        });
        start(&market, watched, parker)?;
        let desk = Desk {
            market: market.clone(),
            auth,
            failures,
            front: front_queue.clone(),
            logins: Default::default(),
        };
        let answering = CancellationToken::new();
        let answers = tokio::spawn(desk.run(received, answering.clone()));
        let names = market.replica.names().clone();
        tokio::select! {
            () = follow_instruments(&names, &front_queue, specs) => {}
            () = follow_members(&market, &front_queue, changes) => {}
            _ = &mut has_ended => {
                answering.cancel();
                return Err(Error::Start("the front has ended".to_owned()));
            }
            () = shutdown.cancelled() => {}
        }
        front_queue.send(FrontMessage::Shutdown).await;
        let _ = tokio::time::timeout(GOODBYE * 2, has_ended).await;
        answering.cancel();
        let _ = answers.await;
        Ok(())
    }
}

fn ended(error: sequencer::SubmitError) -> Error {
    Error::Start(format!("the trading path refused the front: {error}"))
}

/// Moves the front to the thread that polls it.
fn start(market: &Market, front: Box<Watched>, parker: Arc<Parker>) -> Result<(), Error> {
    if market.port.layout() == Layout::Fused {
        return market.port.host(front).map_err(ended);
    }
    priority::spawn("front", move || run_polled(front, &parker, SPIN))
        .map(drop)
        .map_err(Error::Files)
}

/// Sends the front every instrument that is new or has changed since `sent`: at once for its own
/// checks and later logins, and one per [`ANNOUNCE_EVERY`] for its sessions.
async fn follow_instruments(
    names: &Names,
    front_queue: &FrontQueue,
    mut sent: Vec<InstrumentSpec>,
) {
    let mut changes = names.instrument_changes();
    let mut turns = tokio::time::interval(ANNOUNCE_EVERY);
    turns.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut unannounced = BTreeSet::new();
    changes.mark_changed();
    loop {
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
                let now = names.instruments();
                for (at, spec) in now.iter().enumerate() {
                    if sent.get(at) != Some(spec) {
                        front_queue.send(FrontMessage::Instrument(*spec)).await;
                        unannounced.insert(spec.ix);
                    }
                }
                sent = now;
            }
            _ = turns.tick(), if !unannounced.is_empty() => {
                if let Some(instrument) = unannounced.pop_first() {
                    front_queue.send(FrontMessage::Announce(instrument)).await;
                }
            }
        }
    }
}

/// Sends the front each member with sessions whose bounds or group change.
async fn follow_members(
    market: &Market,
    front_queue: &FrontQueue,
    mut changes: broadcast::Receiver<BoundsOf>,
) {
    loop {
        let changed = match changes.recv().await {
            Ok(of) => of,
            // Some changes were missed: send every member.
            Err(RecvError::Lagged(_)) => BoundsOf::Node,
            Err(RecvError::Closed) => return,
        };
        let (as_of, members) = market.replica.read(|state| members(state, changed));
        for some in members.chunks(MEMBERS_MAX) {
            let message = FrontMessage::Members(as_of, some.to_vec());
            front_queue.send(message).await;
            // The front drains its queue in each round. The pause bounds the work of a round.
            tokio::time::sleep(MEMBERS_PAUSE).await;
        }
    }
}

/// The members with sessions that a change of bounds concerns, and the sequence of the state.
fn members(state: &replica::State, of: BoundsOf) -> (Sequence, Vec<Member>) {
    let admission = state.core().admission();
    let users = match of {
        BoundsOf::User(user) => user.0..user.0.saturating_add(1),
        BoundsOf::Group(_) | BoundsOf::Node => 0..u32::MAX,
    };
    let rows = users.map_while(|at| Some((UserIx(at), admission.user(UserIx(at))?)));
    let concerned = rows.filter(|(_, row)| match of {
        BoundsOf::Group(group) => row.group == group && row.sessions > 0,
        BoundsOf::User(_) | BoundsOf::Node => row.sessions > 0,
    });
    let members = concerned.map(|(user, row)| Member {
        user,
        group: row.group,
        rates: admission.rates(row),
    });
    (state.sequence(), members.collect())
}

/// Transport parameters: one bidirectional stream, nothing else.
fn transport(heartbeat_ms: u32) -> Arc<TransportConfig> {
    let mut transport = TransportConfig::default();
    transport.max_concurrent_bidi_streams(1u8.into());
    transport.max_concurrent_uni_streams(0u8.into());
    transport.datagram_receive_buffer_size(None);
    transport.stream_receive_window(RECEIVE_WINDOW.into());
    transport.receive_window(RECEIVE_WINDOW.into());
    transport.send_window(SEND_WINDOW);
    let idle = Duration::from_millis(u64::from(heartbeat_ms.max(1_000)) * 2);
    if let Ok(idle) = IdleTimeout::try_from(idle) {
        transport.max_idle_timeout(Some(idle));
    }
    Arc::new(transport)
}

/// The parker of the thread that will poll the front.
pub fn parker(port: &sequencer::Port) -> Arc<Parker> {
    match port.layout() {
        Layout::Fused => port.parker(),
        Layout::Shared | Layout::Pinned => Arc::default(),
    }
}
