//! A port before a node. It forwards requests, keeps the raw transactions and can be away.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use serde_json::Value;
use tokio::net::TcpListener;

use super::WAIT;

type Answer = ([(&'static str, &'static str); 1], Bytes);

#[derive(Clone)]
pub struct Proxy {
    node: String,
    http: reqwest::Client,
    /// Shared by all ports of a node.
    raw: Arc<Mutex<Vec<String>>>,
    is_away: Arc<AtomicBool>,
}

impl Proxy {
    /// `node`: URL of the node.
    pub fn new(node: String) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().timeout(WAIT).build();
        Self {
            node,
            http: http.expect("client"),
            raw: Arc::default(),
            is_away: Arc::default(),
        }
    }

    /// A port before the same node, which is away on its own.
    pub fn peer(&self) -> Self {
        Self {
            is_away: Arc::default(),
            ..self.clone()
        }
    }

    pub fn set_away(&self, is_away: bool) {
        self.is_away.store(is_away, Ordering::Relaxed);
    }

    /// Serves a port; returns its URL. Forgets the transactions so far.
    pub async fn serve(&self) -> String {
        self.raw.lock().expect("a lock").clear();
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
        let url = format!("http://{}", listener.local_addr().expect("address"));
        let router = Router::new()
            .route("/", post(forward))
            .with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    }

    /// Each raw transaction once, in the order of arrival.
    pub fn received(&self) -> Vec<Vec<u8>> {
        let raw = self.raw.lock().expect("a lock").clone();
        let bytes = raw.iter().map(|raw| raw.strip_prefix("0x").expect("hex"));
        bytes.map(|raw| hex::decode(raw).expect("hex")).collect()
    }
}

async fn forward(State(proxy): State<Proxy>, body: Bytes) -> Result<Answer, StatusCode> {
    if proxy.is_away.load(Ordering::Relaxed) {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    let request: Value = serde_json::from_slice(&body).expect("JSON");
    let calls = request
        .as_array()
        .cloned()
        .unwrap_or_else(|| vec![request.clone()]);
    for call in calls {
        if call["method"] == "eth_sendRawTransaction" {
            let raw = call["params"][0].as_str().expect("a raw transaction");
            let mut received = proxy.raw.lock().expect("a lock");
            // The connector may send a transaction again until it has read its block.
            if received.iter().all(|one| one != raw) {
                received.push(raw.to_owned());
            }
        }
    }
    let asked = proxy
        .http
        .post(&proxy.node)
        .header("content-type", "application/json")
        .body(body);
    // The node may be stopped.
    let gone = |_: reqwest::Error| StatusCode::BAD_GATEWAY;
    let answer = asked.send().await.map_err(gone)?;
    let answer = answer.bytes().await.map_err(gone)?;
    Ok(([("content-type", "application/json")], answer))
}
