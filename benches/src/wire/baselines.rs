//! Baselines without the platform's code: an echo on the platform's transport, a datagram round
//! trip, and a durable write by a parked thread.

use std::fs::{File, OpenOptions};
use std::hint::spin_loop;
use std::net::UdpSocket;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use journal::aligned::Buffer;
use rustix::fs::OFlags;
use rustix::thread::{CpuSet, sched_setaffinity};

use super::echo;
use crate::hop;

/// Size of a durable write.
const BLOCK: usize = 4_096;
/// Blocks of the file, which is written cyclically.
const BLOCKS: u64 = 4_096;
/// Maximum time of the durable writes of a measurement. The caller's connection is not polled
/// meanwhile: it is lost after ten seconds of silence, and the last heartbeat may be five old.
const WRITES_TIME_MAX: Duration = Duration::from_secs(2);
/// Time after which a datagram without a reply counts as lost.
const REPLY_WAIT_MAX: Duration = Duration::from_secs(1);

fn nanos(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Sizes and counts of the baselines.
pub struct Load {
    /// Core of the echo servers and of the thread that spins beside the writes.
    pub core: usize,
    /// Cores of the machine.
    pub cores: usize,
    pub request_bytes: usize,
    pub response_bytes: usize,
    /// Round trips of each echo.
    pub rounds: usize,
    /// Durable writes; fewer if they take longer than two seconds.
    pub writes: u64,
}

/// Times of the baselines in nanoseconds.
pub struct Baselines {
    /// Round trips of [`echo::run`].
    pub echo: Histogram<u64>,
    /// Round trips of [`net`].
    pub net: Histogram<u64>,
    /// Writes of [`durable`].
    pub durable: Histogram<u64>,
}

impl Baselines {
    /// Runs the three baselines, one after the other.
    ///
    /// # Errors
    /// A socket or the file cannot be used, or a message is lost.
    pub fn measure(load: &Load, blocks: &BlockFile) -> anyhow::Result<Self> {
        // One response: the second one has no bytes.
        let responses = [load.response_bytes, 0];
        Ok(Self {
            echo: echo::run(load.core, load.request_bytes, responses, load.rounds)?,
            net: net(
                load.core,
                load.request_bytes,
                load.response_bytes,
                load.rounds,
            )?,
            durable: durable(blocks, load.cores, load.core, load.writes)?,
        })
    }

    /// Adds the times of another measurement.
    ///
    /// # Errors
    /// None for histograms of the same bounds.
    pub fn add(&mut self, other: &Self) -> anyhow::Result<()> {
        self.echo.add(&other.echo)?;
        self.net.add(&other.net)?;
        self.durable.add(&other.durable)?;
        Ok(())
    }
}

/// File for the durable writes. All its blocks are written and synced.
pub struct BlockFile(tempfile::NamedTempFile);

impl BlockFile {
    /// Creates the file in `dir`. It is deleted on drop.
    ///
    /// # Errors
    /// The file system refuses it.
    pub fn create(dir: &Path) -> anyhow::Result<Self> {
        let file = tempfile::NamedTempFile::new_in(dir)?;
        let zeros = vec![0; BLOCK];
        for block in 0..BLOCKS {
            file.as_file().write_all_at(&zeros, block * BLOCK as u64)?;
        }
        file.as_file().sync_all()?;
        Ok(Self(file))
    }
}

/// Measures round trips of single datagrams between two spinning threads in nanoseconds. The server
/// thread runs on `core`.
///
/// # Errors
/// A socket cannot be used, or a datagram was lost.
pub fn net(
    core: usize,
    request_bytes: usize,
    response_bytes: usize,
    rounds: usize,
) -> anyhow::Result<Histogram<u64>> {
    let here = UdpSocket::bind("127.0.0.1:0")?;
    let there = UdpSocket::bind("127.0.0.1:0")?;
    for (socket, peer) in [(&here, &there), (&there, &here)] {
        socket.connect(peer.local_addr()?)?;
        socket.set_nonblocking(true)?;
    }
    let is_stopped = Arc::new(AtomicBool::new(false));
    let server_stop = is_stopped.clone();
    let server = std::thread::spawn(move || {
        hop::pin(core);
        let mut bytes = [7; 2_048];
        while !server_stop.load(Ordering::Relaxed) {
            if there.recv(&mut bytes).is_ok() {
                // The other side detects a failed send as a lost datagram.
                let _ = there.send(&bytes[..response_bytes]);
            }
        }
    });
    let (mut histogram, mut bytes) = (hop::histogram(), [7; 2_048]);
    for round in 0..rounds + rounds / 10 {
        let sent = Instant::now();
        here.send(&bytes[..request_bytes])?;
        while here.recv(&mut bytes).is_err() {
            anyhow::ensure!(sent.elapsed() < REPLY_WAIT_MAX, "a datagram was lost");
            spin_loop();
        }
        if round >= rounds / 10 {
            histogram.saturating_record(nanos(sent));
        }
    }
    is_stopped.store(true, Ordering::Relaxed);
    server.join().expect("the echo panicked");
    Ok(histogram)
}

/// Measures durable writes of 4 KiB by a parked thread in nanoseconds. The thread may run on any of
/// the first `cores`. The caller unparks it and spins until the write has returned. Another thread
/// spins on `core`. Ends after `rounds` or two seconds.
///
/// # Errors
/// The file system refuses direct writes.
pub fn durable(
    blocks: &BlockFile,
    cores: usize,
    core: usize,
    rounds: u64,
) -> anyhow::Result<Histogram<u64>> {
    let flags = OFlags::DIRECT | OFlags::DSYNC;
    let mut options = OpenOptions::new();
    options.write(true).custom_flags(flags.bits().cast_signed());
    let direct = options.open(blocks.0.path())?;
    let (requested, written) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let is_stopped = Arc::new(AtomicBool::new(false));
    let spinner = {
        let stop = is_stopped.clone();
        std::thread::spawn(move || {
            hop::pin(core);
            while !stop.load(Ordering::Relaxed) {
                spin_loop();
            }
        })
    };
    let writer = {
        let (requested, written, stop) = (requested.clone(), written.clone(), is_stopped.clone());
        std::thread::spawn(move || {
            // The thread inherits the affinity of its creator, one core. The journal's thread may
            // run on all cores.
            let mut all = CpuSet::new();
            (0..cores).for_each(|core| all.set(core));
            sched_setaffinity(None, &all)?;
            write_on_request(&direct, &requested, &written, &stop)
        })
    };
    let mut histogram = hop::histogram();
    let end = Instant::now() + WRITES_TIME_MAX;
    'rounds: for round in 1..=rounds {
        let since = Instant::now();
        if since >= end {
            break;
        }
        requested.store(round, Ordering::Release);
        writer.thread().unpark();
        while written.load(Ordering::Acquire) != round {
            if writer.is_finished() {
                break 'rounds;
            }
            spin_loop();
        }
        histogram.saturating_record(nanos(since));
    }
    is_stopped.store(true, Ordering::Relaxed);
    writer.thread().unpark();
    writer.join().expect("the writer panicked")?;
    spinner.join().expect("the spinning thread panicked");
    Ok(histogram)
}

fn write_on_request(
    file: &File,
    requested: &AtomicU64,
    written: &AtomicU64,
    stop: &AtomicBool,
) -> std::io::Result<()> {
    let mut buffer = Buffer::default();
    buffer.resize(BLOCK);
    let mut done = 0;
    while !stop.load(Ordering::Relaxed) {
        let round = requested.load(Ordering::Acquire);
        if round == done {
            std::thread::park();
            continue;
        }
        file.write_all_at(buffer.bytes(), round % BLOCKS * BLOCK as u64)?;
        done = round;
        written.store(done, Ordering::Release);
    }
    Ok(())
}
