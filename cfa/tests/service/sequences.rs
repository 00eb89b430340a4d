//! Runs operations in a random order against a model. After each, the holder list, the chain and
//! the ledger have the balances of the model (R030).

use std::collections::BTreeMap;

use proto::cfa::v1 as pb;
use proto::common::v1::{OperationStatus, OperationType, PaymentStatus};
use proto::ledger::v1 as ledger;
use tonic::Status;

use crate::redeem::finalize;
use crate::trades::wait_batch;
use crate::world::*;

const STEPS: usize = 40;
const RUB: &str = "CFA-RUB";
const BOND: &str = "BOND-1";
/// Price of a buyback, in kopecks.
const NOMINAL: i64 = 10_00;
const INVESTORS: [&str; 3] = ["alice", "bob", "carol"];
const ISSUER: &str = "issuer";

type Called = Result<pb::CfaOperation, Status>;

struct Run {
    world: World,
    random: Random,
    /// Smallest units by user and instrument.
    balances: BTreeMap<(&'static str, &'static str), i64>,
    /// Number of trades and payouts so far.
    number: u64,
    /// Steps that changed a balance, and steps refused for lack of money or units.
    done: u32,
    refused: u32,
}

fn text(instrument_id: &str, minor: i64) -> String {
    match instrument_id {
        RUB => format!("{}.{:02}", minor / 100, minor % 100),
        _ => minor.to_string(),
    }
}

impl Run {
    /// Whether the run has too few steps of one kind to be a useful test.
    fn lacks_coverage(&self) -> bool {
        self.done <= 20 || self.refused <= 2
    }

    fn of(&self, user: &'static str, instrument_id: &'static str) -> i64 {
        let balance = self.balances.get(&(user, instrument_id));
        balance.copied().unwrap_or_default()
    }

    fn add(&mut self, user: &'static str, instrument_id: &'static str, minor: i64) {
        *self.balances.entry((user, instrument_id)).or_default() += minor;
    }

    fn investors(&mut self) -> (&'static str, &'static str) {
        let first = self.random.below(3) as usize;
        let second = (first + 1 + self.random.below(2) as usize) % 3;
        (INVESTORS[first], INVESTORS[second])
    }

    /// Between 1 and a quarter more than the balance, so that some steps are refused.
    fn amount_near(&mut self, balance: i64) -> i64 {
        let end = (balance + balance / 4).max(2);
        1 + self.random.below(end as u64) as i64
    }

    /// Settles an operation and checks its result. True if the model has to change.
    async fn check_result(&mut self, called: Called, is_affordable: bool) -> bool {
        match called {
            Ok(operation) => {
                assert!(is_affordable, "{operation:?}");
                let ended = self.world.settle(&operation).await;
                assert_eq!(ended.status(), OperationStatus::Finalized, "{ended:?}");
                self.done += 1;
                true
            }
            Err(status) => {
                assert!(!is_affordable, "{status}");
                assert_eq!(status.message(), "Insufficient balance");
                self.refused += 1;
                false
            }
        }
    }

    async fn step(&mut self) {
        match self.random.below(9) {
            0 | 1 => self.deposit().await,
            2 | 3 => self.issue().await,
            4 => self.buy_back().await,
            5 => self.transfer().await,
            6 => self.redeem().await,
            7 => self.trade().await,
            _ => self.issue_while_paused().await,
        }
    }

    async fn deposit(&mut self) {
        let user = [INVESTORS[0], INVESTORS[1], INVESTORS[2], ISSUER];
        let user = user[self.random.below(4) as usize];
        let kopecks = 1 + self.random.below(500_00) as i64;
        self.world.deposit(user, &text(RUB, kopecks)).await;
        self.add(user, RUB, kopecks);
        self.done += 1;
    }

    /// A primary issue, every second one against payment.
    async fn issue(&mut self) {
        let (user, _) = self.investors();
        let units = 1 + self.random.below(20) as i64;
        let paid = match self.random.below(2) {
            0 => 0,
            _ => self.amount_near(self.of(user, RUB)),
        };
        let payment = (paid > 0).then(|| text(RUB, paid));
        let request = issue_request(BOND, user, &units.to_string(), payment.as_deref());
        let subscribed = match &payment {
            Some(payment) => {
                let units = units.to_string();
                let subscribed = self.world.subscribe(BOND, user, &units, payment).await;
                subscribed.map(drop)
            }
            None => Ok(()),
        };
        let called = match subscribed {
            Ok(()) => self.world.cfa.issue_investment_cfa(request).await,
            Err(refused) => Err(refused),
        };
        let called = called.map(|answer| answer.into_inner().operation.expect("operation"));
        let is_affordable = paid <= self.of(user, RUB);
        if self.check_result(called, is_affordable).await {
            self.add(user, BOND, units);
            self.add(user, RUB, -paid);
            self.add(ISSUER, RUB, paid);
        }
    }

    async fn buy_back(&mut self) {
        let (user, _) = self.investors();
        let units = self.amount_near(self.of(user, BOND));
        let request = pb::RedeemInvestmentCfaRequest {
            context: context(&key()),
            instrument_id: BOND.into(),
            holder_id: user.into(),
            amount: amount(BOND, &units.to_string()),
            redemption_id: key(),
            reason: pb::RedemptionReason::Buyback.into(),
        };
        let price = units * NOMINAL;
        let (offered, payment) = (units.to_string(), text(RUB, price));
        let offered = self.world.offer(BOND, user, &offered, &payment).await;
        let called = match offered {
            Ok(offer) => {
                let called = self.world.cfa.redeem_investment_cfa(request).await;
                if called.is_err() {
                    self.world.cancel_offer(&offer).await.expect("cancelled");
                }
                called
            }
            Err(refused) => Err(refused),
        };
        let called = called.map(|answer| answer.into_inner().operation.expect("operation"));
        let is_affordable = units <= self.of(user, BOND) && price <= self.of(ISSUER, RUB);
        if self.check_result(called, is_affordable).await {
            self.add(user, BOND, -units);
            self.add(user, RUB, price);
            self.add(ISSUER, RUB, -price);
        }
    }

    async fn transfer(&mut self) {
        let (from, to) = self.investors();
        let instrument_id = [RUB, BOND][self.random.below(2) as usize];
        let minor = self.amount_near(self.of(from, instrument_id));
        let request = pb::TransferCfaRequest {
            context: context(&key()),
            instrument_id: instrument_id.into(),
            from_user_id: from.into(),
            to_user_id: to.into(),
            amount: amount(instrument_id, &text(instrument_id, minor)),
            ..Default::default()
        };
        let called = self.world.transfer(request).await;
        let is_affordable = minor <= self.of(from, instrument_id);
        if self.check_result(called, is_affordable).await {
            self.add(from, instrument_id, -minor);
            self.add(to, instrument_id, minor);
        }
    }

    /// A redemption whose payout the bank makes or refuses.
    async fn redeem(&mut self) {
        let (user, _) = self.investors();
        let kopecks = self.amount_near(self.of(user, RUB));
        self.number += 1;
        let payout_id = format!("payout-{}", self.number);
        let request = pb::RedeemCfaRubRequest {
            context: context(&key()),
            user_id: user.into(),
            amount: roubles(&text(RUB, kopecks)),
            payout_id: payout_id.clone(),
        };
        let called = self.world.redeem_rub(request).await;
        if kopecks > self.of(user, RUB) {
            let refused = called.expect_err("more than the balance");
            assert_eq!(refused.message(), "Insufficient balance");
            self.refused += 1;
            return;
        }
        let operation = called.expect("redeemed").into_inner().operation;
        self.world.settle(&operation.expect("operation")).await;
        let is_paid = self.random.below(2) == 0;
        let answer = match is_paid {
            true => PaymentStatus::Success,
            false => PaymentStatus::Failed,
        };
        self.world.double.payout_becomes(&payout_id, answer);
        let ended = finalize(&mut self.world, &payout_id).await;
        assert_eq!(ended.is_ok(), is_paid, "{ended:?}");
        if is_paid {
            self.add(user, RUB, -kopecks);
        }
        self.done += 1;
    }

    /// An affordable trade, settled as settlement does: first the ledger, then the chain.
    async fn trade(&mut self) {
        let (buyer, seller) = self.investors();
        let (money, units) = (self.of(buyer, RUB), self.of(seller, BOND));
        if money == 0 || units == 0 {
            return;
        }
        let quantity = 1 + self.random.below(units as u64) as i64;
        let payment = 1 + self.random.below(money as u64) as i64;
        self.number += 1;
        let trade_id = format!("trade-{}", self.number);
        let account = |user: &str, instrument_id: &str| format!("{user}:{instrument_id}");
        let posting = |debit: &str, credit: &str, instrument_id: &str, minor| ledger::Posting {
            debit_subaccount_id: account(debit, instrument_id),
            credit_subaccount_id: account(credit, instrument_id),
            amount: amount(instrument_id, &text(instrument_id, minor)),
            ..Default::default()
        };
        let posted = ledger::CreateOperationRequest {
            context: context(&trade_id),
            operation: Some(ledger::Operation {
                r#type: OperationType::TradeBuy.into(),
                user_id: buyer.into(),
                idempotency_key: trade_id.clone(),
                external_ref: Some(trade_id.clone()),
                ..Default::default()
            }),
            postings: vec![
                posting(seller, buyer, BOND, quantity),
                posting(buyer, seller, RUB, payment),
            ],
            ..Default::default()
        };
        let posted = self.world.ledger.create_operation(posted).await;
        posted.expect("posted");
        let request = pb::SettleTradesRequest {
            context: context(&key()),
            batch_id: trade_id.clone(),
            trades: vec![pb::TradeLeg {
                trade_id: trade_id.clone(),
                instrument_id: BOND.into(),
                trade_number: self.number,
                buyer_id: buyer.into(),
                seller_id: seller.into(),
                quantity: decimal(&quantity.to_string()),
                payment: decimal(&text(RUB, payment)),
                fee: decimal("0"),
            }],
        };
        let submitted = self.world.cfa.settle_trades(request).await;
        submitted.expect("submitted");
        let batch = wait_batch(&mut self.world, &trade_id).await;
        assert_eq!(batch.failed_trade_ids, Vec::<String>::new());
        self.add(seller, BOND, -quantity);
        self.add(buyer, BOND, quantity);
        self.add(buyer, RUB, -payment);
        self.add(seller, RUB, payment);
        self.done += 1;
    }

    /// An issue that the chain reverts: nothing changes.
    async fn issue_while_paused(&mut self) {
        call_contract(&mut self.world, BOND, "pause()").await;
        let (user, _) = self.investors();
        let request = issue_request(BOND, user, "1", None);
        let called = self.world.cfa.issue_investment_cfa(request).await;
        let operation = called.expect("sent").into_inner().operation;
        let ended = self.world.settle(&operation.expect("operation")).await;
        assert_eq!(ended.status(), OperationStatus::Rejected);
        call_contract(&mut self.world, BOND, "unpause()").await;
    }

    /// Compares holder list, chain and ledger with the model.
    async fn check(&mut self, step: usize) {
        for instrument_id in [RUB, BOND] {
            let mut expected = Vec::new();
            for user in [INVESTORS[0], INVESTORS[1], INVESTORS[2], ISSUER] {
                let minor = self.of(user, instrument_id);
                let units = text(instrument_id, minor);
                let account = format!("{user}:{instrument_id}");
                self.world.balance_becomes(&account, &units).await;
                let held = self.world.balance(&account).await.held;
                assert!(held.is_zero(), "step {step}: {account} holds {held}");
                let tokens = self.world.tokens(instrument_id, user).await;
                assert_eq!(tokens, minor as u128, "step {step}: {account}");
                if minor > 0 {
                    expected.push((user.to_owned(), units));
                }
            }
            let listed = self.world.holders(instrument_id).await;
            assert_eq!(listed, expected, "step {step}");
        }
    }
}

// rows: R030
#[tokio::test(flavor = "multi_thread")]
async fn r030_holders_chain_and_ledger_agree_after_any_sequence() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    let register = world.register(|request| request.nominal = decimal("10"));
    register.await.expect("registered");
    let mut run = Run {
        world,
        random: Random(testkit::seed::seed(30)),
        balances: BTreeMap::new(),
        number: 0,
        done: 0,
        refused: 0,
    };
    let mut steps = 0;
    // Runs longer if needed, so the sequence of any seed has enough steps of both kinds.
    while steps < STEPS || (run.lacks_coverage() && steps < 4 * STEPS) {
        run.step().await;
        run.check(steps).await;
        steps += 1;
    }
    assert!(
        !run.lacks_coverage(),
        "too few changes or refusals in {steps} steps"
    );
    run.world.stop().await;
}
