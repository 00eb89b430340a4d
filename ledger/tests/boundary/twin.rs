//! The ledger against a naive twin: seeded random operations, holds, splits, parts, returns, finality and reversals, single and in batches.
//!
//! The twin keeps plain numbers and knows the rules in their simplest form. After every step both agree on accept or refuse; in the end on every
//! balance and every hold, the sums are zero and every hold adds up.

use std::collections::BTreeMap;

use proto::{
    common::v1::OperationType,
    ledger::v1::{hold_step::Step, *},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::harness::*;

#[derive(Clone, Default)]
struct Pot {
    balance: i64,
    held: i64,
    unsettled: i64,
}

impl Pot {
    fn available(&self) -> i64 {
        self.balance - self.held - self.unsettled
    }
}

#[derive(Clone)]
struct TwinHold {
    user: usize,
    parent: Option<String>,
    remaining: i64,
    consumed: i64,
    active: bool,
}

#[derive(Clone)]
struct TwinOperation {
    from: Option<usize>,
    to: usize,
    value: i64,
    unsettled: bool,
    open: bool,
    reversed: bool,
    /// Reversed while it was open.
    failed: bool,
}

#[derive(Clone, Default)]
struct Twin {
    pots: Vec<Pot>,
    holds: BTreeMap<String, TwinHold>,
    operations: BTreeMap<String, TwinOperation>,
}

const USERS: usize = 4;

fn sub(user: Option<usize>) -> String {
    user.map_or("system:reserve:CFA-RUB".to_owned(), |user| {
        format!("u{user}:CFA-RUB")
    })
}

fn rub(minor: i64) -> String {
    types::Decimal::from_minor(minor, 2).to_string()
}

impl Twin {
    fn pay(
        &mut self,
        from: Option<usize>,
        to: usize,
        value: i64,
        hold: Option<&str>,
        unsettled: bool,
    ) -> bool {
        if from == Some(to) {
            return false;
        }
        if let Some(user) = from {
            match hold {
                Some(id) => {
                    let Some(hold) = self
                        .holds
                        .get_mut(id)
                        .filter(|hold| hold.active && hold.user == user)
                    else {
                        return false;
                    };
                    if value > hold.remaining {
                        return false;
                    }
                    hold.remaining -= value;
                    hold.consumed += value;
                    hold.active = hold.remaining > 0;
                    self.pots[user].held -= value;
                }
                None if value > self.pots[user].available() => return false,
                None => {}
            }
            self.pots[user].balance -= value;
        }
        self.pots[to].balance += value;
        if unsettled {
            self.pots[to].unsettled += value;
        }
        true
    }

    fn open(&mut self, id: String, user: usize, value: i64) -> bool {
        if value > self.pots[user].available() {
            return false;
        }
        self.pots[user].held += value;
        let hold = TwinHold {
            user,
            parent: None,
            remaining: value,
            consumed: 0,
            active: true,
        };
        self.holds.insert(id, hold);
        true
    }

    fn split(&mut self, parent_id: &str, id: String, value: i64) -> bool {
        let Some(parent) = self
            .holds
            .get_mut(parent_id)
            .filter(|hold| hold.active && value <= hold.remaining)
        else {
            return false;
        };
        parent.remaining -= value;
        let hold = TwinHold {
            user: parent.user,
            parent: Some(parent_id.to_owned()),
            remaining: value,
            consumed: 0,
            active: true,
        };
        self.holds.insert(id, hold);
        true
    }

    fn give_back(&mut self, id: &str, value: i64) {
        let hold = self.holds.get_mut(id).unwrap();
        hold.remaining -= value;
        let (user, parent) = (hold.user, hold.parent.clone());
        match parent
            .and_then(|id| self.holds.get_mut(&id))
            .filter(|parent| parent.active)
        {
            Some(parent) => parent.remaining += value,
            None => self.pots[user].held -= value,
        }
    }

    fn release(&mut self, id: &str) -> bool {
        let Some(hold) = self.holds.get(id).filter(|hold| hold.active) else {
            return false;
        };
        let rest = hold.remaining;
        self.give_back(id, rest);
        self.holds.get_mut(id).unwrap().active = false;
        true
    }

    fn consume(&mut self, id: &str, value: Option<i64>) -> bool {
        let Some(hold) = self.holds.get_mut(id).filter(|hold| hold.active) else {
            return false;
        };
        let value = value.unwrap_or(hold.remaining);
        if value > hold.remaining {
            return false;
        }
        hold.remaining -= value;
        hold.consumed += value;
        hold.active = hold.remaining > 0;
        self.pots[hold.user].held -= value;
        true
    }

    fn finalize(&mut self, id: &str) -> bool {
        let operation = self.operations.get_mut(id).unwrap();
        if !operation.open {
            return !operation.failed;
        }
        operation.open = false;
        if operation.unsettled {
            self.pots[operation.to].unsettled -= operation.value;
        }
        true
    }

    fn reverse(&mut self, id: &str) -> bool {
        let operation = self.operations[id].clone();
        if operation.reversed {
            return false;
        }
        let takes_unsettled = operation.open && operation.unsettled;
        let pot = &mut self.pots[operation.to];
        if !takes_unsettled && operation.value > pot.available() {
            return false;
        }
        pot.balance -= operation.value;
        if takes_unsettled {
            pot.unsettled -= operation.value;
        }
        if let Some(from) = operation.from {
            self.pots[from].balance += operation.value;
        }
        let kept = self.operations.get_mut(id).unwrap();
        kept.reversed = true;
        kept.failed = kept.open;
        kept.open = false;
        true
    }
}

/// A batch of pays and splits, applied to both.
async fn batch(world: &World, twin: &mut Twin, rng: &mut StdRng, step: usize) -> bool {
    let mut model = twin.clone();
    let (mut operations, mut steps, mut accepted) = (Vec::new(), Vec::new(), true);
    let mut made = Vec::new();
    for n in 0..rng.random_range(1..6) {
        let parents: Vec<String> = model.holds.keys().cloned().collect();
        if !parents.is_empty() && rng.random_bool(0.5) {
            let parent = parents[rng.random_range(0..parents.len())].clone();
            let (child, value) = (format!("s{step}-{n}"), rng.random_range(1..400));
            accepted = accepted && model.split(&parent, child.clone(), value);
            steps.push(HoldStep {
                step: Some(Step::Split(SplitHold {
                    parent_hold_id: parent,
                    hold_id: child,
                    amount: amount(RUB, &rub(value)),
                    reason: String::new(),
                })),
                before_operation: operations.len() as u32,
            });
        } else {
            let (from, to, value) = (
                rng.random_range(0..USERS),
                rng.random_range(0..USERS),
                rng.random_range(1..400),
            );
            let unsettled = rng.random_bool(0.5);
            let key = format!("b{step}-{n}");
            accepted = accepted && model.pay(Some(from), to, value, None, unsettled);
            let mut new = item(
                OperationType::P2pTransfer,
                &format!("u{from}"),
                &key,
                &[(&sub(Some(from)), &sub(Some(to)), &rub(value), RUB)],
            );
            new.postings[0].unsettled = unsettled;
            new.operation.as_mut().unwrap().operation_id = key.clone();
            operations.push(new);
            made.push((
                key,
                TwinOperation {
                    from: Some(from),
                    to,
                    value,
                    unsettled,
                    open: true,
                    reversed: false,
                    failed: false,
                },
            ));
        }
    }
    let request = CreateOperationsRequest {
        context: write(&format!("batch-{step}")),
        operations,
        hold_steps: steps,
        ..Default::default()
    };
    let answer = world.client.clone().create_operations(request).await;
    assert_eq!(answer.is_ok(), accepted, "step {step}: {answer:?}");
    if accepted {
        *twin = model;
        twin.operations.extend(made);
    }
    accepted
}

async fn run(seed: u64, steps: usize) {
    let world = World::new().await;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut twin = Twin {
        pots: vec![Pot::default(); USERS],
        ..Twin::default()
    };
    for user in 0..USERS {
        world.fund(&format!("u{user}"), RUB, "20").await;
        twin.pots[user].balance = 2_000;
    }
    let mut refusals = 0;
    for step in 0..steps {
        let key = format!("k{step}");
        let (user, value) = (rng.random_range(0..USERS), rng.random_range(1..900));
        let pick = |rng: &mut StdRng, of: Vec<String>| {
            if of.is_empty() {
                None
            } else {
                Some(of[rng.random_range(0..of.len())].clone())
            }
        };
        let hold = pick(&mut rng, twin.holds.keys().cloned().collect());
        let operation_id = pick(&mut rng, twin.operations.keys().cloned().collect());
        let mut client = world.client.clone();
        let (expected, answered) = match (rng.random_range(0..9), hold, operation_id) {
            (0, ..) => {
                let to = rng.random_range(0..USERS);
                let from = (rng.random_bool(0.8)).then_some(user);
                let unsettled = rng.random_bool(0.3);
                let by_hold = twin
                    .holds
                    .iter()
                    .find(|(_, hold)| Some(hold.user) == from && hold.active)
                    .map(|(id, _)| id.clone());
                let by_hold = by_hold.filter(|_| rng.random_bool(0.6));
                let mut request = operation(
                    OperationType::Payment,
                    &format!("u{user}"),
                    &key,
                    &[(&sub(from), &sub(Some(to)), &rub(value), RUB)],
                );
                request.postings[0].unsettled = unsettled;
                request.postings[0].hold_id = by_hold.clone();
                request.operation.as_mut().unwrap().operation_id = key.clone();
                let expected = twin.pay(from, to, value, by_hold.as_deref(), unsettled);
                if expected {
                    let made = TwinOperation {
                        from,
                        to,
                        value,
                        unsettled,
                        open: true,
                        reversed: false,
                        failed: false,
                    };
                    twin.operations.insert(key.clone(), made);
                }
                (expected, client.create_operation(request).await.map(|_| ()))
            }
            (1 | 2, ..) => {
                let expected = twin.open(key.clone(), user, value);
                let hold = Hold {
                    hold_id: key.clone(),
                    ..new_hold(&format!("u{user}"), RUB, &rub(value))
                };
                (expected, world.open_hold(&key, hold).await.map(|_| ()))
            }
            (3 | 4, Some(hold), _) => {
                let part = rng.random_bool(0.8).then_some(value / 3 + 1);
                let expected = twin.consume(&hold, part);
                (
                    expected,
                    world
                        .consume(&key, &hold, part.and_then(|part| amount(RUB, &rub(part))))
                        .await
                        .map(|_| ()),
                )
            }
            (5, Some(hold), _) => (
                twin.release(&hold),
                world.release(&key, &hold).await.map(|_| ()),
            ),
            (6, _, Some(id)) => {
                let request = FinalizeOperationRequest {
                    context: write(&key),
                    operation_id: id.clone(),
                    onchain_tx_hash: String::new(),
                };
                (
                    twin.finalize(&id),
                    client.finalize_operation(request).await.map(|_| ()),
                )
            }
            (7, _, Some(id)) => {
                let request = ReverseOperationRequest {
                    context: write(&key),
                    operation_id: id.clone(),
                    reason: String::new(),
                };
                (
                    twin.reverse(&id),
                    client.reverse_operation(request).await.map(|_| ()),
                )
            }
            _ => {
                refusals += usize::from(!batch(&world, &mut twin, &mut rng, step).await);
                continue;
            }
        };
        assert_eq!(
            answered.is_ok(),
            expected,
            "seed {seed} step {step}: {answered:?}"
        );
        refusals += usize::from(!expected);
    }
    assert!(
        refusals > steps / 20 && refusals < steps * 19 / 20,
        "the walk is worth something: {refusals}"
    );
    agree(&world, &twin, seed).await;
    let world = world.restart().await;
    agree(&world, &twin, seed).await;
}

async fn agree(world: &World, twin: &Twin, seed: u64) {
    for (user, pot) in twin.pots.iter().enumerate() {
        let expected = [pot.balance, pot.held, pot.unsettled, pot.available()].map(rub);
        assert_eq!(
            world.balance(&sub(Some(user))).await,
            expected,
            "seed {seed} user {user}"
        );
    }
    for (id, expected) in &twin.holds {
        let hold = world.get_hold(id).await;
        let minor = |value: Option<proto::common::v1::Decimal>| {
            value
                .unwrap()
                .value
                .parse::<types::Decimal>()
                .unwrap()
                .to_minor(2)
                .unwrap()
        };
        let remaining = minor(hold.remaining_amount.clone().unwrap().amount);
        assert_eq!(
            (remaining, hold.status() == HoldStatus::Active),
            (expected.remaining, expected.active),
            "seed {seed} hold {id}"
        );
        let consumed = minor(hold.consumed.clone());
        assert_eq!(consumed, expected.consumed);
        let whole = minor(hold.amount.unwrap().amount) + minor(hold.returned_by_children);
        assert_eq!(
            whole,
            remaining + minor(hold.split_off) + consumed + minor(hold.released),
            "seed {seed} hold {id}"
        );
    }
    world.assert_books_balance().await;
}

// rows: R214 R237
#[tokio::test]
async fn random_walks_agree_with_the_naive_twin() {
    for seed in 1..=6 {
        run(seed, 250).await;
    }
}
