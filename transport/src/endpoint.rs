//! Rounds of an endpoint: datagrams in, timers, connections that have something to do, datagrams out.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use bytes::{Bytes, BytesMut};
use quinn_proto::{
    ClientConfig, ConnectError, ConnectionError, ConnectionHandle, DatagramEvent, Dir,
    EndpointConfig, Event, ReadError, ServerConfig, StreamEvent,
};

use crate::link::{End, Key, Link};
use crate::socket::{From, Socket};

/// Calls of the socket per round: no flood of datagrams keeps the rest of the round waiting.
const RECEIVES_MAX: usize = 2;
/// Transmits of one connection per round.
const TRANSMITS_MAX: usize = 16;
/// Bytes read from a stream at once.
const CHUNK_BYTES_MAX: usize = 64 << 10;
/// Bytes kept of a message whose end has not come; what is longer is the driver's to refuse.
const CARRY_BYTES: usize = 4_096;

/// What becomes of a peer that wants a connection.
pub enum Incoming<T> {
    Accept(T),
    /// The peer first has to show that it owns its address (QUIC Retry); accepts nothing yet.
    Retry,
    /// Says no.
    Refuse,
    /// Says nothing.
    Ignore,
}

/// How much of what was read the driver has taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taken {
    pub bytes: usize,
    /// The rest is complete messages for the next round; otherwise it waits for more bytes.
    pub is_paused: bool,
}

/// What the owner of an endpoint does with its connections.
pub trait Driver<T> {
    /// A peer wants a connection; `is_validated` says whether it owns its address, `half_open` how
    /// many connections have not finished their handshake.
    fn incoming(
        &mut self,
        now: Instant,
        from: SocketAddr,
        is_validated: bool,
        half_open: usize,
    ) -> Incoming<T>;

    /// The connection has its stream.
    fn opened(&mut self, _now: Instant, _link: &mut Link<T>) {}

    /// Bytes of the stream in order, what was left of the last call in front.
    fn data(&mut self, now: Instant, link: &mut Link<T>, bytes: &[u8]) -> Taken;

    /// The peer has finished its side of the stream.
    fn finished(&mut self, now: Instant, link: &mut Link<T>);

    /// The moment of [`Link::set_deadline`] has come.
    fn timeout(&mut self, _now: Instant, _link: &mut Link<T>) {}

    /// The connection is over, whoever ended it; called once, last.
    fn closed(&mut self, now: Instant, link: &mut Link<T>, reason: &ConnectionError);
}

/// Connections over one UDP socket.
pub struct Endpoint<T> {
    socket: Socket,
    proto: quinn_proto::Endpoint,
    /// By quinn-proto's handle.
    links: Vec<Option<Box<Link<T>>>>,
    generations: Vec<u32>,
    count: usize,
    half_open: usize,
    /// Connections to look at before the round ends.
    touched: Vec<u32>,
    timers: BinaryHeap<Reverse<(Instant, u32, u32)>>,
    scratch: Vec<u8>,
}

impl<T> Endpoint<T> {
    /// An endpoint that takes connections if it has a server configuration.
    ///
    /// # Errors
    /// The address is taken, or the socket cannot be set up.
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
            scratch: Vec::with_capacity(64 << 10),
        })
    }

    /// # Errors
    /// The system does not say.
    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.socket.local_address()
    }

    /// Connections that are not over.
    pub fn connections(&self) -> usize {
        self.count
    }

    /// Earliest moment at which a round has something to do without a datagram.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, ..))| *at)
    }

    /// True when a round would do something without waiting for the socket or a timer.
    pub fn has_work(&self) -> bool {
        !self.touched.is_empty()
    }

    /// Begins a connection; [`Driver::opened`] says when its stream is there.
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

    /// A connection, to be looked at before the round ends; `None` when it is over.
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

    /// Every connection.
    pub fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        self.links.iter().flatten().map(|link| link.key)
    }

    /// The first part of a round: takes datagrams in and lets timers run out. True when there was
    /// anything to do. The owner then writes what it has, and ends the round by [`Endpoint::flush`].
    ///
    /// # Errors
    /// The socket is broken.
    pub fn receive(&mut self, now: Instant, driver: &mut impl Driver<T>) -> io::Result<bool> {
        let mut did_work = false;
        for _ in 0..RECEIVES_MAX {
            if !self.receive_once(now, driver)? {
                break;
            }
            did_work = true;
        }
        while let Some(Reverse((at, index, generation))) = self.timers.peek().copied() {
            if at > now {
                break;
            }
            self.timers.pop();
            let key = Key { index, generation };
            let Some(link) = self.link(key) else { continue };
            did_work = true;
            link.scheduled = None;
            if link.quic.poll_timeout().is_some_and(|at| at <= now) {
                link.quic.handle_timeout(now);
            }
            if link.deadline.is_some_and(|at| at <= now) {
                link.deadline = None;
                driver.timeout(now, link);
            }
        }
        // Messages are taken before reports are written: a round answers what came in it.
        self.turn(now, driver, false);
        Ok(did_work)
    }

    /// The second part of a round: writes and sends what connections have for their peers.
    pub fn flush(&mut self, now: Instant, driver: &mut impl Driver<T>) -> bool {
        self.turn(now, driver, true)
    }

    fn receive_once(&mut self, now: Instant, driver: &mut impl Driver<T>) -> io::Result<bool> {
        let mut parts = Parts {
            proto: &mut self.proto,
            links: &mut self.links,
            touched: &mut self.touched,
            scratch: &mut self.scratch,
            half_open: self.half_open,
            accepted: Vec::new(),
            responses: Vec::new(),
        };
        let received = self
            .socket
            .receive(|from, data| parts.datagram(now, driver, from, data))?;
        let (accepted, responses) = (parts.accepted, parts.responses);
        for (transmit, contents) in responses {
            // Stateless: a peer that still wants something asks again.
            self.socket.send(&transmit, &contents);
        }
        for (handle, quic, user) in accepted {
            self.insert(handle, quic, user);
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
            index: u32::try_from(index).expect("connections are counted by 32 bits"),
            generation: self.generations[index],
        };
        let link = Link::new(key, handle, quic, user);
        self.links[index] = Some(Box::new(link));
        self.count += 1;
        self.half_open += 1;
        self.link(key);
        key
    }

    /// Looks at every connection that was touched: reads, or lets it send.
    fn turn(&mut self, now: Instant, driver: &mut impl Driver<T>, sends: bool) -> bool {
        // None is added meanwhile: the driver has no hand on the endpoint.
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
            // What was read is answered before the round ends.
            link.is_touched = !sends || self.send(now, &mut link) || !link.rest.is_empty();
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

    /// Events, bytes in, bytes out; true when nothing is left of the connection.
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
        if reads && (link.is_readable || !link.rest.is_empty()) {
            read(now, driver, link);
        }
        link.write();
        end(now, driver, link);
        is_drained
    }

    /// True when the connection has more to send than this round allows, or the socket takes nothing.
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

    /// Sees to it that a timer is due no later than the connection's next moment.
    fn schedule(&mut self, link: &mut Link<T>) {
        let Some(next) = link.next_deadline() else {
            return;
        };
        if link.scheduled.is_none_or(|at| next < at) {
            link.scheduled = Some(next);
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

/// An endpoint without its socket, which is being read.
struct Parts<'a, T> {
    proto: &'a mut quinn_proto::Endpoint,
    links: &'a mut Vec<Option<Box<Link<T>>>>,
    touched: &'a mut Vec<u32>,
    scratch: &'a mut Vec<u8>,
    half_open: usize,
    accepted: Vec<(ConnectionHandle, quinn_proto::Connection, T)>,
    responses: Vec<(quinn_proto::Transmit, Vec<u8>)>,
}

impl<T> Parts<'_, T> {
    fn datagram(&mut self, now: Instant, driver: &mut impl Driver<T>, from: From, data: BytesMut) {
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
                    // Accepted in this very batch.
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
                    if let Some(transmit) = error.response {
                        self.respond(transmit);
                    }
                }
            },
            Incoming::Retry => match self.proto.retry(incoming, self.scratch) {
                Ok(transmit) => self.respond(transmit),
                // It has been asked before.
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
        let contents = self.scratch[..transmit.size].to_vec();
        self.responses.push((transmit, contents));
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
            // One stream: the transport parameters allow no other.
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

/// Gives the driver what the stream has.
fn read<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>) {
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
        if !give(now, driver, link) {
            return;
        }
    }
    // Nothing is read behind the end.
    link.rest = Bytes::new();
}

/// Gives the driver what is at hand; false when it has had enough for this round.
fn give<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>) -> bool {
    if link.carry.is_empty() {
        let bytes = std::mem::take(&mut link.rest);
        let taken = driver.data(now, link, &bytes);
        let left = bytes.slice(taken.bytes..);
        if taken.is_paused {
            link.rest = left;
            return false;
        }
        link.carry.extend_from_slice(&left);
        return true;
    }
    // A message that began in an earlier chunk.
    let more = link.rest.split_to(
        link.rest
            .len()
            .min(CARRY_BYTES.saturating_sub(link.carry.len())),
    );
    link.carry.extend_from_slice(&more);
    let mut carry = std::mem::take(&mut link.carry);
    let taken = driver.data(now, link, &carry);
    carry.drain(..taken.bytes);
    link.carry = carry;
    if taken.is_paused {
        // Looked at again in the next round although nothing new has come.
        if link.rest.is_empty() {
            link.rest = Bytes::from(std::mem::take(&mut link.carry));
        }
        return false;
    }
    true
}

/// The next bytes of the stream; `None` at its end, an error when there is nothing now.
fn next_chunk<T>(link: &mut Link<T>) -> Result<Option<Bytes>, ()> {
    let id = link.stream.ok_or(())?;
    let mut stream = link.quic.recv_stream(id);
    let mut chunks = stream.read(true).map_err(|_| ())?;
    let chunk = chunks.next(CHUNK_BYTES_MAX);
    // What it asks to be sent goes out at the end of the round.
    let _ = chunks.finalize();
    match chunk {
        Ok(chunk) => Ok(chunk.map(|chunk| chunk.bytes)),
        Err(ReadError::Reset(_)) => Ok(None),
        Err(ReadError::Blocked) => Err(()),
    }
}

/// Carries out an end that was asked for.
fn end<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>) {
    if let End::Finishing {
        code,
        reason,
        until,
        is_finished,
    } = &mut link.end
    {
        let is_over = *until <= now;
        if link.out.is_empty() && !*is_finished {
            *is_finished = true;
            let finished = link.stream.map(|id| link.quic.send_stream(id).finish());
            // Without a stream, or with one that the peer has stopped, nothing is waited for.
            let is_pointless = !matches!(finished, Some(Ok(())));
            if is_pointless || is_over {
                let (code, reason) = (*code, std::mem::take(reason));
                link.end = End::Close { code, reason };
            }
        } else if is_over {
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
