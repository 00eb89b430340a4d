//! Remote nodes as an alloy transport: HTTP, a second node while the first is away, authorization.
//!
//! A request goes to the node in use. If that node does not answer, the other one is asked and
//! stays in use; after [`RETURN_AFTER`] the first node is tried again. A transaction is sent to one
//! node only: its failure leaves open whether the node has it, and the refusal of the other node
//! would hide that.
//!
//! Each node has its chain id and genesis block checked before its first request after the start. A
//! node of another chain gets no request, and is checked again whenever it would be used.
//!
//! Errors name a node by host and port. Paths, queries and user names of a URL may be secrets, and
//! `/health` shows errors without authentication.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use alloy::eips::BlockNumberOrTag;
use alloy::providers::{DynProvider, Provider};
use alloy::rpc::client::RpcClient;
use alloy::rpc::json_rpc::{RequestPacket, ResponsePacket};
use alloy::transports::http::Http;
use alloy::transports::{RpcError, TransportError, TransportErrorKind, TransportFut};
use reqwest::Url;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use tower::Service;

use crate::connector::provider;
use crate::{StartError, TxHash};

/// Time on the second node after which the first one is tried again.
const RETURN_AFTER: Duration = Duration::from_secs(30);
/// Limit of a node's text in an error, in characters.
const REASON_MAX: usize = 300;

/// What tells one chain from another.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChainIdentity {
    pub chain_id: u64,
    pub genesis: TxHash,
}

impl ChainIdentity {
    /// Reads the identity from a node.
    pub async fn of(provider: &DynProvider) -> Result<Self, TransportError> {
        let chain_id = provider.get_chain_id().await?;
        let genesis = provider.get_block_by_number(BlockNumberOrTag::Number(0));
        let genesis = genesis
            .await?
            .ok_or_else(|| TransportErrorKind::custom_str("the node has no genesis block"))?;
        Ok(Self {
            chain_id,
            genesis: TxHash::from(genesis.header.hash),
        })
    }
}

struct Node {
    http: Http<reqwest::Client>,
    /// Host and port.
    name: String,
    /// The node has the chain that is expected.
    is_checked: AtomicBool,
}

/// One or two nodes of the same chain. Clones share the node in use.
#[derive(Clone)]
pub(crate) struct Nodes {
    nodes: Arc<[Node]>,
    in_use: Arc<AtomicUsize>,
    changed_at: Arc<Mutex<Instant>>,
    /// The chain of all nodes. Unset: no node is checked, as the start is still reading it.
    expected: Arc<OnceLock<ChainIdentity>>,
}

impl Nodes {
    /// `authorization`: value of the header of each request to a node.
    pub fn new(
        urls: &[&str],
        authorization: Option<HeaderValue>,
        timeout: Duration,
    ) -> Result<Self, StartError> {
        let mut headers = HeaderMap::new();
        if let Some(value) = authorization {
            headers.insert(AUTHORIZATION, value);
        }
        let client = reqwest::Client::builder()
            .timeout(timeout)
            .default_headers(headers)
            .build()
            .map_err(|error| StartError::Url(error.to_string()))?;
        let node = |url: &&str| {
            // The error of the parser does not contain the URL.
            let url = url
                .parse::<Url>()
                .map_err(|error| StartError::Url(error.to_string()))?;
            Ok::<_, StartError>(Node {
                name: name(&url),
                http: Http::with_client(client.clone(), url),
                is_checked: AtomicBool::new(false),
            })
        };
        Ok(Self {
            nodes: urls.iter().map(node).collect::<Result<_, StartError>>()?,
            in_use: Arc::default(),
            changed_at: Arc::new(Mutex::new(Instant::now())),
            expected: Arc::default(),
        })
    }

    pub fn client(&self) -> RpcClient {
        RpcClient::new(self.clone(), self.are_local())
    }

    /// Sets the chain that each node must have from now on. Only the first call has an effect.
    pub fn expect(&self, chain: ChainIdentity) {
        self.expected.get_or_init(|| chain);
    }

    /// Whether all nodes are on this machine: alloy then polls more often.
    fn are_local(&self) -> bool {
        let local = ["127.0.0.1:", "localhost:", "[::1]:"];
        self.nodes
            .iter()
            .all(|node| local.iter().any(|prefix| node.name.starts_with(prefix)))
    }

    /// Checks, before a node's first request, that it has the expected chain.
    async fn check(&self, node: &Node) -> Result<(), TransportError> {
        let Some(expected) = self.expected.get() else {
            return Ok(());
        };
        if node.is_checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let client = RpcClient::new(node.http.clone(), true);
        let found = ChainIdentity::of(&provider(client)).await?;
        if found == *expected {
            node.is_checked.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let text = format!(
            "not used: the node is on chain {} with genesis block {}, the platform on chain {} with {}",
            found.chain_id, found.genesis, expected.chain_id, expected.genesis
        );
        tracing::error!(node = node.name, text, "node of another chain");
        Err(TransportErrorKind::custom_str(&text))
    }

    /// Node for the next request.
    fn first(&self, sends: bool) -> usize {
        let in_use = self.in_use.load(Ordering::Relaxed);
        let changed_at = *self
            .changed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        // A transaction does not probe a node that was away.
        if in_use != 0 && !sends && changed_at.elapsed() >= RETURN_AFTER {
            0
        } else {
            in_use
        }
    }

    fn use_node(&self, index: usize) {
        let before = self.in_use.swap(index, Ordering::Relaxed);
        // Also restarts the time after a failed return to the first node.
        if before != index || index != 0 {
            let mut changed_at = self
                .changed_at
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            if before != index || changed_at.elapsed() >= RETURN_AFTER {
                *changed_at = Instant::now();
            }
        }
        if before != index {
            tracing::warn!(node = self.nodes[index].name, "changed to another node");
        }
    }

    async fn ask(self, packet: RequestPacket) -> Result<ResponsePacket, TransportError> {
        let sends = packet
            .method_names()
            .any(|method| method == "eth_sendRawTransaction");
        let first = self.first(sends);
        let count = self.nodes.len();
        let mut last_error = None;
        for step in 0..count {
            let index = (first + step) % count;
            let node = &self.nodes[index];
            // A transaction may go to the other node then: this one did not get it.
            if let Err(error) = self.check(node).await {
                last_error = Some(without_secrets(&node.name, &error));
                continue;
            }
            match node.http.clone().call(packet.clone()).await {
                Ok(response) => {
                    self.use_node(index);
                    return Ok(response);
                }
                Err(error @ RpcError::ErrorResp(_)) => {
                    self.use_node(index);
                    return Err(error);
                }
                Err(error) => last_error = Some(without_secrets(&node.name, &error)),
            }
            if sends {
                self.use_node((index + 1) % count);
                break;
            }
        }
        Err(last_error.unwrap_or_else(TransportErrorKind::backend_gone))
    }
}

impl Service<RequestPacket> for Nodes {
    type Response = ResponsePacket;
    type Error = TransportError;
    type Future = TransportFut<'static>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, packet: RequestPacket) -> Self::Future {
        Box::pin(self.clone().ask(packet))
    }
}

fn name(url: &Url) -> String {
    let host = url.host_str().unwrap_or("node");
    let port = url.port_or_known_default().unwrap_or_default();
    format!("{host}:{port}")
}

fn without_secrets(name: &str, error: &TransportError) -> TransportError {
    let reason = match error {
        RpcError::Transport(TransportErrorKind::Custom(error)) => {
            match error.downcast_ref::<reqwest::Error>() {
                Some(error) if error.is_timeout() => "no answer in time".to_owned(),
                Some(error) => innermost(error),
                None => error.to_string(),
            }
        }
        other => other.to_string(),
    };
    let reason: String = reason.chars().take(REASON_MAX).collect();
    TransportErrorKind::custom_str(&format!("{name}: {reason}"))
}

/// The cause of an HTTP error. reqwest's own text contains the URL.
fn innermost(error: &reqwest::Error) -> String {
    let mut cause: Option<&dyn std::error::Error> = std::error::Error::source(error);
    let mut text = "the request failed".to_owned();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    text
}

/// Reads the value of the header `Authorization` (`Bearer TOKEN`, `Basic BASE64`) from a file.
///
/// # Errors
/// The file cannot be read, or contains no such value. The error does not contain it.
pub(crate) fn read_authorization(path: &Path) -> Result<HeaderValue, StartError> {
    let refused = || StartError::Authorization(path.to_owned());
    let text = std::fs::read_to_string(path)?;
    let text = text.trim();
    let scheme = text.split_once(' ').map(|(scheme, _)| scheme);
    let is_known = scheme
        .is_some_and(|scheme| ["bearer", "basic"].contains(&scheme.to_ascii_lowercase().as_str()));
    if !is_known {
        return Err(refused());
    }
    let mut value = HeaderValue::from_str(text).map_err(|_| refused())?;
    value.set_sensitive(true);
    Ok(value)
}
