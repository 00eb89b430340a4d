//! The continuous comparison of chain and ledger per instrument and holder (`design.md` 4).
//!
//! Chain figures are read from the chain, not from the registry. A break stays until both sides
//! agree, or two persons accept its difference; its owner is an operator. A break of an issue halts
//! the instrument. A break of CFA-RUB stops the release of payouts, refunds of deposits included,
//! and raises the alarm; it halts no market. A person lifts the halt, once there is no open break.
//!
//! A redemption of an issue or a coupon explains differences of its parties up to the amounts that
//! it is moving, and no others: it may wait for money or for a holder without limit.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use service_clients::caused_by;
use tokio_util::sync::CancellationToken;
use types::subaccount;

use super::workers::log_failure;
use super::{InstrumentChange, RequestMeta, Service};
use crate::api::publish;
use crate::compare::{Pending, Subject, Verdict};
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{CFA_RUB, Instrument, InstrumentStatus, REDEMPTION_ACCOUNT};
use crate::peers;
use crate::repo::{AcceptedDifference, ChainBreak, OpenOperations};
use chain::Address;

/// Holders whose turn it is, per round.
const IN_TURN: i64 = 16;
/// Holders per round whose unsettled amounts are asked for. Others wait for the next round.
const DUE_MAX: usize = 8;
/// Concurrent reads of the chain.
const CHAIN_READS: usize = 8;
/// Follows every address in the order of texts.
const LAST_ADDRESS: &str = "\u{10FFFF}";
/// Who resolves a break.
pub const OWNER: &str = "operator";
/// Health finding, and part of the metrics' names.
const BREAKS: &str = "reconciliation";
/// Breaks that the health finding names.
const NAMED_MAX: i64 = 8;
/// Scope of the idempotency keys of AcceptChainBreak.
const ACCEPT: &str = "AcceptChainBreak";

/// Compares until shutdown.
pub async fn run(service: Arc<Service>, shutdown: CancellationToken) {
    let interval = Duration::from_millis(service.config.compare_interval_ms.max(1));
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(interval) => {}
        }
        let compared = tokio::select! {
            biased;
            () = shutdown.cancelled() => return,
            compared = service.compare_round() => compared,
        };
        log_failure("comparison", "", compared);
    }
}

/// Both sides of a subject, in smallest units.
struct Sides {
    user_id: String,
    chain: i128,
    ledger: i128,
    /// Something credited to the holder in the ledger is not final.
    is_unsettled: bool,
}

impl Sides {
    fn difference(&self) -> i128 {
        self.chain.saturating_sub(self.ledger)
    }
}

/// What all subjects of a round share.
struct Round {
    /// By token.
    instruments: HashMap<String, Instrument>,
    /// By token: the one that its holders are being moved to.
    next: HashMap<String, Address>,
    /// By address.
    users: HashMap<String, String>,
}

/// What may explain the due differences of a round.
#[derive(Default)]
struct InFlight {
    open: OpenOperations,
    /// What redemptions and coupons move, by instrument and user. An empty user: the supply.
    distributed: HashMap<(String, String), Pending>,
    /// Issues whose placement issues, delivers or burns units. Its money is unsettled meanwhile.
    placed: HashSet<String>,
    /// Users with unsettled amounts.
    unsettled: HashSet<String>,
    /// Users who were not asked for.
    unasked: HashSet<String>,
}

impl Service {
    /// Loads the open breaks and the accepted differences of an earlier run.
    pub async fn load_breaks(&self) -> Result<(), Error> {
        for found in self.repo.open_breaks(i64::MAX).await? {
            if let Some(of) = self.repo.instrument(&found.instrument_id).await? {
                self.comparison().follow(Subject {
                    token: of.contract_address,
                    address: found.address,
                });
            }
        }
        for accepted in self.repo.accepted_differences().await? {
            if let Some(of) = self.repo.instrument(&accepted.instrument_id).await? {
                let subject = Subject {
                    token: of.contract_address,
                    address: accepted.address,
                };
                self.comparison().accept(subject, accepted.units);
            }
        }
        self.show_breaks(&self.repo.broken_instruments().await?)
            .await
    }

    /// Compares one round of holders and supplies.
    pub async fn compare_round(&self) -> Result<(), Error> {
        let pause_us = i64::try_from(self.config.compare_interval_ms).unwrap_or(i64::MAX / 1_000);
        let touched = self
            .comparison()
            .take_round(self.now_us(), pause_us.saturating_mul(1_000));
        let compared = self.compare(touched.clone()).await;
        if compared.is_err() {
            self.comparison().put_back(touched);
        }
        // Also after a failure: what is known stays shown and halted.
        let broken = self.repo.broken_instruments().await?;
        self.show_breaks(&broken).await?;
        compared.and(self.halt_broken(&broken).await)
    }

    /// Compares these subjects, and those whose turn it is.
    async fn compare(&self, mut subjects: BTreeSet<Subject>) -> Result<(), Error> {
        subjects.extend(self.in_turn().await?);
        let round = self.round_of(&subjects).await?;
        subjects.retain(|subject| round.instruments.contains_key(&subject.token));
        let mut sides = self.sides(&subjects, &round).await?;
        self.deduct_burned(&mut sides, &round).await?;
        let in_flight = self.in_flight(&sides).await?;
        for (subject, sides) in &sides {
            if in_flight.unasked.contains(&sides.user_id) {
                continue;
            }
            let instrument = &round.instruments[&subject.token];
            let is_in_flight = in_flight.explains(subject, instrument, sides);
            loop {
                let difference = sides.difference();
                let now_us = self.now_us();
                let verdict = self
                    .comparison()
                    .judge(subject, difference, is_in_flight, now_us);
                self.on_verdict(verdict, subject, instrument, sides).await?;
                // An accepted difference may have gone with the break.
                if verdict != Verdict::Resolved {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Reads what may explain the differences that are due. Nothing is read if there are none.
    async fn in_flight(&self, sides: &[(Subject, Sides)]) -> Result<InFlight, Error> {
        let now_us = self.now_us();
        let is_due = |(subject, of): &&(Subject, Sides)| {
            (self.comparison()).is_due(subject, of.difference(), now_us)
        };
        let due: Vec<&Sides> = (sides.iter().filter(is_due)).map(|(_, of)| of).collect();
        if due.is_empty() {
            return Ok(InFlight::default());
        }
        let users: BTreeSet<&str> = (due.iter())
            .filter(|of| !of.is_unsettled && !of.user_id.is_empty())
            .map(|of| of.user_id.as_str())
            .collect();
        let mut in_flight = InFlight {
            open: self.repo.operations_in_flight().await?,
            distributed: self.distributed().await?,
            placed: self.repo.placed_instruments().await?,
            ..InFlight::default()
        };
        let context = caused_by("");
        let (house, users): (Vec<&str>, Vec<&str>) =
            users.into_iter().partition(|user| is_house(user));
        if !house.is_empty() {
            // House accounts have a part in every trade.
            let all = self.peers.ledger.trial_balance(&context).await?;
            if all.iter().any(|of| !of.unsettled.is_zero()) {
                in_flight
                    .unsettled
                    .extend(house.into_iter().map(str::to_owned));
            }
        }
        // A seller's money and a buyer's units are unsettled in another sub-account than the one
        // that the trade debits.
        for (place, user) in users.into_iter().enumerate() {
            if place >= DUE_MAX {
                in_flight.unasked.insert(user.to_owned());
                continue;
            }
            let ledger = &self.peers.ledger;
            let rows = ledger.sub_accounts_of_user(&context, user).await?;
            if rows.iter().any(|row| !row.unsettled.is_zero()) {
                in_flight.unsettled.insert(user.to_owned());
            }
        }
        Ok(in_flight)
    }

    /// What redemptions and coupons move: their funding, and the payments and units of a part. The
    /// ledger posts before the chain moves.
    async fn distributed(&self) -> Result<HashMap<(String, String), Pending>, Error> {
        let fundings = self.repo.fundings_in_flight().await?;
        let parts = self.repo.parts_in_flight().await?;
        let mut distributed: HashMap<(String, String), Pending> = HashMap::new();
        let mut add = |instrument_id: &str, user_id: &str, difference: i64| {
            let subject = (instrument_id.to_owned(), user_id.to_owned());
            let pending = distributed.entry(subject).or_default();
            pending.add(i128::from(difference));
        };
        for (issuer_id, total_minor) in &fundings {
            add(CFA_RUB, issuer_id, *total_minor);
            add(CFA_RUB, REDEMPTION_ACCOUNT, -total_minor);
        }
        for part in &parts {
            add(CFA_RUB, &part.user_id, -part.payment_minor);
            add(CFA_RUB, REDEMPTION_ACCOUNT, part.payment_minor);
            add(&part.instrument_id, &part.user_id, part.units_minor);
            add(&part.instrument_id, "", part.units_minor);
        }
        Ok(distributed)
    }

    /// The next holders in turn, with the supplies of their tokens; after the last one the first.
    async fn in_turn(&self) -> Result<Vec<Subject>, Error> {
        let after = self
            .compared_through
            .lock()
            .expect("no panic under the lock")
            .clone();
        let holders = self.repo.holders_in_turn(&after, IN_TURN).await?;
        let mut last = holders.last().cloned().unwrap_or(Subject {
            token: String::new(),
            address: String::new(),
        });
        // The rest of a token that was replaced is passed over: it has no units on the chain.
        if self.repo.instrument_by_token(&last.token).await?.is_none() {
            last.address = LAST_ADDRESS.to_owned();
        }
        let is_end = (holders.len() as i64) < IN_TURN;
        *self
            .compared_through
            .lock()
            .expect("no panic under the lock") = match is_end {
            true => Subject {
                token: String::new(),
                address: String::new(),
            },
            false => last,
        };
        let tokens: BTreeSet<String> = holders.iter().map(|holder| holder.token.clone()).collect();
        let supplies = tokens.into_iter().map(|token| Subject {
            token,
            address: String::new(),
        });
        Ok(holders.into_iter().chain(supplies).collect())
    }

    /// Instruments and users of the subjects. Leaves out quarantined tokens, whose holders are
    /// unknown, and replaced ones.
    async fn round_of(&self, subjects: &BTreeSet<Subject>) -> Result<Round, Error> {
        let tokens: BTreeSet<&str> = subjects.iter().map(|of| of.token.as_str()).collect();
        let (mut instruments, mut next) = (HashMap::new(), HashMap::new());
        for token in tokens {
            let found = self.repo.instrument_by_token(token).await?;
            let Some(instrument) = found.filter(|of| of.status != InstrumentStatus::Draft) else {
                continue;
            };
            if self.repo.is_quarantined(token).await? {
                continue;
            }
            if let Some(to) = self.next_token(&instrument).await? {
                next.insert(token.to_owned(), to);
            }
            instruments.insert(token.to_owned(), instrument);
        }
        let addresses: Vec<&str> = subjects.iter().map(|of| of.address.as_str()).collect();
        let users = self.repo.users_of_addresses(&addresses).await?;
        Ok(Round {
            instruments,
            next,
            users: users.into_iter().collect(),
        })
    }

    /// Reads both sides of the subjects: one read of the chain each, and one of the ledger for all.
    async fn sides(
        &self,
        subjects: &BTreeSet<Subject>,
        round: &Round,
    ) -> Result<Vec<(Subject, Sides)>, Error> {
        let subjects: Vec<Subject> = subjects.iter().cloned().collect();
        let reads = stream::iter(subjects).map(|subject| async move {
            let token: Address = subject
                .token
                .parse()
                .map_err(|_| Error::Damaged(format!("token address {}", subject.token)))?;
            let next = round.next.get(&subject.token);
            let units = match subject.address.parse::<Address>() {
                Ok(holder) => self.units_in(&token, next, &holder).await?,
                Err(_) => self.supply_in(&token, next).await?.0,
            };
            let units = i128::try_from(units).unwrap_or(i128::MAX);
            Ok::<_, Error>((subject, units))
        });
        let chain: Vec<(Subject, i128)> = reads.buffered(CHAIN_READS).try_collect().await?;
        // The ledger after the chain: a difference of a moment is none that lasts.
        let ids = |subject: &Subject| -> Vec<String> {
            let id = &round.instruments[&subject.token].instrument_id;
            if subject.address.is_empty() {
                return vec![subaccount::reserve(id)];
            }
            let user = round.users.get(&subject.address);
            user.map_or_else(Vec::new, |user| {
                let own = subaccount::of_user(user, id);
                vec![format!("{own}:blocked"), own]
            })
        };
        let all: Vec<String> = chain.iter().flat_map(|(subject, _)| ids(subject)).collect();
        let context = caused_by("");
        let found = self.peers.ledger.sub_accounts_by_id(&context, &all);
        let found: HashMap<String, (i128, bool)> = (found.await?.into_iter())
            .map(|row| {
                let instrument = round
                    .instruments
                    .values()
                    .find(|of| of.instrument_id == row.instrument_id);
                let decimals = instrument.map_or(0, |of| of.decimals);
                let units = row.balance.to_minor(decimals).map_or(i128::MAX, i128::from);
                (row.subaccount_id, (units, !row.unsettled.is_zero()))
            })
            .collect();
        let sides = chain.into_iter().map(|(subject, chain)| {
            let rows = ids(&subject);
            let rows = rows.iter().filter_map(|id| found.get(id));
            let (mut ledger, mut is_unsettled) = (0i128, false);
            for (units, unsettled) in rows {
                ledger = ledger.saturating_add(*units);
                is_unsettled |= unsettled;
            }
            let user_id = round.users.get(&subject.address).cloned();
            let sides = Sides {
                user_id: user_id.unwrap_or_default(),
                chain,
                // The reserve is negative by the units in circulation.
                ledger: if subject.address.is_empty() {
                    -ledger
                } else {
                    ledger
                },
                is_unsettled,
            };
            (subject, sides)
        });
        Ok(sides.collect())
    }

    /// Deducts redemptions that are burned and not paid from the ledger's side of CFA-RUB. Without
    /// it a break would stop the payout that ends the difference.
    async fn deduct_burned(
        &self,
        sides: &mut [(Subject, Sides)],
        round: &Round,
    ) -> Result<(), Error> {
        let is_money = |token: &str| round.instruments[token].instrument_id == CFA_RUB;
        let differs =
            |(subject, of): &(Subject, Sides)| is_money(&subject.token) && of.chain != of.ledger;
        if !sides.iter().any(differs) {
            return Ok(());
        }
        let mut burned: HashMap<String, i128> = HashMap::new();
        let mut total = 0i128;
        for (user_id, units) in self.repo.burned_redemptions().await? {
            *burned.entry(user_id).or_default() += i128::from(units);
            total += i128::from(units);
        }
        for (subject, of) in sides.iter_mut() {
            if is_money(&subject.token) {
                of.ledger -= match subject.address.as_str() {
                    "" => total,
                    _ => burned.get(&of.user_id).copied().unwrap_or_default(),
                };
            }
        }
        Ok(())
    }

    /// Stores what a comparison found.
    async fn on_verdict(
        &self,
        verdict: Verdict,
        subject: &Subject,
        instrument: &Instrument,
        sides: &Sides,
    ) -> Result<(), Error> {
        let (id, now_us) = (&instrument.instrument_id, self.now_us());
        let place = place_of(&subject.address);
        let record = |action, reason: &str| {
            let correlation_id = format!("break:{id}:{place}");
            publish::audit(
                action,
                id,
                peers::SOURCE,
                "",
                "",
                reason,
                &correlation_id,
                now_us,
            )
        };
        let amounts = format!("{place}: chain {}, ledger {}", sides.chain, sides.ledger);
        match verdict {
            Verdict::NoBreak => {}
            Verdict::Resolved => {
                let events = [record("break.cleared", &amounts)];
                let cleared = self.repo.clear_break(id, &subject.address, now_us, &events);
                cleared.await?;
                self.comparison().forget(subject);
                tracing::info!(instrument_id = id, place, "break cleared");
            }
            Verdict::Agreed => {
                let events = [record("difference.gone", &amounts)];
                let removed = self.repo.remove_accepted(id, &subject.address, &events);
                removed.await?;
                self.comparison().forget_accepted(subject);
                tracing::info!(instrument_id = id, place, "accepted difference has gone");
            }
            Verdict::Break | Verdict::Known => {
                // The acceptance may be stored and not noted yet.
                let accepted = self.repo.accepted_difference(id, &subject.address).await?;
                if accepted == Some(sides.difference()) {
                    let subject = subject.clone();
                    self.comparison().accept(subject, sides.difference());
                    return Ok(());
                }
                let found = ChainBreak {
                    instrument_id: id.clone(),
                    address: subject.address.clone(),
                    user_id: sides.user_id.clone(),
                    chain_units: sides.chain,
                    ledger_units: sides.ledger,
                    found_at_us: now_us,
                    cleared_at_us: None,
                };
                let events = [record("break.found", &amounts)];
                if self.repo.save_break(&found, &events).await? {
                    tracing::error!(
                        instrument_id = id,
                        place,
                        user_id = sides.user_id,
                        amounts,
                        severity = "critical",
                        "chain and ledger differ: find the cause before the halt is lifted"
                    );
                }
            }
        }
        Ok(())
    }

    /// Shows the open breaks in health and metrics, and stops or resumes payouts. `broken`:
    /// instrument, number of its open breaks, time of the oldest.
    async fn show_breaks(&self, broken: &[(String, i64, i64)]) -> Result<(), Error> {
        let is_of_money = broken.iter().any(|(id, ..)| id == CFA_RUB);
        self.is_money_broken.store(is_of_money, Ordering::Release);
        let count: i64 = broken.iter().map(|(_, count, _)| count).sum();
        metrics::gauge!("cfa_reconciliation_breaks_open").set(count as f64);
        let oldest = broken.iter().map(|(.., found_at_us)| *found_at_us).min();
        let age_us = oldest.map_or(0, |found_at_us| self.now_us() - found_at_us);
        metrics::gauge!("cfa_reconciliation_break_age_seconds").set(age_us.max(0) as f64 / 1e6);
        if count == 0 {
            self.health.set_finding(BREAKS, None);
            return Ok(());
        }
        let first = self.repo.open_breaks(NAMED_MAX).await?;
        let named = first.iter().map(|of| {
            let (id, place) = (&of.instrument_id, place_of(&of.address));
            let (chain, ledger) = (of.chain_units, of.ledger_units);
            format!("{id} {place}: chain {chain}, ledger {ledger}")
        });
        let named = named.collect::<Vec<_>>().join("; ");
        let reason = format!("{count} open breaks: {named}");
        self.health.set_finding(BREAKS, Some(&reason));
        Ok(())
    }

    /// Halts the instruments of open breaks. Repeated until it is done.
    async fn halt_broken(&self, broken: &[(String, i64, i64)]) -> Result<(), Error> {
        let mut failed = Ok(());
        for (instrument_id, _, found_at_us) in broken.iter().filter(|(id, ..)| id != CFA_RUB) {
            let halted = self.halt(instrument_id, *found_at_us).await;
            failed = halted.and(failed);
        }
        failed
    }

    async fn halt(&self, instrument_id: &str, found_at_us: i64) -> Result<(), Error> {
        let instrument = self.require_instrument(instrument_id).await?;
        if instrument.status != InstrumentStatus::Active {
            return Ok(());
        }
        failpoint::reach(failpoint::BREAK_RECORDED);
        let meta = RequestMeta {
            idempotency_key: format!("break:{instrument_id}:{found_at_us}"),
            correlation_id: format!("break:{instrument_id}"),
            actor: peers::SOURCE.to_owned(),
            digest: 0,
        };
        let halt = InstrumentChange {
            status: Some(InstrumentStatus::Halted),
            ..InstrumentChange::default()
        };
        self.update_instrument(&meta, instrument_id, halt).await?;
        Ok(())
    }

    /// Ends an open break whose difference is explained: it counts as none until it changes. The
    /// instrument stays halted. `difference`: chain - ledger in smallest units. True: a repeat.
    ///
    /// # Errors
    /// `BreakNotFound`: there is no open break. `BreakChanged`: it has another difference.
    pub async fn accept_break(
        &self,
        meta: &RequestMeta,
        instrument_id: &str,
        address: &str,
        difference: i128,
        reason: &str,
    ) -> Result<(Instrument, bool), Error> {
        let _lock = self.lock_call(meta, ACCEPT, instrument_id).await;
        if let Some(accepted) = self.stored_answer(meta, ACCEPT).await? {
            return Ok((self.require_instrument(&accepted).await?, true));
        }
        let instrument = self.require_instrument(instrument_id).await?;
        let found = self.repo.open_break(instrument_id, address).await?;
        let found = found.ok_or(Refusal::BreakNotFound)?;
        if found.chain_units.saturating_sub(found.ledger_units) != difference {
            return Err(Refusal::BreakChanged.into());
        }
        let accepted = AcceptedDifference {
            instrument_id: instrument_id.to_owned(),
            address: address.to_owned(),
            units: difference,
            actor: meta.actor.clone(),
            reason: reason.to_owned(),
            accepted_at_us: self.now_us(),
        };
        let mut tx = self.repo.begin().await?;
        self.repo
            .accept_difference_in_tx(&mut tx, &accepted)
            .await?;
        let record = publish::audit(
            "break.accepted",
            instrument_id,
            &meta.actor,
            "",
            &format!("{}: difference {difference}", place_of(address)),
            reason,
            &meta.correlation_id,
            accepted.accepted_at_us,
        );
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        self.store_call_in_tx(&mut tx, meta, ACCEPT, instrument_id)
            .await?;
        tx.commit().await?;
        let subject = Subject {
            token: instrument.contract_address.clone(),
            address: address.to_owned(),
        };
        self.comparison().accept(subject, difference);
        tracing::info!(actor = meta.actor, instrument_id, "break accepted");
        Ok((instrument, false))
    }

    /// # Errors
    /// `BreakOpen` while chain and ledger differ in the instrument.
    pub(super) async fn require_no_break(&self, instrument_id: &str) -> Result<(), Error> {
        match self.repo.has_open_break(instrument_id).await? {
            true => Err(Refusal::BreakOpen.into()),
            false => Ok(()),
        }
    }

    /// True while chain and ledger differ in CFA-RUB: no payout or refund is released.
    pub(super) fn is_money_broken(&self) -> bool {
        self.is_money_broken.load(Ordering::Acquire)
    }

    pub(super) fn comparison(&self) -> std::sync::MutexGuard<'_, crate::compare::Comparison> {
        self.comparison.lock().expect("no panic under the lock")
    }
}

impl InFlight {
    /// Whether something that is not final may explain the difference of a subject.
    fn explains(&self, subject: &Subject, instrument: &Instrument, sides: &Sides) -> bool {
        let id = instrument.instrument_id.as_str();
        // Operations of a holder without a user id have the address.
        let holder = match sides.user_id.as_str() {
            "" => subject.address.as_str(),
            user_id => user_id,
        };
        let distributed = self.distributed.get(&(id.to_owned(), holder.to_owned()));
        let is_distributed =
            distributed.is_some_and(|pending| pending.explains(sides.difference()));
        let is_open = match subject.address.as_str() {
            // No transfer and no trade changes a supply.
            "" => self.open.instruments.contains(id),
            _ if is_house(&sides.user_id) => !self.open.users.is_empty(),
            _ => self.open.users.contains(&sides.user_id),
        };
        let is_unsettled = sides.is_unsettled || self.unsettled.contains(&sides.user_id);
        is_distributed || self.placed.contains(id) || is_open || is_unsettled || self.open.is_cut
    }
}

fn is_house(user_id: &str) -> bool {
    user_id.starts_with("system:")
}

/// A break's place, in texts.
fn place_of(address: &str) -> &str {
    match address {
        "" => "supply",
        address => address,
    }
}
