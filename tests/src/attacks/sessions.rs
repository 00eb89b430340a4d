//! Attacks of members: what they send over sessions of their own, within and beyond their rates.

use std::time::{Duration, Instant};

use types::{Side, TimeInForce};
use wire::{
    ALL_INSTRUMENTS, BOTH_SIDES, Cancel, ClientMessage, LOGIN_CANCEL_ON_DISCONNECT, MassCancel,
    NewOrder,
};

use super::line::{self, Line};
use super::{Attack, Outcome, Target};
use crate::member::limit;

/// Sessions that share the packets, so that each stays within its rate at 20,000 packets per second.
const SESSIONS: u64 = 5;
/// How long answers are waited for after the last request.
const DRAIN: Duration = Duration::from_secs(15);
/// Requests before the repeats begin: more than what a session's window keeps, and than what is
/// repeated of the other sessions.
const SEEN: [u64; SESSIONS as usize] = [17_500, 1_000, 1_000, 1_000, 1_000];
/// Order ids of different runs: no open order of an earlier one has them.
const UNKNOWN: u64 = 1 << 40;
/// A tick above the band of a bond.
const ABOVE_BAND: i64 = 10_000_001;

/// One connection with [`SESSIONS`] sessions.
struct Member {
    line: Line,
    /// Last client sequence, by channel.
    seqs: [u64; SESSIONS as usize],
    /// Requests that are to be answered.
    sent: u64,
}

impl Member {
    fn login(target: &Target) -> Self {
        let mut line = Line::open(target.trading, line::config());
        let mut seqs = [0; SESSIONS as usize];
        for (channel, seq) in (0u16..).zip(&mut seqs) {
            line.login(channel, &target.token, &format!("session-{channel}"), 0);
            *seq = line.counts().last_seqs[&channel];
        }
        Self {
            line,
            seqs,
            sent: 0,
        }
    }

    /// One request in one datagram.
    fn send(&mut self, channel: u64, message: &ClientMessage) {
        let seq = &mut self.seqs[channel as usize];
        *seq += 1;
        let seq = *seq;
        self.send_as(channel, seq, message);
    }

    fn send_as(&mut self, channel: u64, client_seq: u64, message: &ClientMessage) {
        let sent = self.line.append(channel as u16, client_seq, message);
        self.sent += u64::from(sent);
        self.line.flush();
    }

    /// Cancels what is open; requests without an answer are wrong, and so are other answers.
    fn finish(mut self, allowed: &[&str]) -> Outcome {
        self.line.drain(self.sent, DRAIN);
        let (sent, counts) = (self.sent, self.line.counts().clone());
        let mut wrong = Vec::new();
        if counts.answered() != sent {
            let ended = self.line.ended();
            wrong.push(format!(
                "{sent} requests, {} answers, end {ended:?}",
                counts.answered()
            ));
        }
        for name in counts.answers.keys() {
            if !allowed.contains(name) {
                wrong.push(format!("answer {name}"));
            }
        }
        if self.line.ended().is_none() {
            self.send(0, &mass_cancel(ALL_INSTRUMENTS));
            self.line.drain(self.sent, DRAIN);
        }
        Outcome {
            said: format!(
                "{sent} requests in {} datagrams: {counts}",
                self.line.packets()
            ),
            wrong,
        }
    }
}

fn mass_cancel(instrument: u32) -> ClientMessage {
    MassCancel {
        scope: 1,
        instrument,
        side: BOTH_SIDES,
    }
    .into()
}

fn unknown(number: u64) -> ClientMessage {
    Cancel {
        client_order_id: UNKNOWN + number,
        engine_order_id: 0,
    }
    .into()
}

/// What the requests of a member are, by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requests {
    /// Orders and their cancels, as a member that behaves sends them.
    Ordinary,
    MassCancels,
    BadPrices,
    UnknownCancels,
    /// Orders that rest.
    Orders,
    /// Client sequences that were seen before.
    Repeats,
}

/// What bounds a member besides the answer to its request.
const BOUNDS: [&str; 4] = ["THROTTLE", "JOURNAL_QUOTA", "ORDER_TO_TRADE", "BUSY"];

impl Requests {
    /// Answers that are right, besides [`BOUNDS`].
    fn answers(self) -> &'static [&'static str] {
        match self {
            Self::Ordinary => &["order", "cancelled"],
            Self::MassCancels => &["mass cancelled"],
            Self::BadPrices => &["PRICE_TICK", "PRICE_BAND"],
            Self::UnknownCancels => &["UNKNOWN_ORDER"],
            Self::Orders => &["order", "INSTRUMENT_ORDER_LIMIT", "SETTLEMENT_BACKLOG"],
            Self::Repeats => &["UNKNOWN_ORDER", "ALREADY_SEEN"],
        }
    }
}

/// Requests over the sessions of one member.
pub struct Flood {
    member: Member,
    requests: Requests,
    instrument: u32,
}

impl Flood {
    pub fn begin(target: &Target, requests: Requests) -> Self {
        let mut flood = Self {
            member: Member::login(target),
            requests,
            instrument: target.instrument,
        };
        if requests == Requests::Repeats {
            flood.fill_windows();
        }
        flood
    }

    /// Requests to be repeated, within the sessions' rates.
    fn fill_windows(&mut self) {
        let begun = Instant::now();
        let mut number = 0;
        for (channel, count) in (0u64..).zip(SEEN) {
            for _ in 0..count {
                while number > begun.elapsed().as_millis() as u64 * 4 + 4_000 {
                    self.member.line.poll();
                    std::thread::sleep(Duration::from_micros(250));
                }
                self.member.send(channel, &unknown(number));
                number += 1;
            }
        }
        self.member.line.drain(number, DRAIN);
    }

    fn order(&self, id: u64, price_ticks: i64) -> ClientMessage {
        limit(id, self.instrument, Side::Buy, price_ticks, 1).into()
    }
}

impl Attack for Flood {
    fn packet(&mut self, number: u64) {
        let (channel, nth) = (number % SESSIONS, number / SESSIONS);
        let id = 1 + nth / 2 * SESSIONS + channel;
        let message = match self.requests {
            Requests::Ordinary if nth % 2 == 0 => self.order(id, 101),
            Requests::Ordinary => Cancel {
                client_order_id: id,
                engine_order_id: 0,
            }
            .into(),
            Requests::MassCancels if nth % 2 == 0 => mass_cancel(ALL_INSTRUMENTS),
            Requests::MassCancels => mass_cancel(self.instrument),
            Requests::BadPrices if nth % 2 == 0 => self.order(id, 0),
            Requests::BadPrices => self.order(id, ABOVE_BAND),
            Requests::UnknownCancels => unknown(number),
            Requests::Orders => self.order(1 + number, 101),
            Requests::Repeats => {
                let last = self.member.seqs[channel as usize];
                // Now and then one that has left the window.
                let back = match number % 100 {
                    0 => 17_000 + nth % 400,
                    _ => nth % 900,
                };
                let message = unknown(number);
                return self.member.send_as(channel, last - back, &message);
            }
        };
        self.member.send(channel, &message);
    }

    fn poll(&mut self) {
        self.member.line.poll();
    }

    fn finish(self: Box<Self>) -> Outcome {
        let requests = self.requests;
        let orders = self.member.line.counts().of("order");
        let allowed = [requests.answers(), &BOUNDS[..]].concat();
        let mut outcome = self.member.finish(&allowed);
        if requests == Requests::Orders && orders > 16_384 {
            outcome
                .wrong
                .push(format!("{orders} open orders of one user"));
        }
        if requests == Requests::Ordinary {
            let bounded = BOUNDS.iter().any(|bound| outcome.said.contains(bound));
            outcome
                .wrong
                .extend(bounded.then(|| "the control is refused".to_owned()));
        }
        outcome
    }
}

/// One session that logs in on one channel, then on another, and sends in between.
pub struct Logins {
    line: Line,
    token: String,
    begun: Instant,
    /// Has the session; the other one is free.
    channel: u16,
    /// Logins with a session when the last one was sent.
    logins: u64,
    asked: u64,
    sent: u64,
    seq: u64,
}

impl Logins {
    /// Of twenty packets one is a login: far beyond what a user may.
    const EVERY: u64 = 20;

    pub fn begin(target: &Target) -> Self {
        let mut line = Line::open(target.trading, line::config());
        line.login(0, &target.token, "again", 0);
        Self {
            seq: line.counts().last_seqs[&0],
            token: target.token.clone(),
            begun: Instant::now(),
            channel: 0,
            logins: 0,
            asked: 1,
            sent: 0,
            line,
        }
    }

    /// True when no login is on its way; a session that was taken over is on the other channel.
    fn is_answered(&mut self) -> bool {
        let counts = self.line.counts();
        let refused = counts.ends.get(&19).copied().unwrap_or(0);
        if counts.logins + refused < self.asked {
            return false;
        }
        if counts.logins > self.logins && self.asked > 1 {
            self.channel = 1 - self.channel;
        }
        self.logins = counts.logins;
        true
    }
}

impl Attack for Logins {
    fn packet(&mut self, number: u64) {
        if self.is_answered() && number.is_multiple_of(Self::EVERY) {
            let login = Line::login_message(&self.token, "again", 0);
            self.asked += u64::from(self.line.append(1 - self.channel, 0, &login));
        } else {
            self.seq += 1;
            let request = unknown(number);
            self.sent += u64::from(self.line.append(self.channel, self.seq, &request));
        }
        self.line.flush();
    }

    fn poll(&mut self) {
        self.line.poll();
    }

    fn finish(mut self: Box<Self>) -> Outcome {
        self.line.drain(self.sent, DRAIN);
        let counts = self.line.counts().clone();
        let seconds = self.begun.elapsed().as_secs() + 2;
        let mut wrong = Vec::new();
        let taken = counts.answered() - counts.of("THROTTLE") - counts.of("UNKNOWN_SESSION");
        // The rate, and a burst of it.
        if taken > 5_000 * seconds {
            wrong.push(format!("{taken} requests in {seconds} s"));
        }
        if counts.logins > 100 * seconds {
            wrong.push(format!("{} logins in {seconds} s", counts.logins));
        }
        if self.line.ended().is_some() || counts.answered() != self.sent {
            wrong.push(format!(
                "{} requests, end {:?}",
                self.sent,
                self.line.ended()
            ));
        }
        Outcome {
            said: format!(
                "{} logins and {} requests: {} logged in, {counts}",
                self.asked, self.sent, counts.logins
            ),
            wrong,
        }
    }
}

/// Orders of a client that reads nothing.
pub struct SlowConsumer {
    target: Target,
    member: Member,
    /// Ends by the exchange, by what it said.
    ended: Vec<Option<u64>>,
}

impl SlowConsumer {
    /// Orders that rest until cancel-on-disconnect takes them.
    pub const RESTING: u64 = 10;

    pub fn begin(target: &Target) -> Self {
        let mut member = Self::login(target);
        for id in 1..=Self::RESTING {
            let order = limit(UNKNOWN + id, target.instrument, Side::Buy, 101, 1);
            member.send(0, &order.into());
        }
        member.line.drain(Self::RESTING, DRAIN);
        member.line.stop_reading();
        Self {
            target: target.clone(),
            member,
            ended: Vec::new(),
        }
    }

    fn login(target: &Target) -> Member {
        let mut transport = quinn::TransportConfig::default();
        transport.stream_receive_window(65_536u32.into());
        let mut config = line::config();
        config.transport_config(transport.into());
        let mut line = Line::open(target.trading, config);
        let mut seqs = [0; SESSIONS as usize];
        for (channel, seq) in (0u16..).zip(&mut seqs) {
            let name = format!("slow-{channel}");
            line.login(channel, &target.token, &name, LOGIN_CANCEL_ON_DISCONNECT);
            *seq = line.counts().last_seqs[&channel];
        }
        Member {
            line,
            seqs,
            sent: 0,
        }
    }
}

impl Attack for SlowConsumer {
    fn packet(&mut self, number: u64) {
        let order = NewOrder {
            time_in_force: TimeInForce::Ioc,
            ..limit(1 + number, self.target.instrument, Side::Buy, 100, 1)
        };
        self.member.send(number % SESSIONS, &order.into());
    }

    fn poll(&mut self) {
        self.member.line.poll();
        // Its session is not taken up again: cancel-on-disconnect has to end its orders.
        if self.ended.is_empty() {
            self.ended.extend(self.member.line.ended());
        }
    }

    fn finish(self: Box<Self>) -> Outcome {
        let said = format!("{} orders, ended by {:?}", self.member.sent, self.ended);
        let is_slow = self.ended == [Some(wire::DisconnectCode::SlowConsumer as u64)];
        Outcome {
            wrong: (!is_slow)
                .then(|| "not ended as a slow consumer".to_owned())
                .into_iter()
                .collect(),
            said,
        }
    }
}
