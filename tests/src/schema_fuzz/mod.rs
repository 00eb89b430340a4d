//! Mutated requests of every method of the contract, against a running platform.
//!
//! The requests follow from the descriptors, so a new method is fuzzed without a change here
//! ([`stage`] has the requests that need prepared objects). Each method gets at least
//! [`PER_METHOD_MIN`] mutations of a valid request, as Connect JSON or binary: of its fields
//! ([`edits`]), of its bytes ([`wire_level`]) and of body and headers ([`bodies`]).
//!
//! A fault is the acceptance of a request that the contract forbids ([`Must::Refuse`]), and an
//! answer of 500 or above, with three exceptions. No peer is stopped, so none explains a 503.
//!
//! | status | allowed |
//! |---|---|
//! | 501 | of an unknown compression ([`Must::Unimplemented`]), by the Connect protocol |
//! | 503 | with a text of [`CATCHING_UP`], unless a repeat gets it for 20 s |
//! | 504 | of a request that sets a deadline |

mod bodies;
mod edits;
mod requests;
mod stage;
mod wire_level;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use futures::StreamExt;
use prost_reflect::{DynamicMessage, MethodDescriptor};
use rpc::contract::Contract;
use serde_json::Value;

use stage::Posted;
pub use stage::Stage;

use crate::flow::Random;
use crate::wire::{methods, pool};
use crate::{Platform, Refusal};

/// Least mutations of each method.
pub const PER_METHOD_MIN: usize = 90;
/// Most mutations of the fields, of the bytes and of the context of a request.
const FIELDS_MAX: usize = 90;
const BYTES_MAX: usize = 24;
const CONTEXT_MAX: usize = 60;
/// Total from which on no more mutations of the context are added.
const ENOUGH: usize = 120;
/// Calls at a time.
const IN_FLIGHT: usize = 8;
/// Time in which a repeat must get another answer than 503.
const UNAVAILABLE_MAX: Duration = Duration::from_secs(20);

/// Header of a request's deadline.
const DEADLINE: &str = "connect-timeout-ms";

/// Texts of a 503 while every peer runs: a reader of the journal or of the chain catches up, or the
/// holders of a token move (`cfa.MoveHolders`).
const CATCHING_UP: [&str; 9] = [
    "History is behind the journal, retry later",
    "Market state is behind the journal, retry later",
    "Market store is unavailable",
    "Market service is unavailable",
    "Limit of the user is unavailable",
    "Holder registry is unavailable",
    "Trade batch is unavailable",
    "Token while it moves is unavailable",
    "Token whose holders move is unavailable",
];

/// Methods whose effects reach the calls of other methods. They are called last.
const LAST: [&str; 9] = [
    "ledger.SetVelocityLimit",
    "ledger.SetSubAccountStatus",
    "market.SetMemberBounds",
    "market.SetMemberGroup",
    "market.SetKillSwitch",
    "market.SetTradingPhase",
    "market.ConfirmClock",
    "approvals.Approve",
    "sandbox.SetFault",
];

/// What an answer has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Must {
    /// An answer, of any kind.
    Answer,
    /// An answer, or the end of the connection: a body that is too large is not read.
    AnswerOrClose,
    Refuse,
    /// A refusal, or the end of the connection.
    RefuseOrClose,
    /// 501, the answer of the Connect protocol to a compression that the server does not know.
    Unimplemented,
}

/// One mutated request.
pub struct Mutation {
    /// What is changed.
    pub what: String,
    pub verb: reqwest::Method,
    pub content_type: &'static str,
    pub headers: Vec<(&'static str, &'static str)>,
    /// `None`: the method's own token.
    pub token: Option<&'static str>,
    pub body: Vec<u8>,
    pub must: Must,
}

impl Mutation {
    fn json(what: impl Into<String>, body: impl Into<Vec<u8>>, must: Must) -> Self {
        Self::new(what.into(), "application/json", body.into(), must)
    }

    fn proto(what: impl Into<String>, body: impl Into<Vec<u8>>, must: Must) -> Self {
        Self::new(what.into(), "application/proto", body.into(), must)
    }

    fn new(what: String, content_type: &'static str, body: Vec<u8>, must: Must) -> Self {
        Self {
            what,
            verb: reqwest::Method::POST,
            content_type,
            headers: Vec::new(),
            token: None,
            body,
            must,
        }
    }

    fn has_deadline(&self) -> bool {
        self.headers.iter().any(|(name, _)| *name == DEADLINE)
    }
}

/// Result of a run.
#[derive(Debug, Default)]
pub struct Report {
    /// Mutations sent, by method.
    pub sent: BTreeMap<String, usize>,
    /// Accepted requests.
    pub accepted: usize,
    /// Methods whose unmutated request has an invalid field.
    pub invalid_bases: Vec<String>,
    /// Calls whose first answer was 503, by method and text.
    pub unavailable: BTreeMap<String, usize>,
    /// Answers that are faults, and accepted requests that must be refused.
    pub faults: Vec<String>,
}

impl Report {
    /// Counts a call whose first answer was 503.
    fn note_unavailable(&mut self, method: &str, text: &str) {
        let call = format!("{method}: {text}");
        if !CATCHING_UP.contains(&text) {
            self.faults.push(format!("503 of {call}"));
        }
        *self.unavailable.entry(call).or_default() += 1;
    }
}

/// `/package.Service/Method`.
fn path(method: &MethodDescriptor) -> String {
    format!("/{}/{}", method.parent_service().full_name(), method.name())
}

/// True for a method that changes nothing.
fn reads_only(method: &MethodDescriptor) -> bool {
    let contract = Contract::platform();
    let found = contract.method(&path(method));
    found.is_some_and(|method| method.reads_only)
}

/// `ledger.GetBalance` of a method's descriptor.
pub fn short_name(method: &MethodDescriptor) -> String {
    let package = method.parent_service().package_name().to_owned();
    let area = package.split('.').nth(1).unwrap_or_default();
    format!("{area}.{}", method.name())
}

impl Platform {
    /// Sends the mutations of every method; the seed selects them. Undoes what they changed, so
    /// that the proof of balances passes afterwards.
    pub async fn fuzz_schema(&self, stage: &Stage, seed: u64) -> Report {
        let mut report = Report::default();
        let pool = pool();
        let all = methods(&pool);
        let is_last = |method: &&MethodDescriptor| LAST.contains(&short_name(method).as_str());
        let mut posted = Posted::default();
        for method in all.iter().filter(|method| !is_last(method)) {
            self.fuzz_method(stage, method, seed, &mut report, &mut posted)
                .await;
        }
        stage.undo_money(self, &posted).await;
        for name in LAST {
            let method = all.iter().find(|method| short_name(method) == name);
            let method = method.unwrap_or_else(|| panic!("no method {name}"));
            self.fuzz_method(stage, method, seed, &mut report, &mut posted)
                .await;
        }
        stage.undo_settings(self).await;
        report
    }

    async fn fuzz_method(
        &self,
        stage: &Stage,
        method: &MethodDescriptor,
        seed: u64,
        report: &mut Report,
        posted: &mut Posted,
    ) {
        let name = short_name(method);
        let base = Mutation::json("base", stage.request(method).to_string(), Must::Answer);
        let (sent, unavailable) = self.send(stage, method, &base).await;
        if let Some(text) = unavailable {
            report.note_unavailable(&name, &text);
        }
        match sent {
            Sent::Accepted(answer) => posted.note(&name, &answer),
            Sent::Refused(refusal) if refusal.code == "invalid_argument" => {
                let message = format!("{name}: {}", refusal.message);
                report.invalid_bases.push(message);
            }
            _ => {}
        }
        let mutations = mutations(stage, method, seed);
        report.sent.insert(name.clone(), mutations.len());
        let calls = mutations.iter().map(|mutation| async move {
            let (sent, unavailable) = self.send(stage, method, mutation).await;
            (mutation, sent, unavailable)
        });
        let mut calls = futures::stream::iter(calls).buffer_unordered(IN_FLIGHT);
        while let Some((mutation, sent, unavailable)) = calls.next().await {
            if let Some(text) = unavailable {
                report.note_unavailable(&name, &text);
            }
            if let Some(fault) = fault(mutation, &sent) {
                let body = shown(&mutation.body);
                let what = &mutation.what;
                report
                    .faults
                    .push(format!("{name}, {what}: {fault}\n  {body}"));
            }
            if let Sent::Accepted(answer) = sent {
                report.accepted += 1;
                posted.note(&name, &answer);
            }
        }
    }

    /// Sends a request; repeats it while the answer is 503. Also returns the text of the first 503.
    async fn send(
        &self,
        stage: &Stage,
        method: &MethodDescriptor,
        mutation: &Mutation,
    ) -> (Sent, Option<String>) {
        let deadline = Instant::now() + UNAVAILABLE_MAX;
        let mut first = None;
        loop {
            let sent = self.send_once(stage, method, mutation).await;
            let text = match &sent {
                Sent::Refused(refusal) if refusal.http == 503 => refusal.message.clone(),
                _ => return (sent, first),
            };
            first.get_or_insert(text);
            if Instant::now() > deadline {
                return (sent, first);
            }
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }

    async fn send_once(
        &self,
        stage: &Stage,
        method: &MethodDescriptor,
        mutation: &Mutation,
    ) -> Sent {
        let url = format!("{}{}", self.url("all"), path(method));
        let mut call = self
            .http
            .request(mutation.verb.clone(), url)
            .header("content-type", mutation.content_type)
            .body(mutation.body.clone());
        for (name, value) in &mutation.headers {
            call = call.header(*name, *value);
        }
        let token = match mutation.token {
            Some(token) => token.to_owned(),
            None => stage.token(method),
        };
        if !token.is_empty() {
            call = call.bearer_auth(token);
        }
        let answer = match call.send().await {
            Ok(answer) => answer,
            Err(error) => return Sent::Closed(error.to_string()),
        };
        let http = answer.status().as_u16();
        let body = match answer.bytes().await {
            Ok(body) => body,
            Err(error) => return Sent::Closed(error.to_string()),
        };
        if http >= 300 {
            let body = serde_json::from_slice(&body).unwrap_or_default();
            return Sent::Refused(Refusal::read(http, body));
        }
        let decoded = if mutation.content_type == "application/proto" {
            DynamicMessage::decode(method.output(), body)
                .ok()
                .and_then(|message| serde_json::to_value(message).ok())
        } else {
            serde_json::from_slice(&body).ok()
        };
        match decoded {
            Some(answer) => Sent::Accepted(answer),
            None => Sent::Unreadable,
        }
    }
}

/// Outcome of a call.
enum Sent {
    Accepted(Value),
    Refused(Refusal),
    /// A success whose body is not the method's answer.
    Unreadable,
    Closed(String),
}

/// True for the answer to a batch that states why an operation of it was refused.
fn has_refusal(answer: &Value) -> bool {
    let outcomes = answer["outcomes"].as_array();
    outcomes.is_some_and(|outcomes| outcomes.iter().any(|one| one["errorReason"].is_string()))
}

/// Why an outcome is a fault; `None` if it is none.
fn fault(mutation: &Mutation, sent: &Sent) -> Option<String> {
    match (mutation.must, sent) {
        (Must::Unimplemented, Sent::Refused(refusal)) if refusal.http == 501 => None,
        (Must::Unimplemented, _) => Some("is not 501".to_owned()),
        (_, Sent::Refused(refusal)) if refusal.http == 504 && mutation.has_deadline() => None,
        (_, Sent::Refused(refusal)) if refusal.http >= 500 => {
            Some(format!("{} {}", refusal.http, refusal.body))
        }
        (Must::Refuse, Sent::Accepted(answer)) if has_refusal(answer) => None,
        (Must::Refuse | Must::RefuseOrClose, Sent::Accepted(answer)) => Some(format!(
            "accepted: {}",
            shown(answer.to_string().as_bytes())
        )),
        (_, Sent::Unreadable) => Some("the answer is not the method's message".to_owned()),
        (Must::Answer | Must::Refuse, Sent::Closed(error)) => Some(error.clone()),
        _ => None,
    }
}

/// The first 300 bytes of a body.
fn shown(body: &[u8]) -> String {
    String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned()
}

/// The mutations of a method, selected by the seed.
fn mutations(stage: &Stage, method: &MethodDescriptor, seed: u64) -> Vec<Mutation> {
    let salt = short_name(method).bytes().fold(seed, |hash, byte| {
        hash.wrapping_mul(31).wrapping_add(u64::from(byte))
    });
    let mut random = Random::new(salt);
    let base = stage.request(method);
    let (own, context): (Vec<_>, Vec<_>) = edits::of(&method.input())
        .into_iter()
        .partition(|edit| !edit.is_of_context());
    let mut all = bodies::of(method, &base);
    all.extend(taken(
        wire_level::of(method, &base, &mut random),
        BYTES_MAX,
        &mut random,
    ));
    let mut edited = taken(own, FIELDS_MAX, &mut random);
    let rest = ENOUGH.saturating_sub(all.len() + edited.len());
    edited.extend(taken(context, rest.clamp(10, CONTEXT_MAX), &mut random));
    for (at, edit) in edited.iter().enumerate() {
        // A fresh request per mutation: a repeated key would get the stored answer.
        all.push(edit.render(method, stage.request(method), at % 2 == 1));
    }
    all
}

/// At most `count` items, chosen by the generator.
fn taken<T>(mut items: Vec<T>, count: usize, random: &mut Random) -> Vec<T> {
    for at in (1..items.len()).rev() {
        let bound = u64::try_from(at).expect("64 bits") + 1;
        let other = usize::try_from(random.below(bound)).expect("an index");
        items.swap(at, other);
    }
    items.truncate(count);
    items
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn faults_are_errors_of_the_server_and_accepted_nonsense() {
        let refused = |http| Sent::Refused(Refusal::read(http, json!({})));
        for (must, sent, is_fault) in [
            (Must::Answer, refused(500), true),
            (Must::Answer, refused(501), true),
            (Must::Refuse, refused(503), true),
            (Must::Unimplemented, refused(501), false),
            (Must::Unimplemented, Sent::Accepted(json!({})), true),
            (Must::Refuse, refused(504), true),
            (Must::Refuse, refused(400), false),
            (Must::Refuse, Sent::Accepted(json!({})), true),
            (Must::Answer, Sent::Accepted(json!({})), false),
            (Must::Answer, Sent::Closed("reset".into()), true),
            (Must::RefuseOrClose, Sent::Closed("reset".into()), false),
            (Must::Answer, Sent::Unreadable, true),
        ] {
            let mutation = Mutation::json("a test", "{}", must);
            assert_eq!(fault(&mutation, &sent).is_some(), is_fault, "{must:?}");
        }
        let with_deadline = Mutation {
            headers: vec![(DEADLINE, "1")],
            ..Mutation::json("a test", "{}", Must::Answer)
        };
        assert_eq!(fault(&with_deadline, &refused(504)), None);
        assert!(fault(&with_deadline, &refused(503)).is_some());
    }

    #[test]
    fn a_503_is_a_fault_unless_a_reader_catches_up() {
        let mut report = Report::default();
        let history = "History is behind the journal, retry later";
        report.note_unavailable("market.GetOrder", history);
        report.note_unavailable("market.GetOrder", history);
        assert_eq!(report.faults, Vec::<String>::new());
        report.note_unavailable("cfa.Subscribe", "Ledger service is unavailable");
        assert_eq!(report.faults.len(), 1);
        let counts: Vec<usize> = report.unavailable.into_values().collect();
        assert_eq!(counts, [1, 2]);
    }
}
