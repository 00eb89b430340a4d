//! Redemption of an issue with more holders than a part has, one of whom has an open order, the
//! pages of its payments, and its cost by the number of holders.

use std::fmt::Debug;
use std::sync::Mutex;
use std::time::Duration;

use proto::cfa::v1 as pb;
use proto::common::v1::{OperationStatus, OperationType, PaginationRequest};
use proto::ledger::v1 as ledger;
use tracing::field::{Field, Visit};
use tracing::{Event, Metadata, Subscriber, span};

use crate::metrics::alone;
use crate::node::gated_world;
use crate::trades::{leg, settle, wait_batch};
use crate::world::*;

/// More than the holders of a part.
const HOLDERS: usize = 105;
/// Holders of a part.
const PART: usize = 100;
/// Numbers of holders whose costs are compared.
const FEW: usize = 500;
const MANY: usize = 2_000;
/// Most trades of a batch.
const BATCH: usize = 500;
const ALONE: &str = "CFA_MATURITY_ALONE";

async fn redemption(world: &mut World) -> pb::IssueRedemption {
    let request = pb::GetRedemptionRequest {
        instrument_id: "BOND-1".into(),
        ..Default::default()
    };
    let answer = world.cfa.get_redemption(request).await.expect("recorded");
    answer.into_inner().redemption.expect("redemption")
}

fn page_request(page_size: i32, page_token: &str) -> pb::GetRedemptionRequest {
    pb::GetRedemptionRequest {
        instrument_id: "BOND-1".into(),
        pagination: Some(PaginationRequest {
            page_size,
            page_token: page_token.to_owned(),
        }),
        ..Default::default()
    }
}

/// Users of the payments as the caller sees them, page by page, from a token on. Every page has the
/// same total.
async fn pages(
    world: &World,
    credential: &str,
    page_size: i32,
    mut page_token: String,
    total: &str,
) -> Vec<Vec<String>> {
    let mut caller = world.as_caller(credential);
    let mut pages = Vec::new();
    loop {
        let request = page_request(page_size, &page_token);
        let answer = caller.get_redemption(request).await.expect("recorded");
        let answer = answer.into_inner();
        let redemption = answer.redemption.expect("redemption");
        assert_eq!(redemption.total, amount("CFA-RUB", total));
        let users = redemption.payments.into_iter().map(|paid| paid.user_id);
        pages.push(users.collect());
        page_token = answer.pagination.expect("pagination").next_page_token;
        if page_token.is_empty() {
            return pages;
        }
    }
}

fn start() -> pb::StartRedemptionRequest {
    pb::StartRedemptionRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        record_date: None,
        reason: pb::RedemptionReason::Buyback.into(),
    }
}

/// The chain makes no block. The call answers before its deadline, and the sweep continues.
// rows: R098
#[tokio::test(flavor = "multi_thread")]
async fn r098_a_redemption_answers_within_the_deadline_of_its_call_while_the_chain_stands() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "1").await;
    world.deposit("issuer", "1000.00").await;
    world.stop_sealing().await;
    let first = start();
    let mut timed = tonic::Request::new(first.clone());
    timed.set_timeout(Duration::from_secs(5));
    let started = world.cfa.start_redemption(timed).await;
    let started = started.expect("answered in time").into_inner();
    let under_way = started.redemption.expect("redemption");
    assert_eq!(under_way.status(), pb::RedemptionStatus::Snapshot);
    let repeat = world.cfa.start_redemption(first).await.expect("repeated");
    assert_eq!(repeat.into_inner().redemption, Some(under_way));
    world.stop().await;
    // The next start has a sealer, and sends the transaction that its pool lost.
    let mut world = World::start(folder.path()).await;
    world.resume_operations().await;
    let done = redemption(&mut world).await;
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    let paid = world.balance("alice:CFA-RUB").await;
    assert_eq!(paid.balance.to_string(), "1000.00");
    world.stop().await;
}

// rows: R010 R098 R312
#[tokio::test(flavor = "multi_thread")]
async fn r010_the_payments_of_a_redemption_are_read_in_pages() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let holders = ["alice", "bob", "carol", "dave", "erin"];
    for holder in holders {
        world.issue("BOND-1", holder, "1").await;
    }
    // The issuer has no money: the payments are recorded, and none is made.
    let started = world.cfa.start_redemption(start()).await.expect("started");
    let started = started.into_inner();
    let recorded = started.redemption.expect("redemption");
    assert_eq!(recorded.payments.len(), holders.len());
    let pagination = started.pagination.expect("pagination");
    assert_eq!(pagination.next_page_token, "");

    let staff = "sandbox.operator";
    let paged = pages(&world, staff, 2, String::new(), "5000.00").await;
    assert_eq!(paged.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2, 1]);
    let users = recorded.payments.iter().map(|paid| paid.user_id.clone());
    assert_eq!(paged.concat(), users.collect::<Vec<_>>(), "the same order");
    // A holder sees the own payment, another investor none; the total is of all.
    for (investor, own) in [("dave", vec!["dave".to_owned()]), ("frank", vec![])] {
        let credential = format!("sandbox.investor.{investor}");
        let seen = pages(&world, &credential, 1, String::new(), "5000.00").await;
        assert_eq!(seen, [own], "{investor}");
    }

    let first = world.cfa.get_redemption(page_request(2, "")).await;
    let first = first.expect("recorded").into_inner();
    let token = first.pagination.expect("pagination").next_page_token;
    let foreign = "pagination.page_token: was given for other filters";
    let malformed = "pagination.page_token: is not a token of this service";
    let negative = "pagination.page_size: must not be negative";
    for (credential, size, token, why) in [
        ("sandbox.investor.dave", 2, token.as_str(), foreign),
        (staff, 2, "made up", malformed),
        (staff, -1, "", negative),
    ] {
        let mut caller = world.as_caller(credential);
        let refused = caller.get_redemption(page_request(size, token)).await;
        assert_eq!(refused.expect_err("refused").message(), why);
    }
    world.stop().await;
}

// rows: R098 R102
#[tokio::test(flavor = "multi_thread")]
async fn r102_every_holder_of_several_parts_is_paid_once_and_an_open_order_delays_its_own() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let register = world.register(|request| request.nominal = decimal("2"));
    register.await.expect("registered");
    for holder in 0..HOLDERS {
        world
            .issue("BOND-1", &format!("holder-{holder}"), "1")
            .await;
    }
    let total = format!("{}.00", 2 * HOLDERS);
    world.deposit("issuer", &total).await;
    let hold_id = uuid::Uuid::now_v7().to_string();
    let hold = ledger::CreateHoldRequest {
        context: context(&key()),
        hold: Some(ledger::Hold {
            hold_id: hold_id.clone(),
            subaccount_id: "holder-7:BOND-1".into(),
            amount: amount("BOND-1", "1"),
            reason: "order".into(),
            ..Default::default()
        }),
    };
    world.ledger.create_hold(hold).await.expect("held");
    let started = world.cfa.start_redemption(start()).await.expect("started");
    let next = started.into_inner().pagination.expect("pagination");
    let waiting = redemption(&mut world).await;
    let status = waiting.status();
    assert_eq!(waiting.total, amount("CFA-RUB", &total));
    assert_eq!(waiting.payments.len(), 50, "the first page");
    let rest = pages(&world, "sandbox.operator", 0, next.next_page_token, &total).await;
    assert_eq!(rest.iter().map(Vec::len).collect::<Vec<_>>(), [50, 5]);
    let mut users = rest.concat();
    users.extend(waiting.payments.into_iter().map(|paid| paid.user_id));
    users.sort();
    users.dedup();
    assert_eq!(users.len(), HOLDERS, "each holder once");
    // The others are paid; this holder's order still holds the unit.
    assert_eq!(status, pb::RedemptionStatus::Submitted);
    assert_eq!(world.supply("BOND-1").await, "1");
    let release = ledger::ReleaseHoldRequest {
        context: context(&key()),
        hold_id,
        reason: "cancelled".into(),
    };
    world.ledger.release_hold(release).await.expect("released");
    world.resume_operations().await;
    let done = redemption(&mut world).await;
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    assert_eq!(world.supply("BOND-1").await, "0");
    for holder in [0, 7, HOLDERS - 1] {
        let account = format!("holder-{holder}:CFA-RUB");
        let paid = world.balance(&account).await;
        assert_eq!(paid.balance.to_string(), "2.00", "{account}");
    }
    world.stop().await;
}

/// The steps of the redemption have read the instrument before the change.
// rows: R098
#[tokio::test(flavor = "multi_thread")]
async fn r098_a_change_during_a_redemption_outlasts_its_end() {
    let folder = tempfile::tempdir().expect("folder");
    let (mut world, node, gate) = gated_world(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "1").await;
    world.deposit("issuer", "1000.00").await;
    gate.hide_blocks();
    let mut cfa = world.cfa.clone();
    let redeeming = tokio::spawn(async move { cfa.start_redemption(start()).await });
    // The ledger has moved the money, and the redemption waits for the block.
    world.balance_becomes("issuer:CFA-RUB", "0.00").await;
    let change = pb::UpdateInstrumentRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        price_band_low: decimal("500"),
        price_band_high: decimal("2000"),
        ..Default::default()
    };
    world.cfa.update_instrument(change).await.expect("changed");
    gate.pass();
    redeeming.await.expect("no panic").expect("started");
    world.resume_operations().await;
    let redeemed = world.instrument("BOND-1").await;
    assert_eq!(redeemed.status(), pb::InstrumentStatus::Redeemed);
    assert_eq!(redeemed.price_band_high, decimal("2000"));
    world.stop().await;
    node.stop().await;
}

/// A user id of 40 hexadecimal digits has the format of an address (T14).
// rows: R048 R098
#[tokio::test(flavor = "multi_thread")]
async fn r098_a_holder_whose_id_is_40_hex_digits_is_paid() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    let holder = "00112233445566778899aabbccddeeff00112233";
    world.issue("BOND-1", holder, "2").await;
    world.deposit("issuer", "2000.00").await;
    world.cfa.start_redemption(start()).await.expect("started");
    world.resume_operations().await;
    let done = redemption(&mut world).await;
    assert_eq!(done.status(), pb::RedemptionStatus::Finalized);
    for (account, due) in [("CFA-RUB", "2000.00"), ("BOND-1", "0")] {
        let balance = world.balance(&format!("{holder}:{account}")).await;
        assert_eq!(balance.balance.to_string(), due, "{account}");
    }
    world.stop().await;
}

/// Work on the service's tables of holders, payments and operations.
#[derive(Clone, Copy)]
struct Work {
    statements: u64,
    /// Rows that the statements returned.
    rows: u64,
}

static WORK: Mutex<Work> = Mutex::new(Work {
    statements: 0,
    rows: 0,
});

fn work() -> Work {
    *WORK.lock().expect("no panic with the lock")
}

/// Adds every statement of the process to [`WORK`].
struct Counter;

/// A statement as sqlx reports it.
#[derive(Default)]
struct Statement {
    text: String,
    rows: u64,
}

impl Visit for Statement {
    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}

    fn record_str(&mut self, field: &Field, value: &str) {
        if ["summary", "db.statement"].contains(&field.name()) {
            self.text.push_str(value);
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "rows_returned" {
            self.rows = value;
        }
    }
}

impl Subscriber for Counter {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        ["sqlx::query", "events::statements"].contains(&metadata.target())
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        // No table of the ledger or of the chain has such a name.
        const TABLES: [&str; 4] = [
            "holding",
            "redemption_line",
            "issue_redemption",
            " operation ",
        ];
        let mut statement = Statement::default();
        event.record(&mut statement);
        if TABLES.iter().any(|table| statement.text.contains(table)) {
            let mut work = WORK.lock().expect("no panic with the lock");
            work.statements += 1;
            work.rows += statement.rows;
        }
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// Issues units to one investor, who sells one to each of the others for nothing, in batches of
/// trades. Waits until the ledger has the last of them as final.
async fn issue_to(world: &mut World, symbol: &str, holders: usize) {
    world.issue(symbol, "bob", &holders.to_string()).await;
    let holder = |number: usize| format!("{symbol}-holder-{number}");
    let trade_id = |number: usize| format!("{symbol}-t-{number}");
    for first in (1..=holders).step_by(BATCH) {
        let numbers = first..=holders.min(first + BATCH - 1);
        let operations = numbers.clone().map(|number| ledger::NewOperation {
            operation: Some(ledger::Operation {
                r#type: OperationType::TradeBuy.into(),
                user_id: holder(number),
                idempotency_key: trade_id(number),
                external_ref: Some(trade_id(number)),
                awaits_chain: true,
                ..Default::default()
            }),
            postings: vec![ledger::Posting {
                debit_subaccount_id: format!("bob:{symbol}"),
                credit_subaccount_id: format!("{}:{symbol}", holder(number)),
                amount: amount(symbol, "1"),
                ..Default::default()
            }],
        });
        let request = ledger::CreateOperationsRequest {
            context: context(&key()),
            operations: operations.collect(),
            ..Default::default()
        };
        let posted = world.ledger.create_operations(request).await;
        let last = posted.expect("posted").into_inner().outcomes.pop();
        let last = last.expect("an outcome").operation.expect("an operation");
        let trades = numbers.map(|number| pb::TradeLeg {
            instrument_id: symbol.into(),
            ..leg(
                &trade_id(number),
                number as u64,
                &holder(number),
                "bob",
                "1",
                "0.00",
                "0.00",
            )
        });
        let batch_id = format!("{symbol}:{first}");
        let sent = settle(world, &batch_id, trades.collect()).await;
        sent.expect("sent");
        let batch = wait_batch(world, &batch_id).await;
        assert_eq!(batch.failed_trade_ids, Vec::<String>::new());
        testkit::eventually(async || {
            let request = ledger::GetOperationRequest {
                operation_id: last.operation_id.clone(),
                ..Default::default()
            };
            let found = world.ledger.clone().get_operation(request).await;
            let found = found.expect("found").into_inner().operation;
            let status = found.expect("operation").status();
            (status == OperationStatus::Finalized).then_some(())
        })
        .await;
    }
}

/// Redeems an issue with this number of holders at its maturity. Asserts the ledger's calls and the
/// chain transactions per part of holders; returns the work of the service.
async fn mature(world: &mut World, symbol: &str, holders: usize) -> Work {
    let matures_at = world.clock.now_us() / 1_000_000 + 3_600;
    let terms = |request: &mut pb::RegisterInstrumentRequest| {
        request.symbol = symbol.into();
        request.nominal = decimal("2");
        request.matures_at = Some(prost_types::Timestamp {
            seconds: matures_at,
            nanos: 0,
        });
    };
    world.register(terms).await.expect("registered");
    issue_to(world, symbol, holders).await;
    world.clock.advance_us(3_600 * 1_000_000);
    let connector = world.connector();
    let before = connector.block_number().await.expect("read");
    world.faults.take_calls("");
    let started = work();
    world.resume_operations().await;
    let ended = work();
    let status = world.instrument(symbol).await.status();
    assert_eq!(status, pb::InstrumentStatus::Redeemed);
    // The issuer's money, then each part: posted and made final.
    let parts = holders.div_ceil(PART);
    let calls = world.faults.take_calls("dfa.ledger.v1.LedgerService");
    assert_eq!(calls.len(), 2 * (1 + parts), "{calls:?}");
    let mut transactions = 0;
    for number in before + 1..=connector.block_number().await.expect("read") {
        let block = connector.block(Some(number)).await.expect("read");
        transactions += block.expect("exists").tx_hashes.len();
    }
    assert_eq!(transactions, 1 + parts);
    assert_eq!(world.supply(symbol).await, "0");
    for number in [1, holders] {
        let account = format!("{symbol}-holder-{number}:CFA-RUB");
        let paid = world.balance(&account).await;
        assert_eq!(paid.balance.to_string(), "2.00", "{account}");
    }
    Work {
        statements: ended.statements - started.statements,
        rows: ended.rows - started.rows,
    }
}

/// The process whose statements are counted. Does nothing in an ordinary test run.
#[tokio::test(flavor = "multi_thread")]
async fn child_redeems_issues_of_few_and_of_many_holders() {
    if std::env::var(ALONE).is_err() {
        return;
    }
    // Before the stores are opened, which ask whether statements are traced.
    tracing::subscriber::set_global_default(Counter).expect("one test per process");
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let due = format!("{}.00", 2 * (FEW + MANY));
    world.deposit("issuer", &due).await;
    let few = mature(&mut world, "BOND-1", FEW).await;
    let many = mature(&mut world, "BOND-2", MANY).await;
    for (what, few, many) in [
        ("statements", few.statements, many.statements),
        ("rows", few.rows, many.rows),
    ] {
        println!("{what}: {few} for {FEW} holders, {many} for {MANY}");
        assert!(few >= FEW as u64, "{what}: {few} are too few");
        // Per holder at most a quarter more. A read of all holders per part would be twice as many.
        let [few, many] = [few * MANY as u64, many * FEW as u64];
        assert!(4 * many <= 5 * few, "{what} grow faster than the holders");
    }
    world.stop().await;
}

/// Maturity of 10,000 holders costs 20 times as much as that of 500. Counted, not timed, and in a
/// process of its own: other tests execute statements too.
// rows: R097 R102
#[tokio::test]
async fn r097_the_cost_of_a_maturity_grows_with_its_holders_alone() {
    let child = "maturity::child_redeems_issues_of_few_and_of_many_holders";
    alone(child, ALONE).await;
}
