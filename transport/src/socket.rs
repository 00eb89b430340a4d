//! A non-blocking UDP socket. One system call receives up to [`quinn_udp::BATCH_SIZE`] buffers, or
//! sends a run of datagrams of equal size.

use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
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

    /// Receives with one system call and passes each datagram to `each`. Returns false if none was
    /// available.
    ///
    /// # Errors
    /// The socket fails. A peer cannot cause this.
    pub fn receive(&mut self, mut each: impl FnMut(Origin, BytesMut)) -> io::Result<bool> {
        let one = self.buffers.len() / BATCH_SIZE;
        let mut buffers = self.buffers.chunks_exact_mut(one);
        let mut slices: [IoSliceMut; BATCH_SIZE] =
            std::array::from_fn(|_| IoSliceMut::new(buffers.next().expect("BATCH_SIZE buffers")));
        let socket = UdpSockRef::from(&self.io);
        let count = match self.state.recv(socket, &mut slices, &mut self.metas) {
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            // An ICMP error for a sent datagram, or an interrupted call.
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::ConnectionReset
                        | ErrorKind::ConnectionRefused
                        | ErrorKind::Interrupted
                ) =>
            {
                return Ok(true);
            }
            Err(error) => return Err(error),
        };
        for (meta, buffer) in self.metas[..count].iter().zip(&slices) {
            // One allocation for all datagrams of a GRO batch.
            let mut data = BytesMut::from(&buffer[..meta.len]);
            while !data.is_empty() {
                let length = meta.stride.min(data.len());
                let from = Origin {
                    address: meta.addr,
                    local_ip: meta.dst_ip,
                    ecn: meta.ecn.map(|ecn| match ecn {
                        quinn_udp::EcnCodepoint::Ect0 => EcnCodepoint::Ect0,
                        quinn_udp::EcnCodepoint::Ect1 => EcnCodepoint::Ect1,
                        quinn_udp::EcnCodepoint::Ce => EcnCodepoint::Ce,
                    }),
                };
                each(from, data.split_to(length));
            }
        }
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
