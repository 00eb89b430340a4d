//! Prerequisites of scenarios: users with money, bonds, orders, trades. Uses public calls only.

use serde_json::{Value, json};

use crate::call::{AUDITOR, OPERATOR, SERVICE, number, text};
use crate::{Finished, Platform, Refusal};

/// A user of the platform.
#[derive(Clone, Debug)]
pub struct User {
    pub id: String,
    pub account: String,
    pub profile: Value,
}

impl User {
    /// Token of the user as investor and trader.
    pub fn token(&self) -> String {
        format!("sandbox.investor+trader.{}", self.id)
    }

    /// Subaccount of the user's CFA-RUB.
    pub fn cash(&self) -> String {
        self.units("CFA-RUB")
    }

    /// Subaccount of the user's units of an instrument.
    pub fn units(&self, instrument: &str) -> String {
        format!("{}:{instrument}", self.id)
    }
}

/// `{"currencyCode": .., "amount": {"value": ..}}`
pub fn amount(currency: &str, value: &str) -> Value {
    json!({ "currencyCode": currency, "amount": { "value": value } })
}

/// Roubles at the bank.
pub fn rub(value: &str) -> Value {
    amount("RUB", value)
}

/// An unused symbol.
pub fn symbol(prefix: &str) -> String {
    format!(
        "{prefix}-{}",
        uuid::Uuid::now_v7().simple().to_string()[18..].to_uppercase()
    )
}

/// A limit order in the form of PlaceOrder.
pub fn limit_order(
    user: &User,
    instrument: &str,
    side: &str,
    price: &str,
    quantity: &str,
) -> Value {
    json!({
        "userId": user.id, "instrumentId": instrument, "side": format!("ORDER_SIDE_{side}"), "type": "ORDER_TYPE_LIMIT",
        "timeInForce": "TIME_IN_FORCE_GTC", "price": { "value": price }, "quantity": { "value": quantity },
    })
}

impl Platform {
    /// A user with a KYC level (`NONE`, `SIMPLIFIED`, `STANDARD`, `ENHANCED`): a qualified
    /// investor, so that purchases have no yearly limit.
    pub async fn user(&self, level: &str) -> User {
        let request = json!({
            "kycStatus": format!("KYC_STATUS_{level}"), "fullName": "A person",
            "qualifiedInvestor": true,
        });
        let answer = self.ok(OPERATOR, "identity.CreateUser", request).await;
        User {
            id: text(&answer, "/profile/userId"),
            account: text(&answer, "/profile/bankAccount"),
            profile: answer["profile"].clone(),
        }
    }

    /// A user who may trade.
    pub async fn trader(&self) -> User {
        self.user("STANDARD").await
    }

    /// A user with money.
    pub async fn rich(&self, amount: &str) -> User {
        let user = self.trader().await;
        self.deposit(&user, amount).await;
        user
    }

    /// Sets a daily limit of a user, in roubles. As a service: a person raises no limit alone.
    pub async fn set_limit(&self, user: &User, limit: &str, daily: &str) {
        let request = json!({
            "userId": user.id, "limitType": format!("LIMIT_TYPE_{limit}"), "dailyLimit": rub(daily),
        });
        self.ok(SERVICE, "identity.SetLimit", request).await;
    }

    /// Makes every check of a limit fail with this text. An empty text makes checks pass again.
    pub async fn refuse_limit(&self, user: &User, limit: &str, with: &str) {
        let request = json!({ "userId": user.id, "limitType": format!("LIMIT_TYPE_{limit}"), "refuseWith": with });
        self.ok(SERVICE, "identity.SetLimit", request).await;
    }

    /// Creates a payment intent by QR code.
    pub async fn intent(&self, user: &User, amount: &str) -> Value {
        let request =
            json!({ "userId": user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub(amount) });
        self.ok(&user.token(), "payments.CreatePaymentIntent", request)
            .await["intent"]
            .clone()
    }

    /// Pays an intent at the sandbox bank by its QR code.
    pub async fn pay(&self, intent: &Value) {
        self.ok(
            OPERATOR,
            "sandbox.Pay",
            json!({ "qrPayload": text(intent, "/qrPayload") }),
        )
        .await;
    }

    /// Deposits roubles: creates an intent, pays it and waits for the issue to be final. Returns
    /// the payment id.
    pub async fn deposit(&self, user: &User, amount: &str) -> String {
        let before = self.balance(&user.cash()).await;
        let intent = self.intent(user, amount).await;
        self.pay(&intent).await;
        let payment_id = text(&intent, "/paymentId");
        let request = json!({ "userId": user.id, "externalRef": payment_id });
        self.until(
            "the deposit to be issued",
            "cfa.ListOperations",
            request,
            |answer| {
                answer.pointer("/operations/0/status") == Some(&json!("OPERATION_STATUS_FINALIZED"))
            },
        )
        .await;
        let due = before.checked_add(number(&json!(amount))).expect("a sum");
        self.balance_is(&user.cash(), &due.to_string()).await;
        payment_id
    }

    /// Balance of a sub-account; zero for one that does not exist.
    pub async fn balance(&self, subaccount: &str) -> types::Decimal {
        match self
            .call(
                AUDITOR,
                "ledger.GetBalance",
                json!({ "subaccountId": subaccount }),
            )
            .await
        {
            Ok(answer) => number(&answer["balance"]),
            Err(Refusal { http: 404, .. }) => number(&Value::Null),
            Err(refusal) => panic!("{refusal:?}"),
        }
    }

    /// Waits until balance and available amount of a sub-account equal `expected`.
    pub async fn balance_is(&self, subaccount: &str, expected: &str) -> Value {
        let expected = number(&json!(expected));
        let what = format!("{subaccount} to have {expected}");
        self.until(
            &what,
            "ledger.GetBalance",
            json!({ "subaccountId": subaccount }),
            |answer| {
                number(&answer["balance"]) == expected && number(&answer["available"]) == expected
            },
        )
        .await
    }

    /// Registers a tradable bond with whole units and a tick of one kopeck; returns its id.
    pub async fn bond(&self) -> String {
        self.instrument(json!({})).await
    }

    /// Registers an instrument and waits until the market trades it; returns its id. `fields`
    /// override the defaults of the request.
    pub async fn instrument(&self, fields: Value) -> String {
        let (id, issuer) = self.draft(fields).await;
        self.activate(&id, &issuer).await;
        self.is_traded(&id).await;
        id
    }

    /// Registers an instrument; returns its id and its issuer. `fields` override the defaults of
    /// the request.
    pub async fn draft(&self, fields: Value) -> (String, String) {
        let issuer = self.trader().await;
        let mut request = json!({
            "symbol": symbol("BOND"), "name": "A bond", "type": "INSTRUMENT_TYPE_CFA_BOND", "decimals": 0,
            "issuerId": issuer.id, "currencyCode": "RUB", "issueLimit": { "value": "1000000" },
            "nominal": { "value": "1000.00" },
            "tickSize": { "value": "0.01" }, "lotSize": { "value": "1" },
            "priceBandLow": { "value": "1.00" }, "priceBandHigh": { "value": "100000.00" },
        });
        for (name, value) in fields.as_object().cloned().unwrap_or_default() {
            request[name] = value;
        }
        let answer = self.ok(OPERATOR, "cfa.RegisterInstrument", request).await;
        let issuer = text(&answer, "/instrument/issuerId");
        (text(&answer, "/instrumentId"), issuer)
    }

    /// Waits until the market trades an instrument.
    pub async fn is_traded(&self, id: &str) {
        self.until(
            "the market to list the instrument",
            "market.GetMarketStatus",
            json!({}),
            |answer| {
                let all = answer["instruments"]
                    .as_array()
                    .cloned()
                    .unwrap_or_default();
                all.iter().any(|one| {
                    one["instrumentId"] == json!(id) && one["phase"] == json!("TRADING_PHASE_OPEN")
                })
            },
        )
        .await;
    }

    /// Signs the decision on a registered issue for its issuer and activates the issue.
    pub async fn activate(&self, instrument: &str, issuer: &str) {
        let activate = self.with_signed_decision(instrument, issuer).await;
        self.approved("cfa.ActivateInstrument", activate).await;
    }

    /// Signs the decision on a registered issue for its issuer; returns the request that activates
    /// the issue.
    pub async fn with_signed_decision(&self, instrument: &str, issuer: &str) -> Value {
        // A document decides on one issue.
        let hash: String = instrument
            .bytes()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        let hash = format!("{hash:0>64}");
        let by = format!("sandbox.issuer.{issuer}");
        let sign = json!({ "userId": issuer, "documentHash": hash });
        let signed = self.ok(&by, "sandbox.SignDocument", sign).await;
        let decision = json!({ "instrumentId": instrument, "documentHash": hash,
            "signature": signed["signature"] });
        self.ok(&by, "cfa.SignIssueDecision", decision).await;
        json!({ "instrumentId": instrument, "documentHash": hash })
    }

    /// Waits until the ledger has `count` anchors, all on the chain; returns them, newest first.
    pub async fn anchored(&self, count: usize) -> Vec<Value> {
        let is_on_chain = |anchor: &Value| {
            let on_chain = anchor["onChain"].as_str();
            on_chain.is_some_and(|data| !data.is_empty())
        };
        let what = format!("{count} anchors on the chain");
        let answer = self
            .until(&what, "cfa.ListAnchors", json!({}), |answer| {
                let anchors = answer["anchors"].as_array();
                anchors.is_some_and(|all| all.len() >= count && all.iter().all(is_on_chain))
            })
            .await;
        answer["anchors"].as_array().cloned().unwrap_or_default()
    }

    /// The issuer of an issue, without account and profile.
    pub async fn issuer(&self, instrument: &str) -> User {
        let request = json!({ "instrumentId": instrument });
        let found = self.ok(AUDITOR, "cfa.GetInstrument", request).await;
        User {
            id: text(&found, "/instrument/issuerId"),
            account: String::new(),
            profile: Value::Null,
        }
    }

    /// Token of the issuer of an issue.
    pub async fn issuer_of(&self, instrument: &str) -> String {
        let issuer = self.issuer(instrument).await;
        format!("sandbox.issuer.{}", issuer.id)
    }

    /// Issues units to an investor without a payment; waits until they are available.
    pub async fn issue(&self, instrument: &str, investor: &User, units: &str) -> Value {
        let before = self.balance(&investor.units(instrument)).await;
        let request = json!({ "instrumentId": instrument, "investorId": investor.id, "bookbuildingId": "placement",
            "amount": amount(instrument, units) });
        let issuer = self.issuer_of(instrument).await;
        let answer = self.ok(&issuer, "cfa.IssueInvestmentCfa", request).await;
        let due = before.checked_add(number(&json!(units))).expect("a sum");
        self.balance_is(&investor.units(instrument), &due.to_string())
            .await;
        answer["operation"].clone()
    }

    /// Waits until a CFA operation has a status, given without its `OPERATION_STATUS_` prefix.
    pub async fn cfa_operation_is(&self, operation_id: &str, status: &str) -> Value {
        let wanted = json!(format!("OPERATION_STATUS_{status}"));
        let request = json!({ "operationId": operation_id });
        let what = format!("operation {operation_id} to be {status}");
        let answer = self
            .until(&what, "cfa.GetOperation", request, |answer| {
                answer["operation"]["status"] == wanted
            })
            .await;
        answer["operation"].clone()
    }

    /// Opens a trading hold of money or units; returns the hold id.
    pub async fn trading_hold(&self, user: &User, instrument: &str, amount: &str) -> String {
        let request =
            json!({ "userId": user.id, "instrumentId": instrument, "amount": { "value": amount } });
        text(
            &self
                .ok(&user.token(), "market.OpenTradingHold", request)
                .await,
            "/tradingHold/holdId",
        )
    }

    /// Places a limit order; returns the order of the answer.
    pub async fn place(
        &self,
        user: &User,
        instrument: &str,
        side: &str,
        price: &str,
        quantity: &str,
    ) -> Value {
        let request = json!({ "order": limit_order(user, instrument, side, price, quantity) });
        self.ok(&user.token(), "market.PlaceOrder", request).await["order"].clone()
    }

    /// Waits until an instrument has `count` trades, all settled; returns them.
    pub async fn settled(&self, instrument: &str, count: usize) -> Vec<Value> {
        let request = json!({ "instrumentId": instrument, "pagination": { "pageSize": 1000 } });
        let what = format!("{count} trades of {instrument} to be settled");
        let answer = self
            .until(&what, "market.ListTrades", request, |answer| {
                let trades = answer["trades"].as_array().cloned().unwrap_or_default();
                trades.len() == count && trades.iter().all(is_settled)
            })
            .await;
        answer["trades"].as_array().cloned().unwrap_or_default()
    }

    /// Runs the proof of balances by the command line and asserts that it passes. It exits with 0
    /// only if every difference is explained.
    pub async fn proof(&self) -> Value {
        let proof = self.cli(&["--json", "proof"]).await;
        assert!(
            proof.status.success(),
            "the proof found differences: {proof:?}"
        );
        let proof = proof.json();
        assert_eq!(proof["ok"], json!(true), "{proof}");
        proof
    }

    /// Runs the proof of balances with the check of every row of the stores, as JSON.
    pub async fn full_proof(&self) -> Finished {
        let data = self.data_dir().display().to_string();
        self.cli(&["--json", "--data-dir", &data, "proof", "--full"])
            .await
    }
}

/// A trade whose delivery against payment is complete.
pub fn is_settled(trade: &Value) -> bool {
    trade["settlementStatus"] == json!("SETTLEMENT_STATUS_SETTLED")
}
