//! Polling rounds of an endpoint: receive, read the connections with work, timers, transmit.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use quinn_proto::{
    ClientConfig, ConnectError, ConnectionError, ConnectionHandle, DatagramEvent, Dir,
    EndpointConfig, Event, ReadError, ServerConfig, StreamEvent,
};

use crate::link::{End, Key, Link};
use crate::socket::{Origin, Socket};

/// Datagrams per round (`design.md` 5). A flood of datagrams cannot delay the rest of the round. A
/// system call may return more, with GRO up to 64 per buffer: those are left for the next rounds.
const DATAGRAMS_MAX: usize = 64;
/// Buffers of the receive calls of a round. A call follows only if the one before may have left
/// datagrams: a single one is answered without a second call. Each buffer has a cost even when
/// nothing has arrived. On Linux without GRO a buffer has one datagram: together they reach
/// [`DATAGRAMS_MAX`].
const BUFFERS: [usize; 3] = [2, 32, 30];
const _: () = assert!(BUFFERS[0] + BUFFERS[1] + BUFFERS[2] == DATAGRAMS_MAX);
/// Maximum time for which the endpoint reports a backlog to [`Driver::timeout`]. A flood of
/// datagrams cannot keep a silent peer connected for longer.
const BACKLOG_MAX: Duration = Duration::from_secs(1);
/// Transmits of one connection per round.
const TRANSMITS_MAX: usize = 16;
/// Maximum bytes per read from a stream.
const CHUNK_BYTES_MAX: usize = 64 << 10;
/// Bytes kept of an incomplete message. The driver rejects longer messages.
const CARRY_BYTES: usize = 4_096;

/// Decision on a peer's connection attempt.
pub enum Incoming<T> {
    Accept(T),
    /// Requires the peer to prove that it owns its address (QUIC Retry).
    Retry,
    /// Refuses the connection.
    Refuse,
    /// Sends no reply.
    Ignore,
}

/// Part of the data that the driver has consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsumedBytes {
    pub bytes: usize,
    /// True: the driver gets the rest again, and all later bytes, in the next round. False: the
    /// rest is an incomplete message and waits for more bytes.
    pub is_paused: bool,
}

/// Callbacks of an endpoint's owner.
pub trait Driver<T> {
    /// Decides on a peer's connection attempt. `is_validated`: the peer has proved that it owns its
    /// address. `half_open`: number of connections with an unfinished handshake.
    fn incoming(
        &mut self,
        now: Instant,
        from: SocketAddr,
        is_validated: bool,
        half_open: usize,
    ) -> Incoming<T>;

    /// A connection for which [`Driver::incoming`] returned [`Incoming::Accept`] could not be
    /// accepted, for example because its handshake is invalid. No further call concerns it.
    fn not_accepted(&mut self, _user: T) {}

    /// A peer's connection was accepted. Its handshake is not complete, and it has no stream yet.
    fn accepted(&mut self, _now: Instant, _link: &mut Link<T>) {}

    /// The stream of the connection is open.
    fn opened(&mut self, _now: Instant, _link: &mut Link<T>) {}

    /// Receives bytes of the stream in order, starting with those that the last call left.
    fn data(&mut self, now: Instant, link: &mut Link<T>, bytes: &[u8]) -> ConsumedBytes;

    /// The peer has finished its side of the stream, or it reads the other side no more. In the
    /// second case the waiting bytes are dropped after this call.
    fn finished(&mut self, now: Instant, link: &mut Link<T>);

    /// The deadline set by [`Link::set_deadline`] has passed. The data that the round has received
    /// was passed on before. `has_backlog`: more datagrams may have arrived, of this peer too, so
    /// that it may not be silent. After a second of backlog this is false.
    fn timeout(&mut self, _now: Instant, _link: &mut Link<T>, _has_backlog: bool) {}

    /// The connection has ended, closed by either side or lost. Called once, last.
    fn closed(&mut self, now: Instant, link: &mut Link<T>, reason: &ConnectionError);
}

/// Connections over one UDP socket.
pub struct Endpoint<T> {
    socket: Socket,
    proto: quinn_proto::Endpoint,
    /// Indexed by quinn-proto's handle.
    links: Vec<Option<Box<Link<T>>>>,
    generations: Vec<u32>,
    count: usize,
    half_open: usize,
    /// Indices of connections to process before the round ends.
    touched: Vec<u32>,
    /// Deadline, index and generation of a connection.
    timers: BinaryHeap<Reverse<(Instant, u32, u32)>>,
    backlog: Backlog,
    scratch: Vec<u8>,
    /// Replies to datagrams without a connection, and their contents one after the other. Empty
    /// between two receive calls.
    responses: Vec<quinn_proto::Transmit>,
    response_bytes: Vec<u8>,
}

impl<T> Endpoint<T> {
    /// Binds an endpoint. It accepts connections only with a server configuration.
    ///
    /// # Errors
    /// The address is in use, or the socket cannot be set up.
    pub fn bind(address: SocketAddr, server: Option<ServerConfig>) -> io::Result<Self> {
        let config = Arc::new(EndpointConfig::default());
        Ok(Self {
            socket: Socket::bind(address)?,
            proto: quinn_proto::Endpoint::new(config, server.map(Arc::new), true, None),
            links: Vec::new(),
            generations: Vec::new(),
            count: 0,
            half_open: 0,
            touched: Vec::new(),
            timers: BinaryHeap::new(),
            backlog: Backlog::default(),
            scratch: Vec::with_capacity(64 << 10),
            responses: Vec::new(),
            response_bytes: Vec::new(),
        })
    }

    /// # Errors
    /// The operating system cannot report the address.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_address()
    }

    /// Connections that have not ended.
    pub fn connections(&self) -> usize {
        self.count
    }

    /// Time of the earliest timer.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, ..))| *at)
    }

    /// True if a connection or a received datagram waits to be processed.
    pub fn has_work(&self) -> bool {
        !self.touched.is_empty() || self.has_datagrams()
    }

    /// True if received datagrams are left for the next round. The descriptor does not announce
    /// them.
    pub fn has_datagrams(&self) -> bool {
        self.socket.has_rest()
    }

    /// Starts a connection; [`Driver::opened`] reports that its stream is open.
    ///
    /// # Errors
    /// [`ConnectError`].
    pub fn connect(
        &mut self,
        now: Instant,
        config: ClientConfig,
        to: SocketAddr,
        server_name: &str,
        user: T,
    ) -> Result<Key, ConnectError> {
        let (handle, quic) = self.proto.connect(now, config, to, server_name)?;
        Ok(self.insert(handle, quic, user))
    }

    /// Returns a connection and marks it for processing in this round. `None` if it has ended.
    pub fn link(&mut self, key: Key) -> Option<&mut Link<T>> {
        let link = self.links.get_mut(key.index as usize)?.as_mut()?;
        if link.key != key {
            return None;
        }
        if !link.is_touched {
            link.is_touched = true;
            self.touched.push(key.index);
        }
        Some(link)
    }

    /// Returns a connection without marking it, so that this costs no poll of it. `None` if it has
    /// ended.
    pub fn peek(&self, key: Key) -> Option<&Link<T>> {
        let link = self.links.get(key.index as usize)?.as_deref()?;
        (link.key == key).then_some(link)
    }

    pub fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        self.links.iter().flatten().map(|link| link.key)
    }

    /// First part of a round: receives datagrams, passes data to the driver, and fires timers. The
    /// owner then writes its data and ends the round with [`Endpoint::flush`]. Returns true if a
    /// datagram arrived or a timer fired.
    ///
    /// # Errors
    /// The socket fails.
    pub fn receive(&mut self, now: Instant, driver: &mut impl Driver<T>) -> io::Result<bool> {
        let received = self.receive_datagrams(now, driver)?;
        let has_backlog = self.backlog.note(now, received == Received::Part);
        // Reads before timers: after a stall of the owner's thread, a peer's data may have waited
        // for longer than its deadline. Reads before writes: a round answers the requests that it
        // received.
        self.poll(now, driver, false);
        let has_fired = self.fire_timers(now, driver, has_backlog);
        Ok(has_fired || received != Received::Nothing)
    }

    /// Handles up to [`DATAGRAMS_MAX`] datagrams.
    fn receive_datagrams(
        &mut self,
        now: Instant,
        driver: &mut impl Driver<T>,
    ) -> io::Result<Received> {
        let mut left = DATAGRAMS_MAX;
        for (call, buffers) in BUFFERS.into_iter().enumerate() {
            let Some(count) = self.receive_once(now, driver, left, buffers)? else {
                return Ok(match call {
                    0 => Received::Nothing,
                    _ => Received::All,
                });
            };
            left -= count;
            if !self.socket.may_have_more() {
                return Ok(Received::All);
            }
            if left == 0 {
                break;
            }
        }
        Ok(Received::Part)
    }

    /// Handles the timers that have expired. Returns true if there was one.
    fn fire_timers(
        &mut self,
        now: Instant,
        driver: &mut impl Driver<T>,
        has_backlog: bool,
    ) -> bool {
        let mut has_fired = false;
        while let Some(Reverse((at, index, generation))) = self.timers.peek().copied() {
            if at > now {
                break;
            }
            self.timers.pop();
            let key = Key { index, generation };
            let Some(link) = self.link(key) else { continue };
            has_fired = true;
            let scheduled = link.scheduled.pop();
            assert_eq!(scheduled, Some(at), "the connection's earliest timer");
            if link.quic.poll_timeout().is_some_and(|at| at <= now) {
                link.quic.handle_timeout(now);
            }
            if link.deadline.is_some_and(|at| at <= now) {
                link.deadline = None;
                driver.timeout(now, link, has_backlog);
            }
        }
        has_fired
    }

    /// Second part of a round: writes and sends the connections' data. Returns true if a connection
    /// was processed.
    pub fn flush(&mut self, now: Instant, driver: &mut impl Driver<T>) -> bool {
        self.poll(now, driver, true)
    }

    /// Handles up to `most` datagrams, of one system call at most. Returns their number; `None` if
    /// none was available.
    fn receive_once(
        &mut self,
        now: Instant,
        driver: &mut impl Driver<T>,
        most: usize,
        buffers: usize,
    ) -> io::Result<Option<usize>> {
        let mut parts = Parts {
            proto: &mut self.proto,
            links: &mut self.links,
            touched: &mut self.touched,
            scratch: &mut self.scratch,
            half_open: self.half_open,
            accepted: Vec::new(),
            responses: &mut self.responses,
            response_bytes: &mut self.response_bytes,
        };
        let received = self.socket.receive(most, buffers, |from, data| {
            parts.datagram(now, driver, from, data)
        })?;
        let accepted = parts.accepted;
        let mut contents = &self.response_bytes[..];
        for transmit in self.responses.drain(..) {
            let (own, later) = contents.split_at(transmit.size);
            // Not queued if the kernel's buffer is full: the peer retries.
            self.socket.send(&transmit, own);
            contents = later;
        }
        self.response_bytes.clear();
        for (handle, quic, user) in accepted {
            let key = self.insert(handle, quic, user);
            if let Some(link) = self.link(key) {
                driver.accepted(now, link);
            }
        }
        Ok(received)
    }

    fn insert(&mut self, handle: ConnectionHandle, quic: quinn_proto::Connection, user: T) -> Key {
        let index = handle.0;
        if self.links.len() <= index {
            self.links.resize_with(index + 1, || None);
            self.generations.resize(index + 1, 0);
        }
        self.generations[index] += 1;
        let key = Key {
            index: u32::try_from(index).expect("at most 2^32 connections"),
            generation: self.generations[index],
        };
        let link = Link::new(key, handle, quic, user);
        self.links[index] = Some(Box::new(link));
        self.count += 1;
        self.half_open += 1;
        self.link(key);
        key
    }

    /// Processes every touched connection: sends its data if `sends`, else reads.
    fn poll(&mut self, now: Instant, driver: &mut impl Driver<T>, sends: bool) -> bool {
        // The driver has no access to the endpoint, so no connection is added in this loop.
        let count = self.touched.len();
        let mut kept = 0;
        for at in 0..count {
            let index = self.touched[at];
            let Some(mut link) = self.links[index as usize].take() else {
                continue;
            };
            let was_connected = link.is_connected;
            let is_drained = self.drive(now, driver, &mut link, !sends);
            self.half_open -= usize::from(!was_connected && (link.is_connected || is_drained));
            // Stays touched after the read part: `flush` sends the answers of this round.
            link.is_touched = !sends || self.send(now, &mut link) || link.is_paused;
            if is_drained {
                self.count -= 1;
                continue;
            }
            self.schedule(&mut link);
            if link.is_touched {
                self.touched[kept] = index;
                kept += 1;
            }
            self.links[index as usize] = Some(link);
        }
        self.touched.truncate(kept);
        count > 0
    }

    /// Handles events, reads if `reads`, and moves the owner's bytes into the stream. Returns true
    /// once the connection is drained.
    fn drive(
        &mut self,
        now: Instant,
        driver: &mut impl Driver<T>,
        link: &mut Link<T>,
        reads: bool,
    ) -> bool {
        let mut is_drained = false;
        loop {
            while let Some(event) = link.quic.poll_endpoint_events() {
                is_drained |= event.is_drained();
                if let Some(event) = self.proto.handle_event(link.handle, event) {
                    link.quic.handle_event(event);
                }
            }
            let Some(event) = link.quic.poll() else { break };
            on_event(now, driver, link, event);
        }
        if reads && (link.is_readable || link.is_paused) {
            read(now, driver, link);
        }
        // After the read: the peer may have sent a message before it stopped the stream.
        if std::mem::take(&mut link.is_stopped) {
            if link.is_open() {
                driver.finished(now, link);
            }
            link.drop_output();
        }
        link.flush(now);
        advance_close(now, driver, link);
        is_drained
    }

    /// Sends the connection's datagrams. Returns true if more are left: the round's limit is
    /// reached, or the kernel's buffer is full.
    fn send(&mut self, now: Instant, link: &mut Link<T>) -> bool {
        if let Some((transmit, contents)) = link.unsent.take()
            && !self.socket.send(&transmit, &contents)
        {
            link.unsent = Some((transmit, contents));
            return true;
        }
        for _ in 0..TRANSMITS_MAX {
            self.scratch.clear();
            let segments = self.socket.segments_max();
            let transmit = link.quic.poll_transmit(now, segments, &mut self.scratch);
            let Some(transmit) = transmit else {
                return false;
            };
            let contents = &self.scratch[..transmit.size];
            if !self.socket.send(&transmit, contents) {
                link.unsent = Some((transmit, contents.to_vec()));
                return true;
            }
        }
        true
    }

    /// Sets a timer no later than the connection's next deadline. A later timer stays and serves
    /// again after an earlier one, so no two timers of a connection have the same time.
    fn schedule(&mut self, link: &mut Link<T>) {
        let Some(next) = link.next_deadline() else {
            return;
        };
        if link.scheduled.last().is_none_or(|at| next < *at) {
            link.scheduled.push(next);
            let Key { index, generation } = link.key;
            self.timers.push(Reverse((next, index, generation)));
        }
    }
}

impl<T> AsFd for Endpoint<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Which of the datagrams that have arrived a round has handled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Received {
    /// None had arrived.
    Nothing,
    All,
    /// The round's limit was reached: more may have arrived.
    Part,
}

/// How long datagrams have been left for the next rounds.
#[derive(Default)]
struct Backlog {
    since: Option<Instant>,
}

impl Backlog {
    /// Records whether a round has left datagrams. True while rounds have done so without a break,
    /// for less than [`BACKLOG_MAX`].
    fn note(&mut self, now: Instant, is_left: bool) -> bool {
        self.since = is_left.then(|| self.since.unwrap_or(now));
        self.since
            .is_some_and(|since| now.saturating_duration_since(since) < BACKLOG_MAX)
    }
}

/// The endpoint's fields without the socket, which is borrowed while it receives.
struct Parts<'a, T> {
    proto: &'a mut quinn_proto::Endpoint,
    links: &'a mut Vec<Option<Box<Link<T>>>>,
    touched: &'a mut Vec<u32>,
    scratch: &'a mut Vec<u8>,
    half_open: usize,
    accepted: Vec<(ConnectionHandle, quinn_proto::Connection, T)>,
    responses: &'a mut Vec<quinn_proto::Transmit>,
    response_bytes: &'a mut Vec<u8>,
}

impl<T> Parts<'_, T> {
    fn datagram(
        &mut self,
        now: Instant,
        driver: &mut impl Driver<T>,
        from: Origin,
        data: BytesMut,
    ) {
        self.scratch.clear();
        let (local_ip, ecn) = (from.local_ip, from.ecn);
        let event = self
            .proto
            .handle(now, from.address, local_ip, ecn, data, self.scratch);
        match event {
            Some(DatagramEvent::ConnectionEvent(handle, event)) => {
                let accepted = &mut self.accepted;
                match self.links.get_mut(handle.0).and_then(Option::as_mut) {
                    Some(link) => {
                        link.quic.handle_event(event);
                        if !link.is_touched {
                            link.is_touched = true;
                            self.touched.push(link.key.index);
                        }
                    }
                    // Accepted earlier in the same batch.
                    None => {
                        if let Some((_, quic, _)) =
                            accepted.iter_mut().find(|(other, ..)| *other == handle)
                        {
                            quic.handle_event(event);
                        }
                    }
                }
            }
            Some(DatagramEvent::NewConnection(incoming)) => self.incoming(now, driver, incoming),
            Some(DatagramEvent::Response(transmit)) => self.respond(transmit),
            None => {}
        }
    }

    fn incoming(
        &mut self,
        now: Instant,
        driver: &mut impl Driver<T>,
        incoming: quinn_proto::Incoming,
    ) {
        let (from, is_validated) = (
            incoming.remote_address(),
            incoming.remote_address_validated(),
        );
        let half_open = self.half_open + self.accepted.len();
        self.scratch.clear();
        match driver.incoming(now, from, is_validated, half_open) {
            Incoming::Accept(user) => match self.proto.accept(incoming, now, self.scratch, None) {
                Ok((handle, quic)) => self.accepted.push((handle, quic, user)),
                Err(error) => {
                    driver.not_accepted(user);
                    if let Some(transmit) = error.response {
                        self.respond(transmit);
                    }
                }
            },
            Incoming::Retry => match self.proto.retry(incoming, self.scratch) {
                Ok(transmit) => self.respond(transmit),
                // The peer has already retried.
                Err(error) => self.proto.ignore(error.into_incoming()),
            },
            Incoming::Refuse => {
                let transmit = self.proto.refuse(incoming, self.scratch);
                self.respond(transmit);
            }
            Incoming::Ignore => self.proto.ignore(incoming),
        }
    }

    fn respond(&mut self, transmit: quinn_proto::Transmit) {
        let contents = &self.scratch[..transmit.size];
        self.response_bytes.extend_from_slice(contents);
        self.responses.push(transmit);
    }
}

fn on_event<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>, event: Event) {
    match event {
        Event::Connected => {
            link.is_connected = true;
            if link.quic.side().is_client() {
                link.stream = link.quic.streams().open(Dir::Bi);
                driver.opened(now, link);
            }
        }
        Event::Stream(StreamEvent::Opened { dir: Dir::Bi }) => {
            // The transport parameters allow one stream.
            if link.stream.is_none()
                && let Some(id) = link.quic.streams().accept(Dir::Bi)
            {
                link.stream = Some(id);
                link.is_readable = true;
                driver.opened(now, link);
            }
        }
        Event::Stream(StreamEvent::Readable { id }) if link.stream == Some(id) => {
            link.is_readable = true;
        }
        Event::Stream(StreamEvent::Stopped { id, .. })
            if link.stream == Some(id) && link.is_open() =>
        {
            link.is_stopped = true;
        }
        Event::Stream(StreamEvent::Finished { id } | StreamEvent::Stopped { id, .. })
            if link.stream == Some(id) =>
        {
            if let End::Finishing { code, reason, .. } = &mut link.end {
                let (code, reason) = (*code, std::mem::take(reason));
                link.end = End::Close { code, reason };
            }
        }
        Event::ConnectionLost { reason } if !matches!(link.end, End::Closed) => {
            link.end = End::Closed;
            driver.closed(now, link, &reason);
        }
        _ => {}
    }
}

/// Reads the stream and passes its data to the driver, until it has no more data or the driver
/// pauses.
fn read<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>) {
    link.is_paused = false;
    while link.is_open() {
        if link.rest.is_empty() {
            match next_chunk(link) {
                Ok(Some(bytes)) => link.rest = bytes,
                Ok(None) => {
                    link.is_readable = false;
                    driver.finished(now, link);
                    return;
                }
                Err(()) => {
                    link.is_readable = false;
                    return;
                }
            }
        }
        if !deliver(now, driver, link) {
            link.is_paused = true;
            return;
        }
    }
    // Data that arrives after the close is dropped.
    link.rest = Bytes::new();
}

/// Passes the available data to the driver. Returns false if the driver paused for this round.
fn deliver<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>) -> bool {
    if link.carry.is_empty() {
        let bytes = std::mem::take(&mut link.rest);
        let consumed = driver.data(now, link, &bytes);
        let left = bytes.slice(consumed.bytes..);
        if consumed.is_paused {
            link.rest = left;
            return false;
        }
        link.carry.extend_from_slice(&left);
        return true;
    }
    // Completes a message that started in an earlier chunk.
    let more = link.rest.split_to(
        link.rest
            .len()
            .min(CARRY_BYTES.saturating_sub(link.carry.len())),
    );
    link.carry.extend_from_slice(&more);
    let mut carry = std::mem::take(&mut link.carry);
    let consumed = driver.data(now, link, &carry);
    carry.drain(..consumed.bytes);
    link.carry = carry;
    if consumed.is_paused {
        // The next round begins with `rest`, even if no data arrives.
        if link.rest.is_empty() {
            link.rest = Bytes::from(std::mem::take(&mut link.carry));
        }
        return false;
    }
    true
}

/// Next bytes of the stream; `None` at its end, an error if no bytes are available.
fn next_chunk<T>(link: &mut Link<T>) -> Result<Option<Bytes>, ()> {
    let id = link.stream.ok_or(())?;
    let mut stream = link.quic.recv_stream(id);
    let mut chunks = stream.read(true).map_err(|_| ())?;
    let chunk = chunks.next(CHUNK_BYTES_MAX);
    // The flow-control frames that `finalize` queues are sent at the end of the round.
    let _ = chunks.finalize();
    match chunk {
        Ok(chunk) => Ok(chunk.map(|chunk| chunk.bytes)),
        Err(ReadError::Reset(_)) => Ok(None),
        Err(ReadError::Blocked) => Err(()),
    }
}

/// Advances a requested close.
fn advance_close<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>) {
    if let End::Finishing {
        code,
        reason,
        until,
        is_finished,
    } = &mut link.end
    {
        let is_expired = *until <= now;
        // Without a stream no byte can be sent.
        if (link.out.is_empty() || link.stream.is_none()) && !*is_finished {
            *is_finished = true;
            let finished = link.stream.map(|id| link.quic.send_stream(id).finish());
            // Without a stream, or if the peer has stopped it, no acknowledgement will come.
            let is_unacknowledgeable = !matches!(finished, Some(Ok(())));
            if is_unacknowledgeable || is_expired {
                let (code, reason) = (*code, std::mem::take(reason));
                link.end = End::Close { code, reason };
            }
        } else if is_expired {
            let (code, reason) = (*code, std::mem::take(reason));
            link.end = End::Close { code, reason };
        }
    }
    if let End::Close { code, reason } = &mut link.end {
        let (code, reason) = (*code, std::mem::take(reason));
        link.end = End::Closed;
        link.quic.close(now, code.into(), reason);
        driver.closed(now, link, &ConnectionError::LocallyClosed);
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::time::Duration;

    use quinn_proto::crypto::rustls::QuicClientConfig;

    use super::*;

    /// Counts the deadlines that have passed.
    #[derive(Default)]
    struct Deadlines(usize);

    impl Driver<()> for Deadlines {
        fn incoming(&mut self, _: Instant, _: SocketAddr, _: bool, _: usize) -> Incoming<()> {
            Incoming::Refuse
        }

        fn data(&mut self, _: Instant, _: &mut Link<()>, bytes: &[u8]) -> ConsumedBytes {
            ConsumedBytes {
                bytes: bytes.len(),
                is_paused: false,
            }
        }

        fn finished(&mut self, _: Instant, _: &mut Link<()>) {}

        fn timeout(&mut self, _: Instant, _: &mut Link<()>, _: bool) {
            self.0 += 1;
        }

        fn closed(&mut self, _: Instant, _: &mut Link<()>, _: &ConnectionError) {}
    }

    #[test]
    fn a_backlog_counts_for_less_than_a_second_without_a_break() {
        let mut backlog = Backlog::default();
        let begun = Instant::now();
        let at = |millis| begun + Duration::from_millis(millis);
        assert!(!backlog.note(at(0), false));
        assert!(backlog.note(at(0), true) && backlog.note(at(999), true));
        assert!(!backlog.note(at(1_000), true) && !backlog.note(at(5_000), true));
        assert!(!backlog.note(at(5_000), false), "everything was received");
        assert!(backlog.note(at(5_001), true) && backlog.note(at(6_000), true));
        assert!(!backlog.note(at(6_001), true));
    }

    fn config() -> ClientConfig {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .expect("TLS 1.3")
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let crypto = QuicClientConfig::try_from(tls).expect("a QUIC suite");
        ClientConfig::new(Arc::new(crypto))
    }

    /// The handshake's timer is later than every deadline of the test and keeps its one entry.
    #[test]
    fn a_later_timer_is_set_once_however_many_earlier_ones_expire() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let silent_peer = UdpSocket::bind(any).expect("a socket");
        let to = silent_peer.local_addr().expect("an address");
        let mut endpoint = Endpoint::bind(any, None).expect("a socket");
        let mut now = Instant::now();
        let key = endpoint.connect(now, config(), to, "localhost", ());
        let key = key.expect("a connection");
        let mut deadlines = Deadlines::default();
        endpoint.flush(now, &mut deadlines);
        for count in 1..=100 {
            let due = now + Duration::from_millis(1);
            let link = endpoint.link(key).expect("the connection exists");
            link.set_deadline(Some(due));
            endpoint.flush(now, &mut deadlines);
            now = due;
            endpoint.receive(now, &mut deadlines).expect("the socket");
            endpoint.flush(now, &mut deadlines);
            assert_eq!(deadlines.0, count);
            assert_eq!(endpoint.timers.len(), 1, "{:?}", endpoint.timers);
        }
    }
}
