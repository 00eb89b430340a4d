//! A scripted JSON-RPC node: one account, blocks only on command, reorganisations, refusals.
//!
//! Block hashes are those of a QBFT chain.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard};

use alloy::consensus::{Header, Transaction as _, TxEnvelope};
use alloy::eips::Decodable2718;
use alloy::primitives::{Address as RawAddress, B256, Bytes, keccak256};
use alloy::rpc::types::{Block, BlockTransactions, Header as RpcHeader};
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use chain::Address;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::Notify;

use crate::common::Lab;

pub const CHAIN_ID: u64 = 90_211;
const BLOCK_GAS: u64 = 30_000_000;

/// What the node says to a transaction; `None`: it takes it.
type Judge = Box<dyn Fn(&TxEnvelope) -> Option<String> + Send>;

#[derive(Clone)]
struct Mined {
    header: Header,
    hash: B256,
    transactions: Vec<TxEnvelope>,
}

pub struct Script {
    blocks: Vec<Mined>,
    pool: BTreeMap<u64, TxEnvelope>,
    /// Part of each new block's header.
    salt: u64,
    /// Also the lowest fee of a transaction that enters a block.
    pub base_fee: u64,
    pub balance: u64,
    /// Refuses every transaction: the account cannot pay.
    is_poor: bool,
    pub judge: Option<Judge>,
    /// Sends of these nonces are answered after the notice.
    pub hangs: HashMap<u64, Arc<Notify>>,
    /// Sends that wait for the notice.
    pub hanging: usize,
    /// Expected value of the header.
    pub authorization: Option<&'static str>,
    /// All transactions that were sent, once each.
    pub received: Vec<TxEnvelope>,
}

/// A node. Clones have the same chain; each may be away on its own.
#[derive(Clone)]
pub struct Node {
    script: Arc<Mutex<Script>>,
    is_away: Arc<Mutex<bool>>,
    kept: Arc<Mutex<Vec<Mined>>>,
}

impl Node {
    /// A chain with a genesis block that depends on `salt`.
    pub fn new(salt: u64) -> Self {
        let mut script = Script {
            blocks: Vec::new(),
            pool: BTreeMap::new(),
            salt,
            base_fee: 100,
            balance: 1_000_000_000,
            is_poor: false,
            judge: None,
            hangs: HashMap::new(),
            hanging: 0,
            authorization: None,
            received: Vec::new(),
        };
        script.seal(Vec::new());
        Self {
            script: Arc::new(Mutex::new(script)),
            is_away: Arc::default(),
            kept: Arc::default(),
        }
    }

    pub fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().expect("a lock")
    }
}

impl Lab for Node {
    const IS_STEPPED: bool = true;

    fn chain_id(&self) -> u64 {
        CHAIN_ID
    }

    async fn serve(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("port");
        let url = format!("http://{}", listener.local_addr().expect("address"));
        let router = Router::new()
            .route("/", post(answer))
            .with_state(self.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        url
    }

    fn peer(&self) -> Self {
        Self {
            is_away: Arc::default(),
            ..self.clone()
        }
    }

    fn set_away(&self, is_away: bool) {
        *self.is_away.lock().expect("a lock") = is_away;
    }

    async fn make_poor(&self) {
        let mut script = self.script();
        script.is_poor = true;
        script.balance = 0;
    }

    async fn fund(&self, _: Address) {
        let mut script = self.script();
        script.is_poor = false;
        script.balance = 1_000_000_000;
    }

    async fn mine(&self) {
        self.script().mine();
    }

    async fn mine_empty(&self, count: usize) {
        self.script().mine_empty(count);
    }

    async fn fill_blocks(&self) {}

    /// The base fee is above the fee of the waiting transactions, which is twice the base fee
    /// before.
    async fn pass_blocks(&self, count: u64) {
        let mut script = self.script();
        script.base_fee = 1_000;
        script.mine_empty(count as usize);
    }

    async fn preempt(&self, transaction: TxEnvelope) {
        self.script().mine_this(transaction);
    }

    async fn remove_blocks(&self, count: u64) {
        self.script().remove_blocks(count as usize);
    }

    async fn keep(&self) {
        *self.kept.lock().expect("a lock") = self.script().blocks.clone();
    }

    async fn restore(&self) -> bool {
        self.script().blocks = self.kept.lock().expect("a lock").clone();
        true
    }

    async fn head(&self) -> u64 {
        self.script().head()
    }

    async fn mined(&self) -> Vec<(u64, TxEnvelope)> {
        let script = self.script();
        let blocks = script.blocks.iter();
        let mined = blocks.flat_map(|block| {
            let transactions = block.transactions.iter().cloned();
            transactions.map(move |transaction| (block.header.number, transaction))
        });
        mined.collect()
    }

    fn received(&self) -> Vec<TxEnvelope> {
        self.script().received.clone()
    }

    async fn block_gas_limit(&self) -> u64 {
        BLOCK_GAS
    }
}

impl Script {
    fn seal(&mut self, transactions: Vec<TxEnvelope>) {
        let number = self.blocks.len() as u64;
        let vanity = keccak256(format!("{number} {} {}", self.salt, transactions.len()));
        let extra_data =
            |first: &[u8], last: &[u8]| Bytes::from([first, vanity.as_slice(), last].concat());
        // No validators, no vote, round 1, and a list of one seal of a byte.
        let sealed = extra_data(&[0xe7, 0xa0], &[0xc0, 0xc0, 1, 0xc2, 0x81, 0xff]);
        let hashed = extra_data(&[0xe5, 0xa0], &[0xc0, 0xc0, 0x80, 0xc0]);
        let header = Header {
            number,
            parent_hash: self.blocks.last().map_or(B256::ZERO, |block| block.hash),
            timestamp: 1_700_000_000 + number,
            base_fee_per_gas: Some(self.base_fee),
            gas_limit: BLOCK_GAS,
            extra_data: hashed,
            ..Header::default()
        };
        self.blocks.push(Mined {
            hash: header.hash_slow(),
            header: Header {
                extra_data: sealed,
                ..header
            },
            transactions,
        });
    }

    fn next_nonce(&self) -> u64 {
        let blocks = self.blocks.iter();
        blocks.map(|block| block.transactions.len() as u64).sum()
    }

    /// Seals a block with all transactions that can enter it.
    pub fn mine(&mut self) {
        let mut next = self.next_nonce();
        let mut ready = Vec::new();
        while let Some(transaction) = self.pool.get(&next)
            && transaction.max_fee_per_gas() >= u128::from(self.base_fee)
        {
            ready.extend(self.pool.remove(&next));
            next += 1;
        }
        self.seal(ready);
    }

    pub fn mine_empty(&mut self, count: usize) {
        for _ in 0..count {
            self.seal(Vec::new());
        }
    }

    /// Puts a transaction into the next block, whatever the pool has.
    pub fn mine_this(&mut self, transaction: TxEnvelope) {
        self.pool.remove(&transaction.nonce());
        self.seal(vec![transaction]);
    }

    /// Removes the last blocks and loses their transactions. New blocks have other hashes.
    pub fn remove_blocks(&mut self, count: usize) {
        self.blocks.truncate(self.blocks.len() - count);
        self.salt += 1;
        self.pool.clear();
    }

    /// From now on the last block is stated with a hash that is not that of its header.
    pub fn restate_head(&mut self) {
        let head = self.blocks.last_mut().expect("the genesis block");
        head.hash = B256::repeat_byte(9);
    }

    pub fn head(&self) -> u64 {
        self.blocks.len() as u64 - 1
    }

    pub fn head_hash(&self) -> String {
        let head = self.blocks.last().expect("the genesis block");
        format!("{:#x}", head.hash)
    }

    /// Transactions in blocks, in order.
    pub fn mined(&self) -> Vec<TxEnvelope> {
        let blocks = self.blocks.iter();
        blocks
            .flat_map(|block| block.transactions.clone())
            .collect()
    }

    fn send(&mut self, transaction: TxEnvelope) -> Result<Value, String> {
        let hash = *transaction.tx_hash();
        if self.received.iter().all(|known| *known.tx_hash() != hash) {
            self.received.push(transaction.clone());
        }
        if self.is_poor {
            return Err("Upfront cost exceeds account balance".into());
        }
        if let Some(refusal) = self.judge.as_ref().and_then(|judge| judge(&transaction)) {
            return Err(refusal);
        }
        let nonce = transaction.nonce();
        if nonce < self.next_nonce() {
            return Err("nonce too low".into());
        }
        if let Some(waiting) = self.pool.get(&nonce) {
            if *waiting.tx_hash() == hash {
                return Err("already known".into());
            }
            let fee = waiting.max_fee_per_gas();
            if transaction.max_fee_per_gas() <= fee + fee / 10 {
                return Err("replacement transaction underpriced".into());
            }
        }
        self.pool.insert(nonce, transaction);
        Ok(json!(hash))
    }

    fn find(&self, hash: B256) -> Option<(&Mined, &TxEnvelope)> {
        self.blocks.iter().find_map(|block| {
            let mut transactions = block.transactions.iter();
            let found = transactions.find(|transaction| *transaction.tx_hash() == hash)?;
            Some((block, found))
        })
    }

    fn block(&self, number: &Value) -> Option<&Mined> {
        let hash = number.get("blockHash").unwrap_or(number);
        let by_hash = self.blocks.iter().find(|block| json!(block.hash) == *hash);
        match number.as_str() {
            Some("latest" | "pending") => self.blocks.last(),
            Some(text) if text.len() < 66 => self.blocks.get(quantity(text) as usize),
            _ => by_hash,
        }
    }

    fn call(&mut self, method: &str, params: &Value) -> Result<Value, String> {
        let fee = format!("{:#x}", self.base_fee);
        Ok(match method {
            "eth_chainId" => json!(format!("{CHAIN_ID:#x}")),
            "eth_blockNumber" => json!(format!("{:#x}", self.head())),
            "eth_getBalance" => json!(format!("{:#x}", self.balance)),
            "eth_gasPrice" => json!(fee),
            "eth_feeHistory" => json!({
                "oldestBlock": "0x0",
                "baseFeePerGas": [fee, fee],
                "gasUsedRatio": [0.5],
                "reward": [["0x1"]],
            }),
            "eth_getTransactionCount" => {
                let last = self.block(&params[1]).ok_or("header not found")?;
                let last = last.header.number;
                let blocks = self.blocks.iter().take(last as usize + 1);
                let count: usize = blocks.map(|block| block.transactions.len()).sum();
                json!(format!("{count:#x}"))
            }
            "eth_getBlockByNumber" => self.block(&params[0]).map_or(Value::Null, block_json),
            "eth_getBlockReceipts" => self.block(&params[0]).map_or(Value::Null, |block| {
                let transactions = block.transactions.iter();
                transactions
                    .map(|transaction| receipt_json(block, transaction))
                    .collect()
            }),
            "eth_getTransactionReceipt" => {
                let hash = params[0].as_str().and_then(|text| text.parse().ok());
                let found = self.find(hash.expect("a hash"));
                found.map_or(Value::Null, |(block, found)| receipt_json(block, found))
            }
            "eth_getTransactionByHash" => Value::Null,
            "eth_sendRawTransaction" => self.send(decode(&params[0]))?,
            other => return Err(format!("the method {other} does not exist")),
        })
    }
}

fn quantity(text: &str) -> u64 {
    u64::from_str_radix(text.trim_start_matches("0x"), 16).expect("a quantity")
}

fn decode(raw: &Value) -> TxEnvelope {
    let raw = raw.as_str().and_then(|raw| raw.strip_prefix("0x"));
    let raw = hex::decode(raw.expect("hex")).expect("hex");
    TxEnvelope::decode_2718_exact(&raw).expect("a transaction")
}

fn block_json(block: &Mined) -> Value {
    let hashes = block.transactions.iter();
    let rpc: Block = Block {
        header: RpcHeader::new(block.header.clone()),
        uncles: Vec::new(),
        transactions: BlockTransactions::Hashes(
            hashes.map(|transaction| *transaction.tx_hash()).collect(),
        ),
        withdrawals: None,
    };
    let mut value = json!(rpc);
    value["hash"] = json!(block.hash);
    value
}

fn receipt_json(block: &Mined, transaction: &TxEnvelope) -> Value {
    json!({
        "transactionHash": transaction.tx_hash(),
        "transactionIndex": "0x0",
        "blockHash": block.hash,
        "blockNumber": format!("{:#x}", block.header.number),
        "from": RawAddress::ZERO,
        "to": transaction.to(),
        "cumulativeGasUsed": "0x5208",
        "gasUsed": "0x5208",
        "effectiveGasPrice": "0x1",
        "contractAddress": null,
        "logs": [],
        "logsBloom": format!("0x{}", "00".repeat(256)),
        "status": "0x1",
        "type": "0x2",
    })
}

async fn answer(
    State(node): State<Node>,
    headers: HeaderMap,
    body: String,
) -> Result<String, StatusCode> {
    if *node.is_away.lock().expect("a lock") {
        return Err(StatusCode::SERVICE_UNAVAILABLE);
    }
    let given = headers.get("authorization");
    let given = given.map(|value| value.to_str().expect("text").to_owned());
    let request: Value = serde_json::from_str(&body).expect("JSON");
    let method = request["method"].as_str().expect("a method");
    let params = &request["params"];
    let hangs = {
        let script = node.script();
        if script.authorization.is_some() && script.authorization != given.as_deref() {
            return Err(StatusCode::UNAUTHORIZED);
        }
        script.hangs.clone()
    };
    if method == "eth_sendRawTransaction"
        && let Some(notice) = hangs.get(&decode(&params[0]).nonce())
    {
        node.script().hanging += 1;
        notice.notified().await;
    }
    let answer = node.script().call(method, params);
    let id = &request["id"];
    Ok(match answer {
        Ok(result) => json!({ "jsonrpc": "2.0", "id": id, "result": result }),
        Err(message) => {
            let error = json!({ "code": -32000, "message": message });
            json!({ "jsonrpc": "2.0", "id": id, "error": error })
        }
    }
    .to_string())
}
