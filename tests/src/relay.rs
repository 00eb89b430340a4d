//! A platform that uses the development chain of another one through a proxy, which can stall and
//! move the times of blocks back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::post;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::Platform;
use crate::process::client;

/// The chain of a platform, with the proxy in front of it.
pub struct RelayedChain {
    /// Has the chain.
    _owner: Platform,
    url: String,
    key_file: String,
    is_stalled: watch::Sender<bool>,
    back_s: Arc<AtomicU64>,
}

impl RelayedChain {
    /// Starts a chain, and a platform on it. The platform has the key of the chain's owner, whose
    /// account has the coins.
    pub async fn start() -> (Self, Platform) {
        let owner = Platform::start().await;
        let back_s: Arc<AtomicU64> = Arc::default();
        let serving = Relay::serve(owner.url("chain_rpc"), Arc::clone(&back_s));
        let (url, is_stalled) = serving.await;
        let key_file = owner.data_dir().join("chain/operator.key");
        let chain = Self {
            key_file: key_file.to_str().expect("a text").to_owned(),
            _owner: owner,
            url,
            is_stalled,
            back_s,
        };
        let platform = Platform::start_with(&chain.env("")).await;
        (chain, platform)
    }

    /// Environment of a platform on this chain that aborts at `place`; empty: nowhere.
    pub fn env<'a>(&'a self, place: &'a str) -> [(&'a str, &'a str); 5] {
        [
            ("PLATFORM_CHAIN__RPC_URL", self.url.as_str()),
            ("PLATFORM_CHAIN__OPERATOR_KEY_FILE", self.key_file.as_str()),
            ("PLATFORM_CHAIN__POLL_INTERVAL_MS", "100"),
            ("PLATFORM_CHAIN__REQUEST_TIMEOUT_MS", "2000"),
            ("PLATFORM_CRASH_AT", place),
        ]
    }

    /// While it stalls, the chain answers no request.
    pub fn stall(&self, is_stalled: bool) {
        self.is_stalled.send(is_stalled).expect("the relay runs");
    }

    /// From now on, the times of all blocks are `by_s` seconds earlier. Their hashes stay.
    pub fn turn_back(&self, by_s: u64) {
        self.back_s.store(by_s, Relaxed);
    }
}

/// Forwards JSON-RPC to a node; while it is stalled, requests wait.
#[derive(Clone)]
struct Relay {
    node: String,
    http: reqwest::Client,
    stalled: watch::Receiver<bool>,
    back_s: Arc<AtomicU64>,
}

impl Relay {
    /// Serves a port; returns its URL and the switch.
    async fn serve(node: String, back_s: Arc<AtomicU64>) -> (String, watch::Sender<bool>) {
        let (switch, stalled) = watch::channel(false);
        let relay = Self {
            node,
            http: client(),
            stalled,
            back_s,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let router = Router::new().route("/", post(relayed)).with_state(relay);
        tokio::spawn(async move { axum::serve(listener, router).await });
        (url, switch)
    }
}

async fn relayed(
    State(mut relay): State<Relay>,
    body: Bytes,
) -> Result<([(&'static str, &'static str); 1], Bytes), StatusCode> {
    let running = relay.stalled.wait_for(|stalled| !*stalled).await;
    running.map(drop).map_err(|_| StatusCode::BAD_GATEWAY)?;
    let asked = relay
        .http
        .post(&relay.node)
        .header("content-type", "application/json")
        .body(body)
        .send()
        .await
        .map_err(|_| StatusCode::BAD_GATEWAY)?;
    let answer = asked.bytes().await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    let answer = turned_back(answer, relay.back_s.load(Relaxed));
    Ok(([("content-type", "application/json")], answer))
}

/// The answer with an earlier time of its block, if it has one.
fn turned_back(answer: Bytes, by_s: u64) -> Bytes {
    if by_s == 0 {
        return answer;
    }
    let Ok(mut read) = serde_json::from_slice::<Value>(&answer) else {
        return answer;
    };
    let Some(Value::String(time)) = read.pointer_mut("/result/timestamp") else {
        return answer;
    };
    let time_s = u64::from_str_radix(time.trim_start_matches("0x"), 16);
    let time_s = time_s.expect("the time of a block");
    *time = format!("{:#x}", time_s.saturating_sub(by_s));
    read.to_string().into()
}
