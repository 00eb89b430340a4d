//! The ledger against a naive model: seeded random operations, holds, splits, partial consumption,
//! growth, returns, finality and reversals, single and in batches, over sub-accounts that are
//! frozen, closed, reopened by a credit, and redeemed while frozen.
//!
//! The model has plain numbers and the simplest form of the rules. At every step ledger and model
//! must agree whether the step is accepted, and the rows are audited. At the end they must agree on
//! every balance and on every part of every hold.

use std::collections::BTreeMap;

use proto::{
    common::v1::OperationType,
    ledger::v1::{hold_step::Step, *},
};
use rand::{Rng, SeedableRng, rngs::StdRng};

use crate::{harness::*, rows::audit};

#[derive(Clone, Default)]
struct TwinSubAccount {
    balance: i64,
    held: i64,
    unsettled: i64,
    frozen: bool,
    closed: bool,
}

impl TwinSubAccount {
    fn available(&self) -> i64 {
        self.balance - self.held - self.unsettled
    }

    /// True if `value` may be spent or held.
    fn can_spend(&self, value: i64) -> bool {
        !self.frozen && !self.closed && value <= self.available()
    }

    fn credit(&mut self, value: i64) {
        self.balance += value;
        self.closed = false;
    }
}

#[derive(Clone)]
struct TwinHold {
    user: usize,
    parent: Option<String>,
    original: i64,
    added: i64,
    returned: i64,
    remaining: i64,
    split: i64,
    consumed: i64,
    released: i64,
    active: bool,
}

impl TwinHold {
    fn new(user: usize, parent: Option<String>, original: i64) -> Self {
        TwinHold {
            user,
            parent,
            original,
            added: 0,
            returned: 0,
            remaining: original,
            split: 0,
            consumed: 0,
            released: 0,
            active: true,
        }
    }
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
    instrument: &'static str,
    sub_accounts: Vec<TwinSubAccount>,
    holds: BTreeMap<String, TwinHold>,
    operations: BTreeMap<String, TwinOperation>,
}

const USERS: usize = 4;

/// An instrument with the decimals of money.
const UNITS: &str = "EQ-2";

fn minor(minor: i64) -> String {
    types::Decimal::from_minor(minor, 2).to_string()
}

impl Twin {
    fn sub(&self, user: Option<usize>) -> String {
        let instrument = self.instrument;
        user.map_or(format!("system:reserve:{instrument}"), |user| {
            format!("u{user}:{instrument}")
        })
    }

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
                    self.sub_accounts[user].held -= value;
                }
                None if !self.sub_accounts[user].can_spend(value) => return false,
                None => {}
            }
            self.sub_accounts[user].balance -= value;
        }
        self.sub_accounts[to].credit(value);
        if unsettled {
            self.sub_accounts[to].unsettled += value;
        }
        true
    }

    fn open(&mut self, id: String, user: usize, value: i64) -> bool {
        if !self.sub_accounts[user].can_spend(value) {
            return false;
        }
        self.sub_accounts[user].held += value;
        self.holds.insert(id, TwinHold::new(user, None, value));
        true
    }

    fn adjust(&mut self, id: &str, target: i64) -> bool {
        let Some(hold) = self.holds.get(id).filter(|hold| hold.active).cloned() else {
            return false;
        };
        let growth = target - hold.remaining;
        if growth <= 0 {
            self.return_to_parent_of(id, -growth);
            return true;
        }
        match hold.parent.as_deref() {
            Some(parent) => {
                let parent = self.holds.get_mut(parent).unwrap();
                if !parent.active || growth > parent.remaining {
                    return false;
                }
                parent.remaining -= growth;
                parent.split += growth;
            }
            None if !self.sub_accounts[hold.user].can_spend(growth) => return false,
            None => self.sub_accounts[hold.user].held += growth,
        }
        let hold = self.holds.get_mut(id).unwrap();
        hold.added += growth;
        hold.remaining += growth;
        true
    }

    /// A service redeems units into the reserve.
    fn redeem(&mut self, user: usize, value: i64) -> bool {
        let sub_account = &mut self.sub_accounts[user];
        let is_money = self.instrument == RUB;
        if sub_account.closed || (sub_account.frozen && is_money) || value > sub_account.available()
        {
            return false;
        }
        sub_account.balance -= value;
        true
    }

    fn set_status(&mut self, user: usize, status: SubAccountStatus) -> bool {
        let sub_account = &mut self.sub_accounts[user];
        match status {
            SubAccountStatus::Closed if sub_account.closed => {}
            _ if sub_account.closed => return false,
            SubAccountStatus::Closed
                if sub_account.frozen || sub_account.balance != 0 || sub_account.held != 0 =>
            {
                return false;
            }
            SubAccountStatus::Closed => sub_account.closed = true,
            status => sub_account.frozen = status == SubAccountStatus::Frozen,
        }
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
        parent.split += value;
        let hold = TwinHold::new(parent.user, Some(parent_id.to_owned()), value);
        self.holds.insert(id, hold);
        true
    }

    fn return_to_parent_of(&mut self, id: &str, value: i64) {
        let hold = self.holds.get_mut(id).unwrap();
        hold.remaining -= value;
        hold.released += value;
        let (user, parent) = (hold.user, hold.parent.clone());
        match parent
            .and_then(|id| self.holds.get_mut(&id))
            .filter(|parent| parent.active)
        {
            Some(parent) => {
                parent.remaining += value;
                parent.returned += value;
            }
            None => self.sub_accounts[user].held -= value,
        }
    }

    fn release(&mut self, id: &str) -> bool {
        let Some(hold) = self.holds.get(id).filter(|hold| hold.active) else {
            return false;
        };
        let rest = hold.remaining;
        self.return_to_parent_of(id, rest);
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
        self.sub_accounts[hold.user].held -= value;
        true
    }

    fn finalize(&mut self, id: &str) -> bool {
        let operation = self.operations.get_mut(id).unwrap();
        if !operation.open {
            return !operation.failed;
        }
        operation.open = false;
        if operation.unsettled {
            self.sub_accounts[operation.to].unsettled -= operation.value;
        }
        true
    }

    fn reverse(&mut self, id: &str) -> bool {
        let operation = self.operations[id].clone();
        if operation.reversed {
            return false;
        }
        let takes_unsettled = operation.open && operation.unsettled;
        let sub_account = &mut self.sub_accounts[operation.to];
        if !takes_unsettled && operation.value > sub_account.available() {
            return false;
        }
        sub_account.balance -= operation.value;
        if takes_unsettled {
            sub_account.unsettled -= operation.value;
        }
        if let Some(from) = operation.from {
            self.sub_accounts[from].credit(operation.value);
        }
        let kept = self.operations.get_mut(id).unwrap();
        kept.reversed = true;
        kept.failed = kept.open;
        kept.open = false;
        true
    }
}

/// Applies a random batch of payments and splits to ledger and model; true if it is accepted.
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
                    amount: amount(model.instrument, &minor(value)),
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
                &[(
                    &model.sub(Some(from)),
                    &model.sub(Some(to)),
                    &minor(value),
                    model.instrument,
                )],
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

/// Counts of rare cases that the random walk reached.
#[derive(Default)]
struct Seen {
    reopened: usize,
    redeemed_frozen: usize,
}

async fn run(seed: u64, steps: usize, instrument: &'static str, seen: &mut Seen) {
    let world = World::new().await;
    let rows = world.rows().await;
    let mut rng = StdRng::seed_from_u64(seed);
    let mut twin = Twin {
        instrument,
        sub_accounts: vec![TwinSubAccount::default(); USERS],
        ..Twin::default()
    };
    for user in 0..USERS {
        let mut request = operation(
            OperationType::Deposit,
            &format!("u{user}"),
            &format!("fund-{user}"),
            &[(&twin.sub(None), &twin.sub(Some(user)), "20", instrument)],
        );
        request.instrument_scales = vec![InstrumentScale {
            instrument_id: instrument.to_owned(),
            decimals: 2,
        }];
        world
            .client
            .clone()
            .create_operation(request)
            .await
            .unwrap();
        twin.sub_accounts[user].balance = 2_000;
    }
    let mut refusals = 0;
    for step in 0..steps {
        audit(&rows, &format!("seed {seed} before step {step}")).await;
        let closed: Vec<bool> = twin
            .sub_accounts
            .iter()
            .map(|sub_account| sub_account.closed)
            .collect();
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
        let (expected, answered) = match (rng.random_range(0..14), hold, operation_id) {
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
                    &[(
                        &twin.sub(from),
                        &twin.sub(Some(to)),
                        &minor(value),
                        instrument,
                    )],
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
                    ..new_hold(&format!("u{user}"), instrument, &minor(value))
                };
                (expected, world.open_hold(&key, hold).await.map(|_| ()))
            }
            (3 | 4, Some(hold), _) => {
                let part = rng.random_bool(0.8).then_some(value / 3 + 1);
                let expected = twin.consume(&hold, part);
                (
                    expected,
                    world
                        .consume(
                            &key,
                            &hold,
                            part.and_then(|part| amount(instrument, &minor(part))),
                        )
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
            (9, Some(hold), _) => {
                let request = AdjustHoldRequest {
                    context: write(&key),
                    hold_id: hold.clone(),
                    remaining_amount: amount(instrument, &minor(value / 2)),
                };
                (
                    twin.adjust(&hold, value / 2),
                    client.adjust_hold(request).await.map(|_| ()),
                )
            }
            (10, ..) => {
                // Often the whole available balance, so some sub-accounts can be closed.
                let rest = twin.sub_accounts[user].available();
                let value = if rest > 0 && rng.random_bool(0.7) {
                    rest
                } else {
                    value
                };
                let was_frozen = twin.sub_accounts[user].frozen;
                let expected = twin.redeem(user, value);
                seen.redeemed_frozen += usize::from(expected && was_frozen);
                let request = operation(
                    OperationType::Redemption,
                    &format!("u{user}"),
                    &key,
                    &[(
                        &twin.sub(Some(user)),
                        &twin.sub(None),
                        &minor(value),
                        instrument,
                    )],
                );
                (expected, client.create_operation(request).await.map(|_| ()))
            }
            (11 | 12, ..) => {
                use SubAccountStatus::{Active, Closed, Frozen};
                let status = [Active, Active, Frozen, Closed, Closed][rng.random_range(0..5)];
                let request = SetSubAccountStatusRequest {
                    context: write(&key),
                    subaccount_id: twin.sub(Some(user)),
                    status: status as i32,
                    reason: String::new(),
                };
                (
                    twin.set_status(user, status),
                    client.set_sub_account_status(request).await.map(|_| ()),
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
        let opened = |(was, sub_account): &(&bool, &TwinSubAccount)| **was && !sub_account.closed;
        seen.reopened += closed.iter().zip(&twin.sub_accounts).filter(opened).count();
    }
    audit(&rows, &format!("seed {seed} before step {steps}")).await;
    rows.close().await;
    assert!(
        refusals > steps / 20 && refusals < steps * 19 / 20,
        "the random walk must have both accepted and refused steps: {refusals} refusals"
    );
    assert_equal(&world, &twin, seed).await;
    let world = world.restart().await;
    assert_equal(&world, &twin, seed).await;
}

async fn assert_equal(world: &World, twin: &Twin, seed: u64) {
    for (user, sub_account) in twin.sub_accounts.iter().enumerate() {
        let expected = [
            sub_account.balance,
            sub_account.held,
            sub_account.unsettled,
            sub_account.available(),
        ]
        .map(minor);
        assert_eq!(
            world.balance(&twin.sub(Some(user))).await,
            expected,
            "seed {seed} user {user}"
        );
    }
    for (id, expected) in &twin.holds {
        let hold = world.get_hold(id).await;
        let minor = |value: Option<proto::common::v1::Decimal>| -> i64 {
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
        let added = minor(hold.added.clone());
        let parts = [
            minor(hold.amount.unwrap().amount) - added,
            added,
            minor(hold.returned_by_children),
            minor(hold.split_off),
            minor(hold.consumed),
            minor(hold.released),
        ];
        let expected_parts = [
            expected.original,
            expected.added,
            expected.returned,
            expected.split,
            expected.consumed,
            expected.released,
        ];
        assert_eq!(parts, expected_parts, "seed {seed} hold {id}");
        let [original, added, returned, split, consumed, released] = parts;
        assert_eq!(
            original + added + returned,
            remaining + split + consumed + released,
            "seed {seed} hold {id}"
        );
    }
    world.assert_books_balance().await;
}

// rows: R214 R237 R324
#[tokio::test]
async fn r214_random_walks_agree_with_the_naive_twin() {
    let mut seen = Seen::default();
    for seed in testkit::seed::seeds(1..9) {
        let instrument = if seed % 2 == 0 { UNITS } else { RUB };
        run(seed, 300, instrument, &mut seen).await;
    }
    assert!(
        seen.reopened > 0 && seen.redeemed_frozen > 0,
        "reopened {}, redeemed frozen {}",
        seen.reopened,
        seen.redeemed_frozen
    );
}
