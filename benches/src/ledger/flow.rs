//! Seeded `CreateOperations` requests. Each operation has its own idempotency key and one or more
//! postings.
//!
//! One-phase: a request writes the postings. Two-phase: a request opens a hold per operation, and
//! the next request of the client consumes the holds. An operation counts when its postings are
//! written.

use proto::common::v1::{Decimal, MonetaryAmount, OperationType, RequestContext};
use proto::ledger::v1::{
    CreateOperationsRequest, Hold, HoldStep, NewOperation, OpenHold, Operation, Posting, hold_step,
};
use uuid::Uuid;

use crate::load::Random;

/// Users with money. Each has one sub-account.
pub const USERS: u64 = 10_000;
/// Initial balance of each user in minor units.
const START_MINOR: u64 = 1_000_000_000;
const AMOUNT_MINOR_MAX: u64 = 1_000;
pub const INSTRUMENT: &str = types::CFA_RUB;
const RESERVE: &str = "system:reserve:CFA-RUB";
/// The house account: the credit side of all postings with [`Accounts::Hot`].
const HOUSE: &str = "system:fees:CFA-RUB";
/// Users credited per seeding request.
const SEED_BATCH: u64 = 5_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accounts {
    /// Both sides of a posting are random users.
    Uniform,
    /// Every posting credits the house account.
    Hot,
}

impl Accounts {
    pub fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Hot => "hot",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    OnePhase,
    TwoPhase,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::OnePhase => "one-phase",
            Self::TwoPhase => "two-phase",
        }
    }
}

/// A request and the number of operations it writes.
pub struct Request {
    pub message: CreateOperationsRequest,
    pub operations: usize,
}

/// The requests of one client.
pub struct Flow {
    random: Random,
    accounts: Accounts,
    kind: Kind,
    postings: usize,
}

impl Flow {
    pub fn new(seed: u64, accounts: Accounts, kind: Kind, postings: usize) -> Self {
        Self {
            random: Random::new(seed),
            accounts,
            kind,
            postings,
        }
    }

    /// The next requests, which together write this many operations: one request, or two for
    /// [`Kind::TwoPhase`].
    pub fn next(&mut self, operations: usize) -> Vec<Request> {
        let news: Vec<NewOperation> = (0..operations).map(|_| self.operation()).collect();
        let mut requests = Vec::with_capacity(2);
        if self.kind == Kind::TwoPhase {
            let message = CreateOperationsRequest {
                hold_steps: news.iter().map(open_hold).collect(),
                ..empty_request()
            };
            requests.push(Request {
                message,
                operations: 0,
            });
        }
        let message = CreateOperationsRequest {
            operations: news,
            ..empty_request()
        };
        requests.push(Request {
            message,
            operations,
        });
        requests
    }

    fn user(&mut self) -> u64 {
        self.random.below(USERS)
    }

    fn operation(&mut self) -> NewOperation {
        let from = self.user();
        let hold_id = (self.kind == Kind::TwoPhase).then(new_id);
        let postings = (0..self.postings)
            .map(|_| {
                let credit = match self.accounts {
                    Accounts::Hot => HOUSE.to_owned(),
                    Accounts::Uniform => match self.user() {
                        same if same == from => subaccount((from + 1) % USERS),
                        other => subaccount(other),
                    },
                };
                let minor = 1 + self.random.below(AMOUNT_MINOR_MAX);
                posting(subaccount(from), credit, minor, hold_id.clone())
            })
            .collect();
        operation(OperationType::P2pTransfer, &user(from), postings)
    }
}

/// Requests that fund every user.
pub fn seed_requests() -> impl Iterator<Item = CreateOperationsRequest> {
    (0..USERS)
        .step_by(SEED_BATCH as usize)
        .map(|from| CreateOperationsRequest {
            operations: (from..(from + SEED_BATCH).min(USERS))
                .map(|number| {
                    let credit = posting(RESERVE.to_owned(), subaccount(number), START_MINOR, None);
                    operation(OperationType::Deposit, &user(number), vec![credit])
                })
                .collect(),
            ..empty_request()
        })
}

fn user(number: u64) -> String {
    format!("user-{number:05}")
}

fn subaccount(number: u64) -> String {
    format!("user-{number:05}:{INSTRUMENT}")
}

fn new_id() -> String {
    Uuid::now_v7().to_string()
}

fn money(minor: u64) -> MonetaryAmount {
    MonetaryAmount {
        currency_code: INSTRUMENT.to_owned(),
        amount: Some(Decimal {
            value: format!("{}.{:02}", minor / 100, minor % 100),
        }),
    }
}

fn empty_request() -> CreateOperationsRequest {
    CreateOperationsRequest {
        context: Some(RequestContext {
            request_id: new_id(),
            correlation_id: new_id(),
            idempotency_key: new_id(),
            source: "benches".to_owned(),
            ..RequestContext::default()
        }),
        ..CreateOperationsRequest::default()
    }
}

fn operation(kind: OperationType, user_id: &str, postings: Vec<Posting>) -> NewOperation {
    NewOperation {
        operation: Some(Operation {
            r#type: kind as i32,
            user_id: user_id.to_owned(),
            idempotency_key: new_id(),
            ..Operation::default()
        }),
        postings,
    }
}

fn posting(debit: String, credit: String, minor: u64, hold_id: Option<String>) -> Posting {
    Posting {
        debit_subaccount_id: debit,
        credit_subaccount_id: credit,
        amount: Some(money(minor)),
        hold_id,
        ..Posting::default()
    }
}

/// Opens the hold that an operation consumes: the sum of its postings.
fn open_hold(new: &NewOperation) -> HoldStep {
    let of = &new.postings[0];
    let minor = new.postings.iter().map(minor_of).sum();
    let hold = Hold {
        hold_id: of.hold_id.clone().unwrap_or_default(),
        subaccount_id: of.debit_subaccount_id.clone(),
        amount: Some(money(minor)),
        reason: "benchmark".to_owned(),
        ..Hold::default()
    };
    HoldStep {
        step: Some(hold_step::Step::Open(OpenHold { hold: Some(hold) })),
        before_operation: 0,
    }
}

fn minor_of(posting: &Posting) -> u64 {
    let amount = posting
        .amount
        .as_ref()
        .and_then(|amount| amount.amount.as_ref());
    let digits = amount.map_or_else(String::new, |value| value.value.replace('.', ""));
    digits.parse().expect("digits of a formatted amount")
}
