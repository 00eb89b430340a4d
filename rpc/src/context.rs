//! Request context (D02): ids of one request, from the caller or generated, which are passed to
//! every call and event that it causes.
//!
//! Reads may omit all ids; writes need `request_id` and `idempotency_key`. The ids are recorded in
//! the request's log span, so one correlation id can be followed through all services (R260).

use prost::Message;
use proto::checks::{CONTEXT_ID_BYTES_MAX, id_problem};
use proto::common::v1::RequestContext;
use sha2::{Digest, Sha256};
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Response, Status};
use uuid::Uuid;

use crate::{Caller, observe, status};

/// Response metadata of a call that was answered before (T12).
pub const REPLAYED: &str = "idempotent-replayed";

/// A validated [`RequestContext`]. Only `idempotency_key` and `user_id` may be empty, in reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Context {
    pub request_id: String,
    pub correlation_id: String,
    /// Empty for reads without a key.
    pub idempotency_key: String,
    /// User on whose behalf the caller acts; empty if unset.
    pub user_id: String,
    pub trace_id: String,
    /// The caller's time, microseconds since the epoch; 0 if unset.
    pub occurred_at_us: i64,
    /// Service or client that made the request; may be empty.
    pub source: String,
}

impl Context {
    /// A new context for work without a request (sweepers, recovery). `source` is the service's
    /// name.
    pub fn new(source: &str) -> Self {
        let request_id = new_id();
        Context {
            correlation_id: request_id.clone(),
            trace_id: request_id.clone(),
            request_id,
            idempotency_key: String::new(),
            user_id: String::new(),
            occurred_at_us: 0,
            source: source.to_owned(),
        }
    }

    /// A context for a call that this request causes: same correlation, trace and user, a new
    /// request id, the given key.
    pub fn child(&self, source: &str, idempotency_key: &str) -> Self {
        Context {
            request_id: new_id(),
            idempotency_key: idempotency_key.to_owned(),
            source: source.to_owned(),
            ..self.clone()
        }
    }

    pub fn to_proto(&self) -> RequestContext {
        RequestContext {
            request_id: self.request_id.clone(),
            correlation_id: self.correlation_id.clone(),
            idempotency_key: self.idempotency_key.clone(),
            user_id: self.user_id.clone(),
            trace_id: self.trace_id.clone(),
            // A stored context may have a time that no request may have.
            occurred_at: Some(proto::convert::to_timestamp_us(self.occurred_at_us))
                .filter(|at| proto::times::SECONDS.contains(&at.seconds)),
            source: self.source.clone(),
        }
    }
}

/// Context of a read. Generates ids that are missing, too long or contain control characters.
pub fn record_read_context(context: Option<RequestContext>) -> Context {
    let mut given = context.unwrap_or_default();
    for (_, value) in ids_mut(&mut given) {
        if id_problem(value, CONTEXT_ID_BYTES_MAX).is_some() {
            value.clear();
        }
    }
    let from_header = observe::header_correlation_id();
    let request_id = or(given.request_id, new_id);
    let correlation_id = or(given.correlation_id, || {
        from_header.unwrap_or_else(|| request_id.clone())
    });
    let context = Context {
        trace_id: or(given.trace_id, || correlation_id.clone()),
        request_id,
        correlation_id,
        idempotency_key: given.idempotency_key,
        user_id: given.user_id,
        occurred_at_us: given
            .occurred_at
            .as_ref()
            .map_or(0, proto::convert::timestamp_us),
        source: given.source,
    };
    observe::record_context(&context);
    context
}

/// Context of a write: INVALID_ARGUMENT unless `request_id` and `idempotency_key` are set (D02,
/// T12) and every id is well formed.
pub fn write(context: Option<RequestContext>) -> Result<Context, Status> {
    let mut given = context.unwrap_or_default();
    let required = ["context.request_id", "context.idempotency_key"];
    let problems: Vec<_> = ids_mut(&mut given)
        .into_iter()
        .filter_map(|(field, value)| {
            let missing = required.contains(&field) && value.trim().is_empty();
            let problem = missing.then(|| "must not be empty".to_owned());
            let problem = problem.or_else(|| id_problem(value, CONTEXT_ID_BYTES_MAX));
            Some((field.to_owned(), problem?))
        })
        .collect();
    if !problems.is_empty() {
        return Err(status::invalid_arguments(problems));
    }
    Ok(record_read_context(Some(given)))
}

/// A response, marked if it is the stored answer of an earlier call (T12).
pub fn answered<T>(message: T, replayed: bool) -> Response<T> {
    let mut response = Response::new(message);
    if replayed {
        mark_replayed(response.metadata_mut());
    }
    response
}

/// A write that acts once per caller and idempotency key (T12, D50).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Once {
    pub call: &'static str,
    /// Subject of the caller's credential. Not the context's user, which the caller chooses.
    pub subject: String,
    pub key: String,
    /// Fingerprint of the request's content.
    pub digest: i64,
}

impl Once {
    /// `content` is the request without its context.
    pub fn of(
        call: &'static str,
        caller: &Caller,
        context: &Context,
        content: &impl Message,
    ) -> Self {
        Once {
            call,
            subject: caller.subject.clone(),
            key: context.idempotency_key.clone(),
            digest: digest(content),
        }
    }

    /// The stored answer, for a repeat of the call. A repeat with other content is logged and
    /// counted.
    ///
    /// # Errors
    /// INTERNAL if the bytes do not decode as such an answer.
    pub fn repeat<T: Message + Default>(
        &self,
        stored_digest: i64,
        answer: &[u8],
    ) -> Result<Response<T>, Status> {
        if stored_digest != self.digest {
            note_difference(self.call, &self.key);
        }
        let answer = T::decode(answer).map_err(|error| status::internal(&error))?;
        Ok(answered(answer, true))
    }
}

/// Fingerprint of a request's content, whose context must be cleared.
pub fn digest(content: &impl Message) -> i64 {
    let hash = Sha256::digest(content.encode_to_vec());
    let (head, _) = hash
        .split_first_chunk::<8>()
        .expect("a SHA-256 has 32 bytes");
    i64::from_be_bytes(*head)
}

/// Logs and counts a call with other content under a used key, which gets the stored answer (D50).
pub fn note_difference(call: &'static str, key: &str) {
    tracing::warn!(
        call,
        key,
        "idempotency key was used with other content, returning the stored answer"
    );
    ::metrics::counter!("idempotency_mismatches_total", "call" => call).increment(1);
}

/// Marks a response or a refusal as the stored answer of an earlier call (T12).
pub fn mark_replayed(metadata: &mut MetadataMap) {
    metadata.insert(REPLAYED, MetadataValue::from_static("true"));
}

fn ids_mut(context: &mut RequestContext) -> [(&'static str, &mut String); 6] {
    [
        ("context.request_id", &mut context.request_id),
        ("context.correlation_id", &mut context.correlation_id),
        ("context.idempotency_key", &mut context.idempotency_key),
        ("context.user_id", &mut context.user_id),
        ("context.trace_id", &mut context.trace_id),
        ("context.source", &mut context.source),
    ]
}

fn or(value: String, make: impl FnOnce() -> String) -> String {
    if value.is_empty() { make() } else { value }
}

fn new_id() -> String {
    Uuid::now_v7().to_string()
}

#[cfg(test)]
mod tests {
    use tonic_types::StatusExt;

    use super::*;

    // rows: R003 R004 R005
    #[test]
    fn r004_reads_get_ids_and_keep_the_ones_given() {
        let made = record_read_context(None);
        assert!(!made.request_id.is_empty());
        assert_eq!(made.correlation_id, made.request_id);
        let kept = record_read_context(Some(RequestContext {
            correlation_id: "corr-1".into(),
            ..Default::default()
        }));
        assert_eq!(kept.correlation_id, "corr-1");
        let child = kept.child("ledger", "step-1");
        assert_eq!(child.correlation_id, "corr-1");
        assert_ne!(child.request_id, kept.request_id);
        assert_eq!(child.to_proto().idempotency_key, "step-1");
    }

    // rows: R005
    #[test]
    fn r005_writes_need_request_id_and_key() {
        let refused = write(Some(RequestContext {
            request_id: "r".into(),
            ..Default::default()
        }))
        .unwrap_err();
        assert_eq!(refused.code(), tonic::Code::InvalidArgument);
        let fields = refused.get_details_bad_request().unwrap().field_violations;
        assert_eq!(fields.len(), 1);
        assert_eq!(fields[0].field, "context.idempotency_key");
        assert!(write(None).is_err());
        let long = RequestContext {
            request_id: "x".repeat(CONTEXT_ID_BYTES_MAX + 1),
            idempotency_key: "k\n".into(),
            ..Default::default()
        };
        let refused = write(Some(long.clone())).unwrap_err();
        assert_eq!(
            refused
                .get_details_bad_request()
                .unwrap()
                .field_violations
                .len(),
            2
        );
        assert!(record_read_context(Some(long)).request_id.len() < CONTEXT_ID_BYTES_MAX);
    }
}
