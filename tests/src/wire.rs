//! Unary calls as gRPC-Web, as Connect POST (proto and JSON) and as Connect GET.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage, MethodDescriptor};
use serde_json::Value;

use crate::call::path_of;
use crate::{Platform, Refusal};

/// The answer's message, or the numeric gRPC code and text of a refusal.
pub type Answer = Result<DynamicMessage, (i32, String)>;

/// The descriptors of the contract.
pub fn pool() -> DescriptorPool {
    DescriptorPool::decode(proto::FILE_DESCRIPTOR_SET).expect("the platform's descriptors decode")
}

/// A method by its short name.
pub fn method(pool: &DescriptorPool, name: &str) -> MethodDescriptor {
    let path = path_of(name);
    let (service, method) = path.split_once('/').expect("a path");
    let service = pool
        .get_service_by_name(service)
        .unwrap_or_else(|| panic!("no service {service}"));
    service
        .methods()
        .find(|one| one.name() == method)
        .unwrap_or_else(|| panic!("no method {name}"))
}

/// Every method of the platform's services.
pub fn methods(pool: &DescriptorPool) -> Vec<MethodDescriptor> {
    pool.services()
        .filter(|service| service.full_name().starts_with("dfa."))
        .flat_map(|service| service.methods().collect::<Vec<_>>())
        .collect()
}

/// A message from its JSON form.
pub fn message(descriptor: prost_reflect::MessageDescriptor, json: &Value) -> DynamicMessage {
    DynamicMessage::deserialize(descriptor, json).unwrap_or_else(|error| panic!("{json}: {error}"))
}

/// Sends the request as proto bytes over Connect POST.
pub async fn connect_proto(
    platform: &Platform,
    token: &str,
    name: &str,
    request: &Value,
) -> Answer {
    let method = method(&pool(), name);
    let response = platform
        .http
        .post(format!("{}/{}", platform.url("all"), path_of(name)))
        .bearer_auth(token)
        .header("content-type", "application/proto")
        .header("connect-protocol-version", "1")
        .body(message(method.input(), request).encode_to_vec())
        .send()
        .await
        .expect("an answer");
    connect_answer(&method, response, false).await
}

/// Sends the request as JSON over Connect POST.
pub async fn connect_json(platform: &Platform, token: &str, name: &str, request: &Value) -> Answer {
    let method = method(&pool(), name);
    let post = platform
        .http
        .post(format!("{}/{}", platform.url("all"), path_of(name)));
    let response = post
        .bearer_auth(token)
        .json(request)
        .send()
        .await
        .expect("an answer");
    connect_answer(&method, response, true).await
}

/// Sends the request in the URL of a Connect GET.
pub async fn connect_get(platform: &Platform, token: &str, name: &str, request: &Value) -> Answer {
    let method = method(&pool(), name);
    let bytes = message(method.input(), request).encode_to_vec();
    let encoded = base64::engine::general_purpose::URL_SAFE_NO_PAD.encode(bytes);
    let url = format!(
        "{}/{}?connect=v1&encoding=proto&base64=1&message={encoded}",
        platform.url("all"),
        path_of(name)
    );
    let response = platform
        .http
        .get(url)
        .bearer_auth(token)
        .send()
        .await
        .expect("an answer");
    connect_answer(&method, response, false).await
}

async fn connect_answer(
    method: &MethodDescriptor,
    response: reqwest::Response,
    json: bool,
) -> Answer {
    let status = response.status();
    let kind = response
        .headers()
        .get("content-type")
        .and_then(|value| value.to_str().ok())
        .unwrap_or_default()
        .to_owned();
    let body = response.bytes().await.expect("a body");
    if !status.is_success() {
        assert!(
            kind.starts_with("application/json"),
            "errors of unary Connect calls are JSON, not {kind}"
        );
        let refusal = Refusal::read(
            status.as_u16(),
            serde_json::from_slice(&body).expect("JSON"),
        );
        return Err((code_of(&refusal.code), refusal.message));
    }
    Ok(if json {
        assert!(kind.starts_with("application/json"), "{kind}");
        message(
            method.output(),
            &serde_json::from_slice(&body).expect("JSON"),
        )
    } else {
        assert!(kind.starts_with("application/proto"), "{kind}");
        DynamicMessage::decode(method.output(), body).expect("proto")
    })
}

/// Sends the request as gRPC-Web. The answer has frames and trailers.
pub async fn grpc_web(platform: &Platform, token: &str, name: &str, request: &Value) -> Answer {
    let method = method(&pool(), name);
    let bytes = message(method.input(), request).encode_to_vec();
    let mut body = vec![0];
    body.extend(u32::try_from(bytes.len()).expect("small").to_be_bytes());
    body.extend(bytes);
    let response = platform
        .http
        .post(format!("{}/{}", platform.url("all"), path_of(name)))
        .bearer_auth(token)
        .header("content-type", "application/grpc-web+proto")
        .header("x-grpc-web", "1")
        .body(body)
        .send()
        .await
        .expect("an answer");
    assert_eq!(response.status().as_u16(), 200);
    let header = |name: &str| {
        response
            .headers()
            .get(name)
            .and_then(|value| value.to_str().ok())
            .map(str::to_owned)
    };
    let mut trailers = vec![
        ("grpc-status".to_owned(), header("grpc-status")),
        ("grpc-message".to_owned(), header("grpc-message")),
    ];
    let body = response.bytes().await.expect("a body");
    let mut rest = &body[..];
    let mut answer = None;
    while let [flags, a, b, c, d, tail @ ..] = rest {
        let (frame, next) = tail.split_at(u32::from_be_bytes([*a, *b, *c, *d]) as usize);
        rest = next;
        if flags & 0x80 == 0 {
            answer = Some(DynamicMessage::decode(method.output(), frame).expect("proto"));
        } else {
            for line in std::str::from_utf8(frame).expect("text").lines() {
                if let Some((name, value)) = line.split_once(':') {
                    trailers.push((name.trim().to_owned(), Some(value.trim().to_owned())));
                }
            }
        }
    }
    let find = |wanted: &str| {
        trailers
            .iter()
            .rev()
            .find(|(name, value)| name == wanted && value.is_some())
            .and_then(|(_, value)| value.clone())
    };
    match find("grpc-status").as_deref() {
        Some("0") => Ok(answer.expect("a message before the trailers")),
        Some(code) => Err((
            code.parse().expect("a number"),
            percent_decoded(&find("grpc-message").unwrap_or_default()),
        )),
        None => panic!("no grpc-status: {trailers:?}"),
    }
}

fn percent_decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let hex = bytes
            .get(at + 1..at + 3)
            .and_then(|hex| std::str::from_utf8(hex).ok());
        match hex
            .filter(|_| bytes[at] == b'%')
            .and_then(|hex| u8::from_str_radix(hex, 16).ok())
        {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// gRPC number of a Connect code's name.
pub fn code_of(name: &str) -> i32 {
    const NAMES: [&str; 16] = [
        "canceled",
        "unknown",
        "invalid_argument",
        "deadline_exceeded",
        "not_found",
        "already_exists",
        "permission_denied",
        "resource_exhausted",
        "failed_precondition",
        "aborted",
        "out_of_range",
        "unimplemented",
        "internal",
        "unavailable",
        "data_loss",
        "unauthenticated",
    ];
    let at = NAMES
        .iter()
        .position(|one| *one == name)
        .unwrap_or_else(|| panic!("no code {name}"));
    i32::try_from(at).expect("small") + 1
}

/// Encodes a detail's value as a Connect error does: base64 without padding.
pub fn detail(bytes: &[u8]) -> String {
    STANDARD_NO_PAD.encode(bytes)
}
