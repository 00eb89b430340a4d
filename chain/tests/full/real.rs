//! anvil and geth as nodes of tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use alloy::consensus::transaction::SignerRecoverable;
use alloy::consensus::{Transaction as _, TxEnvelope};
use alloy::eips::{Decodable2718, Encodable2718};
use alloy::rpc::types::Transaction;
use chain::Address;
use serde_json::{Value, json};
use testkit::eventually;

use crate::common::proxy::Proxy;
use crate::common::{Evm, Lab, WAIT};
use crate::server::Server;

/// A hundred coins, in wei.
const COINS: &str = "0x56bc75e2d63100000";
/// Transactions that each fill a block. They raise the base fee by an eighth per block.
const FULL_BLOCKS: u64 = 8;
/// Code of a deployment that uses all its gas: a jump to itself.
const ENDLESS: &str = "0x5b600056";

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Anvil,
    Geth,
}

/// A node of the test's own. Dropping the last clone ends it.
#[derive(Clone)]
pub struct Real {
    kind: Kind,
    server: Arc<Server>,
    proxy: Proxy,
    http: reqwest::Client,
    /// anvil makes blocks only when it is told to.
    is_manual: Arc<AtomicBool>,
    /// Number of withdrawals, each of which makes geth make a block.
    withdrawals: Arc<AtomicU64>,
}

fn quantity(value: &Value) -> u64 {
    let digits = value.as_str().and_then(|text| text.strip_prefix("0x"));
    u64::from_str_radix(digits.expect("a quantity"), 16).expect("a quantity")
}

impl Real {
    fn new(kind: Kind, server: Server) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().timeout(WAIT).build();
        Self {
            kind,
            proxy: Proxy::new(server.address.clone()),
            server: Arc::new(server),
            http: http.expect("client"),
            is_manual: Arc::default(),
            withdrawals: Arc::default(),
        }
    }

    pub fn anvil() -> Self {
        Self::new(Kind::Anvil, Server::anvil(&[]))
    }

    pub fn geth() -> Self {
        Self::new(Kind::Geth, Server::geth(&[]))
    }

    pub fn both() -> [Self; 2] {
        [Self::anvil(), Self::geth()]
    }

    /// Refuses transactions with more gas than EIP-7825 allows.
    pub fn anvil_with_gas_cap() -> Self {
        const SETTINGS: [(&str, &str); 1] =
            [("ANVIL_OPTIONS", "--hardfork osaka --enable-tx-gas-limit")];
        Self::new(Kind::Anvil, Server::anvil(&SETTINGS))
    }

    /// Makes a block every two seconds, so transactions can wait.
    pub fn geth_with_period() -> Self {
        Self::new(Kind::Geth, Server::geth(&[("GETH_PERIOD", "2")]))
    }

    /// A block has more gas than a transaction may have.
    pub fn geth_with_large_blocks() -> Self {
        Self::new(Kind::Geth, Server::geth(&[("GETH_GAS", "30000000")]))
    }

    /// Stops the node cleanly and keeps its chain.
    pub fn stop(&self) {
        self.server.stop();
    }

    /// Starts the node again on the same port.
    pub fn start_again(&self) {
        self.server.start_again();
    }

    /// Calls the node itself, whether its ports are away or not.
    async fn try_ask(&self, method: &str, params: &Value) -> Result<Value, Value> {
        let request = json!({ "jsonrpc": "2.0", "id": 1, "method": method, "params": params });
        let sent = self.http.post(&self.server.address).json(&request).send();
        let answer = sent.await.expect("an answer").json::<Value>().await;
        let answer = answer.expect("JSON");
        match answer["error"].is_null() {
            true => Ok(answer["result"].clone()),
            false => Err(answer["error"].clone()),
        }
    }

    async fn ask(&self, method: &str, params: Value) -> Value {
        let answer = self.try_ask(method, &params).await;
        answer.unwrap_or_else(|error| panic!("{method}: {error}"))
    }

    /// An account that the node signs for, with coins from the start.
    async fn faucet(&self) -> Value {
        let accounts = self.ask("eth_accounts", json!([])).await;
        accounts[0].clone()
    }

    async fn block(&self, number: u64, with_transactions: bool) -> Value {
        let params = json!([format!("{number:#x}"), with_transactions]);
        self.ask("eth_getBlockByNumber", params).await
    }

    async fn has_coins(&self, account: Address) -> bool {
        let params = json!([account.to_string(), "latest"]);
        self.ask("eth_getBalance", params).await != json!("0x0")
    }

    /// Waits until no transaction waits. Both nodes make a block after they have answered.
    async fn is_idle(&self) {
        eventually(async || {
            let pool = self.ask("txpool_status", json!([])).await;
            let waiting = quantity(&pool["pending"]) + quantity(&pool["queued"]);
            (waiting == 0).then_some(())
        })
        .await;
    }

    /// One empty block of geth.
    async fn withdraw(&self) {
        let head = self.head().await;
        let index = self.withdrawals.fetch_add(1, Ordering::Relaxed);
        let withdrawal = json!([{
            "index": format!("{index:#x}"),
            "validatorIndex": "0x1",
            "address": format!("0x{}", "22".repeat(20)),
            "amount": "0x1",
        }]);
        self.ask("dev_addWithdrawal", withdrawal).await;
        eventually(async || (self.head().await > head).then_some(())).await;
    }
}

impl Evm for Real {
    fn chain_id(&self) -> u64 {
        match self.kind {
            Kind::Anvil => 31_337,
            Kind::Geth => 1_337,
        }
    }

    fn url(&self) -> Option<String> {
        Some(self.server.address.clone())
    }

    async fn fund(&self, account: Address) {
        if self.has_coins(account).await {
            return;
        }
        let to = account.to_string();
        match self.kind {
            Kind::Anvil => {
                self.ask("anvil_setBalance", json!([to, COINS])).await;
            }
            Kind::Geth => {
                let from = self.faucet().await;
                let transfer = json!([{ "from": from, "to": to, "value": COINS }]);
                self.ask("eth_sendTransaction", transfer).await;
                eventually(async || self.has_coins(account).await.then_some(())).await;
                // The pool learns of the coins when it drops the transfer.
                self.is_idle().await;
            }
        }
    }
}

impl Lab for Real {
    const IS_STEPPED: bool = false;

    fn chain_id(&self) -> u64 {
        Evm::chain_id(self)
    }

    async fn serve(&self) -> String {
        self.proxy.serve().await
    }

    fn peer(&self) -> Self {
        Self {
            proxy: self.proxy.peer(),
            ..self.clone()
        }
    }

    fn set_away(&self, is_away: bool) {
        self.proxy.set_away(is_away);
    }

    /// Accounts have no coins until they are funded.
    async fn make_poor(&self) {}

    async fn fund(&self, account: Address) {
        Evm::fund(self, account).await;
    }

    async fn mine(&self) {
        if self.is_manual.load(Ordering::Relaxed) {
            self.ask("anvil_mine", json!(["0x1"])).await;
        } else {
            self.is_idle().await;
        }
    }

    async fn mine_empty(&self, count: usize) {
        for _ in 0..count {
            match self.kind {
                Kind::Anvil => {
                    self.ask("anvil_mine", json!(["0x1"])).await;
                }
                Kind::Geth => self.withdraw().await,
            }
        }
    }

    async fn fill_blocks(&self) {
        if self.kind == Kind::Anvil {
            self.ask("evm_setAutomine", json!([false])).await;
            self.is_manual.store(true, Ordering::Relaxed);
        }
        let from = self.faucet().await;
        let gas = self.block_gas_limit().await;
        for _ in 0..FULL_BLOCKS {
            let filler = json!([{
                "from": from,
                "data": ENDLESS,
                "gas": format!("{gas:#x}"),
                "maxFeePerGas": format!("{:#x}", 50_000_000_000_u64),
                "maxPriorityFeePerGas": format!("{:#x}", 1_000_000_000_u64),
            }]);
            self.ask("eth_sendTransaction", filler).await;
        }
    }

    async fn pass_blocks(&self, count: u64) {
        match self.kind {
            Kind::Anvil => self.mine_empty(count as usize).await,
            Kind::Geth => {
                let head = self.head().await + count;
                eventually(async || (self.head().await >= head).then_some(())).await;
            }
        }
    }

    async fn preempt(&self, transaction: TxEnvelope) {
        self.is_idle().await;
        let sender = transaction.recover_signer().expect("a signature");
        let raw = json!([format!("0x{}", hex::encode(transaction.encoded_2718()))]);
        // geth may make the block of an answered transaction only now, and its pool learns of a
        // removed block a moment later.
        eventually(async || {
            let count = self.ask("eth_getTransactionCount", json!([sender, "latest"]));
            if quantity(&count.await) > transaction.nonce() {
                self.remove_blocks(1).await;
            }
            self.try_ask("eth_sendRawTransaction", &raw).await.ok()
        })
        .await;
        self.is_idle().await;
    }

    async fn remove_blocks(&self, count: u64) {
        match self.kind {
            Kind::Anvil => {
                self.ask("anvil_rollback", json!([count])).await;
            }
            Kind::Geth => {
                let number = self.head().await - count;
                let params = json!([format!("{number:#x}")]);
                self.ask("debug_setHead", params).await;
            }
        }
    }

    async fn keep(&self) {}

    async fn restore(&self) -> bool {
        false
    }

    async fn head(&self) -> u64 {
        quantity(&self.ask("eth_blockNumber", json!([])).await)
    }

    async fn mined(&self) -> Vec<(u64, TxEnvelope)> {
        let mut mined = Vec::new();
        for number in 0..=self.head().await {
            // A reorganisation may have removed it.
            let block = self.block(number, true).await;
            for transaction in block["transactions"].as_array().into_iter().flatten() {
                let found: Transaction =
                    serde_json::from_value(transaction.clone()).expect("a transaction");
                mined.push((number, found.into_inner()));
            }
        }
        mined
    }

    fn received(&self) -> Vec<TxEnvelope> {
        let received = self.proxy.received();
        let decode = |raw: &Vec<u8>| TxEnvelope::decode_2718_exact(raw).expect("a transaction");
        received.iter().map(decode).collect()
    }

    async fn block_gas_limit(&self) -> u64 {
        let block = self.block(self.head().await, false).await;
        quantity(&block["gasLimit"])
    }
}
