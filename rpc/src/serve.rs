//! One port: gRPC, gRPC-Web, Connect, HTTP reads, health, metrics, reflection; HTTP/1.1 and h2c.
//!
//! ```text
//! connection -> CORS -> span -> access -+- /health /livez /readyz /metrics
//!                                       +- HTTP reads of the services
//!                                       +- /package.Service/Method -+- application/grpc*  -> gRPC-Web -> observe -> tonic
//!                                                                   +- everything else    -> Connect  -> observe -> tonic
//! ```
//!
//! A port with one service has that service's HTTP reads at the root; a port with several has them under `/<service name>/`.
//! Shutdown: no new connections, running calls get [`DRAIN_MS_MAX`], then they are cut.

use std::{sync::Arc, time::Duration};

use axum::{
    Json, Router,
    extract::{DefaultBodyLimit, Request},
    http::{HeaderName, StatusCode},
    middleware::{from_fn, from_fn_with_state, map_request, map_response},
    response::{IntoResponse, Response},
    routing::get,
};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::{conn::auto, graceful::GracefulShutdown},
    service::TowerToHyperService,
};
use tokio::{net::TcpListener, task::JoinSet};
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic_health::{ServingStatus, server::HealthReporter};
use tonic_web::GrpcWebLayer;
use tower::ServiceExt;
use tower_http::cors::{AllowHeaders, Any, CorsLayer};

use crate::{
    Authenticator, Error, Health, MESSAGE_BYTES_MAX, MetricsHandle, access, connect,
    contract::Contract,
    drain,
    json::{self, HttpError},
    observe, roles, status,
};

/// How long running calls may go on after shutdown was asked for, in milliseconds.
pub const DRAIN_MS_MAX: u64 = 3_000;

/// How long a connection may wait for the next request head, in milliseconds. Longer than clients keep idle connections as a rule: one that
/// is closed from here while a client reuses it costs that client a call.
const HEADER_READ_TIMEOUT_MS: u64 = 120_000;

/// What a service room hands over to be served.
pub struct Service {
    /// Second part of its package: `ledger` of `platform.ledger.v1`.
    pub name: &'static str,
    /// RPC services, without access layer.
    pub routes: Routes,
    /// HTTP diagnostic reads (and the bank's webhook), paths as in the specification.
    pub http: Router,
    pub health: Health,
}

/// Serves the services on one port until `shutdown` is cancelled and the port is drained.
///
/// # Errors
/// [`Error::Listener`], [`Error::Reflection`].
pub async fn serve(
    listener: TcpListener,
    services: Vec<Service>,
    auth: Authenticator,
    metrics: MetricsHandle,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let healths: Vec<Health> = services
        .iter()
        .map(|service| service.health.clone())
        .collect();
    let alone = services.len() == 1;
    let (reporter, health_server) = tonic_health::server::health_reporter();
    let mut served = vec!["grpc.health.v1.Health".to_owned()];
    let mut rpc = Router::new().merge(router_of(Routes::new(health_server)));
    let mut http = Router::new();
    for service in services {
        let names = rpc_services(service.name);
        tokio::spawn(report(
            reporter.clone(),
            names.clone(),
            service.health.clone(),
            shutdown.clone(),
        ));
        served.extend(names);
        rpc = rpc.merge(router_of(service.routes));
        http = if alone {
            http.merge(service.http)
        } else {
            http.nest(&format!("/{}", service.name), service.http)
        };
    }
    rpc = rpc.merge(reflection(&served)?);

    let protocols = protocols(Contract::platform(), rpc, MESSAGE_BYTES_MAX);
    let app = Router::new()
        .merge(operations(healths, metrics, shutdown.clone()))
        .merge(
            http.layer(DefaultBodyLimit::max(MESSAGE_BYTES_MAX))
                .layer(map_response(json::plain_errors))
                .layer(from_fn(observe::observe_http)),
        )
        .fallback(move |request: Request| {
            let protocols = protocols.clone();
            async move {
                if !roles::is_rpc_path(request.uri().path()) {
                    let missing = status::not_found("PATH_NOT_FOUND", "Path not found");
                    return HttpError(missing).into_response();
                }
                match protocols.oneshot(request).await {
                    Ok(response) => response,
                    Err(never) => match never {},
                }
            }
        })
        .layer(from_fn_with_state(auth, access::check))
        .layer(cors());
    listen(listener, app, shutdown).await
}

/// The protocol layer alone: RPC routes of `contract` as gRPC, gRPC-Web and Connect. Knows nothing of callers.
pub fn protocols(contract: Arc<Contract>, rpc: Router, message_bytes_max: usize) -> Router {
    let bounds = observe::Bounds {
        contract: contract.clone(),
        message_bytes_max,
    };
    let rpc = rpc
        .layer(from_fn_with_state(bounds, observe::observe))
        .with_state(());
    let grpc = rpc.clone().layer(GrpcWebLayer::new()).with_state(());
    let connect = connect::service(contract, rpc, message_bytes_max);
    Router::new().fallback(move |request: Request| {
        let (grpc, connect) = (grpc.clone(), connect.clone());
        async move {
            let answered = if connect::is_grpc(request.headers()) {
                if let Some(refusal) = connect::not_grpc(&request) {
                    return refusal;
                }
                grpc.oneshot(request).await
            } else {
                connect.oneshot(request).await
            };
            match answered {
                Ok(response) => response,
                Err(never) => match never {},
            }
        }
    })
}

/// Accepts connections until `shutdown`, then drains for at most [`DRAIN_MS_MAX`].
///
/// # Errors
/// None at present: a failing accept is logged and retried.
pub async fn listen(
    listener: TcpListener,
    app: Router,
    shutdown: CancellationToken,
) -> Result<(), Error> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(hyper_util::rt::TokioTimer::new())
        .header_read_timeout(Duration::from_millis(HEADER_READ_TIMEOUT_MS));
    builder
        .http2()
        .timer(hyper_util::rt::TokioTimer::new())
        .keep_alive_interval(Duration::from_secs(30))
        .max_concurrent_streams(1_000);
    let app = app.layer(map_request(drain::layer)).with_state(());
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next() => continue,
            () = shutdown.cancelled() => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, or the peer is gone already: neither is a reason to stop serving.
                tracing::warn!(%error, "accept failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let _ = stream.set_nodelay(true);
        let service = TowerToHyperService::new(app.clone());
        let connection = builder
            .serve_connection_with_upgrades(TokioIo::new(stream), service)
            .into_owned();
        let connection = graceful.watch(connection);
        connections.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = %error, "connection ended");
            }
        });
    }
    drop(listener);
    let drain = Duration::from_millis(DRAIN_MS_MAX);
    if tokio::time::timeout(drain, graceful.shutdown())
        .await
        .is_err()
    {
        tracing::warn!(connections = connections.len(), "calls cut at shutdown");
    }
    connections.shutdown().await;
    Ok(())
}

/// A service's routes without their fallback, so that they can be merged.
fn router_of(routes: Routes) -> Router {
    routes.into_axum_router().reset_fallback()
}

/// Full names of the RPC services in the package of `name`.
fn rpc_services(name: &str) -> Vec<String> {
    Contract::platform()
        .pool()
        .services()
        .filter(|service| service.full_name().split('.').nth(1) == Some(name))
        .map(|service| service.full_name().to_owned())
        .collect()
}

fn reflection(served: &[String]) -> Result<Router, Error> {
    let failed = |error: tonic_reflection::server::Error| Error::Reflection(error.to_string());
    let builder = || {
        let builder = tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET);
        served
            .iter()
            .fold(builder, |builder, name| builder.with_service_name(name))
    };
    let v1 = builder().build_v1().map_err(failed)?;
    let v1alpha = builder().build_v1alpha().map_err(failed)?;
    Ok(router_of(Routes::new(v1).add_service(v1alpha)))
}

/// Keeps grpc.health in step with [`Health`].
async fn report(
    reporter: HealthReporter,
    names: Vec<String>,
    health: Health,
    shutdown: CancellationToken,
) {
    let mut failing = health.watch();
    loop {
        let status = if failing.borrow_and_update().is_empty() && !shutdown.is_cancelled() {
            ServingStatus::Serving
        } else {
            ServingStatus::NotServing
        };
        for name in &names {
            reporter.set_service_status(name, status).await;
        }
        if shutdown.is_cancelled() {
            return;
        }
        tokio::select! {
            changed = failing.changed() => if changed.is_err() { return },
            () = shutdown.cancelled() => {}
        }
    }
}

/// `/health`, `/livez`, `/readyz`, `/metrics` (D41).
fn operations(healths: Vec<Health>, metrics: MetricsHandle, shutdown: CancellationToken) -> Router {
    let health = move || {
        let failing: Vec<_> = healths
            .iter()
            .flat_map(|health| {
                let service = health.name().to_owned();
                health.failing().into_iter().map(move |(part, reason)| {
                    serde_json::json!({ "service": service, "part": part, "reason": reason })
                })
            })
            .collect();
        if failing.is_empty() {
            return (StatusCode::OK, Json(serde_json::json!({ "status": "ok" }))).into_response();
        }
        let body = serde_json::json!({ "status": "failing", "failing": failing });
        (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response()
    };
    let ready = health.clone();
    let ready = move || -> Response {
        if shutdown.is_cancelled() {
            let body = serde_json::json!({ "status": "stopping" });
            return (StatusCode::SERVICE_UNAVAILABLE, Json(body)).into_response();
        }
        ready()
    };
    let render = move || {
        let headers = [("content-type", "text/plain; version=0.0.4; charset=utf-8")];
        (headers, metrics.render()).into_response()
    };
    Router::new()
        .route("/health", get(async move || health()))
        .route("/readyz", get(async move || ready()))
        .route(
            "/livez",
            get(async || Json(serde_json::json!({ "status": "ok" }))),
        )
        .route("/metrics", get(async move || render()))
}

/// Browsers may call from any origin: credentials are bearer tokens, never cookies.
fn cors() -> CorsLayer {
    const EXPOSED: [&str; 6] = [
        "grpc-status",
        "grpc-message",
        "grpc-status-details-bin",
        "connect-content-encoding",
        "idempotent-replayed",
        "x-correlation-id",
    ];
    CorsLayer::new()
        .allow_origin(Any)
        .allow_methods(Any)
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED.map(HeaderName::from_static))
        .max_age(Duration::from_secs(7_200))
}
