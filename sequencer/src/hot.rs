//! The hot thread: takes requests, asks admission, sequences, journals, matches, answers. One turn of the loop carries up to [`TURN_REQUESTS`] requests and
//! ends with one hand-over to the journal.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use admission::{MassCancelRequest, Request};
use journal::Appender;
use types::command::MassScope;
use types::{CancelReason, Command, Envelope, Id128, InstrumentIx, SessionIx, UserIx};

use crate::backlog::Backlog;
use crate::config::Config;
use crate::core::Core;
use crate::port::{Gate, Job, NotTaken, Outcome, Reply};
use crate::record::{Encoder, Record};
use crate::timers::Timers;

/// Requests between two hand-overs to the journal.
const TURN_REQUESTS: usize = 256;
/// Longest sleep of an idle thread.
const PARK: Duration = Duration::from_millis(500);

pub(crate) struct Hot {
    pub config: Config,
    pub core: Core,
    pub gate: Arc<Gate>,
    pub appender: Appender,
    pub backlog: Arc<Backlog>,
    pub encoder: Encoder,
    pub timers: Timers,
}

impl Hot {
    /// Runs until the gate closes and the queue is empty.
    pub fn run(mut self) {
        if let Some(core) = self.config.core
            && !core_affinity::set_for_current(core_affinity::CoreId { id: core })
        {
            tracing::warn!(core, "the hot thread could not be pinned");
        }
        self.disconnect_all();
        let spin = Duration::from_micros(self.config.spin_us);
        let mut last_work = Instant::now();
        loop {
            let is_stopping = self.gate.is_stopping.load(Ordering::Acquire);
            let did_work = self.turn();
            self.appender.flush();
            if self.appender.is_failed() {
                self.gate.is_failed.store(true, Ordering::Release);
            }
            if did_work {
                last_work = Instant::now();
            } else if is_stopping {
                return;
            } else if last_work.elapsed() < spin {
                std::hint::spin_loop();
            } else {
                self.park();
            }
        }
    }

    /// Nobody is connected after a start.
    fn disconnect_all(&mut self) {
        let open: Vec<SessionIx> = self
            .core
            .admission()
            .open_sessions()
            .map(|(ix, _)| ix)
            .collect();
        for session in open {
            drop(self.take(&Request::CloseSession(session)));
        }
        self.appender.flush();
    }

    fn park(&mut self) {
        self.gate.is_parked.store(true, Ordering::SeqCst);
        if self.gate.queue.is_empty() && !self.gate.is_stopping.load(Ordering::SeqCst) {
            let next = [self.timers.next_ns(), self.core.next_expiry_ns()]
                .into_iter()
                .flatten()
                .min();
            let now_ns = (self.config.clock)();
            let sleep = next.map_or(PARK, |at_ns| {
                Duration::from_nanos(at_ns.saturating_sub(now_ns)).min(PARK)
            });
            std::thread::park_timeout(sleep);
        }
        self.gate.is_parked.store(false, Ordering::SeqCst);
    }

    /// One round; true when there was something to do.
    fn turn(&mut self) -> bool {
        let mut did_work = self.on_time();
        for _ in 0..TURN_REQUESTS {
            let Some(job) = self.gate.queue.pop() else {
                break;
            };
            did_work = true;
            match job {
                Job::Request(request, reply) => self.serve(&request, reply),
                Job::Inspect(read) => read(&self.core),
            }
        }
        did_work
    }

    fn serve(&mut self, request: &Request, reply: Reply) {
        let outcome = self.take(request);
        reply.send(outcome);
    }

    /// What time alone brings about.
    fn on_time(&mut self) -> bool {
        let now_ns = (self.config.clock)();
        let mut did_work = false;
        if self
            .core
            .next_expiry_ns()
            .is_some_and(|at_ns| at_ns <= now_ns)
        {
            did_work |= self
                .take(&Request::ExpireOrders(InstrumentIx::NONE))
                .is_ok();
        }
        while let Some(session) = self.timers.take_due(now_ns) {
            let request = Request::MassCancel(MassCancelRequest {
                scope: MassScope::Session(session),
                instrument: InstrumentIx::NONE,
                side: None,
                reason: CancelReason::CancelOnDisconnect,
                user: UserIx::NONE,
                session: SessionIx::NONE,
                client_seq: 0,
                key_hash: Id128::NONE,
            });
            did_work |= self.take(&request).is_ok();
        }
        did_work
    }

    /// Admits, sequences, journals, matches.
    fn take(&mut self, request: &Request) -> Outcome {
        if self.appender.is_failed() {
            return Err(NotTaken::JournalFailed);
        }
        if self.appender.is_full() {
            return Err(NotTaken::Busy);
        }
        self.core.set_backlog(
            self.backlog.pending_trades.load(Ordering::Relaxed),
            self.backlog.pending_bytes.load(Ordering::Relaxed),
        );
        let now_ns = (self.config.clock)().max(self.core.time_ns());
        let command = match self.core.admission().admit(request, now_ns) {
            Ok(command) => command,
            // A refusal after login is journalled too, so that its numbered answer survives.
            Err(reject) => self
                .core
                .admission()
                .refusal(request, &reject)
                .ok_or(NotTaken::Refused(reject))?,
        };
        let envelope = Envelope {
            sequence: self.core.sequence().next(),
            time_ns: now_ns,
            command,
        };
        let events = self.core.apply(&envelope);
        self.encoder.append(&mut self.appender, &envelope, events);
        let record = Record {
            command: envelope,
            events: events.to_vec(),
        };
        self.watch_sessions(&envelope);
        Ok(record)
    }

    fn watch_sessions(&mut self, envelope: &Envelope) {
        match envelope.command {
            Command::OpenSession(open) => self.timers.session_back(open.session),
            Command::CloseSession(close) => {
                let session = self.core.admission().session(close.session);
                if session.is_some_and(|session| session.cancel_on_disconnect) {
                    self.timers.session_ended(
                        close.session,
                        envelope.time_ns + self.config.grace_ms * 1_000_000,
                    );
                }
            }
            _ => {}
        }
    }
}
