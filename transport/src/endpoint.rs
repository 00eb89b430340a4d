//! Polling rounds of an endpoint: receive, timers, connections with work, transmit.

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

/// Socket calls per round, so that a flood of datagrams cannot delay the rest of the round.
const RECEIVES_MAX: usize = 2;
/// Transmits of one connection per round.
const TRANSMITS_MAX: usize = 16;
/// Most bytes per read from a stream.
const CHUNK_BYTES_MAX: usize = 64 << 10;
/// Bytes kept of an incomplete message; the driver rejects longer ones.
const CARRY_BYTES: usize = 4_096;

/// Decision on a peer's connection attempt.
pub enum Incoming<T> {
    Accept(T),
    /// The peer first proves that it owns its address (QUIC Retry); nothing is accepted yet.
    Retry,
    /// Refuses the connection.
    Refuse,
    /// Sends no reply.
    Ignore,
}

/// How much of the data the driver has consumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConsumedBytes {
    pub bytes: usize,
    /// True: the rest is complete messages for the next round. False: the rest waits for more
    /// bytes.
    pub is_paused: bool,
}

/// Callbacks of an endpoint's owner.
pub trait Driver<T> {
    /// A peer wants a connection. `is_validated`: the peer has proved that it owns its address.
    /// `half_open`: connections with an unfinished handshake.
    fn incoming(
        &mut self,
        now: Instant,
        from: SocketAddr,
        is_validated: bool,
        half_open: usize,
    ) -> Incoming<T>;

    /// The stream of the connection is open.
    fn opened(&mut self, _now: Instant, _link: &mut Link<T>) {}

    /// Bytes of the stream in order, starting with those left by the last call.
    fn data(&mut self, now: Instant, link: &mut Link<T>, bytes: &[u8]) -> ConsumedBytes;

    /// The peer has finished its side of the stream.
    fn finished(&mut self, now: Instant, link: &mut Link<T>);

    /// The deadline set by [`Link::set_deadline`] has passed.
    fn timeout(&mut self, _now: Instant, _link: &mut Link<T>) {}

    /// The connection has ended, on either side's initiative. Called once, last.
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
    /// Connections to process before the round ends.
    touched: Vec<u32>,
    timers: BinaryHeap<Reverse<(Instant, u32, u32)>>,
    scratch: Vec<u8>,
}

impl<T> Endpoint<T> {
    /// An endpoint; with a server configuration it accepts connections.
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
            scratch: Vec::with_capacity(64 << 10),
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

    /// Earliest time at which a round has work without a datagram.
    pub fn next_deadline(&self) -> Option<Instant> {
        self.timers.peek().map(|Reverse((at, ..))| *at)
    }

    /// True if a round has work without waiting for the socket or a timer.
    pub fn has_work(&self) -> bool {
        !self.touched.is_empty()
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

    /// A connection, marked for processing before the round ends; `None` if it has ended.
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

    pub fn keys(&self) -> impl Iterator<Item = Key> + '_ {
        self.links.iter().flatten().map(|link| link.key)
    }

    /// First part of a round: receives datagrams and fires timers. True if there was work. The
    /// owner then writes its data and ends the round with [`Endpoint::flush`].
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
        // Reads come before writes, so that a round answers the requests that it received.
        self.poll(now, driver, false);
        Ok(did_work)
    }

    /// Second part of a round: writes and sends the connections' data.
    pub fn flush(&mut self, now: Instant, driver: &mut impl Driver<T>) -> bool {
        self.poll(now, driver, true)
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
            // Stateless: the peer retries.
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

    /// Processes every touched connection: reads, or sends.
    fn poll(&mut self, now: Instant, driver: &mut impl Driver<T>, sends: bool) -> bool {
        // No connection is added meanwhile: the driver has no access to the endpoint.
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
            // Touched after the read part, so that `flush` sends the answers of this round.
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

    /// Events, bytes in, bytes out; true once the connection is drained.
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
        advance_close(now, driver, link);
        is_drained
    }

    /// True if the connection has more to send than this round allows, or the socket accepts
    /// nothing.
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

    /// Ensures a timer no later than the connection's next deadline.
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

/// An endpoint without its socket, which is borrowed for reading.
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

/// Passes the stream's data to the driver.
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
        if !deliver(now, driver, link) {
            return;
        }
    }
    // Nothing is read after the close.
    link.rest = Bytes::new();
}

/// Passes the available data to the driver; false if the driver paused for this round.
fn deliver<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>) -> bool {
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
    // A message that started in an earlier chunk.
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
        // Processed again in the next round although no data arrives.
        if link.rest.is_empty() {
            link.rest = Bytes::from(std::mem::take(&mut link.carry));
        }
        return false;
    }
    true
}

/// Next bytes of the stream; `None` at its end, an error if none are available yet.
fn next_chunk<T>(link: &mut Link<T>) -> Result<Option<Bytes>, ()> {
    let id = link.stream.ok_or(())?;
    let mut stream = link.quic.recv_stream(id);
    let mut chunks = stream.read(true).map_err(|_| ())?;
    let chunk = chunks.next(CHUNK_BYTES_MAX);
    // Frames that it queues are sent at the end of the round.
    let _ = chunks.finalize();
    match chunk {
        Ok(chunk) => Ok(chunk.map(|chunk| chunk.bytes)),
        Err(ReadError::Reset(_)) => Ok(None),
        Err(ReadError::Blocked) => Err(()),
    }
}

/// Carries out a requested close.
fn advance_close<T>(now: Instant, driver: &mut impl Driver<T>, link: &mut Link<T>) {
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
            // Without a stream, or if the peer has stopped it, there is nothing to wait for.
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
