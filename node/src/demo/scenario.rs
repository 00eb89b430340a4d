//! Calls, waits, comparisons and printed steps, shared by demonstration, replay and load.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::cli::call::{Refusal, Target, context};

/// Longest wait for a single result.
const WAIT_MAX: Duration = Duration::from_secs(60);

/// A running scenario.
pub struct Scenario {
    target: Target,
    quiet: bool,
    steps: Vec<Value>,
    started: Instant,
}

impl Scenario {
    pub fn new(target: Target, quiet: bool) -> Self {
        Self {
            target,
            quiet,
            steps: Vec::new(),
            started: Instant::now(),
        }
    }

    /// Records and prints a completed step, with the ids of its objects.
    pub fn step(&mut self, text: &str, ids: &[(&str, &str)]) {
        if !self.quiet {
            let ids: Vec<String> = ids
                .iter()
                .map(|(name, id)| format!("{name}={id}"))
                .collect();
            println!("{:>3}  {text}  {}", self.steps.len() + 1, ids.join(" "));
        }
        let ids: Map<String, Value> = ids
            .iter()
            .map(|(name, id)| ((*name).to_owned(), json!(id)))
            .collect();
        self.steps.push(
            json!({ "step": text, "ids": ids, "at_ms": self.started.elapsed().as_millis() as u64 }),
        );
    }

    pub fn into_steps(self) -> Vec<Value> {
        self.steps
    }

    pub fn steps_count(&self) -> usize {
        self.steps.len()
    }

    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Calls with the credential `token` and a new request context.
    pub async fn call(&self, token: &str, path: &str, request: Value) -> anyhow::Result<Value> {
        let mut request = request;
        request["context"] = context(None);
        self.target
            .with_token(token)
            .call(path, &request)
            .await
            .with_context(|| format!("{path} as {token}"))
    }

    /// Makes a call that takes two persons (D32): Anna requests it, Boris approves it. Returns the
    /// executed approval.
    ///
    /// # Errors
    /// A step is refused, or the approved call fails.
    pub async fn approved(&self, path: &str, request: Value) -> anyhow::Result<Value> {
        const SERVICE: &str = "dfa.approvals.v1.ApprovalService";
        let ask = json!({
            "method": path, "requestJson": request.to_string(), "reason": "demonstration",
        });
        let asked = self
            .call(
                "sandbox.operator.anna",
                &format!("{SERVICE}/RequestApproval"),
                ask,
            )
            .await?;
        let decision = json!({
            "approvalId": text(&asked, "/approval/approvalId")?,
            "hash": text(&asked, "/approval/hash")?,
        });
        self.call(
            "sandbox.operator.boris",
            &format!("{SERVICE}/Approve"),
            decision,
        )
        .await?;
        // A call that outlasts its deadline, for example on a slow chain, is repeated.
        let ended = self
            .until(
                &format!("the approved call of {path} to end"),
                "sandbox.auditor",
                &format!("{SERVICE}/GetApproval"),
                json!({ "approvalId": text(&asked, "/approval/approvalId")? }),
                |answer| {
                    answer.pointer("/approval/status") != Some(&json!("APPROVAL_STATUS_APPROVED"))
                },
            )
            .await?;
        if ended.pointer("/approval/status") != Some(&json!("APPROVAL_STATUS_EXECUTED")) {
            bail!("{path} was approved and not executed: {ended}");
        }
        Ok(ended["approval"].clone())
    }

    /// Signs the decision on a registered issue for its issuer and activates the issue. Returns the
    /// active instrument.
    ///
    /// # Errors
    /// A call fails, or the contract is not deployed within a minute.
    pub async fn activate(&self, instrument: &str, issuer: &str) -> anyhow::Result<Value> {
        const CFA: &str = "dfa.cfa.v1.CfaRegistryService";
        let document = format!("Decision on the issue {instrument}");
        let hash = hex::encode(Sha256::digest(document));
        let by = format!("sandbox.issuer.{issuer}");
        let signed = self
            .call(
                &by,
                "dfa.sandbox.v1.SandboxBankService/SignDocument",
                json!({ "userId": issuer, "documentHash": hash }),
            )
            .await?;
        self.call(
            &by,
            &format!("{CFA}/SignIssueDecision"),
            json!({
                "instrumentId": instrument, "documentHash": hash,
                "signature": text(&signed, "/signature")?,
            }),
        )
        .await?;
        let activate = json!({ "instrumentId": instrument, "documentHash": hash });
        self.approved(&format!("{CFA}/ActivateInstrument"), activate)
            .await?;
        let active = self
            .until(
                "the issue to be active",
                "sandbox.auditor",
                &format!("{CFA}/GetInstrument"),
                json!({ "instrumentId": instrument }),
                |answer| {
                    answer.pointer("/instrument/status") == Some(&json!("INSTRUMENT_STATUS_ACTIVE"))
                },
            )
            .await?;
        Ok(active["instrument"].clone())
    }

    /// Repeats a read until `done` accepts the answer.
    ///
    /// # Errors
    /// No accepted answer within a minute. The error has the expectation and the last answer.
    pub async fn until(
        &self,
        what: &str,
        token: &str,
        path: &str,
        request: Value,
        done: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            let is_late = Instant::now() > deadline;
            match self.call(token, path, request.clone()).await {
                Ok(answer) if done(&answer) => return Ok(answer),
                Ok(answer) if is_late => bail!(
                    "waited {} s for {what}; the last answer was {answer}",
                    WAIT_MAX.as_secs()
                ),
                Ok(_) => {}
                // An event creates the object later.
                Err(error) if !is_late && is_not_found(&error) => {}
                Err(error) => return Err(error),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits until balance and available amount of a user's sub-account equal `expected` by value.
    pub async fn balance_is(
        &self,
        user: &str,
        instrument: &str,
        expected: &str,
    ) -> anyhow::Result<()> {
        let sub_account = types::subaccount::of_user(user, instrument);
        self.until(
            &format!("{sub_account} to hold {expected}, all of it available"),
            "sandbox.auditor",
            "dfa.ledger.v1.LedgerService/GetBalance",
            json!({ "subaccountId": sub_account }),
            |answer| {
                same_number(&answer["balance"]["value"], expected)
                    && same_number(&answer["available"]["value"], expected)
            },
        )
        .await
        .map(drop)
    }
}

fn is_not_found(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<Refusal>()
        .is_some_and(|refusal| refusal.code == "not_found")
}

/// Compares decimal text by value.
pub fn same_number(value: &Value, expected: &str) -> bool {
    let parse = |text: &str| text.parse::<types::Decimal>().ok();
    value
        .as_str()
        .and_then(parse)
        .is_some_and(|value| Some(value) == parse(expected))
}

/// A required text field of an answer.
pub fn text<'a>(answer: &'a Value, pointer: &str) -> anyhow::Result<&'a str> {
    answer
        .pointer(pointer)
        .and_then(Value::as_str)
        .with_context(|| format!("the answer has no text at {pointer}: {answer}"))
}
