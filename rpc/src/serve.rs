//! One port: gRPC, gRPC-Web, Connect, HTTP reads, health, metrics, reflection; HTTP/1.1 and h2c.
//!
//! ```text
//! connection -> CORS -> guard -> access -> rates -+- /health /livez /readyz /metrics
//!                                                 +- HTTP reads of the services
//!                                                 +- /package.Service/Method -+
//!     +-----------------------------------------------------------------------+
//!     +- application/grpc*  -> gRPC-Web -> observe -> tonic
//!     +- everything else    -> Connect  -> observe -> tonic
//! ```
//!
//! A port with one service has that service's HTTP reads at the root, a port with several under
//! `/<service name>/`. [`Limits`] has the sizes and timeouts. After shutdown the port accepts no
//! connection. Running calls may finish within [`DRAIN_MS_MAX`], then they are cut.

use futures::future::BoxFuture;
use std::{convert::Infallible, future::Future, io, pin::pin, sync::Arc, time::Duration};

use axum::{
    Json, Router,
    body::Body,
    extract::{DefaultBodyLimit, Request, State},
    http::{HeaderName, StatusCode},
    middleware::{Next, from_fn, from_fn_with_state, map_request, map_response},
    response::{IntoResponse, Response},
    routing::{MethodRouter, get},
};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rustix::net::sockopt;
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::Instant,
};
use tokio_util::sync::CancellationToken;
use tonic::{Status, service::Routes};
use tonic_health::{ServingStatus, server::HealthReporter};
use tonic_web::GrpcWebLayer;
use tower::ServiceExt;
use tower_http::cors::{AllowHeaders, Any, CorsLayer};

use crate::{
    Authenticator, CallRates, ConnectionBudget, DEADLINE_MS_DEFAULT, Error, Health,
    MESSAGE_BYTES_MAX, MetricsHandle, access, connect,
    contract::{Contract, PORT_SETS},
    drain, guard,
    idle::{Activity, Answer},
    json::{self, HttpError},
    observe, rates, roles, status,
};

/// Time for running calls to finish after shutdown, in milliseconds.
pub const DRAIN_MS_MAX: u64 = 3_000;

/// Time in which a request may still arrive after the close notice to an idle connection.
const CLOSE_GRACE: Duration = Duration::from_secs(1);
/// Pause after a failed accept. Failures are logged once per [`ACCEPT_LOG_EVERY`].
const ACCEPT_RETRY: Duration = Duration::from_millis(50);
const ACCEPT_LOG_EVERY: Duration = Duration::from_secs(1);

/// Sizes and timeouts of a port.
#[derive(Clone, Debug)]
pub struct Limits {
    /// From accept to the complete head of the first request, on HTTP/1.1 and HTTP/2.
    pub first_request: Duration,
    /// Between two requests. A request being answered is not idle, nor is a stream.
    pub idle: Duration,
    /// While the peer's kernel acknowledges neither keep-alive probes nor sent data. An unread
    /// stream counts too.
    pub silence: Duration,
    /// For the body of a request with one message.
    pub body: Duration,
    /// For an HTTP read, including its body. RPCs have their own deadline.
    pub http: Duration,
    pub connections: ConnectionBudget,
    pub rates: CallRates,
}

impl Default for Limits {
    fn default() -> Self {
        let deadline = Duration::from_millis(DEADLINE_MS_DEFAULT);
        Limits {
            first_request: deadline,
            idle: Duration::from_secs(60),
            silence: Duration::from_secs(60),
            body: deadline,
            http: deadline,
            connections: ConnectionBudget::for_process(),
            rates: CallRates::default(),
        }
    }
}

/// The parts of a service to be served.
pub struct Service {
    /// Second part of its package: `ledger` of `dfa.ledger.v1`.
    pub name: &'static str,
    /// RPC services, without access layer.
    pub routes: Routes,
    /// HTTP diagnostic reads (and the bank's webhook), with the paths of the specification.
    pub http: Router,
    pub health: Health,
}

/// Serves the services on one port until `shutdown` is cancelled and the port is drained.
///
/// # Errors
/// [`Error::Listener`], [`Error::Reflection`].
pub fn serve(
    listener: TcpListener,
    services: Vec<Service>,
    auth: Authenticator,
    metrics: MetricsHandle,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<(), Error>> {
    Box::pin(async move {
        serve_within(
            listener,
            services,
            auth,
            metrics,
            Limits::default(),
            shutdown,
        )
        .await
    })
}

/// Like [`serve`], with other limits.
///
/// # Errors
/// As [`serve`].
pub fn serve_within(
    listener: TcpListener,
    services: Vec<Service>,
    auth: Authenticator,
    metrics: MetricsHandle,
    limits: Limits,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<(), Error>> {
    Box::pin(async move {
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
            let named = from_fn_with_state(service.name, observe::observe_http);
            let reads = service.http.layer(named);
            http = if alone {
                http.merge(reads)
            } else {
                http.nest(&format!("/{}", service.name), reads)
            };
        }
        rpc = rpc.merge(reflection(&served)?);

        let contract = Arc::new(Contract::of_port(&served));
        let served_here = contract.clone();
        let protocols = protocols(contract, rpc, MESSAGE_BYTES_MAX);
        let app = Router::new()
            .merge(operations(healths, metrics, shutdown.clone()))
            .route("/", index(&served))
            .merge(
                http.layer(DefaultBodyLimit::max(MESSAGE_BYTES_MAX))
                    .layer(map_response(json::plain_errors)),
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
            .layer(from_fn_with_state(limits.rates.clone(), rates::layer))
            .layer(from_fn_with_state(auth, access::check))
            .layer(from_fn_with_state(served_here, refuse_unserved))
            .layer(from_fn_with_state(limits.clone(), guard::layer))
            .layer(cors());
        listen_within(listener, app, limits, shutdown).await
    })
}

/// The protocol layer alone: RPC routes of `contract` as gRPC, gRPC-Web and Connect, without access
/// control.
pub fn protocols(contract: Arc<Contract>, rpc: Router, message_bytes_max: usize) -> Router {
    let bounds = observe::Bounds {
        contract: contract.clone(),
        message_bytes_max,
    };
    let rpc = rpc
        .layer(from_fn_with_state(bounds, observe::observe))
        .with_state(());
    let grpc = rpc.clone().layer(GrpcWebLayer::new()).with_state(());
    let connect = connect::service(contract.clone(), rpc, message_bytes_max);
    Router::new().fallback(move |request: Request| {
        let (grpc, connect, contract) = (grpc.clone(), connect.clone(), contract.clone());
        async move {
            // Refused before the body is read: the client of an unknown stream sends until it is
            // answered.
            if contract.method(request.uri().path()).is_none() {
                return unknown_method(&request);
            }
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

/// Refusal of a method that this port does not serve, in the protocol of the request. For Connect
/// it is a 404.
fn unknown_method(request: &Request) -> Response {
    let status = Status::unimplemented("Unknown method");
    observe::refused(request.uri().path(), &status);
    let is_grpc = connect::is_grpc(request.headers());
    let mut response = connect::refusal(request.method(), request.headers(), status);
    if !is_grpc {
        *response.status_mut() = StatusCode::NOT_FOUND;
    }
    response
}

/// Refuses a method of another port as unknown, for every role of the caller.
async fn refuse_unserved(
    State(contract): State<Arc<Contract>>,
    request: Request,
    next: Next,
) -> Response {
    let path = request.uri().path();
    let is_elsewhere = || Contract::platform().method(path).is_some();
    match contract.method(path).is_none() && is_elsewhere() {
        true => unknown_method(&request),
        false => next.run(request).await,
    }
}

/// Serves plain HTTP routes, without RPC services and callers, within the `limits` of connections,
/// bodies and answers.
///
/// # Errors
/// As [`listen`].
pub fn serve_http_within(
    listener: TcpListener,
    app: Router,
    limits: Limits,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<(), Error>> {
    let app = app
        .layer(from_fn(refuse_rpc))
        .layer(from_fn_with_state(limits.clone(), guard::layer));
    listen_within(listener, app, limits, shutdown)
}

/// Refuses RPC requests to a plain HTTP port in their own protocol.
async fn refuse_rpc(request: Request, next: Next) -> Response {
    match roles::is_rpc_path(request.uri().path()) {
        true => unknown_method(&request),
        false => next.run(request).await,
    }
}

/// Accepts connections until `shutdown`, then drains for at most [`DRAIN_MS_MAX`].
///
/// # Errors
/// None at present: a failing accept is logged and retried.
pub fn listen(
    listener: TcpListener,
    app: Router,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<(), Error>> {
    Box::pin(async move { listen_within(listener, app, Limits::default(), shutdown).await })
}

/// Like [`listen`], with other limits. The router enforces the limits of requests.
///
/// # Errors
/// As [`listen`].
pub fn listen_within(
    listener: TcpListener,
    app: Router,
    limits: Limits,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<(), Error>> {
    Box::pin(async move {
        let mut builder = auto::Builder::new(TokioExecutor::new());
        // [`Activity`] enforces the limit for the first head.
        builder.http1().header_read_timeout(None);
        builder
            .http2()
            .timer(hyper_util::rt::TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(30))
            .max_concurrent_streams(1_000);
        let app = app.layer(map_request(drain::layer)).with_state(());
        let port = limits.connections.port();
        let mut connections = JoinSet::new();
        let mut failure_logged: Option<Instant> = None;
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                Some(_) = connections.join_next() => continue,
                () = shutdown.cancelled() => break,
            };
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of descriptors, or the peer has disconnected: keep serving.
                    if failure_logged.is_none_or(|at| at.elapsed() >= ACCEPT_LOG_EVERY) {
                        failure_logged = Some(Instant::now());
                        tracing::warn!(%error, "accept failed");
                    }
                    tokio::time::sleep(ACCEPT_RETRY).await;
                    continue;
                }
            };
            // Above a limit the newest connection is closed at once.
            let Some(permit) = port.admit(from.ip()) else {
                continue;
            };
            if let Err(error) = set_up(&stream, limits.silence) {
                tracing::debug!(%error, "connection closed before it was set up");
                continue;
            }
            let connection = connection(
                &builder,
                stream,
                app.clone(),
                limits.clone(),
                shutdown.clone(),
            );
            connections.spawn(async move {
                let _permit = permit;
                if let Err(error) = connection.await {
                    tracing::debug!(error = %error, "connection ended");
                }
            });
        }
        drop(listener);
        let drained = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(Duration::from_millis(DRAIN_MS_MAX), drained)
            .await
            .is_err()
        {
            tracing::warn!(connections = connections.len(), "calls cut at shutdown");
        }
        connections.shutdown().await;
        Ok(())
    })
}

/// Disables Nagle's algorithm and detects vanished peers: no request deadline applies while a
/// stream runs.
fn set_up(stream: &TcpStream, silence: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    // The system counts whole seconds here. The user timeout ends the connection.
    let probes = (silence / 4).max(Duration::from_secs(1));
    sockopt::set_tcp_keepidle(stream, probes)?;
    sockopt::set_tcp_keepintvl(stream, probes)?;
    sockopt::set_socket_keepalive(stream, true)?;
    let silence_ms = u32::try_from(silence.as_millis()).unwrap_or(u32::MAX);
    Ok(sockopt::set_tcp_user_timeout(stream, silence_ms)?)
}

type ConnectionError = Box<dyn std::error::Error + Send + Sync>;

/// Serves one connection until it ends, expires or is shut down. In the last two cases running
/// requests finish.
fn connection(
    builder: &auto::Builder<TokioExecutor>,
    stream: TcpStream,
    app: Router,
    limits: Limits,
    shutdown: CancellationToken,
) -> impl Future<Output = Result<(), ConnectionError>> + Send + 'static {
    let activity = Activity::new();
    let requests = activity.clone();
    let service = service_fn(move |request: http::Request<Incoming>| {
        let (app, running) = (app.clone(), requests.begin());
        async move {
            let response = match app.oneshot(request.map(Body::new)).await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            Ok::<_, Infallible>(response.map(|body| Answer {
                body,
                _running: running,
            }))
        }
    });
    let connection = builder
        .serve_connection_with_upgrades(TokioIo::new(stream), service)
        .into_owned();
    async move {
        let mut connection = pin!(connection);
        let is_expired = tokio::select! {
            ended = connection.as_mut() => return ended,
            () = activity.expired(&limits) => true,
            () = shutdown.cancelled() => false,
        };
        connection.as_mut().graceful_shutdown();
        if !is_expired {
            return connection.await;
        }
        loop {
            // A request sent before the close notice arrived is still answered.
            match tokio::time::timeout(CLOSE_GRACE, connection.as_mut()).await {
                Ok(ended) => return ended,
                Err(_) if activity.is_idle() => return Ok(()),
                Err(_) => {}
            }
        }
    }
}

/// A service's routes without their fallback, for merging.
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
        let builder = PORT_SETS.into_iter().fold(
            tonic_reflection::server::Builder::configure(),
            |builder, set| builder.register_encoded_file_descriptor_set(set),
        );
        let builder = builder.include_reflection_service(false);
        let own = [
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        ];
        let names = served.iter().map(String::as_str).chain(own);
        names.fold(builder, |builder, name| builder.with_service_name(name))
    };
    let v1 = builder().build_v1().map_err(failed)?;
    let v1alpha = builder().build_v1alpha().map_err(failed)?;
    Ok(router_of(Routes::new(v1).add_service(v1alpha)))
}

/// Copies [`Health`] to grpc.health.
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

/// Name of the server in the index of every port.
const SERVER: &str = "digital financial assets platform";

/// `/`: a summary of the port, for a browser or curl.
fn index(served: &[String]) -> MethodRouter {
    let index = Json(serde_json::json!({
        "server": SERVER,
        "version": env!("CARGO_PKG_VERSION"),
        "protocols": ["gRPC", "gRPC-Web", "Connect"],
        "services": served,
        "reflection": ["grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"],
        "operations": ["/health", "/livez", "/readyz", "/metrics"],
    }));
    get(async move || index)
}

/// `/` of a port without RPCs: the same summary, without a credential.
pub fn http_index<S>(protocol: &str, service: &str, operations: &[&str]) -> MethodRouter<S>
where
    S: Clone + Send + Sync + 'static,
{
    let index = Json(serde_json::json!({
        "server": SERVER,
        "version": env!("CARGO_PKG_VERSION"),
        "protocols": [protocol],
        "services": [service],
        "operations": operations,
    }));
    get(async move || index)
}

/// `/health`, `/livez`, `/readyz`, `/metrics` (D41).
fn operations(healths: Vec<Health>, metrics: MetricsHandle, shutdown: CancellationToken) -> Router {
    let health = move |with_findings: bool| {
        let failing: Vec<_> = healths
            .iter()
            .flat_map(|health| {
                let service = health.name().to_owned();
                let mut parts: Vec<_> = health.failing().into_iter().collect();
                if with_findings {
                    parts.extend(health.findings());
                }
                parts.into_iter().map(move |(part, reason)| {
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
        ready(false)
    };
    let render = move || {
        let headers = [("content-type", "text/plain; version=0.0.4; charset=utf-8")];
        (headers, metrics.render()).into_response()
    };
    Router::new()
        .route("/health", get(async move || health(true)))
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
        crate::context::REPLAYED,
        "x-correlation-id",
    ];
    CorsLayer::new()
        .allow_origin(Any)
        .allow_methods(Any)
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED.map(HeaderName::from_static))
        .max_age(Duration::from_secs(7_200))
}
