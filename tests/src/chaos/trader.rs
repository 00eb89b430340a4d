//! A trading client under chaos: two sessions on one connection through a proxy, seeded requests,
//! and a record of every numbered message. On an instruction it dies without a packet to the
//! server, and returns later.
//!
//! It dies in one of two ways:
//!
//! - A process death drops connection and client library. The client then logs in with the last
//!   recorded number. It resends, under new client sequences, the requests that the server has not
//!   seen.
//! - A path death cuts the network. The client then continues by the library's `resume`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use client::{Connection, Error, LoginOptions, Report, Reports, Trust};
use tokio::sync::mpsc;
use tokio::time::MissedTickBehavior;
use types::RejectReason;
use wire::{ClientMessage, MassCancel, ServerMessage};

use super::judge::encoded;
use super::now_ns;
use super::session::{PendingRequest, Session};
use crate::flow::Random;
use crate::member::instrument_of;
use crate::process::PATIENCE;
use crate::udp_proxy::Proxy;
use crate::world::User;

/// Most unanswered requests of a session.
const WAITING_MAX: usize = 64;
/// Silence after which the client reconnects. A live server sends at least every 500 ms.
const SILENCE_MAX: Duration = Duration::from_secs(2);
/// Timeout of one reconnect attempt.
const ATTEMPT_MAX: Duration = Duration::from_secs(3);

/// Instructions of the test to a trader.
pub enum Instruction {
    /// Dies abruptly and returns after `away`.
    Die { is_process: bool, away: Duration },
    /// Sends no new orders, cancels the open ones, waits for the last answers, and finishes.
    Finish,
}

/// When a client died and when it began to return, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub struct Death {
    pub at_ns: u64,
    pub back_ns: u64,
}

/// A trading client and its record.
pub struct Trader {
    pub user: User,
    pub sessions: Vec<Session>,
    pub proxy: Arc<Proxy>,
    /// Violations.
    pub violations: Vec<String>,
    pub deaths: Vec<Death>,
    /// Connections restored by the library's resume.
    pub resumes: u64,
    /// Connections of a new process.
    pub restarts: u64,
    /// Requests resent by the library or by the client.
    pub resent_requests: u64,
    /// Requests whose rejection was lost with a connection.
    pub refusals_lost: u64,
    /// Counts of the ends of connections and of the reasons of rejected requests.
    pub troubles: BTreeMap<String, u64>,
    bond: String,
    random: Random,
    pace: Duration,
    link: Option<(Connection, Reports)>,
    instrument: u32,
    is_lost: bool,
    /// The library has dropped a session; only a new connection restores all sessions.
    is_broken: bool,
    is_ending: bool,
    logins: u32,
    next_order: u64,
    last_received: Instant,
    progress: Arc<AtomicU64>,
}

impl Trader {
    /// `number` is unique among the traders of one run.
    pub fn new(number: u64, user: User, bond: &str, proxy: Proxy, seed: u64) -> Self {
        Self {
            user,
            sessions: vec![Session::new("cancels", true), Session::new("keeps", false)],
            proxy: Arc::new(proxy),
            violations: Vec::new(),
            deaths: Vec::new(),
            resumes: 0,
            restarts: 0,
            resent_requests: 0,
            refusals_lost: 0,
            troubles: BTreeMap::new(),
            bond: bond.to_owned(),
            random: Random::new(seed.wrapping_add(number << 32)),
            pace: Duration::from_millis(10),
            link: None,
            instrument: 0,
            is_lost: false,
            is_broken: false,
            is_ending: false,
            logins: 0,
            next_order: 1,
            last_received: Instant::now(),
            progress: Arc::default(),
        }
    }

    /// Sets the interval of requests.
    #[must_use]
    pub fn paced(mut self, pace: Duration) -> Self {
        self.pace = pace;
        self
    }

    /// Numbered messages received so far.
    pub fn progress(&self) -> Arc<AtomicU64> {
        self.progress.clone()
    }

    /// Trades until the instruction to finish; returns the trader with its record.
    ///
    /// # Panics
    /// If it cannot log in or does not receive the last answers within a minute.
    pub async fn run(mut self, mut instructions: mpsc::Receiver<Instruction>) -> Self {
        self.connect().await;
        let mut tick = tokio::time::interval(self.pace);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut ending_by = None;
        loop {
            tokio::select! {
                instruction = instructions.recv(), if !self.is_ending => match instruction {
                    Some(Instruction::Die { is_process, away }) => self.die(is_process, away).await,
                    Some(Instruction::Finish) | None => {
                        self.is_ending = true;
                        ending_by = Some(Instant::now() + PATIENCE);
                    }
                },
                report = next(&mut self.link) => self.on_report(report),
                _ = tick.tick() => self.on_tick().await,
            }
            if self.has_finished() {
                self.check_unanswered();
                self.link = None;
                return self;
            }
            if let Some(by) = ending_by {
                assert!(
                    Instant::now() < by,
                    "{} lacks its last answers: {:?}",
                    self.user.id,
                    self.troubles
                );
            }
        }
    }

    /// Reconnects if needed, then sends the next request, or the final mass cancels when ending.
    async fn on_tick(&mut self) {
        if self.last_received.elapsed() > SILENCE_MAX {
            self.trouble("silence");
            self.is_lost = true;
        }
        if self.is_broken {
            self.link = None;
        }
        if self.is_lost || self.link.is_none() {
            self.connect().await;
        }
        if self.is_ending {
            for channel in 0..self.sessions.len() {
                if self.sessions[channel].last.is_none() {
                    let all = MassCancel {
                        scope: 0,
                        instrument: wire::ALL_INSTRUMENTS,
                        side: wire::BOTH_SIDES,
                    };
                    self.sessions[channel].last = self.send_request(channel, all.into());
                }
            }
        } else {
            let channel = usize::from(self.random.below(2) == 1);
            let session = &self.sessions[channel];
            if session.waiting.len() < WAITING_MAX {
                let (instrument, id) = (self.instrument, self.next_order);
                self.next_order += 1;
                let request = session.request(&mut self.random, instrument, id);
                self.send_request(channel, request);
            }
        }
    }

    /// Dies and returns after `away`. Meanwhile no packet reaches the server, not even a close.
    async fn die(&mut self, is_process: bool, away: Duration) {
        let at_ns = now_ns();
        if is_process {
            self.proxy.block_current_clients();
            self.link = None;
            tokio::time::sleep(away).await;
        } else {
            self.proxy.blackhole();
            if let Some((connection, _)) = &self.link {
                connection.cut();
            }
            tokio::time::sleep(away).await;
            self.proxy.restore();
        }
        let back_ns = now_ns();
        self.deaths.push(Death { at_ns, back_ns });
        self.connect().await;
    }

    async fn connect(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let attempt = tokio::time::timeout(ATTEMPT_MAX, self.try_connect()).await;
            let trouble = match attempt {
                Ok(Ok(())) => break,
                Ok(Err(error)) => {
                    self.judge_error(&error);
                    error.to_string()
                }
                Err(_) => "reconnect attempt timed out".to_owned(),
            };
            assert!(
                Instant::now() < deadline,
                "{} cannot log in: {trouble}",
                self.user.id
            );
            self.trouble(&trouble);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        self.last_received = Instant::now();
        self.is_lost = false;
        self.is_broken = false;
    }

    async fn try_connect(&mut self) -> Result<(), Error> {
        let login = self.logins + 1;
        if let Some((connection, _)) = &self.link {
            let infos = connection.resume().await?;
            self.logins = login;
            self.resumes += 1;
            for (channel, info) in infos {
                let waiting = &mut self.sessions[usize::from(channel)].waiting;
                for (_, request) in waiting.range_mut(info.last_client_seq + 1..) {
                    request.login = login;
                    self.resent_requests += 1;
                }
            }
            return Ok(());
        }
        let (connection, reports) =
            Connection::connect(self.proxy.address(), Trust::Loopback).await?;
        let mut seen = Vec::new();
        for (channel, session) in (0u16..).zip(&self.sessions) {
            let mut options = LoginOptions::new(&self.user.token(), &session.name);
            options.cancel_on_disconnect = session.cancel_on_disconnect;
            options.last_sequence = session.messages.len() as u64;
            seen.push(connection.login(channel, options).await?.last_client_seq);
        }
        self.instrument = instrument_of(&connection, &self.bond);
        self.link = Some((connection, reports));
        self.logins = login;
        self.restarts += 1;
        for (channel, seen) in seen.into_iter().enumerate() {
            let unseen = self.sessions[channel].waiting.split_off(&(seen + 1));
            for (client_seq, request) in unseen {
                self.resent_requests += 1;
                let now = self.send_request(channel, request.message);
                let last = &mut self.sessions[channel].last;
                if *last == Some(client_seq) {
                    *last = now;
                }
            }
        }
        Ok(())
    }

    /// Sends a request; returns its client sequence, or `None` if it was not sent.
    fn send_request(&mut self, channel: usize, message: ClientMessage) -> Option<u64> {
        let (connection, _) = self.link.as_ref()?;
        let number = u16::try_from(channel).expect("two sessions");
        match connection.try_send(number, message) {
            Ok(Some(client_seq)) => {
                let login = self.logins;
                let request = PendingRequest { message, login };
                self.sessions[channel].waiting.insert(client_seq, request);
                Some(client_seq)
            }
            Ok(None) => None,
            Err(_) => {
                self.is_lost = true;
                None
            }
        }
    }

    fn on_report(&mut self, report: Option<Result<Report, Error>>) {
        match report {
            Some(Ok(report)) => self.on_message(&report),
            Some(Err(error)) => {
                self.judge_error(&error);
                self.trouble(&error.to_string());
                self.is_lost = true;
            }
            None => self.link = None,
        }
    }

    fn judge_error(&mut self, error: &Error) {
        if let Error::Gap { .. } | Error::Wire(_) = error {
            self.violations.push(error.to_string());
        }
    }

    fn on_message(&mut self, report: &Report) {
        self.last_received = Instant::now();
        let Some(session) = self.sessions.get_mut(usize::from(report.channel)) else {
            return; // On the connection channel: a heartbeat or `Disconnect`.
        };
        let message = &report.message;
        if report.sequence > 0 {
            let due = session.messages.len() as u64 + 1;
            if report.sequence != due {
                let text = format!(
                    "{}: received number {}, expected {due}",
                    session.name, report.sequence
                );
                return self.violations.push(text);
            }
            session.messages.push(encoded(message, report.sequence));
            self.progress.fetch_add(1, Relaxed);
            if let Some(text) = session.note(message) {
                self.violations.push(format!("{}: {text}", session.name));
            }
            return;
        }
        match message {
            ServerMessage::Rejected(refused) => {
                session.waiting.remove(&refused.client_seq);
                if session.last == Some(refused.client_seq) {
                    session.last = None;
                }
                if refused.reason == RejectReason::AlreadySeen {
                    self.violations
                        .push(format!("unexpected ALREADY_SEEN: {refused:?}"));
                }
                self.trouble(refused.reason.as_str());
            }
            ServerMessage::Disconnect(end) => {
                self.is_broken = true;
                let text = end.text.as_str().to_owned();
                self.trouble(&text);
            }
            _ => {}
        }
    }

    fn trouble(&mut self, what: &str) {
        *self.troubles.entry(what.to_owned()).or_default() += 1;
    }

    fn has_finished(&self) -> bool {
        self.is_ending && self.sessions.iter().all(Session::has_finished)
    }

    /// Counts the requests whose rejection was lost with an earlier connection. The server answers
    /// a session in order, so a request of the current login without an answer is a violation.
    fn check_unanswered(&mut self) {
        for session in &self.sessions {
            for (client_seq, request) in &session.waiting {
                self.refusals_lost += 1;
                if request.login == self.logins {
                    let text = format!("{}: request {client_seq} has no answer", session.name);
                    self.violations.push(text);
                }
            }
        }
    }
}

async fn next(link: &mut Option<(Connection, Reports)>) -> Option<Result<Report, Error>> {
    match link {
        Some((_, reports)) => reports.recv().await,
        None => std::future::pending().await,
    }
}
