//! Settlement under failures: differences, refusals, an unwritable store, a worker that has ended.

mod world;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use proto::common::v1::OperationStatus;
use proto::ledger::v1 as wire;
use proto::settlement::v1 as pb;
use proto::settlement::v1::settlement_service_client::SettlementServiceClient;
use settlement::Suspension;
use types::command::{BlockCause, BlockUser, MassCancel, UnblockUser};
use types::*;
use world::services::{Platform, config, context, journal_of_busy_engines, store};
use world::{Market, in_time, node};

type Client = SettlementServiceClient<rpc::Channel>;

/// Generous for slow machines; no test measures it.
const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `seen` is true.
async fn until(what: &str, platform: &Platform, mut seen: impl FnMut() -> bool) {
    let waiting = async {
        while !seen() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting)
        .await
        .unwrap_or_else(|_| panic!("no {what}: {:?}", platform.settlement.stats()));
}

async fn drained(platform: &Platform, sequence: Sequence) {
    tokio::time::timeout(PATIENCE, platform.settlement.drained(sequence))
        .await
        .unwrap_or_else(|_| panic!("not drained: {:?}", platform.settlement.stats()));
}

fn is_failing(platform: &Platform, part: &str) -> bool {
    platform.settlement.health().failing().contains_key(part)
}

fn trade(market: &mut Market, seller: u32, buyer: u32) -> String {
    market
        .order(seller, 0, Side::Sell, 100, 10, TimeInForce::Gtc)
        .unwrap();
    market
        .order(buyer, 0, Side::Buy, 100, 10, TimeInForce::Gtc)
        .unwrap();
    let events = &market.records.last().unwrap().events;
    let trade = events
        .iter()
        .find(|e| matches!(e.event, Event::Trade(_)))
        .unwrap();
    trade.trade_uuid(node()).to_string()
}

/// The undrawn amount of user 0's money hold, and a request that sets its amount in the ledger.
fn trading_hold(market: &Market) -> (i64, impl Fn(i64, &str) -> wire::AdjustHoldRequest + use<>) {
    trading_hold_of(market, UserIx(0))
}

fn trading_hold_of(
    market: &Market,
    user: UserIx,
) -> (i64, impl Fn(i64, &str) -> wire::AdjustHoldRequest + use<>) {
    let trading_hold = Market::trading_hold(user, AssetIx::MONEY);
    let trading_hold = *market.admission().hold(trading_hold).unwrap();
    let adjust = move |minor: i64, key: &str| wire::AdjustHoldRequest {
        context: context(key),
        hold_id: trading_hold.hold_id.to_string(),
        remaining_amount: Some(proto::convert::to_monetary_amount_minor(
            "CFA-RUB", minor, 2,
        )),
    };
    (trading_hold.undrawn.0, adjust)
}

/// Block, cancel and unblock commands of user 0.
fn block() -> Command {
    let (user, cause) = (UserIx(0), BlockCause::Difference);
    Command::BlockUser(BlockUser { user, cause })
}

fn cancel() -> Command {
    Command::MassCancel(MassCancel::of_blocked(UserIx(0)))
}

fn unblock() -> Command {
    let (user, cause) = (UserIx(0), BlockCause::Difference);
    Command::UnblockUser(UnblockUser { user, cause })
}

async fn sql(folder: &Path, statement: &'static str) {
    let mut store = store(folder).await;
    sqlx::query(statement).execute(&mut store).await.unwrap();
    sqlx::Connection::close(store).await.unwrap();
}

/// The differences that an operator sees.
async fn breaks(
    platform: &Platform,
    instrument_id: &str,
    state: pb::BreakState,
    age_seconds_min: u32,
) -> Vec<pb::Break> {
    let (mut operators, _slot) = platform.operators();
    let request = pb::ListBreaksRequest {
        instrument_id: instrument_id.into(),
        state: state.into(),
        age_seconds_min,
        ..Default::default()
    };
    let listed = operators.list_breaks(request).await.unwrap();
    listed.into_inner().breaks
}

/// Asserts that the health names the only open difference, and that operators see it.
async fn listed_break(platform: &Platform, hold_id: &str) {
    let failing = platform.settlement.health().findings();
    assert!(
        failing["settlement-breaks"].contains(hold_id),
        "{failing:?}"
    );
    let open = pb::BreakState::Open;
    let row = breaks(platform, "CFA-RUB", open, 0).await.remove(0);
    assert_eq!((row.hold_id.as_str(), row.state()), (hold_id, open));
    assert_eq!(
        (row.user_id.as_str(), row.owner.as_str()),
        ("user-0", "operator")
    );
    let value = |amount: Option<proto::common::v1::Decimal>| {
        let value = amount.expect("an amount").value;
        value.parse::<Decimal>().expect("a number")
    };
    let kopeck = Decimal::from_minor(1, 2);
    let found = value(row.found).checked_add(kopeck).unwrap();
    assert_eq!(value(row.expected), found);
    // Neither of another instrument nor older than it is.
    assert!(breaks(platform, "BOND-0", open, 0).await.is_empty());
    assert!(breaks(platform, "", open, 3_600).await.is_empty());
    let (mut operators, _slot) = platform.operators();
    let status = pb::GetSettlementStatusRequest::default();
    let status = operators.get_settlement_status(status).await.unwrap();
    let status = status.into_inner();
    assert_eq!(
        (status.breaks_open, status.oldest_break_at.is_some()),
        (1, true)
    );
    let retry = |id: &str| pb::RetrySettlementRequest {
        context: context(&format!("retry-{id}")),
        id: id.into(),
    };
    operators.retry_settlement(retry(hold_id)).await.unwrap();
    let unknown = operators.retry_settlement(retry("nothing")).await;
    assert_eq!(unknown.unwrap_err().code(), tonic::Code::NotFound);
}

/// The only case is that of this trade; an operator closes it, once.
async fn settle_the_case(operators: &mut Client, trade_id: &str, batch_id: &str) {
    let listed = async |operators: &mut Client, state: pb::CaseState| {
        let request = pb::ListCasesRequest {
            state: state.into(),
            ..Default::default()
        };
        let listed = operators.list_cases(request).await.unwrap();
        listed.into_inner().cases
    };
    let open = listed(operators, pb::CaseState::Open).await;
    assert_eq!(open.len(), 1);
    let case = &open[0];
    assert_eq!(
        (case.trade_id.as_str(), case.batch_id.as_str()),
        (trade_id, batch_id)
    );
    assert_eq!(
        (case.buyer_id.as_str(), case.seller_id.as_str()),
        ("user-0", "user-1")
    );
    assert!(case.reason.ends_with("bust by an operator: token is gone"));
    assert_eq!(
        (case.state(), case.owner.as_str()),
        (pb::CaseState::Open, "operator")
    );
    let close = |trade_id: &str, note: &str| pb::CloseCaseRequest {
        context: context("close"),
        trade_id: trade_id.into(),
        note: note.into(),
    };
    let unknown = close(&Id128::from_u128(1).to_string(), "paid");
    let unknown = operators.close_case(unknown).await.unwrap_err();
    assert_eq!(unknown.code(), tonic::Code::NotFound);
    let closed = operators.close_case(close(trade_id, "paid")).await.unwrap();
    assert!(closed.metadata().get("idempotent-replayed").is_none());
    let closed = closed.into_inner().case.unwrap();
    assert_eq!(
        (closed.state(), closed.note.as_str()),
        (pb::CaseState::Closed, "paid")
    );
    assert!(!closed.closed_by.is_empty() && closed.closed_at.is_some());
    // A repeat, also with another note, returns the case as it was closed.
    let again = operators
        .close_case(close(trade_id, "other"))
        .await
        .unwrap();
    assert!(again.metadata().get("idempotent-replayed").is_some());
    assert_eq!(again.into_inner().case.as_ref(), Some(&closed));
    assert!(listed(operators, pb::CaseState::Open).await.is_empty());
    assert_eq!(listed(operators, pb::CaseState::Closed).await, [closed]);
    let status = pb::GetSettlementStatusRequest::default();
    let status = operators.get_settlement_status(status).await.unwrap();
    assert_eq!(status.into_inner().cases_open, 0);
}

// At its bound the queue to the chain holds up nothing. One batch more waits, and the next batches
// are not sealed.
#[tokio::test]
async fn posted_batches_wait_for_the_chain_up_to_a_bound() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = config(folder.path());
    (settings.batch_trades_max, settings.posted_batches_max) = (1, 2);
    let mut platform = Platform::start(folder.path(), settings, &[]).await;
    let mut market = Market::new(1);
    let refused = trade(&mut market, 1, 0);
    platform
        .chain
        .refused_trades
        .lock()
        .unwrap()
        .insert(refused);
    // The first batch is with the worker, the next two are in the queue.
    trade(&mut market, 3, 2);
    trade(&mut market, 1, 2);
    platform.fund(&market).await;
    platform.feed(&market.records);
    let settled = platform.settlement.settled(market.position());
    in_time("postings of three batches", settled).await;
    assert_eq!(platform.settlement.stats().batches_pending, 3);

    let fed = market.records.len();
    let at_bound = market.position();
    trade(&mut market, 3, 0);
    trade(&mut market, 1, 0);
    platform.feed(&market.records[fed..]);
    until("fourth batch", &platform, || {
        platform.settlement.stats().batches_pending == 4
    })
    .await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let stats = platform.settlement.stats();
    assert_eq!(stats.batches_pending, 4, "the fifth is not sealed");
    assert!(stats.progress.settled < market.position(), "{stats:?}");
    assert!(stats.progress.settled >= at_bound, "{stats:?}");

    platform.chain.refused_trades.lock().unwrap().clear();
    drained(&platform, market.position()).await;
    assert_eq!(platform.settlement.stats().trades_settled, 5);
    platform.stop().await;
}

#[tokio::test]
async fn final_batches_are_removed_after_their_retention() {
    let folder = tempfile::tempdir().unwrap();
    let settings = config(folder.path());
    let mut market = Market::new(1);
    let mut platform = Platform::start(folder.path(), settings.clone(), &[]).await;
    trade(&mut market, 1, 0);
    platform.fund(&market).await;
    platform.feed(&market.records);
    drained(&platform, market.position()).await;
    platform.stop().await;
    // Older than the retention by a day.
    let day_us = 86_400_000_000_i64;
    let age = day_us * i64::from(settings.final_retention_days + 1);
    let mut store = store(folder.path()).await;
    sqlx::query("UPDATE batches SET changed_at_us = changed_at_us - $1 WHERE state = 'FINAL'")
        .bind(age)
        .execute(&mut store)
        .await
        .unwrap();
    let platform = Platform::start(folder.path(), settings, &market.records).await;
    let removed = async {
        let count = "SELECT COUNT(*) FROM batches";
        while sqlx::query_scalar::<_, i64>(count)
            .fetch_one(&mut store)
            .await
            .unwrap()
            > 0
        {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    in_time("the sweep at the start", removed).await;
    // Later trades are settled as before.
    let fed = market.records.len();
    trade(&mut market, 3, 2);
    platform.feed(&market.records[fed..]);
    drained(&platform, market.position()).await;
    platform.stop().await;
}

// rows: R186
/// One trade that the chain service refuses stops every later trade. An operator busts it.
#[tokio::test]
async fn r186_an_operator_busts_a_trade_that_stops_the_queue_before_the_chain() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = config(folder.path());
    // Only an operator's retry ends the pause.
    settings.refused_retry_ms = 3_600_000;
    let mut platform = Platform::start(folder.path(), settings, &[]).await;
    let mut market = Market::new(1);
    let refused = trade(&mut market, 1, 0);
    platform
        .chain
        .refused_trades
        .lock()
        .unwrap()
        .insert(refused.clone());
    platform.fund(&market).await;
    platform.feed(&market.records);
    until("alarm", &platform, || {
        !platform.settlement.stats().halted.is_empty()
    })
    .await;
    let (mut operators, slot) = platform.operators();
    let listed = operators.list_batches(pb::ListBatchesRequest::default());
    let batch = listed.await.unwrap().into_inner().batches.remove(0);
    assert_eq!(batch.state(), pb::BatchState::Posted);
    assert_eq!(batch.trade_ids, std::slice::from_ref(&refused));
    let status = pb::GetSettlementStatusRequest::default();
    let status = operators.get_settlement_status(status).await.unwrap();
    let waiting = status.into_inner().waiting.remove(0);
    assert_eq!(
        (waiting.part.as_str(), waiting.id, waiting.is_stuck),
        ("settlement-chain", batch.batch_id.clone(), true)
    );

    // A later trade waits too, and is not the one that stops the queue.
    let fed = market.records.len();
    let later = trade(&mut market, 2, 3);
    platform.feed(&market.records[fed..]);
    let bust = |trade: &str, reason: &str| pb::BustTradeRequest {
        context: context(&format!("bust-{trade}")),
        trade_id: trade.into(),
        reason: reason.into(),
    };
    let status = operators
        .bust_trade(bust(&later, "test"))
        .await
        .unwrap_err();
    assert_eq!(
        rpc::status::reason(&status).as_deref(),
        Some("TRADE_NOT_STUCK")
    );
    let nameless = operators.bust_trade(bust(&refused, " ")).await;
    assert_eq!(nameless.unwrap_err().code(), tonic::Code::InvalidArgument);

    // A batch that the chain service has: the trade is bust only by the outcome there.
    {
        let mut state = platform.chain.state.lock().unwrap();
        let (id, trades) = (batch.batch_id.clone(), vec![refused.clone()]);
        state.failed.insert(id.clone(), trades.clone());
        state.batches.push((id, trades));
    }
    let submitted = operators.bust_trade(bust(&refused, "test")).await;
    let submitted = submitted.unwrap_err();
    assert_eq!(submitted.code(), tonic::Code::FailedPrecondition);
    assert!(submitted.message().contains("with the chain service"));
    platform.chain.state.lock().unwrap().batches.pop();

    let first = operators.bust_trade(bust(&refused, "token is gone")).await;
    let first = first.unwrap();
    assert!(first.metadata().get("idempotent-replayed").is_none());
    assert_eq!(first.into_inner().batch_id, batch.batch_id);
    drained(&platform, market.position()).await;
    platform.reported(market.position()).await;
    assert!(platform.is_bust(&refused) && !platform.is_bust(&later));
    // A repeat returns the first answer, also after the trade is bust.
    let again = operators
        .bust_trade(bust(&refused, "another"))
        .await
        .unwrap();
    assert!(again.metadata().get("idempotent-replayed").is_some());
    assert_eq!(again.into_inner().batch_id, batch.batch_id);
    settle_the_case(&mut operators, &refused, &batch.batch_id).await;
    audited(&mut operators, &refused).await;
    drop(slot);
    let (operation, _) = platform.operation(&refused).await.unwrap();
    assert_eq!(operation.status(), OperationStatus::Failed);
    let why = operation.rejection_message.unwrap_or_default();
    assert!(why.ends_with("bust by an operator: token is gone"), "{why}");
    let (operation, _) = platform.operation(&later).await.unwrap();
    assert_eq!(operation.status(), OperationStatus::Finalized);
    assert!(platform.settlement.health().failing().is_empty());
    assert!(!platform.chain.moved().contains_key(&refused));
    platform.assert_agrees(&market).await;
    platform.stop().await;
    altered_record(folder.path()).await;
}

fn bust_request(trade: &str) -> pb::BustTradeRequest {
    pb::BustTradeRequest {
        context: context(&format!("bust-{trade}")),
        trade_id: trade.into(),
        reason: "token is gone".into(),
    }
}

// rows: R186
/// One trade that the ledger refuses for good stops every later trade. An operator busts it.
#[tokio::test]
async fn r186_an_operator_busts_a_trade_that_the_ledger_refuses() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = config(folder.path());
    // Only an operator's retry ends the pause.
    settings.refused_retry_ms = 3_600_000;
    let mut platform = Platform::start(folder.path(), settings, &[]).await;
    let mut market = Market::new(1);
    platform.fund(&market).await;
    let refused = trade(&mut market, 1, 0);
    platform.occupy(&refused).await;
    platform.feed(&market.records);
    until("alarm", &platform, || {
        let halted = platform.settlement.stats().halted;
        halted.contains("settlement-ledger")
    })
    .await;
    let fed = market.records.len();
    let later = trade(&mut market, 2, 3);
    platform.feed(&market.records[fed..]);

    let (mut operators, slot) = platform.operators();
    let status = pb::GetSettlementStatusRequest::default();
    let status = operators.get_settlement_status(status).await.unwrap();
    let waiting = status.into_inner().waiting.remove(0);
    assert_eq!(
        (waiting.part.as_str(), waiting.is_stuck),
        ("settlement-ledger", true)
    );
    assert!(waiting.reason.contains(&refused), "{}", waiting.reason);
    // The trade names the step of its batch.
    let retry = pb::RetrySettlementRequest {
        context: context("retry trade"),
        id: refused.clone(),
    };
    let retried = operators.retry_settlement(retry).await.unwrap();
    assert_eq!(retried.into_inner().waiting[0].id, waiting.id);
    let early = operators.bust_trade(bust_request(&later)).await;
    assert_eq!(
        rpc::status::reason(&early.unwrap_err()).as_deref(),
        Some("TRADE_NOT_STUCK")
    );

    let bust = operators.bust_trade(bust_request(&refused)).await.unwrap();
    assert_eq!(bust.into_inner().batch_id, waiting.id);
    drained(&platform, market.position()).await;
    platform.reported(market.position()).await;
    assert!(platform.is_bust(&refused) && !platform.is_bust(&later));
    let again = operators.bust_trade(bust_request(&refused)).await.unwrap();
    assert!(again.metadata().get("idempotent-replayed").is_some());
    settle_the_case(&mut operators, &refused, &waiting.id).await;
    drop(slot);

    // Nothing of the trade is in the ledger, and both members have what they had.
    for suffix in ["", ":sell", ":fee"] {
        let key = format!("{refused}{suffix}");
        assert_eq!(platform.operation(&key).await, None, "{key}");
    }
    let [money, _, unsettled, available] = platform.balance("user-0:CFA-RUB").await;
    assert_eq!((money.as_str(), unsettled.as_str()), ("500000.00", "0.00"));
    let available: Decimal = available.parse().unwrap();
    assert!(available >= Decimal::from_integer(10), "{available}");
    let [units, _, _, available] = platform.balance("user-1:BOND-0").await;
    assert_eq!((units.as_str(), available.as_str()), ("50000000", "10"));
    let (operation, _) = platform.operation(&later).await.unwrap();
    assert_eq!(operation.status(), OperationStatus::Finalized);
    assert!(!platform.chain.moved().contains_key(&refused));
    assert!(platform.settlement.health().failing().is_empty());
    assert_eq!(platform.settlement.stats().trades_failed, 1);
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

/// One batch is refused by the chain service, a later one by the ledger.
#[tokio::test]
async fn a_retry_repeats_only_the_step_that_it_names() {
    let folder = tempfile::tempdir().unwrap();
    let mut settings = config(folder.path());
    // Only an operator's retry ends a pause.
    settings.refused_retry_ms = 3_600_000;
    let mut platform = Platform::start(folder.path(), settings, &[]).await;
    let mut market = Market::new(1);
    let refused = trade(&mut market, 1, 0);
    let refusals = &platform.chain.refused_trades;
    refusals.lock().unwrap().insert(refused);
    platform.fund(&market).await;
    platform.feed(&market.records);
    let is_stuck = |platform: &Platform, part: &str| {
        let halted = platform.settlement.stats().halted;
        halted.contains(part)
    };
    let (chain, ledger) = ("settlement-chain", "settlement-ledger");
    until("alarm", &platform, || is_stuck(&platform, chain)).await;
    let (undrawn, adjust) = trading_hold_of(&market, UserIx(2));
    let taken = adjust(1, "steal");
    platform.ledger.adjust_hold(taken).await.unwrap();
    let fed = market.records.len();
    trade(&mut market, 3, 2);
    platform.feed(&market.records[fed..]);
    until("second alarm", &platform, || is_stuck(&platform, ledger)).await;
    platform.chain.refused_trades.lock().unwrap().clear();
    let repaired = adjust(undrawn, "repair");
    platform.ledger.adjust_hold(repaired).await.unwrap();

    let (mut operators, _slot) = platform.operators();
    let status = pb::GetSettlementStatusRequest::default();
    let status = operators.get_settlement_status(status).await.unwrap();
    let waiting = status.into_inner().waiting;
    for (part, others) in [(chain, Some(ledger)), (ledger, None)] {
        let named = waiting.iter().find(|step| step.part == part).unwrap();
        let retry = pb::RetrySettlementRequest {
            context: context(&format!("retry {part}")),
            id: named.id.clone(),
        };
        let retried = operators.retry_settlement(retry).await.unwrap();
        assert_eq!(retried.into_inner().waiting, std::slice::from_ref(named));
        until("retry", &platform, || !is_stuck(&platform, part)).await;
        // Long enough for a retry of the other step.
        tokio::time::sleep(Duration::from_millis(200)).await;
        assert!(others.is_none_or(|other| is_stuck(&platform, other)));
    }
    drained(&platform, market.position()).await;
    assert!(platform.settlement.health().failing().is_empty());
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

/// Each act of an operator has one record, also after its repeats; the newest is first.
async fn audited(operators: &mut Client, trade_id: &str) {
    let retry = || pb::RetrySettlementRequest {
        context: context("retry-all"),
        id: String::new(),
    };
    let first = operators.retry_settlement(retry()).await.unwrap();
    assert!(first.metadata().get("idempotent-replayed").is_none());
    let again = operators.retry_settlement(retry()).await.unwrap();
    assert!(again.metadata().get("idempotent-replayed").is_some());
    let (mut records, mut page_token) = (Vec::new(), String::new());
    loop {
        let ask = pb::ListAuditRecordsRequest {
            pagination: Some(proto::common::v1::PaginationRequest {
                page_size: 2,
                page_token,
            }),
            ..Default::default()
        };
        let page = operators.list_audit_records(ask).await.unwrap();
        let page = page.into_inner();
        assert!(page.records.len() <= 2);
        records.extend(page.records);
        page_token = page.pagination.unwrap().next_page_token;
        if page_token.is_empty() {
            break;
        }
    }
    let seen: Vec<_> = records
        .iter()
        .map(|record| (&*record.action, &*record.object_id, &*record.reason))
        .collect();
    assert_eq!(
        seen,
        [
            ("settlement.retried", "settlement", ""),
            ("case.closed", trade_id, "paid"),
            ("trade.bust", trade_id, "token is gone"),
        ]
    );
    assert!(records.iter().all(|record| !record.actor.is_empty()));
    let ask = pb::ListAuditRecordsRequest {
        actor: records[1].actor.clone(),
        object_id: trade_id.into(),
        ..Default::default()
    };
    let of_trade = operators.list_audit_records(ask).await.unwrap();
    assert_eq!(of_trade.into_inner().records, records[1..]);
}

/// The chain of records is valid, and an altered record is named.
async fn altered_record(folder: &Path) {
    let settings = config(folder);
    let verified = settlement::verify_audit(&settings).await.unwrap();
    assert_eq!((verified.records, verified.broken), (3, None));
    for statement in [
        "DROP TRIGGER audit_records_never_change",
        "UPDATE audit_records SET actor = 'x' WHERE sequence = 2",
    ] {
        let mut store = store(folder).await;
        sqlx::query(statement).execute(&mut store).await.unwrap();
        sqlx::Connection::close(store).await.unwrap();
    }
    let verified = settlement::verify_audit(&settings).await.unwrap();
    assert_eq!(verified.broken.map(|broken| broken.sequence), Some(2));
}

#[tokio::test]
async fn a_short_hold_blocks_its_user_in_the_market_but_not_settlement() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let mut market = Market::new(1);
    trade(&mut market, 1, 0);
    platform.fund(&market).await;
    platform.feed(&market.records);
    let fed = market.records.len();
    drained(&platform, market.position()).await;
    // Money leaves user 0's trading hold without a journal record.
    let (undrawn, adjust) = trading_hold(&market);
    let taken = adjust(undrawn - 1, "steal");
    platform.ledger.adjust_hold(taken).await.unwrap();
    platform.stop().await;

    let platform = Platform::start(folder.path(), config(folder.path()), &market.records).await;
    until("block", &platform, || platform.has_submitted(cancel())).await;
    assert!(!platform.has_submitted(unblock()));
    let suspended = |platform: &Platform| platform.settlement.suspensions().get("user-0").copied();
    assert_eq!(suspended(&platform), Some(Suspension::Differs));
    let submitted = platform.submitted.lock().unwrap().clone();
    let at = |command| submitted.iter().position(|found| *found == command);
    assert!(
        at(block()).unwrap() < at(cancel()).unwrap(),
        "{submitted:?}"
    );
    let found = platform.settlement.breaks().await.unwrap().remove(0);
    assert_eq!(
        (found.name.as_str(), found.user_id.as_str()),
        ("HOLD_SHORT", "user-0")
    );
    assert_eq!(found.expected - found.found, 1);
    listed_break(&platform, &found.hold_id).await;

    // Settlement continues, also for this user: the ledger decides what is covered.
    trade(&mut market, 4, 5);
    trade(&mut market, 0, 3);
    platform.feed(&market.records[fed..]);
    let fed = market.records.len();
    drained(&platform, market.position()).await;
    assert_eq!(platform.settlement.stats().halted, "");

    // A restart keeps the break and reports it once.
    platform.stop().await;
    let mut platform = Platform::start(folder.path(), config(folder.path()), &market.records).await;
    until("block again", &platform, || {
        platform.has_submitted(cancel())
    })
    .await;
    trade(&mut market, 2, 3);
    platform.feed(&market.records[fed..]);
    drained(&platform, market.position()).await;
    assert_eq!(platform.settlement.breaks().await.unwrap().len(), 1);

    // Once repaired, the break clears and the block is lifted.
    let (undrawn, adjust) = trading_hold(&market);
    let repaired = adjust(undrawn, "repair");
    platform.ledger.adjust_hold(repaired).await.unwrap();
    until("end of the block", &platform, || {
        platform.has_submitted(unblock()) && suspended(&platform).is_none()
    })
    .await;
    assert!(platform.settlement.breaks().await.unwrap().is_empty());
    let findings = platform.settlement.health().findings();
    assert!(!findings.contains_key("settlement-breaks"));
    let cleared = pb::BreakState::Cleared;
    let row = breaks(&platform, "CFA-RUB", cleared, 0).await.remove(0);
    assert_eq!((row.state(), row.cleared_at.is_some()), (cleared, true));
    let open = breaks(&platform, "", pb::BreakState::Open, 0).await;
    assert!(open.is_empty(), "{open:?}");
    platform.stop().await;

    // After the next start settlement submits no block and no unblock.
    let platform = Platform::start(folder.path(), config(folder.path()), &market.records).await;
    drained(&platform, market.position()).await;
    assert!(!platform.has_submitted(block()) && !platform.has_submitted(unblock()));
    let mut platform = platform;
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

#[tokio::test]
async fn no_block_waits_for_the_cancel_of_another_users_orders() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let mut market = Market::new(1);
    trade(&mut market, 1, 0);
    platform.fund(&market).await;
    platform.feed(&market.records);
    drained(&platform, market.position()).await;
    let users = [UserIx(0), UserIx(1)];
    for user in users {
        let (undrawn, adjust) = trading_hold_of(&market, user);
        let taken = adjust(undrawn - 1, &format!("steal-{}", user.0));
        platform.ledger.adjust_hold(taken).await.unwrap();
    }
    platform.stop().await;

    let are_busy = Arc::new(AtomicBool::new(true));
    let journal = journal_of_busy_engines(are_busy.clone());
    let config = config(folder.path());
    let platform = Platform::start_on(folder.path(), config, &market.records, journal);
    let platform = platform.await.unwrap();
    let cause = BlockCause::Difference;
    let block = |user| Command::BlockUser(BlockUser { user, cause });
    let cancel = |user| Command::MassCancel(MassCancel::of_blocked(user));
    until("both blocks", &platform, || {
        users
            .iter()
            .all(|user| platform.has_submitted(block(*user)))
    })
    .await;
    until("the health", &platform, || {
        is_failing(&platform, "settlement-journal")
    })
    .await;
    are_busy.store(false, Ordering::SeqCst);
    until("both cancels", &platform, || {
        users
            .iter()
            .all(|user| platform.has_submitted(cancel(*user)))
    })
    .await;
    until("the health again", &platform, || {
        !is_failing(&platform, "settlement-journal")
    })
    .await;
    platform.stop().await;
}

#[tokio::test]
async fn a_batch_refused_by_the_ledger_blocks_the_queue_until_it_is_covered() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let mut market = Market::new(1);
    platform.fund(&market).await;
    platform.feed(&market.records);
    let fed = market.records.len();
    drained(&platform, market.position()).await;
    let (undrawn, adjust) = trading_hold(&market);
    let taken = adjust(1, "steal");
    platform.ledger.adjust_hold(taken).await.unwrap();

    let before = market.position();
    trade(&mut market, 1, 0);
    platform.feed(&market.records[fed..]);
    until("alarm", &platform, || {
        !platform.settlement.stats().halted.is_empty()
    })
    .await;
    let stats = platform.settlement.stats();
    assert!(stats.halted.contains("settlement-ledger"), "{stats:?}");
    assert!(stats.progress.settled < market.position());
    assert!(stats.progress.settled >= before);
    assert!(is_failing(&platform, "settlement-ledger"));

    let repaired = adjust(undrawn, "repair");
    platform.ledger.adjust_hold(repaired).await.unwrap();
    drained(&platform, market.position()).await;
    assert_eq!(platform.settlement.stats().halted, "");
    assert!(platform.settlement.health().failing().is_empty());
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

#[tokio::test]
async fn a_batch_refused_by_the_chain_service_raises_an_alarm_and_is_retried() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let refusal = rpc::status::invalid_argument("trades", "must be whole");
    *platform.chain.refusal.lock().unwrap() = Some(refusal);
    let mut market = Market::new(1);
    trade(&mut market, 1, 0);
    platform.fund(&market).await;
    platform.feed(&market.records);
    until("alarm", &platform, || {
        !platform.settlement.stats().halted.is_empty()
    })
    .await;
    let failing = platform.settlement.health().failing();
    assert!(
        failing["settlement-chain"].contains("must be whole"),
        "{failing:?}"
    );
    // The chain does not delay the ledger.
    let fed = market.records.len();
    trade(&mut market, 2, 3);
    platform.feed(&market.records[fed..]);
    let end = market.position();
    until("posting", &platform, || {
        platform.settlement.stats().progress.settled == end
    })
    .await;

    *platform.chain.refusal.lock().unwrap() = None;
    drained(&platform, end).await;
    assert!(platform.settlement.health().failing().is_empty());
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

/// Finalizes or reverses an operation of settlement before settlement does.
async fn end_before(platform: &mut Platform, key: &str, reverse: bool) {
    let posted = async {
        loop {
            if let Some((operation, _)) = platform.operation(key).await {
                break operation;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let operation_id = in_time("the operation", posted).await.operation_id;
    if reverse {
        let request = wire::ReverseOperationRequest {
            context: context(&format!("reverse {key}")),
            operation_id,
            reason: "by hand".into(),
        };
        platform.ledger.reverse_operation(request).await.unwrap();
    } else {
        let request = wire::FinalizeOperationsRequest {
            context: context(&format!("finalize {key}")),
            operation_ids: vec![operation_id],
            onchain_tx_hash: testkit::messages::tx_hash("by hand"),
        };
        platform.ledger.finalize_operations(request).await.unwrap();
    }
}

// rows: R186 R189
#[tokio::test]
async fn r189_operations_ended_the_same_way_by_another_caller_count_as_done() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    *platform.chain.away.lock().unwrap() = u32::MAX;
    platform.chain.left_out.lock().unwrap().insert(2);
    let mut market = Market::new(1);
    let kept = trade(&mut market, 1, 0);
    let bust = trade(&mut market, 2, 3);
    platform.fund(&market).await;
    platform.feed(&market.records);
    end_before(&mut platform, &kept, false).await;
    end_before(&mut platform, &format!("{bust}:fee"), true).await;
    *platform.chain.away.lock().unwrap() = 0;
    drained(&platform, market.position()).await;

    for key in [kept.clone(), format!("{kept}:sell"), format!("{kept}:fee")] {
        let (operation, _) = platform.operation(&key).await.unwrap();
        assert_eq!(operation.status(), OperationStatus::Finalized, "{key}");
    }
    for key in [bust.clone(), format!("{bust}:sell"), format!("{bust}:fee")] {
        let (operation, _) = platform.operation(&key).await.unwrap();
        assert_eq!(operation.status(), OperationStatus::Failed, "{key}");
    }
    until("bust", &platform, || platform.is_bust(&bust)).await;
    assert!(!platform.is_bust(&kept));
    assert!(platform.settlement.health().failing().is_empty());
    platform.stop().await;
}

#[tokio::test]
async fn an_unwritable_store_is_retried() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    let mut market = Market::new(1);
    trade(&mut market, 1, 0);
    platform.fund(&market).await;
    sql(folder.path(), "ALTER TABLE batches RENAME TO elsewhere").await;
    platform.feed(&market.records);
    until("alarm", &platform, || {
        is_failing(&platform, "settlement-store")
    })
    .await;
    // Meanwhile all records journalled from now on count as lag.
    let lag = |end: Sequence| platform.backlog.settlement_lag(end);
    let (known, later) = (
        lag(market.position()),
        Sequence(market.position().0 + 1_000),
    );
    assert_eq!(lag(later), known + 1_000);
    sql(folder.path(), "ALTER TABLE elsewhere RENAME TO batches").await;
    drained(&platform, market.position()).await;
    assert!(platform.settlement.health().failing().is_empty());
    platform.assert_agrees(&market).await;
    platform.stop().await;
}

#[tokio::test]
async fn failed_workers_restart_and_no_orders_are_accepted_meanwhile() {
    let folder = tempfile::tempdir().unwrap();
    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    *platform.chain.away.lock().unwrap() = u32::MAX;
    let mut market = Market::new(1);
    trade(&mut market, 1, 0);
    platform.fund(&market).await;
    platform.feed(&market.records);
    let end = market.position();
    until("posting", &platform, || {
        platform.settlement.stats().progress.settled == end
    })
    .await;
    platform.stop().await;
    let keep = "CREATE TABLE kept AS SELECT number, legs FROM batches";
    sql(folder.path(), keep).await;
    sql(folder.path(), "UPDATE batches SET legs = x'ff'").await;

    let mut platform = Platform::start(folder.path(), config(folder.path()), &[]).await;
    until("alarm", &platform, || {
        is_failing(&platform, "settlement-chain")
    })
    .await;
    assert!(platform.settlement.stats().halted.contains("unreadable"));
    let lag = || platform.backlog.settlement_lag(Sequence::ZERO);
    until("end of orders", &platform, || lag() == u64::MAX).await;
    // Long enough for several failed attempts.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(lag() == u64::MAX && is_failing(&platform, "settlement-chain"));
    let restore =
        "UPDATE batches SET legs = (SELECT legs FROM kept WHERE kept.number = batches.number)";
    sql(folder.path(), restore).await;
    drained(&platform, end).await;
    until("orders", &platform, || lag() == 0).await;
    assert!(platform.settlement.health().failing().is_empty());
    assert_eq!(platform.settlement.stats().halted, "");
    platform.assert_agrees(&market).await;
    platform.stop().await;
}
