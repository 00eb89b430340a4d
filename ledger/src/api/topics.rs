//! Request/reply over topics (4.4, T37, T38): the gRPC handlers read requests from `ledger.<call>`
//! and reply on `<topic>.reply`.
//!
//! A request is the encoded message of the call. Its reply has the request's `kafka_correlationId`,
//! or else its request id. An error is sent as the headers `error-code`, `error-reason` and
//! `error-message` with an empty value (D26). A request may be handled twice after a crash; writes
//! recognise the repeat by its key. If the log refuses a reply for its size, an error with the
//! committed ids replaces it. Writers to these topics have the rights of a service, so the broker
//! must restrict access.

use std::{collections::HashMap, future::Future, sync::Arc};

use events::{Delivery, Event, Log, Record, RetryPolicy};
use prost::{Message, Name};
use proto::{
    common::v1::RequestContext, ledger::v1 as wire,
    ledger::v1::ledger_service_server::LedgerService,
};
use rpc::{Caller, Role, Roles, context::REPLAYED};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Code, Request, Response, Status};
use uuid::Uuid;

use super::Api;

/// Correlation header of D26.
pub const CORRELATION: &str = "kafka_correlationId";
const GROUP: &str = "ledger.requests";

/// Request topics, each with the response message on its reply topic.
pub const TOPICS: [(&str, &str); 11] = [
    ("ledger.getAccount", "GetAccountResponse"),
    ("ledger.listAccounts", "ListAccountsResponse"),
    ("ledger.getSubAccount", "GetSubAccountResponse"),
    ("ledger.createOperation", "CreateOperationResponse"),
    ("ledger.getOperation", "GetOperationResponse"),
    ("ledger.listOperations", "ListOperationsResponse"),
    ("ledger.createHold", "CreateHoldResponse"),
    ("ledger.releaseHold", "ReleaseHoldResponse"),
    ("ledger.consumeHold", "ConsumeHoldResponse"),
    ("ledger.finalizeOperation", "FinalizeOperationResponse"),
    ("ledger.getBalance", "GetBalanceResponse"),
];

/// Request, reply and dead-letter topics, for a broker that does not create topics on demand.
pub fn all() -> Vec<String> {
    TOPICS
        .iter()
        .flat_map(|(topic, _)| {
            [
                (*topic).to_owned(),
                reply_topic(topic),
                events::topics::dlq(topic),
            ]
        })
        .collect()
}

fn reply_topic(topic: &str) -> String {
    format!("{topic}.reply")
}

/// Spawns one worker per request topic.
pub fn spawn(
    log: &Arc<dyn Log>,
    api: &Arc<Api>,
    tasks: &TaskTracker,
    shutdown: &CancellationToken,
) {
    for (topic, response) in TOPICS {
        let (log, api, shutdown) = (log.clone(), api.clone(), shutdown.clone());
        tasks.spawn(async move {
            while !shutdown.is_cancelled() {
                let Err(error) = serve(&*log, &api, topic, response, &shutdown).await else {
                    return;
                };
                tracing::warn!(%error, topic, "cannot read requests, resubscribing");
                tokio::select! {
                    () = shutdown.cancelled() => {}
                    () = tokio::time::sleep(RetryPolicy::default().delay(1)) => {}
                }
            }
        });
    }
}

async fn serve(
    log: &dyn Log,
    api: &Api,
    topic: &str,
    response: &str,
    shutdown: &CancellationToken,
) -> Result<(), events::Error> {
    let mut subscription = log.subscribe(GROUP, &[topic]).await?;
    loop {
        let delivery = tokio::select! {
            biased;
            () = shutdown.cancelled() => return Ok(()),
            next = subscription.next() => match next {
                Err(events::Error::Closed) => return Ok(()),
                next => next?,
            },
        };
        let answer = dispatch(api, topic, &delivery.record.event.payload).await;
        send(log, &delivery, topic, response, answer).await?;
        subscription.commit(&delivery.position).await?;
    }
}

/// Sends a reply. If the log refuses it, sends an error instead. If the log refuses the error too,
/// the request has no reply.
async fn send(
    log: &dyn Log,
    delivery: &Delivery,
    topic: &str,
    response: &str,
    answer: Answer,
) -> Result<(), events::Error> {
    let too_large = answer.too_large();
    let refused = match log
        .append(&[reply(delivery, topic, response, answer)])
        .await
    {
        Err(error @ events::Error::Refused { .. }) => error,
        sent => return sent,
    };
    let position = &delivery.position;
    tracing::error!(error = %refused, topic, %position, "reply refused by the log, replaced by an error");
    match log
        .append(&[reply(delivery, topic, response, too_large)])
        .await
    {
        Err(error @ events::Error::Refused { .. }) => {
            tracing::error!(%error, topic, %position, "error reply refused by the log, request has no reply");
            Ok(())
        }
        sent => sent,
    }
}

/// Result of a request: the response or an error, with the request id.
struct Answer {
    request_id: String,
    result: Result<TopicResponse, Status>,
}

/// A response, with the ids for the error reply that replaces it if it is too large.
struct TopicResponse {
    payload: Vec<u8>,
    is_replay: bool,
    /// Committed ids; `None` for a read.
    committed: Option<String>,
}

impl Answer {
    /// The error that replaces an answer that is too large to send.
    fn too_large(&self) -> Answer {
        let status = match &self.result {
            Ok(topic_response) => {
                let bytes = topic_response.payload.len();
                let text = match &topic_response.committed {
                    Some(ids) => format!(
                        "Reply of {bytes} bytes is too large, the operation is committed: {ids}"
                    ),
                    None => format!("Reply of {bytes} bytes is too large"),
                };
                rpc::status::with_metadata(
                    Code::ResourceExhausted,
                    "REPLY_TOO_LARGE",
                    text,
                    HashMap::new(),
                )
            }
            Err(status) => rpc::status::with_metadata(
                status.code(),
                &rpc::status::reason(status).unwrap_or_default(),
                "Reply is too large",
                HashMap::new(),
            ),
        };
        Answer {
            request_id: self.request_id.clone(),
            result: Err(status),
        }
    }
}

/// Committed ids of a read: none.
fn no_commit<T>(_: &T) -> Option<String> {
    None
}

fn operation_id(operation: Option<&wire::Operation>) -> Option<String> {
    operation.map(|operation| format!("operation_id {}", operation.operation_id))
}

fn hold_id(hold: Option<&wire::Hold>) -> Option<String> {
    hold.map(|hold| format!("hold_id {}", hold.hold_id))
}

async fn dispatch(api: &Api, topic: &str, payload: &[u8]) -> Answer {
    macro_rules! calls {
        ($($topic:literal $method:ident $request:ident $committed:expr;)+) => {
            match topic {
                $($topic => {
                    let context = |message: &wire::$request| message.context.clone();
                    call(payload, context, |request| LedgerService::$method(api, request), $committed).await
                })+
                other => unreachable!("no handler for topic {other}"),
            }
        };
    }
    calls! {
        "ledger.getAccount" get_account GetAccountRequest no_commit;
        "ledger.listAccounts" list_accounts ListAccountsRequest no_commit;
        "ledger.getSubAccount" get_sub_account GetSubAccountRequest no_commit;
        "ledger.createOperation" create_operation CreateOperationRequest |r| operation_id(r.operation.as_ref());
        "ledger.getOperation" get_operation GetOperationRequest no_commit;
        "ledger.listOperations" list_operations ListOperationsRequest no_commit;
        "ledger.createHold" create_hold CreateHoldRequest |r| hold_id(r.hold.as_ref());
        "ledger.releaseHold" release_hold ReleaseHoldRequest |r| hold_id(r.hold.as_ref());
        "ledger.consumeHold" consume_hold ConsumeHoldRequest |r| {
            let ids = [hold_id(r.hold.as_ref()), operation_id(r.operation.as_ref())];
            Some(ids.into_iter().flatten().collect::<Vec<_>>().join(", "))
        };
        "ledger.finalizeOperation" finalize_operation FinalizeOperationRequest |r| operation_id(r.operation.as_ref());
        "ledger.getBalance" get_balance GetBalanceRequest no_commit;
    }
}

fn reply(delivery: &Delivery, topic: &str, response: &str, answer: Answer) -> Record {
    let request = &delivery.record.event;
    let correlation = delivery
        .record
        .header(CORRELATION)
        .map(str::to_owned)
        .filter(|text| !text.is_empty())
        .unwrap_or(answer.request_id);
    let mut headers = vec![(CORRELATION.to_owned(), correlation)];
    let payload = match answer.result {
        Ok(topic_response) => {
            if topic_response.is_replay {
                headers.push((REPLAYED.to_owned(), "true".to_owned()));
            }
            topic_response.payload
        }
        Err(status) => {
            if status.metadata().contains_key(REPLAYED) {
                headers.push((REPLAYED.to_owned(), "true".to_owned()));
            }
            headers.push(("error-code".to_owned(), code_name(status.code()).to_owned()));
            headers.extend(
                rpc::status::reason(&status).map(|reason| ("error-reason".to_owned(), reason)),
            );
            headers.push(("error-message".to_owned(), status.message().to_owned()));
            Vec::new()
        }
    };
    let event = Event {
        // Derived: a request that is handled again after a crash gets the same reply id.
        id: Uuid::new_v5(&request.id, b"reply"),
        topic: reply_topic(topic),
        key: request.key.clone(),
        type_name: format!("dfa.ledger.v1.{response}"),
        subject: request.subject.clone(),
        source: "ledger".to_owned(),
        correlation_id: request.correlation_id.clone(),
        occurred_at_us: request.occurred_at_us,
        payload,
    };
    Record { event, headers }
}

async fn call<M, R, F>(
    payload: &[u8],
    context: impl Fn(&M) -> Option<RequestContext>,
    method: impl FnOnce(Request<M>) -> F,
    committed: impl Fn(&R) -> Option<String>,
) -> Answer
where
    M: Message + Name + Default,
    R: Message,
    F: Future<Output = Result<Response<R>, Status>>,
{
    let message = match M::decode(payload) {
        Ok(message) => message,
        Err(error) => {
            return Answer {
                request_id: String::new(),
                result: Err(rpc::status::invalid_argument(
                    "value",
                    format!("is no request: {error}"),
                )),
            };
        }
    };
    let request_id = context(&message).map_or_else(String::new, |context| context.request_id);
    // The RPC layer runs this check for calls. Requests on topics do not pass through it.
    if let Err(refused) = proto::checks::check::<M>(payload) {
        return Answer {
            request_id,
            result: Err(refused),
        };
    }
    let mut request = Request::new(message);
    request.extensions_mut().insert(Caller {
        subject: "broker".to_owned(),
        user_id: None,
        roles: Roles::of(&[Role::Service]),
        approval: None,
    });
    let result = method(request).await.map(|response| {
        let is_replay = response.metadata().contains_key(REPLAYED);
        let message = response.into_inner();
        TopicResponse {
            payload: message.encode_to_vec(),
            is_replay,
            committed: committed(&message),
        }
    });
    Answer { request_id, result }
}

/// The contract's name of a code.
fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
