//! Use cases: they load an approval, apply the core's rules, and commit the result with its audit
//! record.

use std::{collections::HashMap, sync::Arc, time::Duration};

use rpc::{
    Approved, Caller, Context, forward,
    roles::{self, Rule},
};
use service_kit::{Clock, KeyedMutex, backoff};
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Code, Status};
use uuid::Uuid;

use crate::{
    SOURCE, audit,
    config::ApprovalsConfig,
    failpoint,
    model::{self, Approval, Attempt, CallResult, Decision, Refusal},
    repo::{Store, Tx},
};

/// Longest request, in bytes.
pub const REQUEST_BYTES_MAX: usize = 64 * 1_024;
/// Default and longest life of an undecided request, in seconds.
const LIFE_S_DEFAULT: u32 = 24 * 3_600;
const LIFE_S_MAX: u32 = 7 * 24 * 3_600;
/// Time of an attempt beyond its call, in microseconds: for the store.
const LEASE_MARGIN_US: i64 = 10_000_000;

/// Why a use case failed: refusals first, then operational errors.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    #[error("Approval not found")]
    NotFound,
    #[error("Caller is not a named person")]
    NoPerson,
    #[error("Caller lacks the role for this operation")]
    RoleRequired,
    #[error("Method takes no approval")]
    NoApproval,
    #[error("Too many open approvals")]
    TooManyOpen,
    #[error(transparent)]
    Decision(#[from] Refusal),
    #[error("{field}: {problem}")]
    Invalid {
        field: &'static str,
        problem: String,
    },
    /// The requested call is refused by its form.
    #[error("{}", .0.message())]
    Request(Status),

    #[error(transparent)]
    Store(#[from] events::Error),
    #[error("store failed: {0}")]
    Sql(#[from] sqlx::Error),
}

/// Content of RequestApproval. One of `request` and `request_json` is empty.
#[derive(Clone, Debug)]
pub struct NewRequest {
    pub method: String,
    pub request: Vec<u8>,
    pub request_json: String,
    pub reason: String,
    pub document: String,
    /// 0: [`LIFE_S_DEFAULT`].
    pub expires_in_s: u32,
    /// Fingerprint of the content.
    pub digest: i64,
}

/// A decision of Approve or Reject.
#[derive(Clone, Debug)]
pub struct NewDecision {
    pub approval_id: String,
    pub verdict: Verdict,
    /// Fingerprint of the content.
    pub digest: i64,
}

#[derive(Clone, Debug)]
pub enum Verdict {
    Approve { hash: String },
    Reject { reason: String },
}

impl Verdict {
    pub const fn call(&self) -> &'static str {
        match self {
            Verdict::Approve { .. } => "Approve",
            Verdict::Reject { .. } => "Reject",
        }
    }
}

/// Dependencies of the use cases.
pub struct Approvals {
    pub store: Store,
    pub clock: Clock,
    pub health: rpc::Health,
    /// Wakes the worker.
    pub due: Notify,
    config: ApprovalsConfig,
    services: HashMap<&'static str, rpc::Channel>,
    /// One attempt per approval at a time.
    executing: KeyedMutex<String>,
    /// First attempts, which do not end with the caller's connection.
    calls: TaskTracker,
    shutdown: CancellationToken,
}

impl Approvals {
    pub fn new(
        config: ApprovalsConfig,
        store: Store,
        services: HashMap<&'static str, rpc::Channel>,
        clock: Clock,
        shutdown: CancellationToken,
    ) -> Approvals {
        Approvals {
            store,
            clock,
            health: rpc::Health::new(SOURCE),
            due: Notify::new(),
            config,
            services,
            executing: KeyedMutex::default(),
            calls: TaskTracker::new(),
            shutdown,
        }
    }

    /// Stores a request. True: it is the stored one of an earlier call with the key.
    ///
    /// # Errors
    /// [`Fault`].
    pub async fn request(
        &self,
        caller: &Caller,
        context: &Context,
        ask: NewRequest,
    ) -> Result<(Approval, bool), Fault> {
        let approval = self.requested(caller, context, ask)?;
        let mut tx = self.store.write().await?;
        tx.lock_person(&approval.requester).await?;
        let known = tx.requested(&approval.requester, &approval.request_key);
        if let Some(known) = known.await? {
            if known.request_digest != approval.request_digest {
                rpc::context::note_difference("RequestApproval", &approval.request_key);
            }
            return Ok((known, true));
        }
        if tx.open(&approval.requester).await? >= i64::from(self.config.open_per_person_max) {
            return Err(Fault::TooManyOpen);
        }
        tx.insert(&approval).await?;
        self.commit(tx, &approval, None, &context.request_id)
            .await?;
        self.due.notify_one();
        Ok((approval, false))
    }

    /// The approval of a valid request.
    fn requested(
        &self,
        caller: &Caller,
        context: &Context,
        ask: NewRequest,
    ) -> Result<Approval, Fault> {
        let requester = caller.person().ok_or(Fault::NoPerson)?.to_owned();
        let method = ask.method.trim_start_matches('/').to_owned();
        if matches!(
            roles::rule(&format!("/{method}")),
            Rule::Unknown | Rule::Open
        ) {
            return Err(invalid("method", "is unknown"));
        }
        check_role(caller, &method)?;
        if ask.reason.trim().is_empty() {
            return Err(invalid("reason", "must not be empty"));
        }
        if ask.expires_in_s > LIFE_S_MAX {
            return Err(invalid(
                "expires_in_s",
                format!("must be at most {LIFE_S_MAX}"),
            ));
        }
        let json = match (ask.request.is_empty(), ask.request_json.is_empty()) {
            (false, false) => return Err(invalid("request_json", "is given beside request")),
            _ if ask.request.len() > REQUEST_BYTES_MAX => return Err(too_long("request")),
            _ if ask.request_json.len() > REQUEST_BYTES_MAX => {
                return Err(too_long("request_json"));
            }
            (_, false) => ask.request_json,
            (_, true) => forward::request_json(&method, &ask.request).map_err(Fault::Request)?,
        };
        let approval_id = Uuid::now_v7().to_string();
        let mut sent = context.child(SOURCE, &approval_id);
        approval_id.clone_into(&mut sent.request_id);
        // The caller chooses it; the called service would act in its name.
        sent.user_id.clear();
        let request = forward::encode(&method, &json, &sent).map_err(Fault::Request)?;
        if request.len() > REQUEST_BYTES_MAX {
            return Err(too_long("request"));
        }
        let now_us = self.clock.now_us();
        let life_s = match ask.expires_in_s {
            0 => LIFE_S_DEFAULT,
            given => given,
        };
        Ok(Approval {
            approval_id,
            hash: model::hash(&method, &request),
            method,
            request,
            reason: ask.reason,
            document: ask.document,
            requester,
            request_key: context.idempotency_key.clone(),
            request_digest: ask.digest,
            status: model::Status::Pending,
            decider: String::new(),
            decision_key: String::new(),
            decision_digest: 0,
            decision_reason: String::new(),
            attempts: 0,
            next_attempt_at_us: 0,
            execute_by_us: 0,
            result_code: 0,
            result_text: String::new(),
            correlation_id: context.correlation_id.clone(),
            created_at_us: now_us,
            expires_at_us: now_us.saturating_add(seconds_us(life_s)),
            decided_at_us: 0,
            ended_at_us: 0,
        })
    }

    /// Approves or rejects a request. An approved call is made once before the return; the worker
    /// repeats it if it has no result. True: the decision is the stored one of an earlier call with
    /// the key, and the approval is shown as it is now.
    ///
    /// # Errors
    /// [`Fault`].
    pub async fn decide(
        self: &Arc<Self>,
        caller: &Caller,
        context: &Context,
        ask: NewDecision,
    ) -> Result<(Approval, bool), Fault> {
        let person = caller.person().ok_or(Fault::NoPerson)?.to_owned();
        let call = ask.verdict.call();
        let decision = Decision {
            key: format!("{call}:{}", context.idempotency_key),
            person,
            digest: ask.digest,
            at_us: self.clock.now_us(),
        };
        let mut tx = self.store.write().await?;
        tx.lock_person(&decision.person).await?;
        let known = tx.decided(&decision.person, &decision.key).await?;
        if let Some(known) = known {
            if known.decision_digest != decision.digest {
                rpc::context::note_difference(call, &context.idempotency_key);
            }
            return Ok((known, true));
        }
        let found = tx.lock(&ask.approval_id).await?;
        let mut approval = found.ok_or(Fault::NotFound)?;
        check_role(caller, &approval.method)?;
        let before = approval.status;
        match ask.verdict {
            Verdict::Approve { hash } => {
                let within_us = seconds_us(self.config.execute_within_s);
                let execute_by_us = decision.at_us.saturating_add(within_us);
                approval.approve(decision, &hash, execute_by_us)?;
            }
            Verdict::Reject { reason } => approval.reject(decision, reason)?,
        }
        tx.update(&approval).await?;
        let request_id = &context.request_id;
        self.commit(tx, &approval, Some(before), request_id).await?;
        if approval.status != model::Status::Approved {
            return Ok((approval, false));
        }
        Ok((self.execute_now(approval).await, false))
    }

    /// Makes the first attempt of an approved call. The attempt goes on if the caller leaves.
    async fn execute_now(self: &Arc<Self>, approval: Approval) -> Approval {
        let (this, id) = (self.clone(), approval.approval_id.clone());
        let shutdown = self.shutdown.clone();
        let attempt = self.calls.spawn(async move {
            tokio::select! {
                () = shutdown.cancelled() => None,
                executed = this.execute(&id) => Some(executed),
            }
        });
        match attempt.await {
            Ok(Some(Ok(executed))) => executed,
            Ok(Some(Err(fault))) => {
                let approval_id = &approval.approval_id;
                tracing::warn!(approval_id, %fault, "approved call failed; retrying later");
                approval
            }
            Ok(None) | Err(_) => approval,
        }
    }

    /// Waits for the attempts of [`Self::decide`] to end after the shutdown.
    pub async fn calls_ended(&self) {
        self.calls.close();
        self.calls.wait().await;
    }

    /// Makes an attempt of an approved call if it is due; returns the approval after it.
    ///
    /// # Errors
    /// [`Fault`] of the store. A call without a result is no error: it stays approved.
    pub async fn execute(&self, approval_id: &str) -> Result<Approval, Fault> {
        let _one = self.executing.lock(approval_id.to_owned()).await;
        let (approval, attempt) = self.begin_attempt(approval_id).await?;
        if attempt != Attempt::Begins {
            return Ok(approval);
        }
        failpoint::reach(failpoint::CALL_BEGUN);
        let result = self.call(&approval).await;
        failpoint::reach(failpoint::CALL_ANSWERED);
        self.end_attempt(approval_id, result).await
    }

    async fn begin_attempt(&self, approval_id: &str) -> Result<(Approval, Attempt), Fault> {
        let mut tx = self.store.write().await?;
        let mut approval = tx.lock(approval_id).await?.ok_or(Fault::NotFound)?;
        let before = approval.status;
        let timeout_us = i64::try_from(self.config.call_timeout_ms).unwrap_or(i64::MAX);
        let lease_us = timeout_us
            .saturating_mul(1_000)
            .saturating_add(LEASE_MARGIN_US);
        let attempt = approval.begin_attempt(self.clock.now_us(), lease_us);
        match attempt {
            Attempt::None => {}
            Attempt::Begins => {
                tx.update(&approval).await?;
                tx.commit().await?;
            }
            Attempt::TooLate => {
                tx.update(&approval).await?;
                self.commit(tx, &approval, Some(before), approval_id)
                    .await?;
            }
        }
        Ok((approval, attempt))
    }

    async fn end_attempt(&self, approval_id: &str, result: CallResult) -> Result<Approval, Fault> {
        let mut tx = self.store.write().await?;
        let mut approval = tx.lock(approval_id).await?.ok_or(Fault::NotFound)?;
        let before = approval.status;
        let (first_ms, most_ms) = (self.config.retry_first_ms, self.config.retry_most_ms);
        let times = approval.attempts.saturating_sub(1);
        let pause_us = backoff::doubled_us(first_ms, times, most_ms);
        if !approval.end_attempt(result, self.clock.now_us(), pause_us) {
            return Ok(approval);
        }
        tx.update(&approval).await?;
        if approval.status == before {
            tx.commit().await?;
            self.due.notify_one();
            return Ok(approval);
        }
        self.commit(tx, &approval, Some(before), approval_id)
            .await?;
        tracing::info!(
            approval_id,
            method = approval.method,
            status = approval.status.as_str(),
            result = approval.result_code,
            "approved call ended"
        );
        Ok(approval)
    }

    /// Makes the call. The called service writes both persons into its audit record.
    async fn call(&self, approval: &Approval) -> CallResult {
        let area = approval.method.split('.').nth(1).unwrap_or_default();
        let Some(channel) = self.services.get(area) else {
            return failed(&Status::unimplemented("Service is not connected"));
        };
        let approved = Approved {
            approval_id: approval.approval_id.clone(),
            requester: approval.requester.clone(),
            approver: approval.decider.clone(),
        };
        let timeout = Duration::from_millis(self.config.call_timeout_ms);
        let request = approval.request.clone();
        let call = forward::call(
            channel.clone(),
            &approval.method,
            request,
            &approved,
            timeout,
        );
        match call.await {
            Ok(answer) => CallResult {
                code: Code::Ok as i32,
                text: forward::answer_json(&approval.method, &answer).unwrap_or_default(),
                is_final: true,
            },
            Err(status) => failed(&status),
        }
    }

    /// Ends an undecided request whose time is over.
    ///
    /// # Errors
    /// [`Fault`] of the store.
    pub async fn expire(&self, approval_id: &str) -> Result<(), Fault> {
        let mut tx = self.store.write().await?;
        let mut approval = tx.lock(approval_id).await?.ok_or(Fault::NotFound)?;
        let before = approval.status;
        if approval.expire(self.clock.now_us()) {
            tx.update(&approval).await?;
            self.commit(tx, &approval, Some(before), approval_id)
                .await?;
        }
        Ok(())
    }

    /// Commits a change of status with its audit record. `request_id` is the approval id for a step
    /// of the worker: its call has the same.
    async fn commit(
        &self,
        mut tx: Tx,
        approval: &Approval,
        before: Option<model::Status>,
        request_id: &str,
    ) -> Result<(), Fault> {
        let after = audit::state(approval);
        let act = audit::act(approval, before, &after, request_id);
        tx.record(self.clock.now_us(), act).await?;
        tx.commit().await?;
        let status = approval.status.as_str();
        metrics::counter!("approvals_total", "status" => status).increment(1);
        Ok(())
    }
}

/// Refuses a caller that may not request and approve calls of the method.
fn check_role(caller: &Caller, method: &str) -> Result<(), Fault> {
    let approval = roles::approval(method).ok_or(Fault::NoApproval)?;
    match approval.persons.intersects(caller.roles) {
        true => Ok(()),
        false => Err(Fault::RoleRequired),
    }
}

/// The result of a call without an answer. Final if the service has refused it for good.
fn failed(status: &Status) -> CallResult {
    let is_final = !matches!(
        status.code(),
        Code::Unavailable
            | Code::DeadlineExceeded
            | Code::Cancelled
            | Code::ResourceExhausted
            | Code::Aborted
            | Code::Internal
            | Code::Unknown
    );
    CallResult {
        code: status.code() as i32,
        text: status.message().to_owned(),
        is_final,
    }
}

fn seconds_us(seconds: u32) -> i64 {
    i64::from(seconds) * 1_000_000
}

fn invalid(field: &'static str, problem: impl Into<String>) -> Fault {
    Fault::Invalid {
        field,
        problem: problem.into(),
    }
}

fn too_long(field: &'static str) -> Fault {
    invalid(
        field,
        format!("must have at most {REQUEST_BYTES_MAX} bytes"),
    )
}
