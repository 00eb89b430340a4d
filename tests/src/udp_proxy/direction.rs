//! Applies the faults to the datagrams of one client in one direction.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::{Shared, WAITING_MAX, count};
use crate::flow::Random;

/// Longest time a datagram is held back for the next one to overtake it.
const HELD_MAX: Duration = Duration::from_millis(20);
const MILLION: u64 = 1_000_000;

/// One direction of one client.
pub(super) struct Direction {
    shared: Arc<Shared>,
    flow: u64,
    random: Random,
    socket: Arc<UdpSocket>,
    to: SocketAddr,
    /// Delayed datagrams by due time; the ticket keeps the order of equal times.
    waiting: BinaryHeap<Reverse<(Instant, u64, Bytes)>>,
    ticket: u64,
    /// A datagram held back until the next one has passed, at most until this time.
    held: Option<(Instant, Bytes)>,
}

impl Direction {
    /// Sends datagrams over `socket` to the address `to`.
    pub fn new(
        shared: Arc<Shared>,
        flow: u64,
        random: Random,
        socket: Arc<UdpSocket>,
        to: SocketAddr,
    ) -> Self {
        Self {
            shared,
            flow,
            random,
            socket,
            to,
            waiting: BinaryHeap::new(),
            ticket: 0,
            held: None,
        }
    }

    /// Processes datagrams until the sender is dropped.
    pub async fn run(mut self, mut receiver: mpsc::Receiver<Bytes>) {
        loop {
            let waiting = self.waiting.peek().map(|Reverse((at, ..))| *at);
            let held = self.held.as_ref().map(|(at, _)| *at);
            let next = [waiting, held].into_iter().flatten().min();
            let due = async {
                match next {
                    Some(at) => tokio::time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                datagram = receiver.recv() => match datagram {
                    Some(datagram) => self.on_datagram(datagram).await,
                    None => return,
                },
                () = due => self.send_due().await,
            }
        }
    }

    fn happens(&mut self, ppm: u32) -> bool {
        self.random.below(MILLION) < u64::from(ppm)
    }

    async fn on_datagram(&mut self, datagram: Bytes) {
        let faults = self.shared.faults;
        count(&self.shared.counters.received);
        if self.happens(faults.drop_ppm) {
            return count(&self.shared.counters.dropped);
        }
        if self.happens(faults.duplicate_ppm) {
            count(&self.shared.counters.duplicated);
            self.pass(datagram.clone()).await;
        }
        self.pass(datagram).await;
    }

    async fn pass(&mut self, datagram: Bytes) {
        let faults = self.shared.faults;
        if self.happens(faults.delay_ppm) {
            if self.waiting.len() >= WAITING_MAX {
                return count(&self.shared.counters.overflowed);
            }
            let longest = u64::try_from(faults.delay_max.as_micros()).unwrap_or(u64::MAX);
            let delay = Duration::from_micros(1 + self.random.below(longest.max(1)));
            self.ticket += 1;
            let entry = (Instant::now() + delay, self.ticket, datagram);
            self.waiting.push(Reverse(entry));
            return count(&self.shared.counters.delayed);
        }
        if self.held.is_none() && self.happens(faults.reorder_ppm) {
            self.held = Some((Instant::now() + HELD_MAX, datagram));
            return;
        }
        self.send(&datagram).await;
        if let Some((_, overtaken)) = self.held.take() {
            count(&self.shared.counters.reordered);
            self.send(&overtaken).await;
        }
    }

    async fn send_due(&mut self) {
        let now = Instant::now();
        if self.held.as_ref().is_some_and(|(at, _)| *at <= now)
            && let Some((_, datagram)) = self.held.take()
        {
            self.send(&datagram).await;
        }
        while let Some(Reverse((at, ..))) = self.waiting.peek()
            && *at <= now
            && let Some(Reverse((.., datagram))) = self.waiting.pop()
        {
            self.send(&datagram).await;
        }
    }

    async fn send(&self, datagram: &[u8]) {
        let counters = &self.shared.counters;
        if self.shared.is_blocked(self.flow) {
            return count(&counters.blocked);
        }
        match self.socket.send_to(datagram, self.to).await {
            Ok(_) => count(&counters.forwarded),
            Err(_) => count(&counters.overflowed),
        }
    }
}
