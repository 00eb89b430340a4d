//! Calls as `curl` makes them: Connect with JSON over HTTP/1.1.

use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use prost::Message;
use serde_json::{Value, json};
use types::Decimal;

use crate::Platform;
use crate::process::PATIENCE;

/// Token with read access to everything.
pub const AUDITOR: &str = "sandbox.auditor";
pub const OPERATOR: &str = "sandbox.operator";
pub const TREASURY: &str = "sandbox.treasury";
pub const SERVICE: &str = "sandbox.service";

/// A refusal as clients see it: HTTP status, Connect code, text, and decoded details.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    pub http: u16,
    pub code: String,
    pub message: String,
    /// `google.rpc.ErrorInfo.reason`; empty when there is none.
    pub reason: String,
    pub domain: String,
    /// Fields of `google.rpc.BadRequest`.
    pub fields: Vec<String>,
    pub body: Value,
}

#[derive(Clone, PartialEq, Message)]
struct ErrorInfo {
    #[prost(string, tag = "1")]
    reason: String,
    #[prost(string, tag = "2")]
    domain: String,
}

#[derive(Clone, PartialEq, Message)]
struct BadRequest {
    #[prost(message, repeated, tag = "1")]
    field_violations: Vec<FieldViolation>,
}

#[derive(Clone, PartialEq, Message)]
struct FieldViolation {
    #[prost(string, tag = "1")]
    field: String,
}

impl Refusal {
    /// Reads the body of a Connect error.
    pub fn read(http: u16, body: Value) -> Self {
        let mut refusal = Self {
            http,
            code: body["code"].as_str().unwrap_or_default().to_owned(),
            message: body["message"].as_str().unwrap_or_default().to_owned(),
            reason: String::new(),
            domain: String::new(),
            fields: Vec::new(),
            body,
        };
        for detail in refusal.body["details"]
            .as_array()
            .cloned()
            .unwrap_or_default()
        {
            let value = STANDARD_NO_PAD
                .decode(detail["value"].as_str().unwrap_or_default())
                .unwrap_or_default();
            match detail["type"].as_str() {
                Some("google.rpc.ErrorInfo") => {
                    let info = ErrorInfo::decode(&*value).expect("ErrorInfo");
                    (refusal.reason, refusal.domain) = (info.reason, info.domain);
                }
                Some("google.rpc.BadRequest") => {
                    let bad = BadRequest::decode(&*value).expect("BadRequest");
                    refusal.fields = bad
                        .field_violations
                        .into_iter()
                        .map(|violation| violation.field)
                        .collect();
                }
                _ => {}
            }
        }
        refusal
    }

    /// A fault of the platform itself (INTERNAL, UNKNOWN, DATA_LOSS, UNIMPLEMENTED). UNAVAILABLE
    /// and DEADLINE_EXCEEDED do not count: the contract lets the caller repeat such a call.
    pub fn is_fault(&self) -> bool {
        self.http >= 500 && !matches!(self.http, 503 | 504)
    }

    /// Asserts HTTP status, code, exact text and reason (D23).
    ///
    /// # Panics
    /// If one differs.
    #[track_caller]
    pub fn is(&self, http: u16, code: &str, message: &str, reason: &str) {
        assert_eq!(
            (
                self.http,
                self.code.as_str(),
                self.message.as_str(),
                self.reason.as_str()
            ),
            (http, code, message, reason),
            "{self:?}"
        );
        assert_eq!(self.domain, "platform", "{self:?}");
    }

    /// Asserts INVALID_ARGUMENT with this field.
    #[track_caller]
    pub fn is_bad_field(&self, field: &str) {
        assert_eq!(
            (self.http, self.code.as_str(), self.reason.as_str()),
            (400, "invalid_argument", "INVALID_ARGUMENT"),
            "{self:?}"
        );
        assert_eq!(self.fields, [field], "{self:?}");
        assert!(self.message.starts_with(&format!("{field}: ")), "{self:?}");
    }
}

/// Token of a named member of staff with every role that changes something.
pub fn staff(name: &str) -> String {
    format!("sandbox.operator+treasury+compliance+market-supervisor.{name}")
}

/// Full path of a short name: `ledger.GetBalance` is `dfa.ledger.v1.LedgerService/GetBalance`.
pub fn path_of(name: &str) -> String {
    let (package, method) = name.split_once('.').expect("service.Method");
    let service = match package {
        "ledger" => "LedgerService",
        "cfa" => "CfaRegistryService",
        "payments" => "PaymentsService",
        "market" => "MarketService",
        "identity" => "IdentityService",
        "chain" => "ChainConnectorService",
        "sandbox" => "SandboxBankService",
        "settlement" => "SettlementService",
        "approvals" => "ApprovalService",
        other => panic!("no service {other}"),
    };
    format!("dfa.{package}.v1.{service}/{method}")
}

/// A context with fresh ids.
pub fn context() -> Value {
    let id = uuid::Uuid::now_v7().to_string();
    json!({ "requestId": id, "correlationId": id, "idempotencyKey": id })
}

/// A context with a given idempotency key.
pub fn context_with_key(key: &str) -> Value {
    let mut context = context();
    context["idempotencyKey"] = json!(key);
    context
}

impl Platform {
    /// Calls `service.Method`; adds a context if the request has none.
    pub async fn call(&self, token: &str, name: &str, request: Value) -> Result<Value, Refusal> {
        self.call_with_headers(token, name, request)
            .await
            .map(|(answer, _)| answer)
    }

    /// Like [`Platform::call`]; also returns the answer's headers.
    pub async fn call_with_headers(
        &self,
        token: &str,
        name: &str,
        mut request: Value,
    ) -> Result<(Value, reqwest::header::HeaderMap), Refusal> {
        if request.get("context").is_none() {
            request["context"] = context();
        }
        let mut post = self
            .http
            .post(format!("{}/{}", self.url("all"), path_of(name)))
            .json(&request);
        if !token.is_empty() {
            post = post.bearer_auth(token);
        }
        let response = post.send().await.map_err(|error| {
            Refusal::read(
                0,
                json!({ "code": "transport", "message": error.to_string() }),
            )
        })?;
        let (status, headers) = (response.status(), response.headers().clone());
        let body = response.bytes().await.unwrap_or_default();
        let body: Value = serde_json::from_slice(&body)
            .unwrap_or_else(|_| json!({ "raw": String::from_utf8_lossy(&body) }));
        if status.is_success() {
            Ok((body, headers))
        } else {
            Err(Refusal::read(status.as_u16(), body))
        }
    }

    /// Makes a call that must succeed.
    ///
    /// # Panics
    /// If it is refused.
    pub async fn ok(&self, token: &str, name: &str, request: Value) -> Value {
        let request_text = request.to_string();
        self.call(token, name, request)
            .await
            .unwrap_or_else(|refusal| {
                panic!("{name} as {token}: {refusal:?}\nrequest {request_text}")
            })
    }

    /// Makes a call that takes two persons (D32); returns the executed approval.
    ///
    /// # Panics
    /// If a step is refused or the call fails.
    pub async fn approved(&self, name: &str, request: Value) -> Value {
        let approved = self.decided(name, request).await;
        let executed = json!("APPROVAL_STATUS_EXECUTED");
        assert_eq!(approved["status"], executed, "{name}: {approved}");
        approved
    }

    /// As [`Self::approved`], but the call may fail; returns the approval with its result.
    ///
    /// # Panics
    /// If the request or the approval is refused.
    pub async fn decided(&self, name: &str, request: Value) -> Value {
        let decision = self.requested(name, &request).await;
        let boris = staff("boris");
        let approved = self.ok(&boris, "approvals.Approve", decision).await;
        approved["approval"].clone()
    }

    /// Requests a call that takes two persons (D32), as the first of them; returns the request of
    /// `Approve` for the second.
    ///
    /// # Panics
    /// If it is refused.
    pub async fn requested(&self, name: &str, request: &Value) -> Value {
        let ask = json!({
            "method": path_of(name), "requestJson": request.to_string(), "reason": "test",
        });
        let anna = staff("anna");
        let asked = self.ok(&anna, "approvals.RequestApproval", ask).await;
        let asked = &asked["approval"];
        json!({ "approvalId": asked["approvalId"], "hash": asked["hash"] })
    }

    /// Waits until an approved call is executed. `decision`: from [`Platform::requested`].
    ///
    /// # Panics
    /// After a minute.
    pub async fn executed(&self, decision: &Value) {
        let request = json!({ "approvalId": decision["approvalId"] });
        let executed = json!("APPROVAL_STATUS_EXECUTED");
        self.until("the approval", "approvals.GetApproval", request, |answer| {
            answer["approval"]["status"] == executed
        })
        .await;
    }

    /// Makes a call that must be refused.
    ///
    /// # Panics
    /// If it succeeds.
    pub async fn refused(&self, token: &str, name: &str, request: Value) -> Refusal {
        let request_text = request.to_string();
        match self.call(token, name, request).await {
            Err(refusal) => refusal,
            Ok(answer) => {
                panic!(
                    "{name} as {token} should be refused, it answered {answer}\nrequest {request_text}"
                )
            }
        }
    }

    /// Repeats a read until `done` accepts the answer. A refusal counts as not done.
    ///
    /// # Panics
    /// After a minute; the message contains `what` and the last answer. At once if the platform
    /// reports a fault of its own.
    pub async fn until(
        &self,
        what: &str,
        name: &str,
        request: Value,
        done: impl Fn(&Value) -> bool,
    ) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let last = match self.call(AUDITOR, name, request.clone()).await {
                Ok(answer) if done(&answer) => return answer,
                Ok(answer) => answer.to_string(),
                Err(refusal) => {
                    assert!(
                        !refusal.is_fault(),
                        "a fault of the platform while waiting for {what}: {name} {request} \
                         returned {refusal:?}"
                    );
                    format!("{refusal:?}")
                }
            };
            assert!(
                Instant::now() < deadline,
                "timed out waiting for {what}; {name} {request} returned {last}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// All rows of a list, read in pages of 1,000, the largest size.
    pub async fn all(&self, token: &str, name: &str, field: &str, request: Value) -> Vec<Value> {
        self.pages(token, name, field, request, 1_000)
            .await
            .concat()
    }

    /// All pages of a list, `size` rows each.
    pub async fn pages(
        &self,
        token: &str,
        name: &str,
        field: &str,
        mut request: Value,
        size: u32,
    ) -> Vec<Vec<Value>> {
        let mut pages = Vec::new();
        let mut page_token = String::new();
        loop {
            request["pagination"] = json!({ "pageSize": size, "pageToken": page_token });
            let answer = self.ok(token, name, request.clone()).await;
            pages.push(answer[field].as_array().cloned().unwrap_or_default());
            page_token = answer["pagination"]["nextPageToken"]
                .as_str()
                .unwrap_or_default()
                .to_owned();
            if page_token.is_empty() {
                return pages;
            }
            assert!(pages.len() < 10_000, "{name} returns pages without end");
        }
    }

    /// An HTTP GET of a listener.
    pub async fn get(&self, listener: &str, path: &str, token: &str) -> (u16, Value) {
        let mut get = self.http.get(format!("{}{path}", self.url(listener)));
        if !token.is_empty() {
            get = get.bearer_auth(token);
        }
        let response = get
            .send()
            .await
            .unwrap_or_else(|error| panic!("GET {path} of {listener}: {error}"));
        let status = response.status().as_u16();
        let body = response.text().await.unwrap_or_default();
        let body = serde_json::from_str(&body).unwrap_or(Value::String(body));
        (status, body)
    }

    /// Sum of a metric's samples that have these labels; zero without a sample.
    ///
    /// # Panics
    /// If the metrics cannot be read.
    pub async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        let (status, text) = self.get("all", "/metrics", "").await;
        assert_eq!(status, 200, "{text}");
        sum_of(text.as_str().expect("text"), name, labels)
    }
}

/// Sum of a metric's samples that have these labels.
fn sum_of(metrics: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let labels: Vec<String> = labels
        .iter()
        .map(|(label, value)| format!("{label}=\"{value}\""))
        .collect();
    let samples = metrics.lines().filter_map(|line| {
        let (sample, value) = line.rsplit_once(' ')?;
        let rest = sample.strip_prefix(name)?;
        let is_own = rest.is_empty() || rest.starts_with('{');
        let has_all = labels.iter().all(|label| rest.contains(label.as_str()));
        (is_own && has_all).then(|| value.parse::<f64>().expect("a number"))
    });
    samples.sum()
}

/// A text field of an answer.
///
/// # Panics
/// If it is missing.
#[track_caller]
pub fn text(answer: &Value, pointer: &str) -> String {
    match answer.pointer(pointer).and_then(Value::as_str) {
        Some(text) => text.to_owned(),
        None => panic!("no text at {pointer}: {answer}"),
    }
}

/// A decimal (`{"value": ..}` or text) as a number; zero if it is missing.
///
/// # Panics
/// If it is not a number.
#[track_caller]
pub fn number(value: &Value) -> Decimal {
    let value = value.get("value").unwrap_or(value);
    match value {
        Value::Null => Decimal::from(0),
        Value::String(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("not a number: {text}")),
        other => panic!("not a number: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_is_a_fault_unless_a_repeat_may_help() {
        let is_fault = |http| Refusal::read(http, json!({})).is_fault();
        assert!([500, 501, 502].into_iter().all(is_fault));
        assert!(
            ![0, 400, 403, 404, 409, 429, 503, 504]
                .into_iter()
                .any(is_fault)
        );
    }

    #[test]
    fn samples_of_one_metric_are_added() {
        let metrics = "# TYPE calls counter\ncalls{code=\"ok\",method=\"/a\"} 2\n\
            calls{code=\"internal\",method=\"/a\"} 3\ncalls_more 7\nplain 4\n";
        assert!((sum_of(metrics, "calls", &[("method", "/a")]) - 5.0).abs() < f64::EPSILON);
        assert!((sum_of(metrics, "calls", &[("code", "ok")]) - 2.0).abs() < f64::EPSILON);
        assert!((sum_of(metrics, "plain", &[]) - 4.0).abs() < f64::EPSILON);
        assert!(sum_of(metrics, "none", &[]).abs() < f64::EPSILON);
    }
}
