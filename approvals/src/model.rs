//! The pure core: the life of an approval. No clock, no store, no call.
//!
//! ```text
//! PENDING -approve-> APPROVED -end_attempt-> EXECUTED | FAILED
//!    +-----reject--> REJECTED
//!    +-----expire--> EXPIRED
//! ```

use sha2::{Digest, Sha256};
use types::code_enum;

code_enum! {
    /// State of an approval.
    Status: i32 {
        /// Waits for another person.
        Pending = 1 "PENDING",
        /// The call is being made or repeated.
        Approved = 2 "APPROVED",
        /// The call succeeded.
        Executed = 3 "EXECUTED",
        /// The call was refused, or had no result in time.
        Failed = 4 "FAILED",
        Rejected = 5 "REJECTED",
        /// Not decided in time.
        Expired = 6 "EXPIRED",
    }
}

/// Longest stored text of a result, in bytes.
pub const RESULT_BYTES_MAX: usize = 4_096;
/// gRPC's code DEADLINE_EXCEEDED: the result of a call that was not made in time.
const DEADLINE_EXCEEDED: i32 = 4;

/// A requested call and its life. Times are microseconds since the epoch, 0 if unset.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Approval {
    pub approval_id: String,
    /// `dfa.<area>.v1.<Service>/<Method>`.
    pub method: String,
    /// Exact bytes that are sent. Empty in lists.
    pub request: Vec<u8>,
    /// [`hash`] of method and request.
    pub hash: String,
    pub reason: String,
    pub document: String,
    pub requester: String,
    /// Idempotency key of RequestApproval, and the fingerprint of its content.
    pub request_key: String,
    pub request_digest: i64,
    pub status: Status,
    /// Person that approved or rejected; empty before.
    pub decider: String,
    /// Call and idempotency key of the decision, and the fingerprint of its content.
    pub decision_key: String,
    pub decision_digest: i64,
    pub decision_reason: String,
    pub attempts: u32,
    /// Next attempt of an approved call.
    pub next_attempt_at_us: i64,
    /// No attempt begins after it.
    pub execute_by_us: i64,
    /// gRPC code and text of the last attempt.
    pub result_code: i32,
    pub result_text: String,
    pub correlation_id: String,
    pub created_at_us: i64,
    pub expires_at_us: i64,
    pub decided_at_us: i64,
    pub ended_at_us: i64,
}

/// Why a decision is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("Approval is not pending")]
    NotPending,
    #[error("Approval has expired")]
    Expired,
    #[error("Approval needs another person than the requester")]
    SamePerson,
    #[error("Hash is not that of the requested call")]
    HashMismatch,
}

/// A person's decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    pub person: String,
    /// Call and idempotency key.
    pub key: String,
    /// Fingerprint of the content.
    pub digest: i64,
    pub at_us: i64,
}

/// Whether an attempt of the call begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attempt {
    /// Make the call.
    Begins,
    /// Not approved, ended, or not due.
    None,
    /// The approval has become too old: it is FAILED now.
    TooLate,
}

/// Result of one attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallResult {
    /// gRPC code, 0 for success.
    pub code: i32,
    pub text: String,
    /// False: the same call may succeed later.
    pub is_final: bool,
}

/// SHA-256 of the method's name, a zero byte and the request, as hexadecimal digits.
pub fn hash(method: &str, request: &[u8]) -> String {
    let hasher = Sha256::new().chain_update(method).chain_update([0_u8]);
    hex::encode(hasher.chain_update(request).finalize())
}

impl Approval {
    /// Approves the call that `hash` names; the first attempt is due at once.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn approve(
        &mut self,
        decision: Decision,
        hash: &str,
        execute_by_us: i64,
    ) -> Result<(), Refusal> {
        self.check_pending(decision.at_us)?;
        // Names in user tokens may differ in case.
        if decision.person.eq_ignore_ascii_case(&self.requester) {
            return Err(Refusal::SamePerson);
        }
        if !hash.eq_ignore_ascii_case(&self.hash) {
            return Err(Refusal::HashMismatch);
        }
        self.next_attempt_at_us = decision.at_us;
        self.execute_by_us = execute_by_us;
        self.decide(decision, Status::Approved);
        Ok(())
    }

    /// Rejects the request. The requester may do so too.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn reject(&mut self, decision: Decision, reason: String) -> Result<(), Refusal> {
        self.check_pending(decision.at_us)?;
        self.decision_reason = reason;
        self.ended_at_us = decision.at_us;
        self.decide(decision, Status::Rejected);
        Ok(())
    }

    fn check_pending(&self, now_us: i64) -> Result<(), Refusal> {
        match self.status {
            Status::Expired => Err(Refusal::Expired),
            Status::Pending if now_us >= self.expires_at_us => Err(Refusal::Expired),
            Status::Pending => Ok(()),
            _ => Err(Refusal::NotPending),
        }
    }

    fn decide(&mut self, decision: Decision, status: Status) {
        self.status = status;
        self.decider = decision.person;
        self.decision_key = decision.key;
        self.decision_digest = decision.digest;
        self.decided_at_us = decision.at_us;
    }

    /// Ends an undecided request after its time; false if it is not due.
    pub fn expire(&mut self, now_us: i64) -> bool {
        let is_due = self.status == Status::Pending && now_us >= self.expires_at_us;
        if is_due {
            self.status = Status::Expired;
            self.ended_at_us = now_us;
        }
        is_due
    }

    /// Begins an attempt that may take `lease_us`; no other one begins within it.
    pub fn begin_attempt(&mut self, now_us: i64, lease_us: i64) -> Attempt {
        if self.status != Status::Approved || now_us < self.next_attempt_at_us {
            return Attempt::None;
        }
        if now_us < self.execute_by_us {
            self.attempts = self.attempts.saturating_add(1);
            self.next_attempt_at_us = now_us.saturating_add(lease_us);
            return Attempt::Begins;
        }
        if self.attempts == 0 {
            self.result_code = DEADLINE_EXCEEDED;
            self.result_text = "Call was not made in time".to_owned();
        } else if self.result_code == 0 {
            // A crash in the last attempt: it may have acted.
            self.result_code = DEADLINE_EXCEEDED;
            self.result_text = "Result of the call is unknown".to_owned();
        }
        self.status = Status::Failed;
        self.ended_at_us = now_us;
        Attempt::TooLate
    }

    /// Records the result of an attempt. A result that is not final is due again after `pause_us`.
    /// A result of a call that has ended meanwhile is dropped: false.
    pub fn end_attempt(&mut self, result: CallResult, now_us: i64, pause_us: i64) -> bool {
        if self.status != Status::Approved {
            return false;
        }
        self.result_code = result.code;
        self.result_text = result.text;
        if self.result_text.len() > RESULT_BYTES_MAX {
            self.result_text.clear();
        }
        if result.is_final {
            self.status = match result.code {
                0 => Status::Executed,
                _ => Status::Failed,
            };
            self.ended_at_us = now_us;
        } else {
            self.next_attempt_at_us = now_us.saturating_add(pause_us);
        }
        true
    }

    /// Why the row cannot be right; `None` if it is sound.
    pub fn contradiction(&self) -> Option<&'static str> {
        let is_approved = match self.status {
            Status::Pending | Status::Expired => {
                return (!self.decider.is_empty()).then_some("undecided with a decider");
            }
            Status::Rejected => false,
            Status::Approved | Status::Executed | Status::Failed => true,
        };
        if self.decider.is_empty() {
            return Some("decided without a person");
        }
        let is_own = self.decider.eq_ignore_ascii_case(&self.requester);
        (is_approved && is_own).then_some("approved by its requester")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: i64 = 1_000_000;

    fn pending() -> Approval {
        let (method, request) = ("dfa.market.v1.MarketService/ConfirmClock", vec![1, 2]);
        Approval {
            approval_id: "a-1".into(),
            hash: hash(method, &request),
            method: method.into(),
            request,
            reason: "why".into(),
            document: String::new(),
            requester: "anna".into(),
            request_key: "k".into(),
            request_digest: 1,
            status: Status::Pending,
            decider: String::new(),
            decision_key: String::new(),
            decision_digest: 0,
            decision_reason: String::new(),
            attempts: 0,
            next_attempt_at_us: 0,
            execute_by_us: 0,
            result_code: 0,
            result_text: String::new(),
            correlation_id: "c".into(),
            created_at_us: 0,
            expires_at_us: 100 * S,
            decided_at_us: 0,
            ended_at_us: 0,
        }
    }

    fn by(person: &str, at_us: i64) -> Decision {
        Decision {
            person: person.into(),
            key: "approve:k".into(),
            digest: 2,
            at_us,
        }
    }

    fn result(code: i32, is_final: bool) -> CallResult {
        CallResult {
            code,
            text: "text".into(),
            is_final,
        }
    }

    #[test]
    fn d32_two_persons_the_same_hash_and_in_time() {
        let fresh = pending();
        let refused = |decision: Decision, hash: &str| {
            let mut approval = fresh.clone();
            let refused = approval.approve(decision, hash, 0).unwrap_err();
            assert_eq!(approval, fresh, "nothing changed");
            refused
        };
        assert_eq!(refused(by("anna", S), &fresh.hash), Refusal::SamePerson);
        assert_eq!(refused(by("Anna", S), &fresh.hash), Refusal::SamePerson);
        let other = hash(&fresh.method, &[1]);
        assert_eq!(refused(by("boris", S), &other), Refusal::HashMismatch);
        assert_eq!(refused(by("boris", 100 * S), &fresh.hash), Refusal::Expired);
        let mut approved = fresh.clone();
        approved
            .approve(by("boris", S), &fresh.hash, 9 * S)
            .unwrap();
        assert_eq!(approved.contradiction(), None);
        let again = approved.approve(by("boris", S), &fresh.hash, 9 * S);
        assert_eq!(again, Err(Refusal::NotPending));
        let late = approved.reject(by("vera", S), String::new());
        assert_eq!(late, Err(Refusal::NotPending));
        let mut withdrawn = fresh;
        withdrawn.reject(by("anna", S), "mistake".into()).unwrap();
        assert_eq!(withdrawn.status, Status::Rejected);
        assert_eq!(withdrawn.contradiction(), None);
    }

    #[test]
    fn a_call_is_repeated_until_its_result_is_final_or_it_is_too_late() {
        let mut approval = pending();
        let hash = approval.hash.clone();
        approval.approve(by("boris", S), &hash, 9 * S).unwrap();
        assert_eq!(approval.begin_attempt(S, 2 * S), Attempt::Begins);
        assert_eq!(
            approval.begin_attempt(2 * S, 2 * S),
            Attempt::None,
            "leased"
        );
        assert!(approval.end_attempt(result(14, false), 2 * S, S));
        assert_eq!((approval.status, approval.attempts), (Status::Approved, 1));
        assert_eq!(approval.begin_attempt(3 * S, 2 * S), Attempt::Begins);
        let mut late = approval.clone();
        assert!(approval.end_attempt(result(0, true), 4 * S, S));
        assert_eq!(approval.status, Status::Executed);
        assert!(!approval.end_attempt(result(9, true), 4 * S, S), "once");
        assert_eq!(late.begin_attempt(9 * S, 2 * S), Attempt::TooLate);
        assert_eq!((late.status, late.result_code), (Status::Failed, 14));
    }

    #[test]
    fn an_approval_that_was_not_executed_in_time_is_never_executed() {
        let mut approval = pending();
        let hash = approval.hash.clone();
        approval.approve(by("boris", S), &hash, 9 * S).unwrap();
        assert_eq!(approval.begin_attempt(9 * S, S), Attempt::TooLate);
        assert_eq!(approval.result_text, "Call was not made in time");
        assert_eq!(approval.begin_attempt(10 * S, S), Attempt::None);
        let mut undecided = pending();
        assert!(!undecided.expire(99 * S) && undecided.expire(100 * S));
        assert_eq!(undecided.contradiction(), None);
    }
}
