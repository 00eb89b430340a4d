//! Seeded properties of the fold: several instruments and users, late events in any interleaving.

#[path = "../../testkit/src/seed.rs"]
mod seed;
mod support;

use std::collections::BTreeMap;

use admission::*;
use support::*;
use types::command::{Amend, BlockCause, Bust, Cause, MassScope, SetBudget, TradeParty};
use types::*;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

const DAY_NS: u64 = 86_400_000_000_000;
/// Key of a user's second session, which is closed, forgotten and opened again.
const EXTRA: u128 = 600;
const INSTRUMENTS: u32 = 3;
const USERS: u32 = 5;

/// Money into and out of each hold, counted independently of admission.
#[derive(Clone, Default)]
struct Ledger {
    held: Vec<i64>,
}

impl Ledger {
    fn add(&mut self, hold: HoldIx, amount: i64) {
        if self.held.len() <= hold.index() {
            self.held.resize(hold.index() + 1, 0);
        }
        self.held[hold.index()] += amount;
    }

    fn compare(&self, room: &Admission) {
        for (at, totals) in room.all_hold_totals().iter().enumerate() {
            assert_eq!(totals.held().0, self.held[at], "hold {at}");
        }
    }
}

struct Run {
    market: Market,
    ledger: Ledger,
    /// By user and day: what ended orders have used of the budget, and charges that never return.
    used: BTreeMap<(UserIx, u32), i64>,
    opened: u64,
    closed: u64,
    trades: u64,
}

/// Plays seeded commands; events of each instrument reach admission late, at random.
fn live(seed: u64, commands: u32) -> Run {
    let mut random = Random(seed);
    let mut market = Market::with_room_for(300);
    let mut ledger = Ledger::default();
    for n in 0..INSTRUMENTS {
        market.instrument(spec(&format!("BOND-{n}"), 2_000));
    }
    for n in 0..USERS {
        let user = market.user(&format!("user-{n}"));
        market.budget(user, i64::MAX);
        ledger.add(market.fund(user, AssetIx::MONEY, 9_000_000), 9_000_000);
        for ix in 0..INSTRUMENTS {
            let asset = AssetIx::units(InstrumentIx(ix));
            ledger.add(market.fund(user, asset, 200_000), 200_000);
        }
        market.session(user, 500 + u128::from(n));
    }
    for n in 0..USERS {
        market.session(UserIx(n), EXTRA + u128::from(n));
    }
    let mut run = Run {
        market,
        ledger,
        used: BTreeMap::new(),
        opened: 0,
        closed: 0,
        trades: 0,
    };
    for _ in 0..commands {
        let request = request(&mut random, &run.market);
        match run.market.submit(request) {
            Ok(Command::New(_)) => run.opened += 1,
            Ok(Command::Fund(c)) => run.ledger.add(c.hold, c.amount_minor.0),
            Ok(Command::Defund(c)) => run.ledger.add(c.hold, -c.amount_minor.0),
            Ok(Command::Amend(c)) if !c.budget_returns => run.use_budget(&c),
            Ok(_) => {}
            Err(reject) => {
                if let Some(refused) = run.market.room.refusal(&request, &reject) {
                    run.market.run(refused);
                }
            }
        }
        for _ in 0..random.below(6) {
            let at = random.below(u64::from(INSTRUMENTS)) as usize;
            run.market.drain_one(at);
        }
        if random.chance(3) {
            run.market.drain();
        }
        if random.below(400) == 0 {
            run.market.time_ns += DAY_NS / 2;
            for user in (0..USERS).map(UserIx) {
                // Refused if the day and the limit are unchanged.
                let _ = run.market.submit(budget(&mut random, &run.market, user));
            }
        }
        run.settle();
        run.ledger.compare(&run.market.room);
    }
    run.market.drain();
    run.settle();
    run.ledger.compare(&run.market.room);
    run.compare_budgets();
    run
}

impl Run {
    /// Deducts what trades have spent from the independent count.
    fn settle(&mut self) {
        for effect in std::mem::take(&mut self.market.effects) {
            self.ledger.add(effect.order.hold, -effect.spent.total().0);
            self.closed += u64::from(effect.closed);
            if effect.closed {
                let (order, budget) = (effect.order, effect.order.budget);
                let counted = order.fill_totals.value_minor.0 - budget.free.0;
                *self.used.entry((order.user, budget.day)).or_default() += counted.max(0);
            }
            self.trades += u64::from(effect.spent != Reserve::ZERO);
        }
    }

    /// Counts the charge of an amend that never returns: of an order of an earlier day.
    fn use_budget(&mut self, c: &Amend) {
        let day = self.market.room.user(c.user).unwrap().budget.day;
        *self.used.entry((c.user, day)).or_default() += c.budget_minor.0;
    }

    /// A user has used what its ended orders of the day have traded, and the charges of open ones.
    fn compare_budgets(&self) {
        let room = &self.market.room;
        for user in (0..USERS).map(UserIx) {
            let budget = room.user(user).unwrap().budget;
            let of_day = |order: &&OpenOrder| order.user == user && order.budget.day == budget.day;
            let open = room.orders().filter(of_day);
            let charged: i64 = open.map(|order| order.budget.charged.0).sum();
            let ended = self.used.get(&(user, budget.day)).copied();
            assert_eq!(budget.used.0, charged + ended.unwrap_or(0), "{user:?}");
        }
    }
}

fn request(random: &mut Random, market: &Market) -> Request {
    let user = random.below(u64::from(USERS)) as u32;
    let session = SessionIx(user);
    let client_seq = market.room.session(session).unwrap().client_seq + 1;
    let orders: Vec<OpenOrder> = market.room.orders().copied().collect();
    let some =
        (!orders.is_empty()).then(|| orders[random.below(orders.len().max(1) as u64) as usize]);
    match (random.below(100), some) {
        (0..=24, Some(order)) => Request::Cancel(CancelRequest {
            order: OrderRef::Handle(order.handle),
            user: order.user,
            session: SessionIx(order.user.0),
            client_seq: market
                .room
                .session(SessionIx(order.user.0))
                .unwrap()
                .client_seq
                + 1,
            reason: CancelReason::UserRequest,
            key_hash: Id128::NONE,
        }),
        (25..=49, Some(order)) => Request::Amend(AmendRequest {
            order: OrderRef::Handle(order.handle),
            user: order.user,
            session: SessionIx::NONE,
            client_seq: 0,
            price: random
                .chance(60)
                .then(|| Ticks(900 + random.below(200) as i64)),
            quantity: random.chance(60).then(|| Lots(1 + random.below(60))),
            // Always an unused id: the hot thread waits until the ids in use are known.
            new_client_order_id: match random.chance(30) {
                true => 1_000_000 + market.room.sequence().0,
                false => 0,
            },
            limit_checked: random.chance(5),
            key_hash: Id128::NONE,
        }),
        (50, _) => Request::MassCancel(MassCancelRequest {
            scope: MassScope::User(UserIx(user)),
            instrument: InstrumentIx::NONE,
            side: None,
            reason: CancelReason::MassCancel,
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
        }),
        (51..=54, _) => {
            let asset = AssetIx::units(InstrumentIx(random.below(u64::from(INSTRUMENTS)) as u32));
            let asset = if random.chance(50) {
                AssetIx::MONEY
            } else {
                asset
            };
            let hold = market.room.default_hold(UserIx(user), asset).unwrap();
            let balance = market.room.hold(hold).unwrap();
            let amount_minor = Minor(1 + random.below(20_000) as i64);
            let funding_seq = balance.funding_seq + 1;
            if random.chance(60) {
                Request::Fund(FundRequest {
                    hold_id: balance.hold_id,
                    kind: balance.kind,
                    user: balance.user,
                    asset,
                    amount_minor,
                    funding_seq,
                    key_hash: Id128::NONE,
                })
            } else {
                Request::Defund {
                    hold,
                    amount_minor,
                    funding_seq,
                    key_hash: Id128::NONE,
                }
            }
        }
        (55, _) => Request::SetPhase {
            instrument: InstrumentIx(random.below(u64::from(INSTRUMENTS)) as u32),
            phase: [Phase::Open, Phase::Halt, Phase::PreOpen][random.below(3) as usize],
            cancel_orders: random.chance(50),
            lifts_halt: true,
            key_hash: Id128::NONE,
        },
        (56..=60, _) => Request::SetPhase {
            instrument: InstrumentIx(random.below(u64::from(INSTRUMENTS)) as u32),
            phase: Phase::Open,
            cancel_orders: false,
            lifts_halt: true,
            key_hash: Id128::NONE,
        },
        (61, _) => Request::ExpireOrders(InstrumentIx::NONE),
        (62, _) => settlements(random, market, UserIx(user)),
        (63, _) => budget(random, market, UserIx(user)),
        (64, _) => second_session(random, market, UserIx(user)),
        _ => {
            let side = Side::ALL[random.below(2) as usize];
            let quantity = 1 + random.below(60);
            let mut new = if random.chance(15) {
                market_order(user, side, quantity)
            } else {
                limit(user, side, 900 + random.below(200) as i64, quantity)
            };
            new.instrument = InstrumentIx(random.below(u64::from(INSTRUMENTS)) as u32);
            (new.session, new.client_seq) = match second(market, UserIx(user)) {
                Some((ix, row)) if row.open && random.chance(20) => (ix, row.client_seq + 1),
                _ => (session, client_seq),
            };
            new.stp = StpMode::ALL[random.below(5) as usize];
            new.client_order_id = random.below(60).saturating_sub(30);
            new.post_only = new.time_in_force.rests() && random.chance(10);
            if new.order_type == OrderType::Limit {
                match random.below(8) {
                    0 => new.time_in_force = TimeInForce::Gtd,
                    1 if !new.post_only => new.time_in_force = TimeInForce::Ioc,
                    2 if !new.post_only => new.time_in_force = TimeInForce::Fok,
                    _ => {}
                }
            }
            if new.time_in_force == TimeInForce::Gtd {
                new.expire_at_ns = market.time_ns + 2_000 + random.below(60_000);
            }
            new.limit_checked = random.chance(30);
            new.key_hash = Id128::from_u128(u128::from(random.below(1 << 20)));
            Request::New(new)
        }
    }
}

fn second(market: &Market, user: UserIx) -> Option<(SessionIx, Session)> {
    let ix = market
        .room
        .session_ix(Id128::from_u128(EXTRA + u128::from(user.0)))?;
    Some((ix, *market.room.session(ix).unwrap()))
}

/// Closes the user's second session, forgets it, or opens it.
fn second_session(random: &mut Random, market: &Market, user: UserIx) -> Request {
    match second(market, user) {
        Some((session, row)) if row.open => Request::CloseSession {
            session,
            epoch: None,
            keep_orders: random.chance(50),
        },
        Some((session, row)) if random.chance(80) => Request::ForgetSession {
            session,
            epoch: row.epoch,
        },
        _ => Request::OpenSession(SessionRequest {
            key: Id128::from_u128(EXTRA + u128::from(user.0)),
            user,
            stp_group: None,
            cancel_on_disconnect: false,
        }),
    }
}

/// A reading of identity's limit for the day.
fn budget(random: &mut Random, market: &Market, user: UserIx) -> Request {
    Request::SetBudget(SetBudget {
        user,
        day: moscow_day(market.time_ns + 1_000),
        limit_minor: Minor(20_000_000 + random.below(5_000_000) as i64),
        left_minor: Minor(15_000_000),
    })
}

/// Settlement's requests; a user blocked for a difference is soon unblocked.
fn settlements(random: &mut Random, market: &Market, user: UserIx) -> Request {
    let last = market.room.sequence();
    match random.below(8) {
        0..=1 => Request::Settled {
            posted: last,
            finalized: Sequence(random.below(last.get() + 1)),
            trades_final: last.get() / 4,
        },
        2 => Request::Bust(Bust {
            trade: Id128::from_u128(1 + u128::from(random.below(50))),
            trade_number: 1,
            instrument: InstrumentIx(0),
            buy: TradeParty::NONE,
            sell: TradeParty::NONE,
        }),
        3 => {
            let cause = BlockCause::ALL[random.below(2) as usize];
            Request::BlockUser { user, cause }
        }
        _ => {
            let users = (0..USERS).map(UserIx);
            let blocked = |cause: BlockCause| {
                let is_blocked = |user| market.room.user(user).unwrap().blocks.has(cause);
                let user = users.clone().find(|user| is_blocked(*user))?;
                Some(Request::UnblockUser { user, cause })
            };
            let found = BlockCause::ALL.iter().copied().find_map(blocked);
            let cause = BlockCause::Identity;
            found.unwrap_or(Request::UnblockUser { user, cause })
        }
    }
}

fn room() -> Admission {
    Admission::new(AdmissionConfig::default())
}

/// Replays commands with their events right after them, as a recovery does.
fn replay_strict(steps: &[Step]) -> Admission {
    let mut room = room();
    let mut events: Vec<EventEnvelope> = steps
        .iter()
        .filter_map(|step| match step {
            Step::Event(event) => Some(*event),
            Step::Command(_) => None,
        })
        .collect();
    events.sort_by_key(|event| (event.sequence, event.instrument, event.index));
    let mut events = events.into_iter().peekable();
    for step in steps {
        if let Step::Command(envelope) = step {
            room.apply_command(envelope, &Cause::of(envelope));
            while let Some(event) = events.next_if(|event| event.sequence == envelope.sequence) {
                apply(&mut room, steps, &event);
            }
            room.check_invariants();
        }
    }
    room
}

fn apply(room: &mut Admission, steps: &[Step], event: &EventEnvelope) {
    let cause = cause_of(steps, event);
    room.apply_event(event, &cause, &mut ());
}

/// Replays the same steps, each event at a random point between its command and its live position.
fn replay_mixed(steps: &[Step], seed: u64) -> Admission {
    let mut random = Random(seed);
    let mut room = room();
    let mut waiting: Vec<std::collections::VecDeque<EventEnvelope>> =
        vec![Default::default(); INSTRUMENTS as usize];
    for step in steps {
        if let Step::Event(event) = step {
            waiting[event.instrument.index()].push_back(*event);
        }
    }
    for step in steps {
        match step {
            Step::Command(envelope) => room.apply_command(envelope, &Cause::of(envelope)),
            Step::Event(event) => {
                let queue = &mut waiting[event.instrument.index()];
                while queue
                    .front()
                    .is_some_and(|next| next.number <= event.number)
                {
                    apply(&mut room, steps, &queue.pop_front().unwrap());
                }
            }
        }
        while random.chance(60) {
            let queue = &mut waiting[random.below(u64::from(INSTRUMENTS)) as usize];
            if queue
                .front()
                .is_some_and(|next| next.sequence <= room.sequence())
            {
                apply(&mut room, steps, &queue.pop_front().unwrap());
            }
        }
    }
    room
}

#[test]
fn free_and_reserves_are_conserved_and_every_slot_is_freed_once() {
    for seed in seed::seeds(1..13) {
        let mut run = live(seed, 2_000);
        assert!(run.trades > 100, "seed {seed}, trades: {}", run.trades);
        let everyone = Request::MassCancel(MassCancelRequest {
            scope: MassScope::All,
            instrument: InstrumentIx::NONE,
            side: None,
            reason: CancelReason::KillSwitch,
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
        });
        run.market.execute(everyone).unwrap();
        run.settle();
        run.ledger.compare(&run.market.room);
        assert_eq!(run.opened, run.closed, "each order closed once");
        assert_eq!(run.market.room.orders().count(), 0);
        for (_, balance) in run.market.room.holds() {
            assert_eq!(balance.reserved, Minor::ZERO);
        }
    }
}

// rows: R180
#[test]
fn r180_the_fold_does_not_depend_on_how_instruments_interleave() {
    for seed in seed::seeds(21..31) {
        let run = live(seed, 1_000);
        let hash = run.market.room.state_hash();
        assert_eq!(
            replay_strict(&run.market.steps).state_hash(),
            hash,
            "seed {seed}"
        );
        for mix in 1..=3 {
            let room = replay_mixed(&run.market.steps, seed * 100 + mix);
            assert_eq!(room.state_hash(), hash, "seed {seed}, mix {mix}");
            assert_eq!(room.image(), run.market.room.image());
        }
    }
}

// rows: R174
#[test]
fn r174_a_restored_state_goes_on_as_the_one_that_never_stopped() {
    let run = live(41, 800);
    let steps = &run.market.steps;
    let mut room = room();
    for (at, step) in steps.iter().enumerate() {
        match step {
            Step::Command(envelope) => room.apply_command(envelope, &Cause::of(envelope)),
            Step::Event(event) => {
                apply(&mut room, steps, event);
            }
        }
        if at % 97 == 0 {
            let bytes = rkyv::to_bytes::<rkyv::rancor::Error>(&room.image()).expect("writes");
            let image =
                rkyv::from_bytes::<AdmissionImage, rkyv::rancor::Error>(&bytes).expect("reads");
            assert_eq!(image, room.image());
            let restored = Admission::restore(&image, AdmissionConfig::default());
            assert_eq!(restored.state_hash(), room.state_hash());
            room = restored;
        }
    }
    assert_eq!(room.state_hash(), run.market.room.state_hash());
}
