//! State that a refusal must leave unchanged, and owners of holds.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde_json::{Value, json};

use crate::Platform;
use crate::call::{AUDITOR, number, text};

/// State that a call might change, as counts, amounts and statuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub trial_balance: Vec<String>,
    pub operations: usize,
    /// Hold id to status and remaining amount.
    pub holds: BTreeMap<String, (String, String)>,
    pub cfa_operations: usize,
    pub instruments: usize,
    /// Order id to status and filled quantity.
    pub orders: BTreeMap<String, (String, String)>,
    pub trades: usize,
    pub trading_holds: BTreeMap<String, (String, String)>,
    /// Payment id to status.
    pub intents: BTreeMap<String, String>,
    pub payouts: BTreeMap<String, String>,
    pub users: usize,
    pub bank_balance: String,
}

impl Platform {
    /// Reads the state as the auditor.
    pub async fn state(&self) -> State {
        let list =
            |name: &'static str, field: &'static str| self.all(AUDITOR, name, field, json!({}));
        let trial = self.ok(AUDITOR, "ledger.GetTrialBalance", json!({})).await;
        let bank = self.ok(AUDITOR, "sandbox.GetBankBalance", json!({})).await;
        State {
            trial_balance: trial["lines"]
                .as_array()
                .into_iter()
                .flatten()
                .map(Value::to_string)
                .collect(),
            operations: list("ledger.ListOperations", "operations").await.len(),
            holds: by_id(&list("ledger.ListHolds", "holds").await, "holdId", |hold| {
                (
                    text(hold, "/status"),
                    number(&hold["remainingAmount"]["amount"]).to_string(),
                )
            }),
            cfa_operations: list("cfa.ListOperations", "operations").await.len(),
            instruments: list("cfa.ListInstruments", "instruments").await.len(),
            orders: by_id(
                &list("market.ListOrders", "orders").await,
                "orderId",
                |order| {
                    (
                        text(order, "/status"),
                        number(&order["filledQuantity"]).to_string(),
                    )
                },
            ),
            trades: list("market.ListTrades", "trades").await.len(),
            trading_holds: by_id(
                &list("market.ListTradingHolds", "tradingHolds").await,
                "holdId",
                |hold| {
                    (
                        number(&hold["undrawn"]).to_string(),
                        number(&hold["drawn"]).to_string(),
                    )
                },
            ),
            intents: by_id(
                &list("payments.ListPaymentIntents", "intents").await,
                "paymentId",
                |one| text(one, "/status"),
            ),
            payouts: by_id(
                &list("payments.ListPayouts", "payouts").await,
                "payoutId",
                |one| text(one, "/status"),
            ),
            users: list("identity.ListUsers", "users").await.len(),
            bank_balance: number(&bank["balance"]["amount"]).to_string(),
        }
    }

    /// Active holds of the ledger.
    pub async fn active_holds(&self) -> Vec<Value> {
        self.all(
            AUDITOR,
            "ledger.ListHolds",
            "holds",
            json!({ "status": "HOLD_STATUS_ACTIVE" }),
        )
        .await
    }

    /// Waits until each active hold belongs to an open trading hold or an open order. `keys` maps
    /// the idempotency key of an order with its own hold to the order.
    ///
    /// # Panics
    /// If a hold still has no owner after a minute; the message contains the hold.
    pub async fn assert_no_orphans(&self, keys: &HashMap<String, String>) {
        let deadline = std::time::Instant::now() + crate::process::PATIENCE;
        loop {
            let orphans = self.orphans(keys).await;
            if orphans.is_empty() {
                return;
            }
            assert!(
                std::time::Instant::now() < deadline,
                "active holds without an owner: {orphans:#?}"
            );
            tokio::time::sleep(std::time::Duration::from_millis(50)).await;
        }
    }

    async fn orphans(&self, keys: &HashMap<String, String>) -> Vec<Value> {
        let holds = self.active_holds().await;
        let open: BTreeSet<String> = self
            .all(AUDITOR, "market.ListOrders", "orders", json!({}))
            .await
            .iter()
            .filter(|order| is_open(order))
            .map(|order| text(order, "/orderId"))
            .collect();
        let trading: BTreeSet<String> = self
            .all(
                AUDITOR,
                "market.ListTradingHolds",
                "tradingHolds",
                json!({}),
            )
            .await
            .iter()
            .filter(|hold| hold["status"] == json!("TRADING_HOLD_STATUS_OPEN"))
            .map(|hold| text(hold, "/holdId"))
            .collect();
        holds
            .into_iter()
            .filter(|hold| !has_owner(hold, &open, &trading, keys))
            .collect()
    }
}

fn has_owner(
    hold: &Value,
    open: &BTreeSet<String>,
    trading: &BTreeSet<String>,
    keys: &HashMap<String, String>,
) -> bool {
    let reason = hold["reason"].as_str().unwrap_or_default();
    let names_open_order = open.iter().any(|order| reason.contains(order.as_str()));
    let own = reason.split(' ').next_back().and_then(|key| keys.get(key));
    trading.contains(&text(hold, "/holdId")) && reason.starts_with("Trading hold")
        || names_open_order
        || own.is_some_and(|order| open.contains(order))
}

/// An order that may still trade.
pub fn is_open(order: &Value) -> bool {
    order["status"] == json!("ORDER_STATUS_OPEN")
        || order["status"] == json!("ORDER_STATUS_PARTIALLY_FILLED")
}

fn by_id<T>(rows: &[Value], id: &str, read: impl Fn(&Value) -> T) -> BTreeMap<String, T> {
    rows.iter()
        .map(|row| (text(row, &format!("/{id}")), read(row)))
        .collect()
}
