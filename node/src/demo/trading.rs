//! Trading in the demonstration: Alice uses the binary protocol, Bob gRPC. The orders cover partial
//! fills, a cancel and a market order. At the end every trade is settled.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, bail};
use client::{Connection, LoginOptions, Report, Reports, Trust};
use serde_json::{Value, json};
use types::{CFA_RUB, OrderType, Side, TimeInForce};
use wire::{Cancel, NewOrder, ServerMessage};

use super::participants::Participants;
use super::scenario::{Scenario, same_number, text};

const CHANNEL: u16 = 0;

/// Alice's trading session.
struct Terminal {
    connection: Connection,
    reports: Reports,
    instrument: u32,
}

impl Terminal {
    async fn open(gateway: SocketAddr, parties: &Participants) -> anyhow::Result<Self> {
        let (connection, reports) = Connection::connect(gateway, Trust::Loopback)
            .await
            .context("connect")?;
        let token = format!("sandbox.trader.{}", parties.alice);
        connection
            .login(CHANNEL, LoginOptions::new(&token, "demo"))
            .await
            .context("login")?;
        let instrument = connection
            .instruments()
            .iter()
            .find(|definition| definition.id.as_str() == parties.bond)
            .map(|definition| definition.instrument)
            .context("the gateway does not know the bond")?;
        Ok(Self {
            connection,
            reports,
            instrument,
        })
    }

    /// Waits for the next report that `pick` accepts.
    ///
    /// # Errors
    /// A rejected request, a lost connection, or no such report within 30 s.
    async fn expect<T>(
        &mut self,
        what: &str,
        pick: impl Fn(&ServerMessage) -> Option<T>,
    ) -> anyhow::Result<T> {
        let wait = async {
            loop {
                let Report { message, .. } = self
                    .reports
                    .recv()
                    .await
                    .context("the connection was lost")??;
                if let ServerMessage::Rejected(rejected) = message {
                    bail!("refused: {}", rejected.reason.as_str());
                }
                if let Some(found) = pick(&message) {
                    return Ok(found);
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(30), wait)
            .await
            .with_context(|| format!("waited for {what}"))?
    }

    async fn place(
        &mut self,
        id: u64,
        order_type: OrderType,
        price_ticks: i64,
        quantity: u64,
    ) -> anyhow::Result<u64> {
        let order = NewOrder {
            order_type,
            time_in_force: if order_type == OrderType::Market {
                TimeInForce::Ioc
            } else {
                TimeInForce::Gtc
            },
            ..NewOrder::limit(id, self.instrument, Side::Buy, price_ticks, quantity)
        };
        self.connection.send(CHANNEL, order).await?;
        self.expect("the acknowledgement", |message| match message {
            ServerMessage::OrderAck(ack) if ack.client_order_id == id => Some(ack.engine_order_id),
            _ => None,
        })
        .await
    }

    /// Price and quantity of the next fill.
    async fn fill(&mut self) -> anyhow::Result<(i64, u64)> {
        self.expect("a fill", |message| match message {
            ServerMessage::Fill(fill) => Some((fill.price_ticks, fill.quantity_lots)),
            _ => None,
        })
        .await
    }
}

/// Places the orders and waits for settlement; returns the number of trades.
pub async fn play(
    scenario: &mut Scenario,
    parties: &Participants,
    gateway: SocketAddr,
) -> anyhow::Result<u64> {
    let alice_token = format!("sandbox.investor.{}", parties.alice);
    let hold = scenario
        .call(
            &alice_token,
            "dfa.market.v1.MarketService/OpenTradingHold",
            json!({ "userId": parties.alice, "instrumentId": "CFA-RUB", "amount": { "value": "20000.00" } }),
        )
        .await?;
    let hold_id = text(&hold, "/tradingHold/holdId")?.to_owned();
    scenario.step(
        "Alice blocked 20000.00 CFA-RUB for trading",
        &[("hold_id", &hold_id)],
    );

    until_listed(scenario, parties).await?;
    let mut alice = Terminal::open(gateway, parties).await?;

    bid(scenario, parties, &mut alice).await?;
    cancel_rest(scenario, &mut alice).await?;
    buy_at_market(scenario, parties, &mut alice).await?;
    drop(alice);

    let trades = wait_settled(scenario, parties, 3).await?;
    scenario
        .call(
            &alice_token,
            "dfa.market.v1.MarketService/CloseTradingHold",
            json!({ "holdId": hold_id }),
        )
        .await?;
    check_balances(scenario, parties).await?;
    let ids: Vec<(&str, &str)> = trades
        .iter()
        .filter_map(|trade| Some(("trade_id", trade["tradeId"].as_str()?)))
        .collect();
    let summary = "Every trade was delivered against payment, in the ledger and on chain; Alice closed \
                   her trading hold";
    scenario.step(summary, &ids);
    Ok(trades.len() as u64)
}

/// Alice's bid, and two orders of Bob that trade with it.
async fn bid(
    scenario: &mut Scenario,
    parties: &Participants,
    alice: &mut Terminal,
) -> anyhow::Result<()> {
    let engine_id = alice.place(1, OrderType::Limit, 101_000, 10).await?;
    scenario.step(
        "Alice bids for 10 bonds at 1010.00 over the binary protocol; the order is durable",
        &[("engine_order_id", &engine_id.to_string())],
    );
    for (price, quantity) in [("1005.00", 4u64), ("1010.00", 3)] {
        let order = sell(scenario, parties, price, &quantity.to_string()).await?;
        if order.pointer("/order/status") != Some(&json!("ORDER_STATUS_FILLED")) {
            bail!("expected Bob's order to be filled at once: {order}");
        }
        let fill = alice.fill().await?;
        if fill != (101_000, quantity) {
            bail!("expected a fill of {quantity} at 1010.00, got {fill:?}");
        }
        scenario.step(
            &format!("Bob sells {quantity} at {price} over gRPC: traded at 1010.00, the resting order's price"),
            &[("order_id", text(&order, "/order/orderId")?)],
        );
    }
    Ok(())
}

async fn cancel_rest(scenario: &mut Scenario, alice: &mut Terminal) -> anyhow::Result<()> {
    alice
        .connection
        .send(
            CHANNEL,
            Cancel {
                client_order_id: 1,
                engine_order_id: 0,
            },
        )
        .await?;
    let left = alice
        .expect("the cancel", |message| match message {
            ServerMessage::Cancelled(cancelled) => Some(cancelled.quantity_lots),
            _ => None,
        })
        .await?;
    if left != 3 {
        bail!("expected 3 open bonds, {left} were cancelled");
    }
    scenario.step("Alice cancels the 3 that are left", &[]);
    Ok(())
}

/// Bob's offer, Alice's market order, and the cancel of the rest.
async fn buy_at_market(
    scenario: &mut Scenario,
    parties: &Participants,
    alice: &mut Terminal,
) -> anyhow::Result<()> {
    let offer = sell(scenario, parties, "1020.00", "5").await?;
    let offer_id = text(&offer, "/order/orderId")?.to_owned();
    if offer.pointer("/order/status") != Some(&json!("ORDER_STATUS_OPEN")) {
        bail!("expected Bob's offer to rest: {offer}");
    }
    alice.place(2, OrderType::Market, 0, 2).await?;
    let fill = alice.fill().await?;
    if fill != (102_000, 2) {
        bail!("expected a fill of 2 at 1020.00, got {fill:?}");
    }
    scenario.step(
        "Alice buys 2 at the market from Bob's offer of 5 at 1020.00",
        &[("order_id", &offer_id)],
    );
    let cancelled = scenario
        .call(
            &format!("sandbox.investor.{}", parties.bob),
            "dfa.market.v1.MarketService/CancelOrder",
            json!({ "orderId": offer_id }),
        )
        .await?;
    if cancelled.pointer("/order/status") != Some(&json!("ORDER_STATUS_CANCELLED"))
        || !same_number(&cancelled["order"]["filledQuantity"]["value"], "2")
    {
        bail!("expected Bob's offer to be cancelled with 2 filled: {cancelled}");
    }
    scenario.step(
        "Bob cancels the rest of the offer",
        &[("order_id", &offer_id)],
    );
    Ok(())
}

async fn check_balances(scenario: &mut Scenario, parties: &Participants) -> anyhow::Result<()> {
    // 4 and 3 at 1010.00, 2 at 1020.00: 9110.00, plus a fee of 9.11 paid by the buyer.
    scenario
        .balance_is(&parties.alice, CFA_RUB, "90880.89")
        .await?;
    scenario
        .balance_is(&parties.alice, &parties.bond, "9")
        .await?;
    scenario
        .balance_is(&parties.bob, CFA_RUB, "39110.00")
        .await?;
    scenario
        .balance_is(&parties.bob, &parties.bond, "11")
        .await?;
    Ok(())
}

async fn sell(
    scenario: &Scenario,
    parties: &Participants,
    price: &str,
    quantity: &str,
) -> anyhow::Result<Value> {
    scenario
        .call(
            &format!("sandbox.investor.{}", parties.bob),
            "dfa.market.v1.MarketService/PlaceOrder",
            json!({ "order": {
                "userId": parties.bob, "instrumentId": parties.bond,
                "side": "ORDER_SIDE_SELL", "type": "ORDER_TYPE_LIMIT",
                "timeInForce": "TIME_IN_FORCE_GTC", "price": { "value": price }, "quantity": { "value": quantity },
            } }),
        )
        .await
}

/// Waits until the bond has `count` trades and all are settled; returns them.
async fn wait_settled(
    scenario: &Scenario,
    parties: &Participants,
    count: usize,
) -> anyhow::Result<Vec<Value>> {
    let answer = scenario
        .until(
            "the trades to be settled",
            "sandbox.auditor",
            "dfa.market.v1.MarketService/ListTrades",
            json!({ "instrumentId": parties.bond }),
            |answer| {
                answer["trades"].as_array().is_some_and(|trades| {
                    trades.len() == count
                        && trades.iter().all(|trade| {
                            trade["settlementStatus"] == json!("SETTLEMENT_STATUS_SETTLED")
                        })
                })
            },
        )
        .await?;
    Ok(answer["trades"].as_array().cloned().unwrap_or_default())
}

/// Waits until the market is open for the bond.
async fn until_listed(scenario: &mut Scenario, parties: &Participants) -> anyhow::Result<()> {
    scenario
        .until(
            "the market to know the bond",
            "sandbox.auditor",
            "dfa.market.v1.MarketService/GetMarketStatus",
            json!({}),
            |answer| {
                answer["instruments"].as_array().is_some_and(|all| {
                    all.iter().any(|one| {
                        one["instrumentId"] == json!(parties.bond)
                            && one["phase"] == json!("TRADING_PHASE_OPEN")
                    })
                })
            },
        )
        .await?;
    Ok(())
}
