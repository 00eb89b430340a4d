//! Bad requests: each gets the error of the contract (code, exact text, reason in the details) and
//! changes no state. The tests therefore run in parallel against one prepared platform and compare
//! its state with one snapshot.

use bytes_of_login::login;
use serde_json::{Value, json};
use tests::call::{AUDITOR, OPERATOR, SERVICE, TREASURY, context, text};
use tests::ledger::State;
use tests::member::Terminal;
use tests::quic::Raw;
use tests::shared::run;
use tests::world::{User, amount, limit_order, rub};
use tests::{Platform, bank};
use tokio::sync::OnceCell;

/// A platform with users and orders, and its state after preparation.
struct Stage {
    platform: &'static Platform,
    user: User,
    other: User,
    bond: String,
    /// An open offer of `other`.
    order: String,
    /// A pending payment.
    intent: Value,
    before: State,
}

static STAGE: OnceCell<Stage> = OnceCell::const_new();

async fn stage() -> &'static Stage {
    STAGE.get_or_init(prepare).await
}

async fn prepare() -> Stage {
    let platform = tests::shared::platform().await;
    let (user, other, bond) = (
        platform.rich("1000.00").await,
        platform.trader().await,
        platform.bond().await,
    );
    platform.issue(&bond, &other, "10").await;
    platform.trading_hold(&user, "CFA-RUB", "200.00").await;
    let order = text(
        &platform.place(&other, &bond, "SELL", "500.00", "2").await,
        "/orderId",
    );
    let intent = platform.intent(&user, "40.00").await;
    // The state is stable once settlement has split off the order's holds.
    let request = json!({ "status": "HOLD_STATUS_ACTIVE" });
    platform
        .until(
            "the hold of the open order",
            "ledger.ListHolds",
            request,
            |answer| {
                answer["holds"].as_array().is_some_and(|holds| {
                    holds.iter().any(|hold| {
                        hold["reason"]
                            .as_str()
                            .is_some_and(|reason| reason.contains(&order))
                    })
                })
            },
        )
        .await;
    let before = platform.state().await;
    assert!(
        before.operations > 0 && !before.holds.is_empty() && !before.intents.is_empty(),
        "{before:?}"
    );
    assert!(
        !before.orders.is_empty() && !before.trading_holds.is_empty() && before.users > 2,
        "{before:?}"
    );
    Stage {
        platform,
        user,
        other,
        bond,
        order,
        intent,
        before,
    }
}

impl Stage {
    async fn unchanged(&self) {
        assert_eq!(self.platform.state().await, self.before);
    }

    fn order(&self, price: &str, quantity: &str) -> Value {
        json!({ "order": limit_order(&self.user, &self.bond, "BUY", price, quantity) })
    }

    async fn refused(&self, name: &str, request: Value) -> tests::Refusal {
        self.platform
            .refused(&self.user.token(), name, request)
            .await
    }
}

// rows: R339
#[test]
fn unknown_users_are_not_found() {
    run(async {
        let stage = stage().await;
        let ghost = User {
            id: "ghost".into(),
            account: String::new(),
            profile: Value::Null,
        };
        let sender = stage.other.token();
        let issuer = stage.platform.issuer_of(&stage.bond).await;
        for (token, name, request) in [
            (
                OPERATOR,
                "payments.CreatePaymentIntent",
                json!({ "userId": "ghost", "method": "PAYMENT_METHOD_SBP_QR", "amount": rub("1.00") }),
            ),
            (
                SERVICE,
                "cfa.IssueCfaRub",
                json!({ "userId": "ghost", "paymentId": "p", "amount": rub("1.00") }),
            ),
            (
                "sandbox.investor.ghost",
                "cfa.RedeemCfaRub",
                json!({ "userId": "ghost", "payoutId": "p", "amount": rub("1.00") }),
            ),
            (
                &issuer,
                "cfa.IssueInvestmentCfa",
                json!({
                    "instrumentId": stage.bond, "investorId": "ghost", "bookbuildingId": "b",
                    "amount": amount(&stage.bond, "1"),
                }),
            ),
            (
                &sender,
                "cfa.TransferCfa",
                json!({
                    "instrumentId": stage.bond, "fromUserId": stage.other.id, "toUserId": "ghost",
                    "amount": amount(&stage.bond, "1"),
                }),
            ),
            (
                "sandbox.trader.ghost",
                "market.PlaceOrder",
                json!({ "order": limit_order(&ghost, &stage.bond, "BUY", "10.00", "1") }),
            ),
            (
                "sandbox.trader.ghost",
                "market.OpenTradingHold",
                json!({ "userId": "ghost", "instrumentId": "CFA-RUB", "amount": { "value": "1.00" } }),
            ),
            (
                OPERATOR,
                "identity.UpdateUser",
                json!({ "userId": "ghost", "kycStatus": "KYC_STATUS_ENHANCED" }),
            ),
            (
                AUDITOR,
                "identity.GetUserProfile",
                json!({ "userId": "ghost" }),
            ),
        ] {
            let refusal = stage.platform.refused(token, name, request).await;
            assert_eq!(
                (name, refusal.http, refusal.message.as_str()),
                (name, 404, "User not found"),
                "{refusal:?}"
            );
            refusal.is(404, "not_found", "User not found", "USER_NOT_FOUND");
        }
        stage.unchanged().await;
    });
}

// rows: R339
#[test]
fn unknown_things_are_not_found_by_their_exact_text() {
    run(async {
        let stage = stage().await;
        let id = uuid::Uuid::now_v7().to_string();
        let order =
            |bond: &str| json!({ "order": limit_order(&stage.user, bond, "BUY", "10.00", "1") });
        let trader = stage.user.token();
        for (token, name, request, message, reason) in [
            (
                AUDITOR,
                "market.GetOrderBook",
                json!({ "instrumentId": "NO-SUCH" }),
                "Instrument not found",
                "INSTRUMENT_NOT_FOUND",
            ),
            (
                AUDITOR,
                "cfa.ListHolders",
                json!({ "instrumentId": "NO-SUCH" }),
                "Instrument not found",
                "INSTRUMENT_NOT_FOUND",
            ),
            (
                AUDITOR,
                "cfa.GetInstrument",
                json!({ "instrumentId": "NO-SUCH" }),
                "Instrument not found",
                "INSTRUMENT_NOT_FOUND",
            ),
            (
                AUDITOR,
                "cfa.GetSupply",
                json!({ "instrumentId": "NO-SUCH" }),
                "Instrument not found",
                "INSTRUMENT_NOT_FOUND",
            ),
            (
                trader.as_str(),
                "market.PlaceOrder",
                order("NO-SUCH"),
                "Instrument not found",
                "INSTRUMENT_NOT_FOUND",
            ),
            (
                AUDITOR,
                "market.GetOrder",
                json!({ "orderId": id }),
                "Order not found",
                "ORDER_NOT_FOUND",
            ),
            (
                OPERATOR,
                "market.CancelOrder",
                json!({ "orderId": id }),
                "Order not found",
                "ORDER_NOT_FOUND",
            ),
            (
                AUDITOR,
                "ledger.GetHold",
                json!({ "holdId": id }),
                "Hold not found",
                "HOLD_NOT_FOUND",
            ),
            (
                OPERATOR,
                "ledger.ReleaseHold",
                json!({ "holdId": id, "reason": "r" }),
                "Hold not found",
                "HOLD_NOT_FOUND",
            ),
            (
                AUDITOR,
                "ledger.GetOperation",
                json!({ "operationId": id }),
                "Operation not found",
                "OPERATION_NOT_FOUND",
            ),
            (
                AUDITOR,
                "cfa.GetOperation",
                json!({ "operationId": id }),
                "Operation not found",
                "OPERATION_NOT_FOUND",
            ),
            (
                AUDITOR,
                "ledger.GetAccount",
                json!({ "accountId": "ghost:MAIN" }),
                "Account not found",
                "ACCOUNT_NOT_FOUND",
            ),
            (
                AUDITOR,
                "ledger.GetSubAccount",
                json!({ "subaccountId": "ghost:CFA-RUB" }),
                "Sub-account not found",
                "SUB_ACCOUNT_NOT_FOUND",
            ),
            (
                AUDITOR,
                "payments.GetPaymentIntent",
                json!({ "paymentId": id }),
                "Payment intent not found",
                "PAYMENT_INTENT_NOT_FOUND",
            ),
            (
                AUDITOR,
                "payments.GetPayout",
                json!({ "payoutId": id }),
                "Payout not found",
                "PAYOUT_NOT_FOUND",
            ),
        ] {
            let refusal = stage.platform.refused(token, name, request).await;
            assert_eq!(
                (name, refusal.message.as_str()),
                (name, message),
                "{refusal:?}"
            );
            refusal.is(404, "not_found", message, reason);
        }
        stage.unchanged().await;
    });
}

#[test]
fn malformed_amounts_name_their_field() {
    run(async {
        let stage = stage().await;
        for bad in [
            "",
            "abc",
            "1,5",
            "1e5",
            "--1",
            "1.001",
            "0",
            "0.00",
            "-5.00",
            "NaN",
            " 1",
            "99999999999999999999999999999999999999999",
        ] {
            let intent = json!({ "userId": stage.user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub(bad) });
            stage
                .refused("payments.CreatePaymentIntent", intent)
                .await
                .is_bad_field("amount");
            let redeem = json!({ "userId": stage.user.id, "payoutId": "p", "amount": rub(bad) });
            let refusal = stage.refused("cfa.RedeemCfaRub", redeem).await;
            assert_eq!(
                (refusal.http, refusal.code.as_str()),
                (400, "invalid_argument"),
                "{bad}: {refusal:?}"
            );
            assert!(
                refusal
                    .fields
                    .iter()
                    .all(|field| field.starts_with("amount")),
                "{bad}: {refusal:?}"
            );
        }
        for (wrong, field) in [(amount("USD", "1.00"), "amount"), (Value::Null, "amount")] {
            let intent = json!({ "userId": stage.user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": wrong });
            stage
                .refused("payments.CreatePaymentIntent", intent)
                .await
                .is_bad_field(field);
        }
        stage.unchanged().await;
    });
}

#[test]
fn orders_with_bad_quantities_or_prices_name_their_field() {
    run(async {
        let stage = stage().await;
        for quantity in ["-1", "0", "0.5", "x", ""] {
            stage
                .refused("market.PlaceOrder", stage.order("10.00", quantity))
                .await
                .is_bad_field("order.quantity");
        }
        for price in ["-1.00", "0", "10.001", "x", ""] {
            stage
                .refused("market.PlaceOrder", stage.order(price, "1"))
                .await
                .is_bad_field("order.price");
        }
        let mut order = stage.order("10.00", "1");
        order["order"]["side"] = json!("ORDER_SIDE_UNSPECIFIED");
        stage
            .refused("market.PlaceOrder", order)
            .await
            .is_bad_field("order.side");
        let hold = json!({ "userId": stage.user.id, "instrumentId": stage.bond, "amount": { "value": "-3" } });
        stage
            .refused("market.OpenTradingHold", hold)
            .await
            .is_bad_field("amount");
        stage.unchanged().await;
    });
}

#[test]
fn orders_without_money_are_refused_with_the_figures() {
    run(async {
        let stage = stage().await;
        let refusal = stage
            .refused("market.PlaceOrder", stage.order("500.00", "2"))
            .await;
        refusal.is(
            400,
            "failed_precondition",
            "Insufficient balance",
            "INSUFFICIENT_BALANCE",
        );
        let poor = json!({ "order": limit_order(&stage.user, &stage.bond, "SELL", "10.00", "1") });
        stage.refused("market.PlaceOrder", poor).await.is(
            400,
            "failed_precondition",
            "Insufficient balance",
            "INSUFFICIENT_BALANCE",
        );
        let hold = json!({ "userId": stage.user.id, "instrumentId": stage.bond, "amount": { "value": "3" } });
        stage.refused("market.OpenTradingHold", hold).await.is(
            400,
            "failed_precondition",
            "Insufficient balance",
            "INSUFFICIENT_BALANCE",
        );
        stage.unchanged().await;
    });
}

// rows: R332 R333
#[test]
fn callers_without_a_right_are_refused() {
    run(async {
        let stage = stage().await;
        let (order, cancel) = (stage.order("10.00", "1"), json!({ "orderId": stage.order }));
        let platform = stage.platform;
        platform
            .refused("", "market.PlaceOrder", order.clone())
            .await
            .is(
                401,
                "unauthenticated",
                "Credentials are required",
                "CREDENTIALS_REQUIRED",
            );
        for token in [
            "nonsense",
            "sandbox.root",
            "sandbox.investor",
            "sandbox.service.ghost",
        ] {
            platform
                .refused(token, "market.PlaceOrder", order.clone())
                .await
                .is(
                    401,
                    "unauthenticated",
                    "Credentials are not valid",
                    "CREDENTIALS_INVALID",
                );
        }
        let lacks = |refusal: tests::Refusal| {
            refusal.is(
                403,
                "permission_denied",
                "Caller lacks the role for this operation",
                "ROLE_REQUIRED",
            )
        };
        lacks(
            platform
                .refused(AUDITOR, "market.PlaceOrder", order.clone())
                .await,
        );
        lacks(
            platform
                .refused(AUDITOR, "market.CancelOrder", cancel.clone())
                .await,
        );
        lacks(
            platform
                .refused(
                    &stage.user.token(),
                    "cfa.IssueCfaRub",
                    json!({ "userId": stage.user.id, "paymentId": "p", "amount": rub("1.00") }),
                )
                .await,
        );
        lacks(
            platform
                .refused(
                    &stage.user.token(),
                    "identity.SetLimit",
                    json!({ "userId": stage.user.id }),
                )
                .await,
        );
        lacks(
            platform
                .refused(OPERATOR, "ledger.CreateOperations", json!({}))
                .await,
        );
        // Requests about another user's orders and money.
        let foreign = |refusal: tests::Refusal| {
            refusal.is(
                403,
                "permission_denied",
                "Caller may act only on its own user id",
                "FOREIGN_USER",
            )
        };
        let other = stage.other.token();
        foreign(platform.refused(&other, "market.PlaceOrder", order).await);
        foreign(
            platform
                .refused(&stage.user.token(), "market.CancelOrder", cancel)
                .await,
        );
        foreign(
            platform
                .refused(
                    &other,
                    "cfa.RedeemCfaRub",
                    json!({ "userId": stage.user.id, "payoutId": "p", "amount": rub("1.00") }),
                )
                .await,
        );
        let intent = json!({ "userId": stage.user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub("1.00") });
        foreign(
            platform
                .refused(&other, "payments.CreatePaymentIntent", intent)
                .await,
        );
        foreign(
            platform
                .refused(
                    &other,
                    "ledger.GetBalance",
                    json!({ "subaccountId": stage.user.cash() }),
                )
                .await,
        );
        foreign(
            platform
                .refused(
                    &other,
                    "market.ListOrders",
                    json!({ "userId": stage.user.id }),
                )
                .await,
        );
        let (status, _) = platform.get("ledger", "/operations", "").await;
        assert_eq!(status, 401);
        let (status, _) = platform.get("ledger", "/operations", &other).await;
        assert_eq!(status, 403);
        stage.unchanged().await;
    });
}

// rows: R005
#[test]
fn writes_without_an_idempotency_key_are_refused() {
    run(async {
        let stage = stage().await;
        let mut empty = context();
        empty["idempotencyKey"] = json!("");
        let with = |mut request: Value| {
            request["context"] = empty.clone();
            request
        };
        let trader = stage.user.token();
        for (token, name, request) in [
            (
                trader.as_str(),
                "market.PlaceOrder",
                stage.order("10.00", "1"),
            ),
            (
                OPERATOR,
                "market.CancelOrder",
                json!({ "orderId": stage.order }),
            ),
            (
                trader.as_str(),
                "market.OpenTradingHold",
                json!({ "userId": stage.user.id, "instrumentId": stage.bond, "amount": { "value": "1" } }),
            ),
            (
                SERVICE,
                "cfa.IssueCfaRub",
                json!({ "userId": stage.user.id, "paymentId": "p", "amount": rub("1.00") }),
            ),
            (
                trader.as_str(),
                "cfa.RedeemCfaRub",
                json!({ "userId": stage.user.id, "payoutId": "p", "amount": rub("1.00") }),
            ),
            (
                OPERATOR,
                "cfa.RegisterInstrument",
                json!({ "symbol": "NEW-ONE", "type": "INSTRUMENT_TYPE_CFA_BOND", "issuerId": stage.user.id }),
            ),
            (
                OPERATOR,
                "payments.CreatePaymentIntent",
                json!({ "userId": stage.user.id, "method": "PAYMENT_METHOD_SBP_QR", "amount": rub("1.00") }),
            ),
            (
                OPERATOR,
                "ledger.CreateHold",
                json!({ "hold": {
                    "subaccountId": stage.user.cash(), "amount": amount("CFA-RUB", "1.00"), "reason": "r",
                } }),
            ),
            (
                OPERATOR,
                "identity.CreateUser",
                json!({ "kycStatus": "KYC_STATUS_STANDARD" }),
            ),
        ] {
            let refusal = stage.platform.refused(token, name, with(request)).await;
            assert_eq!(
                (name, refusal.fields.clone()),
                (name, vec!["context.idempotency_key".to_owned()]),
                "{refusal:?}"
            );
            refusal.is_bad_field("context.idempotency_key");
        }
        stage.unchanged().await;
    });
}

// rows: R114 R334
#[test]
fn webhooks_with_a_wrong_signature_are_refused() {
    run(async {
        let stage = stage().await;
        let paid = bank::notice(&text(&stage.intent, "/paymentId"), "SUCCESS", "40.00");
        let good = stage.platform.signed(&paid, bank::now_s());
        let mut cases = Vec::new();
        for wrong in ["", "v1,", "v1,AAAA", "v2,anything", "nonsense"] {
            cases.push(bank::Webhook {
                signature: wrong.to_owned(),
                ..good.clone()
            });
        }
        // A valid signature with another body, another id, or another time.
        cases.push(bank::Webhook {
            body: good.body.replace("40.00", "40000.00"),
            ..good.clone()
        });
        cases.push(bank::Webhook {
            id: "another".to_owned(),
            ..good.clone()
        });
        cases.push(bank::Webhook {
            timestamp: (bank::now_s() + 1).to_string(),
            ..good.clone()
        });
        cases.push(stage.platform.signed(&paid, bank::now_s() - 3_600));
        // An unknown payment with a wrong signature: the signature is checked before the lookup.
        let unknown = stage.platform.signed(
            &bank::notice("no-such-payment", "SUCCESS", "1.00"),
            bank::now_s(),
        );
        cases.push(bank::Webhook {
            signature: good.signature.clone(),
            ..unknown
        });
        for webhook in &cases {
            let refusal = stage
                .platform
                .post_webhook(webhook)
                .await
                .expect_err("refused");
            refusal.is(
                401,
                "unauthenticated",
                "Invalid signature",
                "INVALID_SIGNATURE",
            );
        }
        // The same notice by RPC, without a signature.
        let webhook = json!({
            "paymentId": text(&stage.intent, "/paymentId"), "status": "PAYMENT_STATUS_SUCCESS",
            "amount": rub("40.00"), "providerPayload": paid.to_string(),
        });
        let refusal = stage
            .platform
            .refused(
                TREASURY,
                "payments.HandlePaymentWebhook",
                json!({ "webhook": webhook }),
            )
            .await;
        refusal.is(
            401,
            "unauthenticated",
            "Invalid signature",
            "INVALID_SIGNATURE",
        );
        stage.unchanged().await;
    });
}

// rows: R115 R116 R334
#[test]
fn webhooks_of_another_amount_or_an_unknown_payment_are_refused() {
    run(async {
        let stage = stage().await;
        let id = text(&stage.intent, "/paymentId");
        for wrong in ["39.99", "40.01", "4000.00"] {
            let webhook = stage
                .platform
                .signed(&bank::notice(&id, "SUCCESS", wrong), bank::now_s());
            let refusal = stage
                .platform
                .post_webhook(&webhook)
                .await
                .expect_err("refused");
            refusal.is(
                409,
                "failed_precondition",
                "Amount mismatch",
                "AMOUNT_MISMATCH",
            );
        }
        let webhook = stage.platform.signed(
            &bank::notice("no-such-payment", "SUCCESS", "40.00"),
            bank::now_s(),
        );
        let refusal = stage
            .platform
            .post_webhook(&webhook)
            .await
            .expect_err("refused");
        refusal.is(
            404,
            "not_found",
            "Payment intent not found",
            "PAYMENT_INTENT_NOT_FOUND",
        );
        let nonsense = stage.platform.signed(&json!({ "hello": 1 }), bank::now_s());
        let refusal = stage
            .platform
            .post_webhook(&nonsense)
            .await
            .expect_err("refused");
        assert_eq!(
            (refusal.http, refusal.code.as_str()),
            (400, "invalid_argument"),
            "{refusal:?}"
        );
        stage.unchanged().await;
    });
}

#[test]
fn garbage_on_the_trading_port_ends_that_connection_and_nothing_else() {
    run(async {
        let stage = stage().await;
        let server = stage.platform.address("trading");
        let mut noise = tests::flow::Random::new(tests::seed::seed(1));
        let mut bytes = |length: usize| {
            (0..length)
                .map(|_| noise.next().to_le_bytes()[0])
                .collect::<Vec<u8>>()
        };

        // Datagrams that are not QUIC.
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0")
            .await
            .expect("a socket");
        for length in [1, 20, 200, 1_200, 1_400] {
            socket.send_to(&bytes(length), server).await.expect("sent");
        }
        // An unknown ALPN name is refused in the handshake.
        assert!(
            Raw::open(server, b"h3").await.is_err(),
            "a connection with the ALPN name h3 was accepted"
        );
        // A connection whose stream is noise, and a session that sends noise after its login.
        for greeting in [Vec::new(), login(&stage.user.token())] {
            let mut raw = Raw::open(server, wire::ALPN).await.expect("a connection");
            raw.send.write_all(&greeting).await.expect("sent");
            // Fails if the server closes before the last byte, which is correct.
            let _ = raw.send.write_all(&bytes(4_096)).await;
            match raw.closed().await {
                quinn::ConnectionError::ApplicationClosed(close) => {
                    assert_ne!(close.error_code.into_inner(), 0, "{close:?}")
                }
                other => panic!("the server closed without an application code: {other}"),
            }
        }
        // A message longer than any valid one.
        let mut raw = Raw::open(server, wire::ALPN).await.expect("a connection");
        let _ = raw.send.write_all(&[0xff; 65_536]).await;
        raw.closed().await;

        // Other members are unaffected: a session logs in, and the order still rests.
        let terminal = Terminal::open(stage.platform, &stage.other, &stage.bond).await;
        drop(terminal);
        let order = stage
            .platform
            .ok(
                AUDITOR,
                "market.GetOrder",
                json!({ "orderId": stage.order }),
            )
            .await;
        assert_eq!(order["order"]["status"], json!("ORDER_STATUS_OPEN"));
        let (status, health) = stage.platform.get("market", "/health", "").await;
        assert_eq!((status, health), (200, json!({ "status": "ok" })));
        stage.unchanged().await;
    });
}

mod bytes_of_login {
    use wire::{ClientMessage, Login, Text, encode};

    /// Bytes of a login on channel 0.
    pub fn login(token: &str) -> Vec<u8> {
        let message = ClientMessage::from(Login {
            token: Text::new(token).expect("short"),
            session_name: Text::new("raw").expect("short"),
            last_sequence: 0,
            flags: 0,
            heartbeat_ms: 0,
            stp_group: 0,
            money_hold_minor: 0,
        });
        let mut bytes = bytes::BytesMut::new();
        encode(&message, 0, 0, &mut bytes);
        bytes.to_vec()
    }
}

// rows: R132
#[test]
fn d49_times_far_away_are_refused_and_lists_stay_readable() {
    run(async {
        let stage = stage().await;
        let platform = stage.platform;
        let far = "0001-01-01T00:00:00Z";
        let reconcile = json!({ "businessDate": far });
        let refused = platform.refused(TREASURY, "payments.Reconcile", reconcile);
        refused.await.is_bad_field("business_date");
        let update = json!({ "instrumentId": stage.bond, "maturesAt": far });
        let refused = platform.refused(OPERATOR, "cfa.UpdateInstrument", update);
        refused.await.is_bad_field("matures_at");
        let listed = platform.ok(AUDITOR, "cfa.ListInstruments", json!({}));
        assert!(listed.await["instruments"].is_array());
    });
}
