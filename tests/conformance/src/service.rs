//! The suite's service: returns the response that each request defines, with the received request.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};
use prost::{Message, Name};
use prost_types::Any;
use rpc::{Trailers, connect::GetQuery};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Extensions, Request, Response, Status, Streaming, metadata::MetadataMap};

use crate::pb::{
    self, ConformancePayload, StreamResponseDefinition, UnaryResponseDefinition,
    conformance_payload::{ConnectGetInfo, RequestInfo},
    conformance_service_server::ConformanceService,
    unary_response_definition::Response as Wanted,
};

/// Namespace of the suite's messages in an `Any`.
const PACKAGE: &str = "connectrpc.conformance.v1";

pub struct Service;

/// Metadata of a request, known before its messages.
struct Received {
    headers: Vec<pb::Header>,
    timeout_ms: Option<i64>,
    get: Option<ConnectGetInfo>,
}

impl Received {
    fn new(metadata: &MetadataMap, extensions: &Extensions) -> Self {
        let headers = metadata.clone().into_headers();
        let timeout_ms = headers
            .get("grpc-timeout")
            .and_then(|value| value.to_str().ok())
            .and_then(timeout_ms);
        Received {
            headers: from_headers(&headers),
            timeout_ms,
            get: extensions.get::<GetQuery>().map(|query| ConnectGetInfo {
                query_params: query_params(&query.0),
            }),
        }
    }

    fn info(&self, requests: Vec<Any>) -> RequestInfo {
        RequestInfo {
            request_headers: self.headers.clone(),
            timeout_ms: self.timeout_ms,
            requests,
            connect_get_info: self.get.clone(),
        }
    }
}

fn timeout_ms(text: &str) -> Option<i64> {
    let (digits, unit) = text.split_at(text.len().checked_sub(1)?);
    let amount: i64 = digits.parse().ok()?;
    Some(match unit {
        "H" => amount * 3_600_000,
        "M" => amount * 60_000,
        "S" => amount * 1_000,
        "m" => amount,
        "u" => (amount + 999) / 1_000,
        _ => (amount + 999_999) / 1_000_000,
    })
}

fn query_params(query: &str) -> Vec<pb::Header> {
    query
        .split('&')
        .filter_map(|pair| pair.split_once('='))
        .map(|(name, value)| pb::Header {
            name: name.to_owned(),
            value: vec![value.to_owned()],
        })
        .collect()
}

fn from_headers(headers: &HeaderMap) -> Vec<pb::Header> {
    headers
        .keys()
        .map(|name| pb::Header {
            name: name.to_string(),
            value: headers
                .get_all(name)
                .iter()
                .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned())
                .collect(),
        })
        .collect()
}

fn to_headers(headers: &[pb::Header]) -> HeaderMap {
    let mut map = HeaderMap::new();
    for header in headers {
        let name = HeaderName::try_from(&header.name).expect("the suite sends valid names");
        for value in &header.value {
            let value = HeaderValue::try_from(value).expect("the suite sends valid values");
            map.append(name.clone(), value);
        }
    }
    map
}

fn any<M: Message + Name>(message: &M) -> Any {
    Any {
        type_url: format!("type.googleapis.com/{PACKAGE}.{}", M::NAME),
        value: message.encode_to_vec(),
    }
}

/// The error that the request defines, with the request info among its details.
fn error(
    error: &pb::Error,
    info: Option<RequestInfo>,
    headers: &[pb::Header],
    trailers: &[pb::Header],
) -> Status {
    let message = error.message.clone().unwrap_or_default();
    let mut details = error.details.clone();
    details.extend(info.map(|info| Any {
        type_url: format!("type.googleapis.com/{PACKAGE}.ConformancePayload.RequestInfo"),
        value: info.encode_to_vec(),
    }));
    let status = tonic_types::pb::Status {
        code: error.code,
        message: message.clone(),
        details,
    };
    let mut metadata = to_headers(headers);
    for (name, value) in &to_headers(trailers) {
        metadata.append(name, value.clone());
    }
    Status::with_details_and_metadata(
        Code::from_i32(error.code),
        message,
        status.encode_to_vec().into(),
        MetadataMap::from_headers(metadata),
    )
}

fn decorate<T>(
    mut response: Response<T>,
    headers: &[pb::Header],
    trailers: &[pb::Header],
) -> Response<T> {
    *response.metadata_mut() = MetadataMap::from_headers(to_headers(headers));
    response
        .extensions_mut()
        .insert(Trailers(to_headers(trailers)));
    response
}

async fn unary_response(
    definition: Option<UnaryResponseDefinition>,
    info: RequestInfo,
) -> Result<Response<ConformancePayload>, Status> {
    let definition = definition.unwrap_or_default();
    tokio::time::sleep(Duration::from_millis(definition.response_delay_ms.into())).await;
    let (headers, trailers) = (&definition.response_headers, &definition.response_trailers);
    let data = match definition.response {
        Some(Wanted::Error(wanted)) => return Err(error(&wanted, Some(info), headers, trailers)),
        Some(Wanted::ResponseData(data)) => data,
        None => Vec::new(),
    };
    let payload = ConformancePayload {
        data,
        request_info: Some(info),
    };
    Ok(decorate(Response::new(payload), headers, trailers))
}

type Sender<T> = mpsc::Sender<Result<T, Status>>;
type Stream<T> = ReceiverStream<Result<T, Status>>;

/// Sends one message of a stream after its delay; false if the caller has ended the stream.
async fn send<T>(
    to: &Sender<T>,
    definition: &StreamResponseDefinition,
    payload: ConformancePayload,
    wrap: fn(ConformancePayload) -> T,
) -> bool {
    tokio::time::sleep(Duration::from_millis(definition.response_delay_ms.into())).await;
    to.send(Ok(wrap(payload))).await.is_ok()
}

/// Sends all messages and the error of the definition. The first message contains `info`; without a
/// message the error does.
async fn send_all<T>(
    to: Sender<T>,
    definition: StreamResponseDefinition,
    mut info: Option<RequestInfo>,
    wrap: fn(ConformancePayload) -> T,
) {
    for data in &definition.response_data {
        let payload = ConformancePayload {
            data: data.clone(),
            request_info: info.take(),
        };
        if !send(&to, &definition, payload, wrap).await {
            return;
        }
    }
    finish(&to, &definition, info).await;
}

async fn finish<T>(
    to: &Sender<T>,
    definition: &StreamResponseDefinition,
    info: Option<RequestInfo>,
) {
    if let Some(wanted) = &definition.error {
        let _ = to.send(Err(error(wanted, info, &[], &[]))).await;
    }
}

fn open<T>(
    definition: &StreamResponseDefinition,
    stream: mpsc::Receiver<Result<T, Status>>,
) -> Response<Stream<T>> {
    decorate(
        Response::new(ReceiverStream::new(stream)),
        &definition.response_headers,
        &definition.response_trailers,
    )
}

#[tonic::async_trait]
impl ConformanceService for Service {
    async fn unary(
        &self,
        request: Request<pb::UnaryRequest>,
    ) -> Result<Response<pb::UnaryResponse>, Status> {
        let received = Received::new(request.metadata(), request.extensions());
        let message = request.into_inner();
        let info = received.info(vec![any(&message)]);
        let response = unary_response(message.response_definition, info).await?;
        Ok(response.map(|payload| pb::UnaryResponse {
            payload: Some(payload),
        }))
    }

    async fn idempotent_unary(
        &self,
        request: Request<pb::IdempotentUnaryRequest>,
    ) -> Result<Response<pb::IdempotentUnaryResponse>, Status> {
        let received = Received::new(request.metadata(), request.extensions());
        let message = request.into_inner();
        let info = received.info(vec![any(&message)]);
        let response = unary_response(message.response_definition, info).await?;
        Ok(response.map(|payload| pb::IdempotentUnaryResponse {
            payload: Some(payload),
        }))
    }

    async fn unimplemented(
        &self,
        _: Request<pb::UnimplementedRequest>,
    ) -> Result<Response<pb::UnimplementedResponse>, Status> {
        Err(Status::unimplemented(
            "not implemented, as the suite expects",
        ))
    }

    async fn client_stream(
        &self,
        request: Request<Streaming<pb::ClientStreamRequest>>,
    ) -> Result<Response<pb::ClientStreamResponse>, Status> {
        let received = Received::new(request.metadata(), request.extensions());
        let mut messages = request.into_inner();
        let mut definition = None;
        let mut requests = Vec::new();
        while let Some(message) = messages.message().await? {
            requests.push(any(&message));
            if requests.len() == 1 {
                definition = message.response_definition;
            }
        }
        let response = unary_response(definition, received.info(requests)).await?;
        Ok(response.map(|payload| pb::ClientStreamResponse {
            payload: Some(payload),
        }))
    }

    type ServerStreamStream = Stream<pb::ServerStreamResponse>;

    async fn server_stream(
        &self,
        request: Request<pb::ServerStreamRequest>,
    ) -> Result<Response<Self::ServerStreamStream>, Status> {
        let received = Received::new(request.metadata(), request.extensions());
        let message = request.into_inner();
        let info = received.info(vec![any(&message)]);
        let definition = message.response_definition.unwrap_or_default();
        let (to, stream) = mpsc::channel(1);
        let response = open(&definition, stream);
        tokio::spawn(send_all(to, definition, Some(info), |payload| {
            pb::ServerStreamResponse {
                payload: Some(payload),
            }
        }));
        Ok(response)
    }

    type BidiStreamStream = Stream<pb::BidiStreamResponse>;

    async fn bidi_stream(
        &self,
        request: Request<Streaming<pb::BidiStreamRequest>>,
    ) -> Result<Response<Self::BidiStreamStream>, Status> {
        let received = Received::new(request.metadata(), request.extensions());
        let mut messages = request.into_inner();
        let Some(first) = messages.message().await? else {
            let (_, stream) = mpsc::channel(1);
            return Ok(Response::new(ReceiverStream::new(stream)));
        };
        let definition = first.response_definition.clone().unwrap_or_default();
        let full_duplex = first.full_duplex;
        let mut requests = vec![any(&first)];
        if !full_duplex {
            while let Some(message) = messages.message().await? {
                requests.push(any(&message));
            }
            let (to, stream) = mpsc::channel(1);
            let response = open(&definition, stream);
            let info = received.info(requests);
            tokio::spawn(send_all(to, definition, Some(info), wrap_bidi));
            return Ok(response);
        }
        let (to, stream) = mpsc::channel(1);
        let response = open(&definition, stream);
        tokio::spawn(ping_pong(to, definition, received, requests, messages));
        Ok(response)
    }
}

fn wrap_bidi(payload: ConformancePayload) -> pb::BidiStreamResponse {
    pb::BidiStreamResponse {
        payload: Some(payload),
    }
}

/// Serves a full-duplex stream: a response per request while there are both, then the remaining
/// responses.
async fn ping_pong(
    to: Sender<pb::BidiStreamResponse>,
    definition: StreamResponseDefinition,
    received: Received,
    mut requests: Vec<Any>,
    mut messages: Streaming<pb::BidiStreamRequest>,
) {
    let mut sent = 0;
    while let Some(data) = definition.response_data.get(sent) {
        let info = match sent {
            0 => Some(received.info(std::mem::take(&mut requests))),
            _ if requests.is_empty() => None,
            _ => Some(RequestInfo {
                requests: std::mem::take(&mut requests),
                ..RequestInfo::default()
            }),
        };
        let payload = ConformancePayload {
            data: data.clone(),
            request_info: info,
        };
        if !send(&to, &definition, payload, wrap_bidi).await {
            return;
        }
        sent += 1;
        match messages.message().await {
            Ok(Some(message)) => requests.push(any(&message)),
            Ok(None) => break,
            Err(status) => {
                let _ = to.send(Err(status)).await;
                return;
            }
        }
    }
    for data in definition.response_data.iter().skip(sent) {
        let payload = ConformancePayload {
            data: data.clone(),
            request_info: None,
        };
        if !send(&to, &definition, payload, wrap_bidi).await {
            return;
        }
        sent += 1;
    }
    let info = (sent == 0).then(|| received.info(requests));
    finish(&to, &definition, info).await;
}
