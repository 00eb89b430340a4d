//! Identity: profiles, limits and their use, blocks, events.

use std::sync::Arc;

use events::{Embedded, Event, Log};
use prost::Message;
use proto::{
    cfa::v1::{CfaIssuedEvent, CfaRedeemedEvent},
    common::v1 as common,
    convert::{to_monetary_amount_minor, to_money, to_timestamp_us},
    identity::v1::{self as wire, identity_service_client::IdentityServiceClient},
    market::v1::TradeExecutedEvent,
};
use rail::account;
use rpc::{Authenticator, Channel, LocalSlot};
use sandbox::identity::{IdentityConfig, IdentityDeps, IdentityHandle, TradingBasis};
use service_kit::Clock;
use tempfile::TempDir;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use types::{BusinessDay, Decimal};
use uuid::Uuid;

use crate::in_time;

const INVESTMENT_EXCEEDED: &str =
    "Yearly investment limit exceeded: the user is not a qualified investor";

/// Start of every world's clock: 2026-11-20, noon in Moscow. So no test passes a real midnight.
const NOON_US: i64 = 1_795_165_200_000_000;

struct World {
    folder: TempDir,
    log: Arc<Embedded>,
    clock: Clock,
    slot: LocalSlot,
    url: String,
    stop: CancellationToken,
    handle: IdentityHandle,
}

impl World {
    async fn start(change: impl FnOnce(&mut IdentityConfig)) -> World {
        let folder = tempfile::tempdir().unwrap();
        let log = Arc::new(Embedded::open(folder.path().join("log")).await.unwrap());
        let stop = CancellationToken::new();
        let mut config = IdentityConfig {
            data_dir: folder.path().into(),
            ..IdentityConfig::default()
        };
        change(&mut config);
        let deps = IdentityDeps { log: log.clone() };
        let clock = Clock::manual(NOON_US);
        let start = sandbox::identity::start_with_clock(config, deps, clock.clone(), stop.clone());
        let handle = start.await.unwrap();
        let slot = testkit::in_memory(handle.service().routes);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let services = vec![handle.service()];
        tokio::spawn(rpc::serve(
            listener,
            services,
            Authenticator::Sandbox,
            rpc::metrics_init(),
            stop.clone(),
        ));
        World {
            folder,
            log,
            clock,
            slot,
            url,
            stop,
            handle,
        }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.slot.clear();
        in_time("identity's stop", self.handle.stopped()).await;
        self.log.close().await;
    }

    fn client(&self) -> IdentityServiceClient<Channel> {
        self.client_as("sandbox.operator")
    }

    /// As the approvals service, which makes the calls that take two persons.
    fn approved(&self) -> IdentityServiceClient<Channel> {
        self.client_as(testkit::APPROVED)
    }

    fn client_as(&self, credential: &str) -> IdentityServiceClient<Channel> {
        let _ = rustls::crypto::ring::default_provider().install_default();
        IdentityServiceClient::new(Channel::local(&self.slot, credential))
    }

    async fn create(&self, user_id: &str) -> wire::UserProfile {
        let answer = self.client().create_user(user(user_id)).await.unwrap();
        answer.into_inner().profile.unwrap()
    }

    async fn check(
        &self,
        limit_type: common::LimitType,
        kopecks: i64,
    ) -> wire::CheckLimitsResponse {
        let answer = self
            .client()
            .check_limits(limit_ask(limit_type, kopecks))
            .await;
        answer.unwrap().into_inner()
    }

    async fn used(&self, user_id: &str, limit_type: common::LimitType) -> String {
        let ask = wire::GetLimitsRequest {
            context: None,
            user_id: user_id.into(),
        };
        let limits = self
            .client()
            .get_limits(ask)
            .await
            .unwrap()
            .into_inner()
            .limits;
        let of_type = limits
            .iter()
            .find(|limit| limit.limit_type == limit_type as i32);
        amount(of_type.unwrap().used_today.as_ref())
    }

    async fn until_used(&self, user_id: &str, limit_type: common::LimitType, expected: &str) {
        let wait = async {
            while self.used(user_id, limit_type).await != expected {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        };
        let what = format!("{user_id} uses {expected} of {limit_type:?}");
        in_time(&what, wait).await;
    }

    async fn publish(&self, topic: &str, name: &str, message: &impl Message) -> Event {
        let event = Event {
            id: Uuid::now_v7(),
            topic: topic.into(),
            key: "k".into(),
            type_name: name.into(),
            subject: "k".into(),
            source: "test".into(),
            correlation_id: "c".into(),
            occurred_at_us: NOON_US,
            payload: message.encode_to_vec(),
        };
        self.log
            .publish(std::slice::from_ref(&event))
            .await
            .unwrap();
        event
    }

    async fn get(&self, path: &str) -> (u16, serde_json::Value) {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder().timeout(testkit::PATIENCE);
        let answer = http
            .build()
            .unwrap()
            .get(format!("{}{path}", self.url))
            .bearer_auth("sandbox.auditor")
            .send()
            .await
            .unwrap();
        let status = answer.status().as_u16();
        (
            status,
            serde_json::from_str(&answer.text().await.unwrap()).unwrap(),
        )
    }
}

fn ctx() -> Option<common::RequestContext> {
    Some(common::RequestContext {
        request_id: "r".into(),
        correlation_id: "corr-1".into(),
        idempotency_key: Uuid::now_v7().to_string(),
        ..Default::default()
    })
}

fn user(user_id: &str) -> wire::CreateUserRequest {
    wire::CreateUserRequest {
        context: ctx(),
        user_id: user_id.into(),
        kyc_status: common::KycStatus::Standard as i32,
        bank_account: "40817810299910004312".into(),
        qualified_investor: true,
        full_name: "Алиса Иванова".into(),
    }
}

fn limit_ask(limit_type: common::LimitType, kopecks: i64) -> wire::CheckLimitsRequest {
    wire::CheckLimitsRequest {
        context: None,
        user_id: "alice".into(),
        limit_type: limit_type as i32,
        amount: Some(to_money(kopecks)),
        operation_type: common::OperationType::Deposit as i32,
        notional: None,
    }
}

fn reservation(id: &str, kopecks: i64) -> wire::ReserveLimitRequest {
    wire::ReserveLimitRequest {
        context: ctx(),
        reservation_id: id.into(),
        user_id: "alice".into(),
        limit_type: WITHDRAWAL as i32,
        amount: Some(to_money(kopecks)),
        operation_type: common::OperationType::Withdrawal as i32,
    }
}

fn amount(money: Option<&common::Money>) -> String {
    money.unwrap().amount.clone().unwrap().value
}

const DEPOSIT: common::LimitType = common::LimitType::Deposit;
const WITHDRAWAL: common::LimitType = common::LimitType::Withdrawal;
const TRADING: common::LimitType = common::LimitType::Trading;
const INVESTMENT: common::LimitType = common::LimitType::Investment;

// rows: R016 R333
#[tokio::test]
async fn r333_market_supervisors_see_no_whole_bank_account() {
    let world = World::start(|_| ()).await;
    let made = world.create("alice").await;
    let whole = made.bank_account.as_str();
    let masked = "****************4312";
    let ask = wire::GetUserProfileRequest {
        context: None,
        user_id: "alice".into(),
    };
    for (role, seen) in [
        ("operator", whole),
        ("treasury", whole),
        ("compliance", whole),
        ("service", whole),
        ("auditor", whole),
        ("market-supervisor", masked),
    ] {
        let mut client = world.client_as(&format!("sandbox.{role}"));
        let read = client.get_user_profile(ask.clone()).await.unwrap();
        let profile = read.into_inner().profile.unwrap();
        assert_eq!(profile.bank_account, seen, "{role}");
        let listed = client.list_users(wire::ListUsersRequest::default()).await;
        assert_eq!(listed.unwrap().into_inner().users, [profile], "{role}");
        let records = wire::ListAuditRecordsRequest::default();
        let records = client.list_audit_records(records).await;
        // The record of a created user has the account.
        assert_eq!(records.is_ok(), seen == whole, "{role}: {records:?}");
    }
    let mut own = world.client_as("sandbox.investor.alice");
    let read = own.get_user_profile(ask).await.unwrap();
    assert_eq!(read.into_inner().profile.unwrap().bank_account, whole);
    world.stop().await;
}

// rows: R016 R036 R289 R317
#[tokio::test]
async fn r289_a_profile_is_equal_by_rpc_and_http() {
    let world = World::start(|_| ()).await;
    let made = world.create("alice").await;
    assert_eq!(made.kyc_status, common::KycStatus::Standard as i32);
    assert_eq!(made.bank_account, "40817810299910004312");
    assert_eq!(made.status, wire::UserStatus::Active as i32);
    assert!(made.qualified_investor && made.created_at.is_some());
    assert!(made.onchain_address.starts_with("0x") && made.onchain_address.len() == 42);
    assert_eq!(made.full_name_hash.len(), 64);
    let ask = wire::GetUserProfileRequest {
        context: None,
        user_id: "alice".into(),
    };
    let read = world.client().get_user_profile(ask.clone()).await.unwrap();
    assert_eq!(read.into_inner().profile.unwrap(), made);
    let (status, body) = world.get("/identity/users/alice").await;
    assert_eq!(status, 200);
    assert_eq!(body["userId"], "alice");
    assert_eq!(body["kycStatus"], "STANDARD");
    assert_eq!(body["status"], "ACTIVE");
    let (status, body) = world.get("/identity/limits/alice").await;
    assert_eq!(status, 200);
    assert_eq!(body["limits"][0]["limitType"], "DEPOSIT");
    assert_eq!(body["limits"][0]["dailyLimit"]["amount"]["value"], "600000");
    for path in ["/identity/users/unknown", "/identity/limits/unknown"] {
        let (status, body) = world.get(path).await;
        assert_eq!(
            (status, body["message"].as_str()),
            (404, Some("User not found"))
        );
    }
    let foreign = world
        .client_as("sandbox.investor.bob")
        .get_user_profile(ask)
        .await;
    assert_eq!(foreign.unwrap_err().code(), Code::PermissionDenied);
    world.stop().await;
}

// rows: R012 R036 R340
#[tokio::test]
async fn r340_limits_of_a_day_and_of_a_user() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    for (limit_type, limit_kopecks, text) in [
        (DEPOSIT, 60_000_000, "Daily deposit limit exceeded"),
        (WITHDRAWAL, 60_000_000, "Daily withdrawal limit exceeded"),
        (TRADING, 500_000_000, "Daily trading limit exceeded"),
    ] {
        assert!(world.check(limit_type, limit_kopecks).await.allowed);
        // A check reserves nothing: repeating it is allowed (T24).
        assert!(world.check(limit_type, limit_kopecks).await.allowed);
        let over = world.check(limit_type, limit_kopecks + 1).await;
        assert!(!over.allowed);
        assert_eq!(over.reason.as_deref(), Some(text));
    }
    let set = |daily: Option<i64>, refuse_with: &str| wire::SetLimitRequest {
        context: ctx(),
        user_id: "alice".into(),
        limit_type: DEPOSIT as i32,
        daily_limit: daily.map(to_money),
        refuse_with: refuse_with.into(),
    };
    world
        .client()
        .set_limit(set(Some(1_000), ""))
        .await
        .unwrap();
    assert!(world.check(DEPOSIT, 1_000).await.allowed);
    assert!(!world.check(DEPOSIT, 1_001).await.allowed);
    world
        .client()
        .set_limit(set(None, "KYC please"))
        .await
        .unwrap();
    assert_eq!(
        world.check(DEPOSIT, 1).await.reason.as_deref(),
        Some("KYC please")
    );
    // Raising a limit, or ending a refusal, takes two persons (D32).
    for raise in [set(None, ""), set(Some(1_001), "KYC please")] {
        let alone = world.client().set_limit(raise).await.unwrap_err();
        assert_eq!(alone.message(), "This call needs an approval");
    }
    world.approved().set_limit(set(None, "")).await.unwrap();
    assert_eq!(
        amount(world.check(DEPOSIT, 1).await.remaining.as_ref()),
        "10.00"
    );

    let mut unknown = limit_ask(DEPOSIT, 1);
    unknown.user_id = "unknown".into();
    let unknown = world.client().check_limits(unknown).await.unwrap_err();
    assert_eq!(
        (unknown.code(), unknown.message()),
        (Code::NotFound, "User not found")
    );
    for bad in [
        limit_ask(DEPOSIT, 0),
        limit_ask(common::LimitType::Unspecified, 1),
        wire::CheckLimitsRequest {
            amount: None,
            ..limit_ask(DEPOSIT, 1)
        },
    ] {
        let refused = world.client().check_limits(bad).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
    }
    world.stop().await;
}

fn issued(instrument_id: &str, kopecks: i64, at_us: i64) -> CfaIssuedEvent {
    CfaIssuedEvent {
        instrument_id: instrument_id.into(),
        holder_id: "alice".into(),
        amount: Some(to_monetary_amount_minor(instrument_id, kopecks, 2)),
        issued_at: Some(to_timestamp_us(at_us)),
        ..Default::default()
    }
}

fn trade() -> TradeExecutedEvent {
    let number = |value: &str| {
        Some(common::Decimal {
            value: value.into(),
        })
    };
    TradeExecutedEvent {
        buyer_id: "alice".into(),
        seller_id: "bob".into(),
        quantity: number("10"),
        price: number("1000.50"),
        executed_at: Some(to_timestamp_us(NOON_US)),
        ..Default::default()
    }
}

// rows: R340
#[tokio::test]
async fn r340_each_event_counts_once_and_on_its_day() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    world.create("bob").await;
    let now_us = NOON_US;
    let today = BusinessDay::of(now_us);
    let yesterday_us = today.start_us() - 1;
    let (cfa, market) = (events::topics::CFA, events::topics::MARKET);
    let name = "dfa.cfa.v1.CfaIssuedEvent";
    world
        .publish(cfa, name, &issued("CFA-RUB", 777, yesterday_us))
        .await;
    world
        .publish(cfa, name, &issued("BOND-1", 888, now_us))
        .await;
    let event = world
        .publish(cfa, name, &issued("CFA-RUB", 59_999_900, now_us))
        .await;
    // The same event is delivered again, as after a crash of the relay.
    world.log.publish(&[event]).await.unwrap();
    let redeemed = CfaRedeemedEvent {
        instrument_id: "CFA-RUB".into(),
        holder_id: "alice".into(),
        amount: Some(to_monetary_amount_minor("CFA-RUB", 1_234, 2)),
        redeemed_at: Some(to_timestamp_us(now_us)),
        ..Default::default()
    };
    world
        .publish(cfa, "dfa.cfa.v1.CfaRedeemedEvent", &redeemed)
        .await;
    world.until_used("alice", WITHDRAWAL, "12.34").await;
    assert_eq!(world.used("alice", DEPOSIT).await, "599999.00");
    assert!(world.check(DEPOSIT, 100).await.allowed);
    assert!(!world.check(DEPOSIT, 101).await.allowed);
    world
        .publish(market, "dfa.market.v1.TradeExecutedEvent", &trade())
        .await;
    world.until_used("alice", TRADING, "10").await;
    world.until_used("bob", TRADING, "10").await;

    // The day ends at midnight in Moscow. Then the whole limit is available again.
    world.clock.advance_us(today.end_us() - 1 - now_us);
    assert_eq!(world.used("alice", DEPOSIT).await, "599999.00");
    world.clock.advance_us(1);
    for limit_type in [DEPOSIT, WITHDRAWAL, TRADING] {
        let used: Decimal = world.used("alice", limit_type).await.parse().unwrap();
        assert!(used.is_zero(), "{limit_type:?}: {used}");
    }
    assert!(world.check(DEPOSIT, 60_000_000).await.allowed);
    world
        .publish(cfa, name, &issued("CFA-RUB", 5_000, today.end_us()))
        .await;
    world.until_used("alice", DEPOSIT, "50.00").await;
    world.stop().await;
}

// rows: R012 R340
#[tokio::test(flavor = "multi_thread")]
async fn t24_reservations_at_once_stay_within_the_limit() {
    let world = World::start(|config| config.withdrawal_daily = "25".into()).await;
    world.create("alice").await;
    let calls: Vec<_> = (0..10)
        .map(|number| {
            let mut client = world.client_as("sandbox.service");
            let ask = reservation(&format!("op-{number}"), 1_000);
            tokio::spawn(async move { client.reserve_limit(ask).await.unwrap().into_inner() })
        })
        .collect();
    let mut allowed = 0;
    for call in calls {
        let answer = call.await.unwrap();
        match answer.allowed {
            true => allowed += 1,
            false => assert_eq!(
                answer.reason.as_deref(),
                Some("Daily withdrawal limit exceeded")
            ),
        }
    }
    assert_eq!(allowed, 2);
    assert_eq!(world.used("alice", WITHDRAWAL).await, "20.00");
    // A check counts what is reserved.
    assert!(world.check(WITHDRAWAL, 500).await.allowed);
    assert!(!world.check(WITHDRAWAL, 501).await.allowed);
    world.stop().await;
}

// rows: R340
#[tokio::test]
async fn t24_a_reservation_is_made_once_and_ends_once() {
    let world = World::start(|config| config.withdrawal_daily = "25".into()).await;
    world.create("alice").await;
    let client = || world.client_as("sandbox.service");
    let reserve = async |id: &str, kopecks| {
        let answer = client().reserve_limit(reservation(id, kopecks)).await;
        let answer = answer.unwrap();
        let is_repeat = answer.metadata().contains_key("idempotent-replayed");
        let answer = answer.into_inner();
        (answer.allowed, amount(answer.remaining.as_ref()), is_repeat)
    };
    let confirm = async |id: &str| {
        let ask = wire::ConfirmLimitRequest {
            context: ctx(),
            reservation_id: id.into(),
            amount: None,
        };
        client().confirm_limit(ask).await
    };
    let cancel = async |id: &str| {
        let ask = wire::CancelLimitRequest {
            context: ctx(),
            reservation_id: id.into(),
        };
        client().cancel_limit(ask).await
    };
    assert_eq!(reserve("op-1", 1_000).await, (true, "15.00".into(), false));
    // A repeat receives the stored answer, also with other content (D50).
    assert_eq!(reserve("op-1", 1_000).await, (true, "15.00".into(), true));
    assert_eq!(reserve("op-1", 1).await, (true, "15.00".into(), true));
    // A refusal is stored as well.
    let refused = (false, "15.00".to_owned());
    let (allowed, left, is_repeat) = reserve("op-0", 1_501).await;
    assert_eq!(((allowed, left), is_repeat), (refused.clone(), false));
    let (allowed, left, is_repeat) = reserve("op-0", 1).await;
    assert_eq!(((allowed, left), is_repeat), (refused, true));
    assert_eq!(reserve("op-2", 1_500).await, (true, "0.00".into(), false));

    confirm("op-1").await.unwrap();
    let again = confirm("op-1").await.unwrap();
    assert!(again.metadata().contains_key("idempotent-replayed"));
    cancel("op-2").await.unwrap();
    cancel("op-2").await.unwrap();
    assert_eq!(world.used("alice", WITHDRAWAL).await, "10.00");
    for (ended, message) in [
        (cancel("op-0").await.map(drop), "Reservation is REFUSED"),
        (cancel("op-1").await.map(drop), "Reservation is CONFIRMED"),
        (confirm("op-2").await.map(drop), "Reservation is CANCELLED"),
    ] {
        let refused = ended.unwrap_err();
        assert_eq!(
            (refused.code(), refused.message()),
            (Code::FailedPrecondition, message)
        );
    }
    let (allowed, ..) = reserve("op-2", 1_500).await;
    assert!(!allowed, "its operation has ended");
    assert_eq!(confirm("op-9").await.unwrap_err().code(), Code::NotFound);

    // The event of an operation with a reservation adds nothing. An event without one does.
    let redeemed = |operation_id: &str| CfaRedeemedEvent {
        operation_id: operation_id.into(),
        instrument_id: "CFA-RUB".into(),
        holder_id: "alice".into(),
        amount: Some(to_monetary_amount_minor("CFA-RUB", 1_000, 2)),
        redeemed_at: Some(to_timestamp_us(NOON_US)),
        ..Default::default()
    };
    for operation_id in ["op-1", "op-7"] {
        let name = "dfa.cfa.v1.CfaRedeemedEvent";
        let event = redeemed(operation_id);
        world.publish(events::topics::CFA, name, &event).await;
    }
    world.until_used("alice", WITHDRAWAL, "20.00").await;

    // A cancel on the next day returns the amount to the day of the reservation.
    assert_eq!(reserve("op-3", 500).await, (true, "0.00".into(), false));
    let today = BusinessDay::of(NOON_US);
    world.clock.advance_us(today.end_us() - NOON_US);
    assert_eq!(reserve("op-4", 100).await, (true, "24.00".into(), false));
    cancel("op-3").await.unwrap();
    assert_eq!(world.used("alice", WITHDRAWAL).await, "1.00");
    world.clock.advance_us(NOON_US - today.end_us());
    assert_eq!(world.used("alice", WITHDRAWAL).await, "20.00");
    world.stop().await;
}

/// Subscriptions reserve the yearly limit, trades count against it, and January 1 renews it.
// rows: R340
#[tokio::test]
async fn f35_purchases_of_a_year_stay_within_the_limit_unless_the_investor_is_qualified() {
    let world = World::start(|_| ()).await;
    let plain = wire::CreateUserRequest {
        qualified_investor: false,
        ..user("alice")
    };
    world.client().create_user(plain).await.unwrap();
    world.create("bob").await;
    let client = || world.client_as("sandbox.service");
    let reserve = async |id: &str, user_id: &str, kopecks| {
        let ask = wire::ReserveLimitRequest {
            user_id: user_id.into(),
            limit_type: INVESTMENT as i32,
            operation_type: common::OperationType::Issuance as i32,
            ..reservation(id, kopecks)
        };
        let answer = client().reserve_limit(ask).await.unwrap().into_inner();
        (answer.allowed, answer.reason.unwrap_or_default())
    };
    let yes = (true, String::new());
    assert_eq!(reserve("s-1", "alice", 50_000_000).await, yes);
    // A part of it is used. The rest is available again.
    let confirm = async |id: &str, kopecks| {
        let ask = wire::ConfirmLimitRequest {
            context: ctx(),
            reservation_id: id.into(),
            amount: Some(to_money(kopecks)),
        };
        client().confirm_limit(ask).await
    };
    let above = confirm("s-1", 50_000_001).await.unwrap_err();
    assert_eq!(above.code(), Code::InvalidArgument);
    confirm("s-1", 20_000_000).await.unwrap();
    let again = confirm("s-1", 20_000_000).await.unwrap();
    assert!(again.metadata().contains_key("idempotent-replayed"));
    assert_eq!(world.used("alice", INVESTMENT).await, "200000.00");
    // A purchase in trading counts by its value, for the buyer only.
    let market = events::topics::MARKET;
    let name = "dfa.market.v1.TradeExecutedEvent";
    world.publish(market, name, &trade()).await;
    world.until_used("alice", INVESTMENT, "210005.00").await;
    assert_eq!(world.used("alice", TRADING).await, "10");
    let refused = reserve("s-2", "alice", 38_999_501).await;
    assert_eq!(refused.1, INVESTMENT_EXCEEDED);
    assert_eq!(reserve("s-3", "alice", 38_999_500).await, yes);
    assert!(!world.check(INVESTMENT, 1).await.allowed);

    // A qualified investor has no such limit.
    assert_eq!(reserve("s-4", "bob", 90_000_000).await, yes);
    let ask = wire::GetLimitsRequest {
        context: None,
        user_id: "bob".into(),
    };
    let limits = world.client().get_limits(ask).await.unwrap().into_inner();
    let mut types = limits.limits.iter().map(|limit| limit.limit_type);
    assert!(types.all(|limit_type| limit_type != INVESTMENT as i32));

    // The limit holds until the last instant of the year in Moscow: 2027-01-01 is day 20,819.
    let new_year = BusinessDay::from_number(20_819);
    world.clock.advance_us(new_year.start_us() - 1 - NOON_US);
    assert!(!world.check(INVESTMENT, 1).await.allowed);
    world.clock.advance_us(1);
    assert!(world.check(INVESTMENT, 60_000_000).await.allowed);
    assert!(!world.check(INVESTMENT, 60_000_001).await.allowed);
    world.stop().await;
}

/// Two persons end the yearly limit of a user (D32). One person sets it again.
// rows: R333 R340
#[tokio::test]
async fn f35_one_person_makes_no_user_a_qualified_investor() {
    let world = World::start(|_| ()).await;
    let plain = wire::CreateUserRequest {
        qualified_investor: false,
        ..user("alice")
    };
    world.client().create_user(plain).await.unwrap();
    let qualify = |qualified| wire::UpdateUserRequest {
        context: ctx(),
        user_id: "alice".into(),
        qualified_investor: Some(qualified),
        ..Default::default()
    };
    let alone = world.client().update_user(qualify(true)).await.unwrap_err();
    assert_eq!(alone.code(), Code::FailedPrecondition);
    assert_eq!(alone.message(), "This call needs an approval");
    assert!(!world.check(INVESTMENT, 60_000_001).await.allowed);
    world.approved().update_user(qualify(true)).await.unwrap();
    assert!(world.check(INVESTMENT, 60_000_001).await.allowed);
    // No change, and the end of the qualification, need one person.
    world.client().update_user(qualify(true)).await.unwrap();
    world.client().update_user(qualify(false)).await.unwrap();
    assert!(!world.check(INVESTMENT, 60_000_001).await.allowed);
    world.stop().await;
}

#[tokio::test]
async fn t24_only_services_reserve_and_bad_reservations_are_refused() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    for credential in [
        "sandbox.investor.alice",
        "sandbox.operator",
        "sandbox.auditor",
    ] {
        let mut client = world.client_as(credential);
        let refused = client.reserve_limit(reservation("op-1", 1)).await;
        assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);
    }
    let good = reservation("op-1", 1);
    let bad = [
        wire::ReserveLimitRequest {
            context: None,
            ..good.clone()
        },
        wire::ReserveLimitRequest {
            reservation_id: " ".into(),
            ..good.clone()
        },
        wire::ReserveLimitRequest {
            reservation_id: "\0".into(),
            ..good.clone()
        },
        wire::ReserveLimitRequest {
            reservation_id: "x".repeat(129),
            ..good.clone()
        },
        wire::ReserveLimitRequest {
            amount: Some(to_money(-1)),
            ..good.clone()
        },
        wire::ReserveLimitRequest {
            limit_type: 9,
            ..good.clone()
        },
        wire::ReserveLimitRequest {
            operation_type: 999,
            ..good.clone()
        },
        wire::ReserveLimitRequest {
            operation_type: 0,
            ..good.clone()
        },
    ];
    for ask in bad {
        let refused = world
            .client_as("sandbox.service")
            .reserve_limit(ask.clone())
            .await;
        assert_eq!(
            refused.unwrap_err().code(),
            Code::InvalidArgument,
            "{ask:?}"
        );
    }
    let stranger = wire::ReserveLimitRequest {
        user_id: "unknown".into(),
        ..good
    };
    let refused = world
        .client_as("sandbox.service")
        .reserve_limit(stranger)
        .await;
    assert_eq!(refused.unwrap_err().code(), Code::NotFound);
    world.stop().await;
}

// rows: R340
#[tokio::test]
async fn t23_trading_can_be_counted_by_value() {
    let world = World::start(|config| {
        config.trading_limit_basis = TradingBasis::Notional;
        config.trading_daily = "20010".into();
    })
    .await;
    world.create("alice").await;
    world.create("bob").await;
    let topic = events::topics::MARKET;
    world
        .publish(topic, "dfa.market.v1.TradeExecutedEvent", &trade())
        .await;
    world.until_used("alice", TRADING, "10005").await;
    let ask = |notional_kopecks| wire::CheckLimitsRequest {
        notional: Some(to_money(notional_kopecks)),
        ..limit_ask(TRADING, 100)
    };
    let allowed = world.client().check_limits(ask(1_000_500)).await.unwrap();
    assert!(allowed.into_inner().allowed);
    let refused = world.client().check_limits(ask(1_000_501)).await.unwrap();
    assert!(!refused.into_inner().allowed);
    world.stop().await;
}

// rows: R036
#[tokio::test]
async fn d49_an_order_value_that_is_no_amount_is_refused_even_if_quantities_are_counted() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    for (currency_code, value) in [
        ("RUB", "NaN"),
        ("RUB", "abc"),
        ("RUB", ""),
        ("RUB", "-1"),
        ("EUR", "1"),
    ] {
        let ask = wire::CheckLimitsRequest {
            notional: Some(common::Money {
                currency_code: currency_code.into(),
                amount: Some(common::Decimal {
                    value: value.into(),
                }),
            }),
            ..limit_ask(TRADING, 100)
        };
        let refused = world.client().check_limits(ask).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{value}");
        let text = refused.message();
        assert!(text.starts_with("notional: "), "{value}: {text}");
    }
    // An order worth less than a kopeck has the value zero.
    let ask = wire::CheckLimitsRequest {
        notional: Some(to_money(0)),
        ..limit_ask(TRADING, 100)
    };
    let allowed = world.client().check_limits(ask).await.unwrap();
    assert!(allowed.into_inner().allowed);
    world.stop().await;
}

// rows: R235 R242 R036
#[tokio::test]
async fn r242_every_change_of_a_user_publishes_an_event_in_order() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    let update = |kyc: common::KycStatus, sanctioned| wire::UpdateUserRequest {
        context: ctx(),
        user_id: "alice".into(),
        kyc_status: kyc as i32,
        sanctioned: Some(sanctioned),
        ..Default::default()
    };
    let enhanced = world
        .client()
        .update_user(update(common::KycStatus::Enhanced, true))
        .await
        .unwrap();
    let profile = enhanced.into_inner().profile.unwrap();
    assert_eq!(profile.kyc_status, common::KycStatus::Enhanced as i32);
    assert_eq!(profile.bank_account, "40817810299910004312");
    let sanctions = wire::CheckSanctionsRequest {
        user_id: "alice".into(),
        ..Default::default()
    };
    let hit = world
        .client()
        .check_sanctions(sanctions.clone())
        .await
        .unwrap()
        .into_inner();
    assert!(hit.hit && hit.reason == "Sanctions list hit");
    assert!(!world.check(DEPOSIT, 1).await.allowed);
    // No change, no event.
    world
        .client()
        .update_user(update(common::KycStatus::Unspecified, true))
        .await
        .unwrap();
    // One person marks a user as sanctioned, and two end the mark (D32).
    let alone = update(common::KycStatus::Unspecified, false);
    let alone = world.client().update_user(alone).await.unwrap_err();
    assert_eq!(alone.message(), "This call needs an approval");
    world
        .approved()
        .update_user(update(common::KycStatus::Unspecified, false))
        .await
        .unwrap();
    assert!(
        !world
            .client()
            .check_sanctions(sanctions)
            .await
            .unwrap()
            .into_inner()
            .hit
    );
    let block = wire::BlockUserRequest {
        context: ctx(),
        user_id: "alice".into(),
        reason: "court order".into(),
    };
    let blocked = world.client().block_user(block.clone()).await.unwrap();
    assert_eq!(
        blocked.into_inner().profile.unwrap().status,
        wire::UserStatus::Blocked as i32
    );
    world.client().block_user(block).await.unwrap();
    assert_eq!(
        world.check(DEPOSIT, 1).await.reason.as_deref(),
        Some("User is blocked")
    );
    let unblock = wire::UnblockUserRequest {
        context: ctx(),
        user_id: "alice".into(),
        reason: "lifted".into(),
    };
    let alone = world.client().unblock_user(unblock.clone()).await;
    let reason = rpc::status::reason(&alone.unwrap_err());
    assert_eq!(reason.as_deref(), Some("APPROVAL_REQUIRED"));
    world.approved().unblock_user(unblock).await.unwrap();
    assert!(world.check(DEPOSIT, 1).await.allowed);

    let mut subscription = world
        .log
        .subscribe("test", &[events::topics::IDENTITY])
        .await
        .unwrap();
    let mut seen = Vec::new();
    while seen.len() < 5 {
        let delivery = in_time("the next event", subscription.next()).await;
        let event = delivery.unwrap().record.event;
        assert_eq!(
            (event.key.as_str(), event.correlation_id.as_str()),
            ("alice", "corr-1")
        );
        seen.push(event.short_type().to_owned());
        if event.short_type() == "UserBlockedEvent" {
            let blocked = wire::UserBlockedEvent::decode(event.payload.as_slice()).unwrap();
            assert_eq!(
                (blocked.user_id.as_str(), blocked.reason.as_str()),
                ("alice", "court order")
            );
            assert!(blocked.at.is_some() && blocked.context.is_some());
        }
    }
    assert_eq!(
        seen,
        [
            "UserCreatedEvent",
            "UserUpdatedEvent",
            "UserUpdatedEvent",
            "UserBlockedEvent",
            "UserUnblockedEvent"
        ]
    );
    world.stop().await;
}

// rows: R036
#[tokio::test]
async fn t14_users_are_created_once_and_never_share_an_address() {
    let world = World::start(|_| ()).await;
    let ask = user("0190f2a1-7c3d-7e10-8a55-1234567890ab");
    let made = world
        .client()
        .create_user(ask.clone())
        .await
        .unwrap()
        .into_inner();
    let again = world
        .client()
        .create_user(ask.clone())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(made, again);
    assert_eq!(
        made.profile.unwrap().onchain_address.to_lowercase(),
        "0x0190f2a17c3d7e108a551234567890ab00000000"
    );
    let other_key = wire::CreateUserRequest {
        context: ctx(),
        ..ask.clone()
    };
    let taken = world.client().create_user(other_key).await.unwrap_err();
    assert_eq!(
        (taken.code(), taken.message()),
        (Code::AlreadyExists, "User already exists")
    );
    // The same digits without hyphens are another user with the same derived address.
    let twin = wire::CreateUserRequest {
        context: ctx(),
        user_id: ask.user_id.replace('-', ""),
        ..ask
    };
    let refused = world.client().create_user(twin).await.unwrap_err();
    assert_eq!(
        rpc::status::reason(&refused).as_deref(),
        Some("ADDRESS_TAKEN")
    );
    for bad in ["a:b", "two words", "system", &"u".repeat(65)] {
        let refused = world.client().create_user(user(bad)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument, "{bad}");
    }
    let nameless = wire::CreateUserRequest {
        bank_account: String::new(),
        ..user("")
    };
    let made = world
        .client()
        .create_user(nameless.clone())
        .await
        .unwrap()
        .into_inner();
    let profile = made.profile.clone().unwrap();
    assert!(Uuid::parse_str(&profile.user_id).is_ok());
    assert_eq!(account::check(&profile.bank_account), Ok(()));
    assert_eq!(
        world
            .client()
            .create_user(nameless)
            .await
            .unwrap()
            .into_inner(),
        made
    );
    world.stop().await;
}

/// A repeated call must not act again after a later call has undone it.
#[tokio::test]
async fn d50_a_repeated_key_gets_the_stored_answer_and_changes_nothing() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    let again = wire::CreateUserRequest {
        context: ctx_with("k-create"),
        ..user("bob")
    };
    let made = world.client().create_user(again.clone()).await.unwrap();
    assert!(!is_repeat(&made));
    let repeat = world.client().create_user(again).await.unwrap();
    assert!(is_repeat(&repeat));
    assert_eq!(repeat.into_inner(), made.into_inner());

    let block = |key| wire::BlockUserRequest {
        context: ctx_with(key),
        user_id: "alice".into(),
        reason: "court order".into(),
    };
    let unblock = |key| wire::UnblockUserRequest {
        context: ctx_with(key),
        user_id: "alice".into(),
        reason: "lifted".into(),
    };
    let account = |key, number| wire::UpdateUserRequest {
        context: ctx_with(key),
        user_id: "alice".into(),
        bank_account: Some(account::number("40817", number)),
        ..Default::default()
    };
    let limit = |key, kopecks| wire::SetLimitRequest {
        context: ctx_with(key),
        user_id: "alice".into(),
        limit_type: DEPOSIT as i32,
        daily_limit: Some(to_money(kopecks)),
        refuse_with: String::new(),
    };
    let client = || world.client();
    let blocked = client().block_user(block("k-1")).await.unwrap();
    let approved = || world.approved();
    approved().unblock_user(unblock("k-2")).await.unwrap();
    let repeat = client().block_user(block("k-1")).await.unwrap();
    assert!(is_repeat(&repeat) && !is_repeat(&blocked));
    assert_eq!(repeat.into_inner(), blocked.into_inner());
    client().block_user(block("k-3")).await.unwrap();
    let repeat = approved().unblock_user(unblock("k-2")).await.unwrap();
    assert!(is_repeat(&repeat));
    // One person does not change an account (D32).
    let alone = client().update_user(account("k-4", 1)).await.unwrap_err();
    assert_eq!(alone.message(), "This call needs an approval");
    let first = approved().update_user(account("k-4", 1)).await.unwrap();
    approved().update_user(account("k-5", 2)).await.unwrap();
    // A repeat with other content receives the stored answer too.
    let repeat = approved().update_user(account("k-4", 3)).await.unwrap();
    assert!(is_repeat(&repeat));
    assert_eq!(repeat.into_inner(), first.into_inner());
    client().set_limit(limit("k-6", 1_000)).await.unwrap();
    approved().set_limit(limit("k-7", 2_000)).await.unwrap();
    let repeat = client().set_limit(limit("k-6", 1_000)).await.unwrap();
    assert!(is_repeat(&repeat));

    let ask = wire::GetUserProfileRequest {
        context: None,
        user_id: "alice".into(),
    };
    let profile = client().get_user_profile(ask).await.unwrap().into_inner();
    let profile = profile.profile.unwrap();
    assert_eq!(profile.status, wire::UserStatus::Blocked as i32);
    assert_eq!(profile.bank_account, account::number("40817", 2));
    let (_, limits) = world.get("/identity/limits/alice").await;
    assert_eq!(
        limits["limits"][0]["dailyLimit"]["amount"]["value"],
        "20.00"
    );
    // A key belongs to its caller.
    let mut compliance = world.client_as("sandbox.compliance");
    let other = compliance.set_limit(limit("k-6", 1_500)).await.unwrap();
    assert!(!is_repeat(&other));
    world.stop().await;
}

fn ctx_with(key: &str) -> Option<common::RequestContext> {
    ctx().map(|context| common::RequestContext {
        idempotency_key: key.into(),
        ..context
    })
}

fn is_repeat<T>(answer: &tonic::Response<T>) -> bool {
    answer.metadata().contains_key("idempotent-replayed")
}

// rows: R036
#[tokio::test]
async fn d49_an_account_that_no_bank_accepts_is_refused() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    for (bad, problem) in [
        (
            "40817810099910004312",
            "control key of the account number does not match",
        ),
        ("40817840099910004312", "account is not in roubles"),
        ("4081781", "account number must have 20 digits"),
    ] {
        let create = wire::CreateUserRequest {
            bank_account: bad.into(),
            ..user("bob")
        };
        let created = world.client().create_user(create).await.map(drop);
        let update = wire::UpdateUserRequest {
            context: ctx(),
            user_id: "alice".into(),
            bank_account: Some(bad.into()),
            ..Default::default()
        };
        let updated = world.client().update_user(update).await.map(drop);
        for call in [created, updated] {
            let refused = call.unwrap_err();
            assert_eq!(refused.code(), Code::InvalidArgument);
            assert_eq!(refused.message(), format!("bank_account: {problem}"));
        }
    }
    world.stop().await;
}

// rows: R036
#[tokio::test]
async fn d49_a_user_id_that_reads_as_a_path_is_refused() {
    let world = World::start(|_| ()).await;
    for bad in ["..%2f../etc/passwd", "a/b", "/", "a%2Fb"] {
        let refused = world.client().create_user(user(bad)).await.unwrap_err();
        assert_eq!(refused.code(), Code::InvalidArgument);
        assert_eq!(refused.message(), "user_id: must not contain `/` or `%`");
    }
    world.create("a.b-c_d@e").await;
    world.stop().await;
}

/// A text named two causes, or an empty currency as a foreign one (B10 of the review from outside).
// rows: R036
#[tokio::test]
async fn b10_a_refused_limit_names_one_cause() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    for (currency, amount, problem) in [
        (
            "RUB",
            "1.001",
            "has more digits after the point than the 2 that RUB allows",
        ),
        (
            "RUB",
            "92233720368547758.08",
            "is too large for an amount in RUB",
        ),
        ("EUR", "1.00", "is in `EUR`, `RUB` is expected"),
        ("", "1.00", "has no currency_code"),
    ] {
        let limit = wire::SetLimitRequest {
            context: ctx(),
            user_id: "alice".into(),
            limit_type: DEPOSIT as i32,
            daily_limit: Some(common::Money {
                currency_code: currency.into(),
                amount: Some(common::Decimal {
                    value: amount.into(),
                }),
            }),
            refuse_with: String::new(),
        };
        let refused = world.client().set_limit(limit).await.unwrap_err();
        assert_eq!(refused.message(), format!("daily_limit: {problem}"));
    }
    world.stop().await;
}

// rows: R215 R333
#[tokio::test]
async fn d34_every_change_of_a_user_is_recorded_once_in_a_chain_and_listed() {
    let world = World::start(|_| ()).await;
    world.create("alice").await;
    let block = wire::BlockUserRequest {
        context: ctx(),
        user_id: "alice".into(),
        reason: "court order".into(),
    };
    for _ in 0..2 {
        // The repeat is answered from the store.
        world.client().block_user(block.clone()).await.unwrap();
    }
    let unblock = testkit::messages::approved(wire::UnblockUserRequest {
        context: ctx(),
        user_id: "alice".into(),
        reason: "lifted".into(),
    });
    world.approved().unblock_user(unblock).await.unwrap();
    let limit = wire::SetLimitRequest {
        context: ctx(),
        user_id: "alice".into(),
        limit_type: DEPOSIT as i32,
        daily_limit: Some(to_money(1_000)),
        refuse_with: String::new(),
    };
    let mut compliance = world.client_as("sandbox.compliance.vera");
    compliance.set_limit(limit.clone()).await.unwrap();
    // The same limit again changes nothing.
    let same = wire::SetLimitRequest {
        context: ctx(),
        ..limit
    };
    compliance.set_limit(same).await.unwrap();
    world.create("bob").await;

    let list = async |actor: &str, user_id: &str, page_token: String| {
        let ask = wire::ListAuditRecordsRequest {
            actor: actor.into(),
            user_id: user_id.into(),
            pagination: Some(common::PaginationRequest {
                page_size: 3,
                page_token,
            }),
            ..Default::default()
        };
        let mut auditor = world.client_as("sandbox.auditor");
        auditor.list_audit_records(ask).await.unwrap().into_inner()
    };
    let first = list("", "", String::new()).await;
    let token = first.pagination.unwrap().next_page_token;
    let mut records = first.records;
    records.extend(list("", "", token).await.records);
    records.reverse();
    let seen: Vec<_> = records
        .iter()
        .map(|one| (one.action.as_str(), one.actor.as_str(), one.reason.as_str()))
        .collect();
    let persons = testkit::messages::APPROVED_SUBJECT;
    assert_eq!(
        seen,
        [
            ("user.created", "operator", ""),
            ("user.blocked", "operator", "court order"),
            ("user.unblocked", persons, "lifted"),
            ("limit.set", "vera", ""),
            ("user.created", "operator", ""),
        ]
    );
    assert_eq!(records[0].previous_hash, "0".repeat(64));
    assert!(
        records
            .windows(2)
            .all(|two| two[1].previous_hash == two[0].hash)
    );
    assert!(records[1].after.contains("blocked (court order)"));
    assert_eq!(records[2].before, records[1].after);
    assert_eq!(records[3].after, "DEPOSIT at most 10.00 RUB a day");
    let of_vera = list("vera", "alice", String::new()).await.records;
    assert_eq!(of_vera, records[3..4]);
    let mut investor = world.client_as("sandbox.investor.alice");
    let refused = investor
        .list_audit_records(wire::ListAuditRecordsRequest::default())
        .await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);

    let config = IdentityConfig {
        data_dir: world.folder.path().into(),
        ..IdentityConfig::default()
    };
    let verified = sandbox::identity::verify_audit(&config).await.unwrap();
    assert_eq!((verified.records, verified.broken), (5, None));
    assert_eq!(verified.head, records[4].hash);
    world.stop().await;
}
