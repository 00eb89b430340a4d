//! Sets up members and an instrument in a running platform over its RPC port, and reads its state.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::{Value, json};
use uuid::Uuid;

/// Maximum wait until a deposit or an issue is final, or a market open.
const FINAL_WAIT_MAX: Duration = Duration::from_secs(60);
/// Maximum wait for the replica.
const REPLICA_WAIT_MAX: Duration = Duration::from_secs(10);
/// Pause between two calls that wait for the replica.
const RETRY: Duration = Duration::from_millis(20);

/// Token for the setup. Calls of a service are exempt from the call rates.
const SETUP: &str = "sandbox.service";

/// Calls of the platform's RPC port.
pub struct PlatformClient {
    pub address: SocketAddr,
}

/// The market's state, as one user sees it.
pub struct Status {
    /// Last durable record of the journal.
    pub commit: u64,
    /// Bounds of the user, as JSON of the contract.
    pub bounds: Value,
}

impl PlatformClient {
    /// Makes a call in JSON. Adds the request context.
    ///
    /// # Errors
    /// The connection fails, or the status is not 200.
    pub fn call(&self, token: &str, method: &str, mut body: Value) -> anyhow::Result<Value> {
        let id = Uuid::new_v4().to_string();
        body["context"] = json!({ "requestId": id, "idempotencyKey": id });
        let body = body.to_string();
        let mut stream = TcpStream::connect(self.address)?;
        write!(
            stream,
            "POST /{method} HTTP/1.0\r\nhost: {}\r\nauthorization: Bearer {token}\r\n\
             content-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            self.address,
            body.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let (head, body) = answer.split_once("\r\n\r\n").context("no HTTP answer")?;
        let status = head.lines().next().unwrap_or_default();
        anyhow::ensure!(status.contains(" 200 "), "{method}: {status}: {body}");
        Ok(serde_json::from_str(body)?)
    }

    /// Creates a user that may trade and has this much CFA-RUB. Returns its id.
    ///
    /// # Errors
    /// A call fails, or the deposit does not become final.
    pub fn member(&self, roubles: u64) -> anyhow::Result<String> {
        const IDENTITY: &str = "dfa.identity.v1.IdentityService";
        let user = format!("wire-{}", Uuid::new_v4().simple());
        let new = json!({ "userId": user, "kycStatus": "KYC_STATUS_STANDARD",
                          "bankAccount": "40817810100000000001", "qualifiedInvestor": true });
        self.call(SETUP, &format!("{IDENTITY}/CreateUser"), new)?;
        for limit in ["LIMIT_TYPE_DEPOSIT", "LIMIT_TYPE_TRADING"] {
            let limit = json!({ "userId": user, "limitType": limit, "dailyLimit":
                { "currencyCode": "RUB", "amount": { "value": "1000000000000.00" } } });
            self.call(SETUP, &format!("{IDENTITY}/SetLimit"), limit)?;
        }
        let intent = self.call(
            &format!("sandbox.investor.{user}"),
            "dfa.payments.v1.PaymentsService/CreatePaymentIntent",
            json!({ "userId": user, "method": "PAYMENT_METHOD_BANK_TRANSFER", "amount":
                { "currencyCode": "RUB", "amount": { "value": format!("{roubles}.00") } } }),
        )?;
        let link = intent.pointer("/intent/qrPayload").cloned();
        let pay = json!({ "qrPayload": link.context("no payment link")? });
        self.call(SETUP, "dfa.sandbox.v1.SandboxBankService/Pay", pay)?;
        self.wait_for_balance(&user, "CFA-RUB", roubles)?;
        Ok(user)
    }

    /// Issues units of an instrument to a user and opens a trading hold for them.
    ///
    /// # Errors
    /// A call fails, or the units do not become final.
    pub fn units(&self, user: &str, instrument: &str, units: u64) -> anyhow::Result<()> {
        let amount = json!({ "value": units.to_string() });
        self.call(
            SETUP,
            "dfa.cfa.v1.CfaRegistryService/IssueInvestmentCfa",
            json!({ "instrumentId": instrument, "investorId": user, "bookbuildingId": "wire",
                    "amount": { "currencyCode": instrument, "amount": amount } }),
        )?;
        self.wait_for_balance(user, instrument, units)?;
        self.call(
            &format!("sandbox.trader.{user}"),
            "dfa.market.v1.MarketService/OpenTradingHold",
            json!({ "userId": user, "instrumentId": instrument, "amount": amount }),
        )?;
        Ok(())
    }

    /// Waits until exactly this amount is available in whole units.
    fn wait_for_balance(&self, user: &str, asset: &str, amount: u64) -> anyhow::Result<()> {
        let balance = json!({ "subaccountId": types::subaccount::of_user(user, asset) });
        let since = Instant::now();
        loop {
            let method = "dfa.ledger.v1.LedgerService/GetBalance";
            let found = self.call("sandbox.auditor", method, balance.clone());
            let available = found.ok().and_then(|found| {
                let value = found.pointer("/available/value")?.as_str()?;
                value.split('.').next()?.parse::<u64>().ok()
            });
            if available == Some(amount) {
                return Ok(());
            }
            anyhow::ensure!(
                since.elapsed() < FINAL_WAIT_MAX,
                "timed out waiting for {amount} {asset}"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Reads the commit position of the journal and the user's bounds.
    ///
    /// # Errors
    /// The call fails.
    pub fn status(&self, user: &str) -> anyhow::Result<Status> {
        let method = "dfa.market.v1.MarketService/GetMarketStatus";
        let token = format!("sandbox.trader.{user}");
        let since = Instant::now();
        let mut status = loop {
            match self.call(&token, method, json!({})) {
                // Directly after the load the replica may lag.
                Err(error)
                    if error.to_string().contains("REPLICA_BEHIND")
                        && since.elapsed() < REPLICA_WAIT_MAX =>
                {
                    std::thread::sleep(RETRY);
                }
                answer => break answer?,
            }
        };
        let commit = status["commitSequence"]
            .as_str()
            .context("no commitSequence")?;
        Ok(Status {
            commit: commit.parse()?,
            bounds: status["bounds"].take(),
        })
    }

    /// Reads the user's TRADING limit per day and its use, as JSON of the contract.
    ///
    /// # Errors
    /// The call fails, or the user has no such limit.
    pub fn trading_budget(&self, user: &str) -> anyhow::Result<Value> {
        let method = "dfa.identity.v1.IdentityService/GetLimits";
        let token = format!("sandbox.trader.{user}");
        let found = self.call(&token, method, json!({ "userId": user }))?;
        let limits = found["limits"].as_array().context("no limits")?;
        let trading = json!("LIMIT_TYPE_TRADING");
        let limit = limits.iter().find(|limit| limit["limitType"] == trading);
        limit.cloned().context("no TRADING limit")
    }

    /// Reads the metrics of the platform, by name. Metrics with labels have them in the name.
    ///
    /// # Errors
    /// The connection fails.
    pub fn metrics(&self) -> anyhow::Result<BTreeMap<String, f64>> {
        let mut stream = TcpStream::connect(self.address)?;
        write!(
            stream,
            "GET /metrics HTTP/1.0\r\nhost: {}\r\n\r\n",
            self.address
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let named = |line: &str| {
            let (name, value) = line.split_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Ok(answer.lines().filter_map(named).collect())
    }

    /// Registers an instrument and waits until its market is open. Returns its id.
    ///
    /// # Errors
    /// A call fails, or the market does not open.
    pub fn instrument(&self) -> anyhow::Result<String> {
        const CFA: &str = "dfa.cfa.v1.CfaRegistryService";
        let issuer = format!("wire-issuer-{}", Uuid::new_v4().simple());
        let new = json!({ "userId": issuer, "kycStatus": "KYC_STATUS_STANDARD" });
        self.call(SETUP, "dfa.identity.v1.IdentityService/CreateUser", new)?;
        let symbol = format!(
            "W{}",
            &Uuid::new_v4().simple().to_string()[..10].to_uppercase()
        );
        let new = json!({ "symbol": symbol, "name": "Bench", "type": "INSTRUMENT_TYPE_CFA_EQUITY",
            "decimals": 0, "issuerId": issuer, "currencyCode": "RUB",
            "tickSize": { "value": "0.01" }, "lotSize": { "value": "1" },
            "priceBandLow": { "value": "0.01" }, "priceBandHigh": { "value": "1000.00" } });
        let made = self.call(SETUP, &format!("{CFA}/RegisterInstrument"), new)?;
        let id = made.pointer("/instrumentId").and_then(Value::as_str);
        let id = id.context("no instrument id")?.to_owned();
        // A document decides on one issue.
        let hash: String = id.bytes().map(|byte| format!("{byte:02x}")).collect();
        let hash = format!("{hash:0>64}");
        let sign = json!({ "userId": issuer, "documentHash": hash });
        let signed = self.call(
            SETUP,
            "dfa.sandbox.v1.SandboxBankService/SignDocument",
            sign,
        )?;
        let decision = json!({ "instrumentId": id, "documentHash": hash,
            "signature": signed["signature"] });
        self.call(SETUP, &format!("{CFA}/SignIssueDecision"), decision)?;
        let activate = json!({ "instrumentId": id, "documentHash": hash });
        self.call(SETUP, &format!("{CFA}/ActivateInstrument"), activate)?;
        let since = Instant::now();
        loop {
            let method = "dfa.market.v1.MarketService/GetMarketStatus";
            let status = self.call("sandbox.auditor", method, json!({}))?;
            let is_open = status["instruments"].as_array().is_some_and(|all| {
                all.iter().any(|one| {
                    one["instrumentId"] == json!(id) && one["phase"] == json!("TRADING_PHASE_OPEN")
                })
            });
            if is_open {
                return Ok(id);
            }
            anyhow::ensure!(
                since.elapsed() < FINAL_WAIT_MAX,
                "timed out waiting for the market to open"
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
