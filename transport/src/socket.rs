//! A non-blocking UDP socket. One system call receives up to [`quinn_udp::BATCH_SIZE`] buffers, or
//! sends a run of datagrams of equal size.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use bytes::BytesMut;
use quinn_proto::EcnCodepoint;
use quinn_udp::{BATCH_SIZE, RecvMeta, UdpSockRef, UdpSocketState};

/// Requested size of the kernel's buffers, for simultaneous bursts of all members. The system may
/// limit it.
const KERNEL_BUFFER_BYTES: usize = 8 << 20;
/// Longest datagram that is received. The endpoint announces this size.
const DATAGRAM_BYTES_MAX: usize = 1_500;
/// Bytes that one call may send over IPv4 and IPv6. The kernel drops a longer run of datagrams as a
/// whole, and quinn-udp reports no error.
const SEND_BYTES_MAX: usize = 65_507;

pub(crate) struct Socket {
    io: UdpSocket,
    state: UdpSocketState,
    /// [`BATCH_SIZE`] buffers, each of the size of the largest GRO batch.
    buffers: Box<[u8]>,
    metas: [RecvMeta; BATCH_SIZE],
    /// Index of the buffer whose datagrams are passed on, and those that the system has filled
    /// after it.
    current: usize,
    filled: Range<usize>,
    /// True if datagrams may wait in the system: the last call filled all its buffers, failed, or
    /// only passed on what an earlier one had left.
    may_wait: bool,
    /// Bytes of `buffers` with the datagrams of the current buffer that are not passed on yet.
    rest: Range<usize>,
}

/// Origin of a datagram.
pub(crate) struct Origin {
    pub address: SocketAddr,
    pub local_ip: Option<std::net::IpAddr>,
    pub ecn: Option<EcnCodepoint>,
}

impl Socket {
    pub fn bind(address: SocketAddr) -> io::Result<Self> {
        let io = UdpSocket::bind(address)?;
        let state = UdpSocketState::new(UdpSockRef::from(&io))?;
        // Errors are ignored: a smaller buffer only drops bursts earlier.
        let _ = state.set_recv_buffer_size(UdpSockRef::from(&io), KERNEL_BUFFER_BYTES);
        let _ = state.set_send_buffer_size(UdpSockRef::from(&io), KERNEL_BUFFER_BYTES);
        let one = DATAGRAM_BYTES_MAX * state.gro_segments();
        Ok(Self {
            buffers: vec![0; one * BATCH_SIZE].into(),
            metas: [RecvMeta::default(); BATCH_SIZE],
            current: 0,
            filled: 0..0,
            may_wait: false,
            rest: 0..0,
            io,
            state,
        })
    }

    pub fn local_address(&self) -> io::Result<SocketAddr> {
        self.io.local_addr()
    }

    /// Maximum number of datagrams per [`Socket::send`].
    pub fn segments_max(&self) -> usize {
        let fitting = SEND_BYTES_MAX / DATAGRAM_BYTES_MAX;
        self.state.max_gso_segments().min(fitting)
    }

    /// True if received datagrams are not passed on yet.
    pub fn has_rest(&self) -> bool {
        !self.rest.is_empty() || !self.filled.is_empty()
    }

    /// True if more datagrams may have arrived than those passed on.
    pub fn may_have_more(&self) -> bool {
        self.has_rest() || self.may_wait
    }

    /// Passes up to `most` datagrams to `each`: those that the last call left, else those of one
    /// system call with up to `buffers` buffers. Returns their number; `None` if none was
    /// available.
    ///
    /// # Errors
    /// The socket fails. A peer cannot cause this.
    pub fn receive(
        &mut self,
        most: usize,
        buffers: usize,
        mut each: impl FnMut(Origin, BytesMut),
    ) -> io::Result<Option<usize>> {
        if self.has_rest() {
            self.may_wait = true;
        } else if !self.fill(buffers)? {
            return Ok(None);
        }
        let one = self.buffers.len() / BATCH_SIZE;
        let mut count = 0;
        while count < most {
            if self.rest.is_empty() {
                let Some(next) = self.filled.next() else {
                    break;
                };
                self.current = next;
                let start = next * one;
                self.rest = start..start + self.metas[next].len;
                continue;
            }
            let meta = &self.metas[self.current];
            let end = self.rest.end.min(self.rest.start + meta.stride);
            // Each datagram has an allocation of its own: quinn-proto keeps the part of a stream
            // that follows a gap, and bounds it by the sizes and number of single packets.
            let data = BytesMut::from(&self.buffers[self.rest.start..end]);
            self.rest.start = end;
            let from = Origin {
                address: meta.addr,
                local_ip: meta.dst_ip,
                ecn: meta.ecn.map(|ecn| match ecn {
                    quinn_udp::EcnCodepoint::Ect0 => EcnCodepoint::Ect0,
                    quinn_udp::EcnCodepoint::Ect1 => EcnCodepoint::Ect1,
                    quinn_udp::EcnCodepoint::Ce => EcnCodepoint::Ce,
                }),
            };
            each(from, data);
            count += 1;
        }
        Ok(Some(count))
    }

    /// Fills up to `offered` buffers with one system call. Returns false if no datagram was
    /// available.
    fn fill(&mut self, offered: usize) -> io::Result<bool> {
        self.may_wait = false;
        let offered = offered.min(BATCH_SIZE);
        let one = self.buffers.len() / BATCH_SIZE;
        let mut buffers = self.buffers.chunks_exact_mut(one).take(offered);
        let mut slices: [IoSliceMut; BATCH_SIZE] =
            std::array::from_fn(|_| IoSliceMut::new(buffers.next().unwrap_or_default()));
        let slices = &mut slices[..offered];
        let socket = UdpSockRef::from(&self.io);
        let count = match self.state.recv(socket, slices, &mut self.metas) {
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            // An ICMP error for a sent datagram, or an interrupted call: datagrams may wait.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::ConnectionReset
                        | ErrorKind::ConnectionRefused
                        | ErrorKind::Interrupted
                ) =>
            {
                self.may_wait = true;
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        self.filled = 0..count;
        self.may_wait = count == offered;
        Ok(true)
    }

    /// Sends a run of datagrams. Returns false if the kernel's buffer is full. Other errors count
    /// as loss, which QUIC repairs.
    pub fn send(&self, transmit: &quinn_proto::Transmit, contents: &[u8]) -> bool {
        let transmit = quinn_udp::Transmit {
            destination: transmit.destination,
            ecn: transmit.ecn.map(|ecn| match ecn {
                EcnCodepoint::Ect0 => quinn_udp::EcnCodepoint::Ect0,
                EcnCodepoint::Ect1 => quinn_udp::EcnCodepoint::Ect1,
                EcnCodepoint::Ce => quinn_udp::EcnCodepoint::Ce,
            }),
            contents,
            segment_size: transmit.segment_size,
            src_ip: transmit.src_ip,
        };
        let sent = self.state.send(UdpSockRef::from(&self.io), &transmit);
        !sent.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.io.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(60);

    /// Runs of datagrams arrive as GRO batches where the system has them: one system call returns
    /// all of them. A kept datagram keeps no other in memory.
    #[test]
    fn a_call_passes_on_a_bounded_number_of_datagrams_and_the_next_calls_the_rest() {
        const RUNS: usize = 4;
        const BYTES: usize = 100;
        const MOST: usize = 10;
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut to = Socket::bind(any).expect("a socket");
        let from = Socket::bind(any).expect("a socket");
        let segments = from.segments_max();
        let mut sent = Vec::new();
        for run in 0..RUNS {
            let numbers = (0..segments).map(|segment| (run * segments + segment) as u8);
            let contents: Vec<u8> = numbers.clone().flat_map(|number| [number; BYTES]).collect();
            sent.extend(numbers);
            let transmit = quinn_proto::Transmit {
                destination: to.local_address().expect("an address"),
                ecn: None,
                size: contents.len(),
                segment_size: Some(BYTES),
                src_ip: None,
            };
            assert!(from.send(&transmit, &contents));
        }
        let mut received = Vec::new();
        let mut kept = Vec::new();
        let begun = Instant::now();
        while received.len() < sent.len() {
            assert!(begun.elapsed() < PATIENCE, "{} received", received.len());
            let before = received.len();
            let count = to.receive(MOST, BATCH_SIZE, |_, data| {
                assert_eq!(data.len(), BYTES);
                received.push(data[0]);
                kept.push(data.freeze());
            });
            let count = count.expect("the socket works").unwrap_or(0);
            assert_eq!(count, received.len() - before);
            assert!(count <= MOST, "{count}");
        }
        assert_eq!(received, sent);
        assert!(kept.iter().all(bytes::Bytes::is_unique));
        assert!(!to.has_rest());
    }

    #[test]
    fn a_call_that_fills_all_its_buffers_may_have_left_datagrams() {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut to = Socket::bind(any).expect("a socket");
        let from = UdpSocket::bind(any).expect("a socket");
        let address = to.local_address().expect("an address");
        for _ in 0..5 {
            from.send_to(&[0], address).expect("sent");
        }
        for (buffers, count, may_have_more) in [(2, 2, true), (3, 3, true), (2, 0, false)] {
            let received = to.receive(100, buffers, |_, _| ()).expect("the socket");
            assert_eq!(received.unwrap_or(0), count);
            assert_eq!(to.may_have_more(), may_have_more);
        }
        from.send_to(&[0], address).expect("sent");
        let received = to.receive(100, 2, |_, _| ()).expect("the socket");
        assert_eq!((received, to.may_have_more()), (Some(1), false));
        // While one of two waits here, another arrives.
        for (sent, most) in [(2, 1), (1, 100)] {
            for _ in 0..sent {
                from.send_to(&[0], address).expect("sent");
            }
            let received = to.receive(most, 5, |_, _| ()).expect("the socket");
            assert_eq!((received, to.may_have_more()), (Some(1), true));
        }
        let received = to.receive(100, 5, |_, _| ()).expect("the socket");
        assert_eq!((received, to.may_have_more()), (Some(1), false));
    }
}
