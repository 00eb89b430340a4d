//! Shared by the book's tests: short commands, events as text, and scripts of both.
#![allow(dead_code)]

use engine::{Book, BookConfig, EventSink, RestingOrder};
use types::command::{
    Amend, Cancel, Command, ExpireOrders, Listed, MassCancel, MassScope, New, Route, SetInstrument,
    SetPhase, SweepPosition,
};
use types::event::Event;
use types::*;

pub const IX: InstrumentIx = InstrumentIx(3);

/// Prices 1 to 1,000 allowed; tick 0.01, lot 1.
pub fn spec() -> InstrumentSpec {
    spec_with_band(1, 1_000)
}

pub fn spec_with_band(low: i64, high: i64) -> InstrumentSpec {
    spec_with(low, high, VelocityRule::OFF)
}

pub fn spec_with(low: i64, high: i64, velocity: VelocityRule) -> InstrumentSpec {
    InstrumentSpec::new(&InstrumentParams {
        ix: IX,
        band_low: Ticks(low),
        band_high: Ticks(high),
        velocity,
        ..InstrumentParams::new(InstrumentId::new("TEST-1").unwrap())
    })
    .unwrap()
}

pub fn small_book(spec: InstrumentSpec) -> Book {
    Book::new(
        spec,
        BookConfig {
            orders: 16,
            levels: 1_024,
        },
    )
}

#[derive(Default)]
pub struct Tape {
    pub events: Vec<EventEnvelope>,
    pub quote: Quote,
}

impl EventSink for Tape {
    fn event(&mut self, event: &EventEnvelope) {
        self.events.push(*event);
    }

    fn quote(&mut self, instrument: InstrumentIx, quote: Quote) {
        assert_eq!(instrument, IX);
        self.quote = quote;
    }
}

pub fn handle(number: u32) -> Handle {
    Handle {
        slot: number,
        generation: 1,
    }
}

/// A good-till-cancelled limit order; each order has its own user.
pub fn limit(number: u32, side: Side, price: i64, quantity: u64) -> New {
    let (user, price, quantity) = (UserIx(number), Ticks(price), Lots(quantity));
    New {
        session: SessionIx(number % 4),
        ..New::limit(IX, handle(number), user, side, price, quantity)
    }
}

/// Applies commands one after the other, one microsecond apart.
pub struct Runner {
    pub book: Book,
    pub sequence: Sequence,
    pub time_ns: u64,
    pub tape: Tape,
}

impl Runner {
    pub fn new(book: Book) -> Self {
        Self {
            book,
            sequence: Sequence::ZERO,
            time_ns: 0,
            tape: Tape::default(),
        }
    }

    /// Applies a command and returns its events.
    pub fn apply(&mut self, command: Command) -> Vec<EventEnvelope> {
        self.sequence = self.sequence.next();
        self.time_ns += 1_000;
        let from = self.tape.events.len();
        let envelope = Envelope {
            sequence: self.sequence,
            time_ns: self.time_ns,
            received_ns: self.time_ns,
            command,
        };
        let count = apply(&mut self.book, &envelope, &mut self.tape);
        let events = self.tape.events[from..].to_vec();
        assert_eq!(count as usize, events.len());
        assert_eq!(
            self.tape.quote,
            self.book.quote(),
            "the published best prices differ from the book's"
        );
        for (index, event) in events.iter().enumerate() {
            assert_eq!(event.index as usize, index);
            assert_eq!(
                event.number as usize,
                from + index + 1,
                "event numbers have a gap"
            );
            assert_eq!(event.sequence, self.sequence);
        }
        events
    }
}

/// Applies a command as the hot thread does.
pub fn apply(book: &mut Book, envelope: &Envelope, tape: &mut Tape) -> u32 {
    match envelope.command.route() {
        Route::Listed => {
            let listed = listed(book, &envelope.command);
            book.apply_listed(envelope, &listed, tape)
        }
        _ => book.apply(envelope, tape),
    }
}

/// Orders that a command ends, as admission lists them: in slot order.
pub fn listed(book: &Book, command: &Command) -> Vec<Listed> {
    let is_in = |order: &RestingOrder| match command {
        Command::MassCancel(c) => {
            let is_in_scope = match c.scope {
                MassScope::All => true,
                MassScope::User(user) => order.user == user,
                MassScope::Session(session) => order.session == session,
                MassScope::Group(group) => order.stp_group == group,
            };
            is_in_scope && c.side.is_none_or(|side| order.side == side)
        }
        Command::SetKillSwitch(c) => order.user == c.user,
        other => panic!("{other:?} lists no orders"),
    };
    let sides = [Side::Buy, Side::Sell].into_iter();
    let orders = sides.flat_map(|side| book.orders(side)).filter(is_in);
    let mut listed: Vec<_> = orders
        .map(|order| Listed {
            instrument: IX,
            handle: order.handle,
        })
        .collect();
    listed.sort_unstable();
    listed
}

/// One event in script notation.
pub fn text(event: &Event) -> String {
    match event {
        Event::Accepted(e) => format!(
            "accepted {} {} open {}{}",
            e.handle.slot,
            e.price,
            e.open,
            if e.rests { " rests" } else { "" }
        ),
        Event::Rejected(e) => format!("rejected {} {}", e.handle.slot, e.reason),
        Event::Rested(e) => format!(
            "rested {} {} {} open {}",
            e.handle.slot, e.side, e.price, e.open
        ),
        Event::Trade(e) => format!(
            "trade maker {} taker {} {} x{} open {} {}",
            e.maker.slot, e.taker.slot, e.price, e.quantity, e.maker_open, e.taker_open
        ),
        Event::Amended(e) => format!(
            "amended {} {} x{} open {} {}",
            e.handle.slot,
            e.price,
            e.quantity,
            e.open,
            if e.kept_priority { "kept" } else { "lost" }
        ),
        Event::AmendRejected(e) => {
            format!(
                "amend-rejected {} {} open {}",
                e.handle.slot, e.reason, e.open
            )
        }
        Event::CancelRejected(e) => format!("cancel-rejected {} {}", e.handle.slot, e.reason),
        Event::Reduced(e) => format!(
            "reduced {} {} x{} open {}",
            e.handle.slot, e.reason, e.quantity, e.open
        ),
        Event::Cancelled(e) => format!("cancelled {} {} x{}", e.handle.slot, e.reason, e.quantity),
        Event::PhaseChanged(e) => match e.cause {
            PhaseCause::Command => format!("phase {}", e.phase),
            PhaseCause::Velocity => format!("phase {} VELOCITY", e.phase),
        },
    }
}

/// Runs a script and checks the structure after each command.
///
/// A line is a command; the events it must cause follow it, indented.
///
/// ```text
/// new N buy|sell PRICE|market xQTY [ioc|fok|gtd:TIME] [post] [user:U] [stp:MODE] [at:PRICE]
/// cancel N | amend N [price:P] [qty:Q] | phase PHASE [cancel] | expire | time NS
/// mass all|user:U|session:S [buy|sell] [REASON]
/// band LOW HIGH                moves the price band
/// depth                        prints the levels, bids then asks
/// ```
pub fn run(script: &str) -> Runner {
    run_on(small_book(spec()), script)
}

pub fn run_on(book: Book, script: &str) -> Runner {
    let mut runner = Runner::new(book);
    let mut lines = script
        .lines()
        .filter(|line| !line.trim().is_empty())
        .peekable();
    let indent = |line: &str| line.len() - line.trim_start().len();
    let base = lines.peek().map_or(0, |line| indent(line));
    while let Some(line) = lines.next() {
        let mut expected = Vec::new();
        while let Some(next) = lines.next_if(|next| indent(next) > base) {
            expected.push(next.trim().to_owned());
        }
        let found = step(&mut runner, line.trim());
        assert_eq!(found, expected, "after `{}`", line.trim());
        runner.book.check_invariants();
    }
    runner
}

fn step(runner: &mut Runner, line: &str) -> Vec<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let order = || words[1].parse::<u32>().expect("order number");
    let find = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
    let command = match words[0] {
        "time" => {
            runner.time_ns = words[1].parse().expect("time");
            return Vec::new();
        }
        "depth" => {
            return [Side::Buy, Side::Sell]
                .into_iter()
                .flat_map(|side| {
                    runner
                        .book
                        .depth(side)
                        .map(move |level| format!("{side} {} x{}", level.price, level.open))
                })
                .collect();
        }
        "new" => Command::New(new(&words)),
        "cancel" => Command::Cancel(Cancel {
            handle: handle(order()),
            instrument: IX,
            user: UserIx(order()),
            session: SessionIx::NONE,
            reason: CancelReason::UserRequest,
            client_seq: 0,
            key_hash: Id128::NONE,
        }),
        "amend" => Command::Amend(Amend {
            handle: handle(order()),
            instrument: IX,
            user: UserIx(order()),
            session: SessionIx::NONE,
            client_seq: 0,
            new_client_order_id: 0,
            price: find("price:").map(|p| Ticks(p.parse().expect("price"))),
            quantity: find("qty:").map(|q| Lots(q.parse().expect("quantity"))),
            draw: Reserve::ZERO,
            budget_minor: Minor::ZERO,
            budget_returns: false,
            key_hash: Id128::NONE,
        }),
        "phase" => Command::SetPhase(SetPhase {
            instrument: IX,
            phase: words[1].parse().expect("phase"),
            cancel_orders: words.contains(&"cancel"),
            key_hash: Id128::NONE,
        }),
        "mass" => Command::MassCancel(MassCancel {
            scope: if let Some(user) = find("user:") {
                MassScope::User(UserIx(user.parse().expect("user")))
            } else if let Some(session) = find("session:") {
                MassScope::Session(SessionIx(session.parse().expect("session")))
            } else if let Some(group) = find("group:") {
                MassScope::Group(StpGroup::explicit(group.parse().expect("group")))
            } else {
                MassScope::All
            },
            instrument: if words.contains(&"here") {
                IX
            } else {
                InstrumentIx::NONE
            },
            side: if words.contains(&"buy") {
                Some(Side::Buy)
            } else if words.contains(&"sell") {
                Some(Side::Sell)
            } else {
                None
            },
            reason: words
                .iter()
                .find_map(|word| word.parse().ok())
                .unwrap_or(CancelReason::MassCancel),
            user: UserIx::NONE,
            session: SessionIx::NONE,
            client_seq: 0,
            key_hash: Id128::NONE,
            through: SweepPosition::END,
            remaining: 0,
        }),
        "band" => Command::SetInstrument(SetInstrument {
            spec: spec_with(
                words[1].parse().expect("low"),
                words[2].parse().expect("high"),
                runner.book.spec().velocity,
            ),
        }),
        "expire" => Command::ExpireOrders(ExpireOrders {
            instrument: InstrumentIx::NONE,
            orders_max: 0,
        }),
        other => panic!("no such command: {other}"),
    };
    let events = runner.apply(command);
    events.iter().map(|event| text(&event.event)).collect()
}

fn new(words: &[&str]) -> New {
    let number = words[1].parse().expect("order number");
    let side = if words[2] == "buy" {
        Side::Buy
    } else {
        Side::Sell
    };
    let find = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
    let quantity = words[4][1..].parse().expect("quantity");
    let price = words[3].parse().unwrap_or(0);
    let mut order = limit(number, side, price, quantity);
    if words[3] == "market" {
        order.order_type = OrderType::Market;
        order.time_in_force = TimeInForce::Ioc;
        let protection = find("at:").map(|p| p.parse().expect("price"));
        order.price = Ticks(protection.unwrap_or(match side {
            Side::Buy => 1_000,
            Side::Sell => 1,
        }));
    }
    if words.contains(&"ioc") {
        order.time_in_force = TimeInForce::Ioc;
    }
    if words.contains(&"fok") {
        order.time_in_force = TimeInForce::Fok;
    }
    if let Some(time) = find("gtd:") {
        order.time_in_force = TimeInForce::Gtd;
        order.expire_at_ns = time.parse().expect("time");
    }
    order.post_only = words.contains(&"post");
    if let Some(user) = find("user:") {
        order.user = UserIx(user.parse().expect("user"));
        order.stp_group = StpGroup::of_user(order.user);
    }
    if let Some(group) = find("group:") {
        order.stp_group = StpGroup::explicit(group.parse().expect("group"));
    }
    if let Some(session) = find("session:") {
        order.session = SessionIx(session.parse().expect("session"));
    }
    if let Some(mode) = find("stp:") {
        order.stp = mode.parse().expect("self-trade mode");
    }
    order
}
