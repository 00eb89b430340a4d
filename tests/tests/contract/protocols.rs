//! A method returns the same answer in every protocol; each port serves its services.

use prost::Message;
use prost_reflect::DynamicMessage;
use proto::cfa::v1 as cfa;
use proto::cfa::v1::cfa_registry_service_client::CfaRegistryServiceClient;
use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR};
use tests::shared::{platform, run};
use tests::wire::{self, Answer, methods, pool};
use tokio_stream::StreamExt;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServiceResponse};

const NAME: &str = "cfa.GetInstrument";

/// Sends the same request in every protocol.
async fn everywhere(token: &str, instrument: &str) -> Vec<(&'static str, Answer)> {
    let platform = platform().await;
    let request = json!({ "context": { "requestId": "r" }, "instrumentId": instrument });
    vec![
        ("gRPC", grpc(token, instrument).await),
        (
            "gRPC-Web",
            wire::grpc_web(platform, token, NAME, &request).await,
        ),
        (
            "Connect, proto",
            wire::connect_proto(platform, token, NAME, &request).await,
        ),
        (
            "Connect, JSON",
            wire::connect_json(platform, token, NAME, &request).await,
        ),
        (
            "Connect, GET",
            wire::connect_get(platform, token, NAME, &request).await,
        ),
    ]
}

async fn grpc(token: &str, instrument: &str) -> Answer {
    let channel = rpc::Channel::remote(&platform().await.url("all"), token).expect("an address");
    let request = cfa::GetInstrumentRequest {
        context: None,
        instrument_id: instrument.to_owned(),
    };
    match CfaRegistryServiceClient::new(channel)
        .get_instrument(request)
        .await
    {
        Ok(answer) => {
            let output = wire::method(&pool(), NAME).output();
            Ok(
                DynamicMessage::decode(output, &*answer.into_inner().encode_to_vec())
                    .expect("proto"),
            )
        }
        Err(status) => Err((status.code() as i32, status.message().to_owned())),
    }
}

#[test]
fn r001_one_method_answers_the_same_in_every_protocol() {
    run(async {
        let bond = platform().await.bond().await;
        let json = |answer: &Answer| {
            answer
                .as_ref()
                .map(|message| serde_json::to_value(message).expect("JSON"))
                .map_err(Clone::clone)
        };
        let answers = everywhere(AUDITOR, &bond).await;
        let first = json(&answers[0].1).expect("gRPC succeeds");
        assert_eq!(first["instrument"]["instrumentId"], json!(bond));
        for (protocol, answer) in &answers {
            assert_eq!(json(answer), Ok(first.clone()), "{protocol}");
        }
    });
}

// rows: R001 R339
#[test]
fn r001_refusals_are_the_same_in_every_protocol() {
    run(async {
        for (protocol, answer) in everywhere(AUDITOR, "NO-SUCH-THING").await {
            assert_eq!(
                answer,
                Err((5, "Instrument not found".to_owned())),
                "{protocol}"
            );
        }
        for (protocol, answer) in everywhere("sandbox.root", "CFA-RUB").await {
            assert_eq!(
                answer,
                Err((16, "Credentials are not valid".to_owned())),
                "{protocol}"
            );
        }
    });
}

// rows: R001 R325
#[test]
fn r325_every_method_is_served_on_common_and_own_port() {
    run(async {
        let platform = platform().await;
        for method in methods(&pool()) {
            let path = format!("{}/{}", method.parent_service().full_name(), method.name());
            let url = |listener: &str| format!("{}/{path}", platform.url(listener));
            let http = tests::process::client();
            // A known path refuses a call without a credential. An unknown one is unimplemented.
            let refused = http
                .post(url("all"))
                .json(&json!({}))
                .send()
                .await
                .expect("an answer");
            assert_eq!(refused.status().as_u16(), 401, "{path}");
            let unknown = http
                .post(url("all") + "Not")
                .bearer_auth(OPERATOR)
                .json(&json!({}))
                .send()
                .await;
            assert_eq!(
                unknown.expect("an answer").status().as_u16(),
                501,
                "{path}Not"
            );
        }
        for (listener, name) in [
            ("ledger", "ledger.GetTrialBalance"),
            ("cfa", "cfa.ListInstruments"),
            ("payments", "payments.ListPayouts"),
            ("market", "market.GetMarketStatus"),
            ("identity", "identity.ListUsers"),
            ("approvals", "approvals.ListApprovals"),
            ("chain", "chain.GetBlock"),
        ] {
            let url = format!("{}/{}", platform.url(listener), tests::path_of(name));
            let answer = tests::process::client()
                .post(url)
                .bearer_auth(AUDITOR)
                .json(&json!({}))
                .send()
                .await;
            assert_eq!(
                answer.expect("an answer").status().as_u16(),
                200,
                "{name} on {listener}"
            );
        }
    });
}

#[test]
fn r325_reflection_lists_every_service_of_the_contract() {
    run(async {
        let channel =
            rpc::Channel::remote(&platform().await.url("all"), AUDITOR).expect("an address");
        let ask = ServerReflectionRequest {
            host: String::new(),
            message_request: Some(MessageRequest::ListServices(String::new())),
        };
        let answers = ServerReflectionClient::new(channel)
            .server_reflection_info(tokio_stream::once(ask))
            .await;
        let answer = answers
            .expect("reflection")
            .into_inner()
            .next()
            .await
            .expect("one answer")
            .expect("an answer");
        let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else {
            panic!("reflection returned no list of services")
        };
        let listed: Vec<String> = list
            .service
            .into_iter()
            .map(|ServiceResponse { name }| name)
            .collect();
        for service in pool()
            .services()
            .filter(|service| service.full_name().starts_with("dfa."))
        {
            assert!(
                listed.iter().any(|name| name == service.full_name()),
                "{listed:?} lacks {}",
                service.full_name()
            );
            let parts: Vec<&str> = service.full_name().split('.').collect();
            assert!(
                matches!(parts[..], ["dfa", _, "v1", _]),
                "{}",
                service.full_name()
            );
        }
    });
}

// rows: R001
#[test]
fn r001_unknown_json_fields_and_wrong_types_are_bad_requests() {
    run(async {
        let platform = platform().await;
        for request in [
            json!({ "instrumentId": 5 }),
            json!({ "nothingLikeThis": "x" }),
        ] {
            let refusal = platform.refused(AUDITOR, NAME, request).await;
            assert_eq!(
                (refusal.http, refusal.code.as_str()),
                (400, "invalid_argument"),
                "{refusal:?}"
            );
        }
        assert_eq!(platform.get("all", "/nothing", OPERATOR).await.0, 404);
        let (status, body): (u16, Value) = platform.get("all", "/health", "").await;
        assert_eq!((status, body), (200, json!({ "status": "ok" })));
    });
}
