//! The pure part against a naive model of the ledger. For any orders and any batch boundaries, no
//! step of a plan overdraws a hold, money is conserved, and the ledger's holds match the journal.

mod world;

use std::collections::HashMap;

use rand::Rng;
use replica::Effect;
use settlement::batch::{Batch, ChainSize, Limits, Settler};
use settlement::plan::HoldMovement;
use settlement::split::splits_in_ledger;
use settlement::trading_state::{Change, TradingState};
use types::*;
use types::{HoldPart, order_hold};
use world::ledger::Ledger;
use world::{Market, Record, node, replayed};

const SECOND_NS: u64 = 1_000_000_000;

fn limits() -> Limits {
    Limits {
        trades: 8,
        weight: 120,
        linger_ns: 0,
        wait_ns: SECOND_NS,
        idle_records: 10_000,
    }
}

fn settler(limits: Limits, market: &Market) -> Settler {
    Settler::new(
        node(),
        limits,
        market.initial_state(),
        HashMap::new(),
        Sequence::ZERO,
        0,
    )
}

/// Applies records and seals where the limits or the test require it.
struct Run {
    settler: Settler,
    ledger: Ledger,
    batches: Vec<Batch>,
}

impl Run {
    fn new(limits: Limits, market: &Market) -> Self {
        Self {
            settler: settler(limits, market),
            ledger: Ledger::default(),
            batches: Vec::new(),
        }
    }

    fn feed(&mut self, record: &Record) {
        if !self.settler.has_room(&record.applied) {
            self.seal(record.command.time_ns);
        }
        let covered = self.settler.covered();
        self.settler.apply(&record.applied, record.command.time_ns);
        assert!(
            self.settler.covered() >= covered,
            "`covered` never decreases"
        );
        self.ledger.fund(self.settler.trading_state(), record);
        if self
            .settler
            .is_due(record.command.time_ns, Some(record.command.time_ns), false)
        {
            self.seal(record.command.time_ns);
        }
    }

    fn seal(&mut self, now_ns: u64) {
        for batch in self.settler.seal(now_ns) {
            assert_eq!(self.ledger.post(&batch), Ok(true), "{batch:#?}");
            self.batches.push(batch);
        }
        assert!(self.settler.is_empty());
        self.ledger.check_against(self.settler.trading_state());
    }
}

// rows: R186
#[test]
fn r186_the_size_of_batches_follows_what_the_chain_executes() {
    let size = ChainSize::new(250);
    size.executed(250);
    assert_eq!(size.get(), 250, "never above the maximum");
    size.failed(1);
    assert_eq!(
        size.get(),
        250,
        "a single trade may fail for its own reason"
    );
    size.failed(250);
    // Batches that were sealed before fail too.
    size.failed(250);
    assert_eq!(size.get(), 125);
    size.executed(124);
    assert_eq!(size.get(), 125, "a smaller transaction proves nothing");
    size.executed(125);
    assert_eq!(size.get(), 126);
    size.failed(3);
    assert_eq!(size.get(), 2);
}

// rows: R188 R190
#[test]
fn r188_every_plan_is_covered_and_conserves_money() {
    for seed in testkit::seed::seeds(0..40) {
        let mut market = Market::new(seed);
        for _ in 0..400 {
            market.random();
        }
        let mut run = Run::new(limits(), &market);
        for record in &market.records {
            run.feed(record);
            if market.rng.random_range(0..10) == 0 {
                run.seal(record.command.time_ns);
            }
        }
        let late_ns = market.time_ns + 2 * SECOND_NS;
        run.seal(late_ns);
        while run.settler.is_due(late_ns, Some(late_ns), true) {
            run.seal(late_ns);
        }
        let trades: usize = run.batches.iter().map(|b| b.plan.trades.len()).sum();
        assert_eq!(trades as u64, run.settler.trading_state().trades());
        assert!(trades > 50, "seed {seed} traded {trades} times");
        // With the clock past the wait time every open order has its own holds.
        for order in run.settler.trading_state().orders() {
            let main = run.ledger.holds[&order_hold(order.id, HoldPart::Main)];
            assert_eq!(main.remaining, order.reserved.main.0);
        }
        // The hold of a single order is released once the order has ended.
        for (_, hold) in run.settler.trading_state().holds() {
            let is_active = run.ledger.holds[&hold.hold_id].is_active;
            assert_eq!(is_active, !hold.is_emptied);
        }
    }
}

// rows: R180 R189
#[test]
fn r189_plans_are_deterministic_and_idempotent() {
    let mut market = Market::new(7);
    for _ in 0..600 {
        market.random();
    }
    let run = |records: &[Record]| {
        let mut run = Run::new(limits(), &market);
        for record in records {
            run.feed(record);
        }
        run
    };
    let (first, mut second) = (run(&market.records), run(&market.records));
    assert_eq!(first.batches, second.batches);
    let before = second.ledger.clone();
    for batch in &first.batches {
        assert_eq!(second.ledger.post(batch), Ok(false));
    }
    assert_eq!(second.ledger.balances, before.balances);
    assert_eq!(second.ledger.holds, before.holds);
}

// rows: R186
#[test]
fn r186_a_settler_rebuilt_from_journal_and_ledger_continues() {
    for seed in testkit::seed::seeds(100..120) {
        let mut market = Market::new(seed);
        for _ in 0..300 {
            market.random();
        }
        let mut run = Run::new(limits(), &market);
        let crashes: Vec<usize> = (0..6)
            .map(|_| market.rng.random_range(0..market.records.len()))
            .collect();
        let mut at = 0;
        while at < market.records.len() {
            run.feed(&market.records[at]);
            at += 1;
            if crashes.contains(&at) {
                // Applied, unposted records are lost; the ledger's position remains.
                let position = run.ledger.positions.get("market:1").copied().unwrap_or(0);
                let split_number = run
                    .ledger
                    .positions
                    .get("market:1/carve")
                    .copied()
                    .unwrap_or(0);
                let state = replayed(&market.records[..position as usize]);
                let trading_state = TradingState::of(&state, market.names().clone());
                let (split_holds, breaks) =
                    splits_in_ledger(&trading_state, &run.ledger.active_holds());
                assert_eq!(breaks, Vec::new());
                for record in &market.records[position as usize..at] {
                    // The hold of a Fund after the position is in the ledger already. The model
                    // adds it only once.
                    if let Command::Fund(fund) = &record.command.command {
                        assert!(run.ledger.holds.contains_key(&fund.hold_id));
                    }
                }
                run.settler = Settler::new(
                    node(),
                    limits(),
                    trading_state,
                    split_holds,
                    Sequence(position),
                    split_number,
                );
                for record in &market.records[position as usize..at] {
                    run.settler.apply(&record.applied, record.command.time_ns);
                }
                run.seal(market.records[at - 1].command.time_ns);
            }
        }
        run.seal(market.time_ns + 2 * SECOND_NS);
        let trades: usize = run.batches.iter().map(|b| b.plan.trades.len()).sum();
        assert_eq!(trades as u64, run.settler.trading_state().trades());
    }
}

#[test]
fn an_order_that_comes_and_goes_within_a_batch_writes_no_row() {
    let mut market = Market::new(1);
    let handle = market
        .order(0, 0, Side::Buy, 100, 10, TimeInForce::Gtc)
        .unwrap();
    market.cancel(handle);
    market
        .order(0, 0, Side::Buy, 100, 10, TimeInForce::Ioc)
        .unwrap();
    let mut settler = settler(limits(), &market);
    for record in &market.records {
        settler.apply(&record.applied, record.command.time_ns);
    }
    assert!(settler.is_empty());
    assert_eq!(settler.seal(market.time_ns + 5 * SECOND_NS), Vec::new());
    assert_eq!(settler.covered(), settler.trading_state().position());
}

#[test]
fn records_without_ledger_effect_eventually_move_its_position() {
    let mut market = Market::new(1);
    for _ in 0..20 {
        let handle = market.order(0, 0, Side::Buy, 100, 10, TimeInForce::Gtc);
        market.cancel(handle.unwrap());
    }
    let mut limits = limits();
    limits.idle_records = 30;
    let mut run = Run::new(limits, &market);
    for record in &market.records {
        run.feed(record);
    }
    let sealed: Vec<_> = run.batches.iter().map(|b| (b.first, b.through)).collect();
    assert_eq!(sealed, vec![(1, 30), (31, 60)]);
    assert!(run.batches.iter().all(|batch| batch.plan.is_empty()));
    assert_eq!(run.ledger.positions["market:1"], 60);
}

// rows: R151 R153
#[test]
fn r151_open_order_gets_own_holds_after_one_second() {
    let mut market = Market::new(2);
    let handle = market
        .order(0, 0, Side::Buy, 100, 10, TimeInForce::Gtc)
        .unwrap();
    let order = market.order_of(handle);
    let mut run = Run::new(limits(), &market);
    for record in &market.records {
        run.feed(record);
    }
    assert_eq!(run.batches.len(), 0);
    assert_eq!(
        run.settler
            .due_in_ns(market.time_ns, Some(market.time_ns), true),
        Some(SECOND_NS)
    );
    run.seal(market.time_ns + SECOND_NS);
    let splits: Vec<_> = run.batches[0]
        .plan
        .steps
        .iter()
        .map(|s| s.movement)
        .collect();
    assert!(matches!(
        splits[0],
        HoldMovement::Split { amount, part: HoldPart::Main, order: o, .. }
            if amount.minor == Minor(1000) && o == order.id
    ));
    assert!(
        matches!(splits[1], HoldMovement::Split { amount, part: HoldPart::Fee, .. } if amount.minor == Minor(1))
    );
    assert_eq!(
        run.batches[0].id,
        format!("1:1-{}", order_sequence(&market))
    );

    // Another order is unsplit when a trade is posted. Without new records it is then split under
    // the split source.
    let pending = market
        .order(1, 0, Side::Buy, 99, 5, TimeInForce::Gtc)
        .unwrap();
    let pending = market.order_of(pending);
    market
        .order(2, 0, Side::Sell, 100, 1, TimeInForce::Gtc)
        .unwrap();
    for record in &market.records[run.settler.trading_state().position().0 as usize..] {
        run.settler.apply(&record.applied, record.command.time_ns);
    }
    run.seal(pending.created_ns);
    assert!(
        !run.ledger
            .holds
            .contains_key(&order_hold(pending.id, HoldPart::Main))
    );
    run.seal(pending.created_ns + 2 * SECOND_NS);
    assert_eq!(run.batches.last().unwrap().source, "market:1/carve");
    assert_eq!(
        run.ledger.holds[&order_hold(pending.id, HoldPart::Main)].remaining,
        495
    );
}

fn order_sequence(market: &Market) -> u64 {
    market.records.last().unwrap().command.sequence.0
}

// rows: R191 R190 R183
#[test]
fn r191_price_improvement_returns_to_the_trading_hold() {
    let mut market = Market::new(3);
    market
        .order(1, 0, Side::Sell, 10_000, 10, TimeInForce::Gtc)
        .unwrap();
    let buyer = market.order(0, 0, Side::Buy, 10_500, 10, TimeInForce::Gtc);
    let buy_order = order_of(&market, buyer.unwrap());
    let mut run = Run::new(limits(), &market);
    for record in &market.records {
        run.feed(record);
    }
    run.seal(market.time_ns);
    let main = run.ledger.holds[&order_hold(buy_order, HoldPart::Main)];
    assert_eq!(
        (main.amount, main.consumed, main.released),
        (105_000, 100_000, 5_000)
    );
    assert!(!main.is_active);
    let fee = run.ledger.holds[&order_hold(buy_order, HoldPart::Fee)];
    assert_eq!((fee.amount, fee.consumed, fee.released), (105, 100, 5));
    let money = Market::trading_hold(UserIx(0), AssetIx::MONEY);
    let hold = run.settler.trading_state().hold(money).hold_id;
    assert_eq!(run.ledger.holds[&hold].remaining, world::FUNDED - 100_100);
    assert_eq!(
        run.ledger.balances["user-1:CFA-RUB"],
        world::FUNDED + 100_000
    );
    assert_eq!(run.ledger.unsettled["user-1:CFA-RUB"], 100_000);
    assert_eq!(run.ledger.unsettled["user-0:BOND-0"], 10);
    assert_eq!(run.ledger.balances["system:fees:CFA-RUB"], 100);
}

fn order_of(market: &Market, handle: Handle) -> Id128 {
    market
        .records
        .iter()
        .find_map(|r| match &r.command.command {
            Command::New(new) if new.handle == handle => {
                Some(order_uuid(r.command.time_ns, node(), r.command.sequence))
            }
            _ => None,
        })
        .unwrap()
}

// rows: R190
#[test]
fn r190_three_fills_consume_one_hold_in_parts() {
    let mut market = Market::new(4);
    let buyer = market
        .order(0, 0, Side::Buy, 100, 30, TimeInForce::Gtc)
        .unwrap();
    let mut run = Run::new(limits(), &market);
    for record in &market.records {
        run.feed(record);
    }
    let hold = order_hold(order_of(&market, buyer), HoldPart::Main);
    for (fill, remaining) in [(1, 2_000), (2, 1_000), (3, 0)] {
        market
            .order(fill, 0, Side::Sell, 100, 10, TimeInForce::Gtc)
            .unwrap();
        run.feed(market.records.last().unwrap());
        run.seal(market.time_ns);
        assert_eq!(run.ledger.holds[&hold].remaining, remaining);
        assert_eq!(run.ledger.holds[&hold].is_active, remaining > 0);
    }
}

#[test]
fn a_taker_larger_than_a_batch_is_settled_in_parts() {
    let mut market = Market::new(5);
    for n in 0..300 {
        market
            .order(1 + n % 5, 0, Side::Sell, 100, 1, TimeInForce::Gtc)
            .unwrap();
    }
    let mut run = Run::new(limits(), &market);
    for record in &market.records {
        run.feed(record);
    }
    run.seal(market.time_ns);
    let before = run.batches.len();
    market
        .order(0, 0, Side::Buy, 100, 300, TimeInForce::Gtc)
        .unwrap();
    let record = market.records.last().unwrap().clone();
    assert_eq!(record.events.len(), 301);
    run.feed(&record);
    let parts = &run.batches[before..];
    assert!(parts.len() > 4, "{}", parts.len());
    assert!(
        parts
            .iter()
            .all(|b| b.plan.weight() <= limits().weight + 20)
    );
    let (last, others) = parts.split_last().unwrap();
    let sequence = record.command.sequence;
    assert!(
        others
            .iter()
            .all(|b| b.source == format!("market:1/{sequence}") && b.covers.0 < sequence.0)
    );
    assert_eq!(
        (last.source.as_str(), last.through),
        ("market:1", sequence.0)
    );
    assert!(parts.iter().all(|b| b.plan.trades.len() <= limits().trades));
    assert_eq!(
        parts.iter().map(|b| b.plan.trades.len()).sum::<usize>(),
        300
    );
}

#[test]
#[should_panic(expected = "sequences of records are contiguous")]
fn a_gap_in_the_journal_is_refused() {
    let market = Market::new(6);
    let record = &market.records[1];
    market
        .initial_state()
        .apply(&record.applied, &mut Vec::new());
}

#[test]
#[should_panic(expected = "held before = held after + spent")]
fn an_effect_that_does_not_add_up_is_refused() {
    let mut market = Market::new(6);
    let handle = market.order(0, 0, Side::Buy, 100, 10, TimeInForce::Gtc);
    let mut trading_state = market.trading_state();
    market.cancel(handle.unwrap());
    let mut applied = market.records.last().unwrap().applied.clone();
    for effect in &mut applied.effects {
        if let Effect::Cancelled { moved, .. } = effect {
            moved.held += Minor(1);
        }
    }
    trading_state.apply(&applied, &mut Vec::new());
}

#[test]
fn a_defund_takes_only_what_is_undrawn_and_settlement_expects_the_rest() {
    let mut market = Market::new(8);
    let trading_hold = Market::trading_hold(UserIx(0), AssetIx::MONEY);
    market
        .order(0, 0, Side::Buy, 100, 10, TimeInForce::Gtc)
        .unwrap();
    let mut trading_state = market.trading_state();
    let undrawn = market.admission().hold(trading_hold).unwrap().undrawn;
    assert_eq!(undrawn, Minor(world::FUNDED - 1_001));
    let defund = |amount_minor: Minor| {
        let request = admission::Request::Defund {
            hold: trading_hold,
            amount_minor,
            funding_seq: 1_000,
            key_hash: Id128::NONE,
        };
        market.admission().admit(&request, market.time_ns)
    };
    assert!(defund(undrawn + Minor(1)).is_err());
    let command = defund(undrawn).unwrap();
    let mut changes = Vec::new();
    trading_state.apply(&market.submit(command).applied, &mut changes);
    let by = Minor::ZERO - undrawn;
    assert_eq!(changes, vec![Change::Funded { trading_hold, by }]);
    assert_eq!(trading_state.held(trading_hold), Minor(1_001));
}

// rows: R151
#[test]
fn r151_orders_applied_late_share_a_batch() {
    let mut market = Market::new(9);
    for n in 0..40 {
        market
            .order(n % 5, 0, Side::Buy, 100, 1, TimeInForce::Gtc)
            .unwrap();
    }
    let mut settler = settler(limits(), &market);
    let now_ns = market.time_ns + 3_600 * SECOND_NS;
    for record in &market.records {
        settler.apply(&record.applied, now_ns);
        // During catch-up an old order does not make a batch due.
        assert!(!settler.is_due(now_ns, None, false));
    }
    // By journal time the last orders are recent. By wall clock all are old.
    let journal_ns = market.time_ns;
    assert!(settler.is_due(now_ns, Some(journal_ns), false));
    let catch_up = settler.seal(journal_ns);
    assert_eq!(catch_up.len(), 1);
    let young_ns = settler.due_in_ns(now_ns, Some(journal_ns), false).unwrap();
    assert!(young_ns > 0 && young_ns <= SECOND_NS, "{young_ns}");
    assert!(settler.is_due(now_ns, Some(now_ns), true));
    assert_eq!(settler.seal(now_ns).len(), 1);
    assert_eq!(settler.due_in_ns(now_ns, Some(now_ns), true), None);
}

#[test]
fn many_old_orders_are_split_batch_by_batch() {
    let mut market = Market::new(10);
    for n in 0..150 {
        market
            .order(n % 5, 0, Side::Buy, 100, 1, TimeInForce::Gtc)
            .unwrap();
    }
    let mut run = Run::new(limits(), &market);
    let now_ns = market.time_ns + 3_600 * SECOND_NS;
    for record in &market.records {
        run.settler.apply(&record.applied, now_ns);
        run.ledger.fund(run.settler.trading_state(), record);
    }
    while run.settler.is_due(now_ns, Some(now_ns), true) {
        run.seal(now_ns);
    }
    assert!(run.batches.len() > 1);
    assert!(
        run.batches
            .iter()
            .all(|b| b.plan.weight() <= limits().weight + 2)
    );
    for order in run.settler.trading_state().orders() {
        assert!(
            run.ledger
                .holds
                .contains_key(&order_hold(order.id, HoldPart::Main))
        );
    }
}
