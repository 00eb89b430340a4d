//! A separate chain that is reached only over HTTP, and a proxy that can act like a faulty node.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex};

use axum::extract::State;
use chain::{ChainConfig, ChainDeps, ChainHandle, start_chain};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use crate::world::*;

/// Refusal of a node whose account has no coins.
pub const NO_COINS: &str = "insufficient funds for gas * price + value";

pub struct Node {
    pub handle: ChainHandle,
    shutdown: CancellationToken,
    pub address: SocketAddr,
}

impl Node {
    pub async fn start(folder: &Path, address: &str) -> Self {
        let log = events::Embedded::open(folder.join("node-log")).await;
        let log = Arc::new(log.expect("log"));
        let shutdown = CancellationToken::new();
        let config = ChainConfig {
            data_dir: folder.join("node"),
            seal_interval_ms: 1,
            ..ChainConfig::default()
        };
        let handle = start_chain(config, ChainDeps { log }, shutdown.clone()).await;
        let handle = handle.expect("node");
        let listener = tokio::net::TcpListener::bind(address).await.expect("port");
        let address = listener.local_addr().expect("address");
        handle.serve_json_rpc(listener);
        Self {
            handle,
            shutdown,
            address,
        }
    }

    pub async fn stop(self) {
        self.shutdown.cancel();
        self.handle.stopped().await;
    }

    /// Copies the key of the node's funded account into the world of this folder.
    pub fn share_key(folder: &Path) {
        std::fs::create_dir_all(folder.join("chain")).expect("folder");
        let [from, to] = ["node", "chain"].map(|of| folder.join(of).join("operator.key"));
        std::fs::copy(from, to).expect("key");
    }
}

#[derive(Clone, Copy, Default)]
enum Mode {
    #[default]
    Pass,
    /// Every transaction is refused with this text.
    Refuse(&'static str),
    /// Transactions are executed, but the node reports no new block.
    HideBlocks,
}

/// Proxy between the service and its node. Clones are the same proxy.
#[derive(Clone, Default)]
pub struct Gate {
    node: String,
    /// States other block hashes than the node.
    restates: bool,
    mode: Arc<Mutex<Mode>>,
}

impl Gate {
    /// The node refuses transactions with this text.
    pub fn refuse(&self, text: &'static str) {
        self.set(Mode::Refuse(text));
    }

    /// The node executes transactions, but the service sees none of their blocks.
    pub fn hide_blocks(&self) {
        self.set(Mode::HideBlocks);
    }

    pub fn pass(&self) {
        self.set(Mode::Pass);
    }

    fn set(&self, mode: Mode) {
        *self.mode.lock().expect("no panic with the lock") = mode;
    }

    /// The error that replaces the answer to this request.
    fn error(&self, body: &str) -> Option<&'static str> {
        match *self.mode.lock().expect("no panic with the lock") {
            Mode::Refuse(text) if body.contains("eth_sendRawTransaction") => Some(text),
            Mode::HideBlocks if body.contains("eth_blockNumber") => Some("node is syncing"),
            _ => None,
        }
    }
}

fn refusal(body: &str, message: &str) -> String {
    let asked: Value = serde_json::from_str(body).expect("JSON");
    let error = serde_json::json!({ "code": -32000, "message": message });
    serde_json::json!({ "jsonrpc": "2.0", "id": asked["id"], "error": error }).to_string()
}

/// Replaces the block hashes of an answer, always by the same ones.
fn restate(answer: &mut Value) {
    match answer {
        Value::Array(items) => items.iter_mut().for_each(restate),
        Value::Object(fields) => {
            let is_block = fields.contains_key("parentHash");
            for (name, value) in fields.iter_mut() {
                let is_block_hash = match name.as_str() {
                    "blockHash" | "parentHash" => true,
                    "hash" => is_block,
                    _ => false,
                };
                let hash = value.as_str().filter(|_| is_block_hash);
                match hash.map(|hash| chain::keccak256(hash.as_bytes())) {
                    Some(other) => *value = other.into(),
                    None => restate(value),
                }
            }
        }
        _ => {}
    }
}

async fn pass_on(State(gate): State<Gate>, body: String) -> String {
    if let Some(message) = gate.error(&body) {
        return refusal(&body, message);
    }
    let http = reqwest::Client::builder().timeout(WAIT).build();
    let http = http.expect("an HTTP client");
    let request = http
        .post(&gate.node)
        .header("content-type", "application/json")
        .body(body.clone());
    let answer = request.send().await.expect("answered");
    let mut answer = answer.text().await.expect("text");
    if gate.restates {
        let mut parsed: Value = serde_json::from_str(&answer).expect("JSON");
        restate(&mut parsed);
        answer = parsed.to_string();
    }
    // The mode may have changed meanwhile. No block after the change may get through.
    match gate.error(&body) {
        Some(message) if !body.contains("eth_sendRawTransaction") => refusal(&body, message),
        _ => answer,
    }
}

/// A world whose node is reached through a [`Gate`].
pub async fn gated_world(folder: &Path) -> (World, Node, Gate) {
    world_behind(folder, Gate::default()).await
}

/// A world whose node states block hashes that are not those of the headers.
pub async fn restated_world(folder: &Path) -> (World, Node) {
    let gate = Gate {
        restates: true,
        ..Gate::default()
    };
    let (world, node, _) = world_behind(folder, gate).await;
    (world, node)
}

async fn world_behind(folder: &Path, gate: Gate) -> (World, Node, Gate) {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let node = Node::start(folder, "127.0.0.1:0").await;
    Node::share_key(folder);
    let gate = Gate {
        node: format!("http://{}", node.address),
        ..gate
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0");
    let listener = listener.await.expect("port");
    let url = format!("http://{}", listener.local_addr().expect("address"));
    let router = axum::Router::new()
        .fallback(pass_on)
        .with_state(gate.clone());
    tokio::spawn(async move { axum::serve(listener, router).await.expect("served") });
    let settings = Settings {
        rpc_url: Some(url),
        ..Settings::default()
    };
    let world = World::with(folder, settings).await;
    (world, node, gate)
}
