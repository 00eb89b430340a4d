//! The continuous comparison of chain and ledger per instrument and holder (`design.md` 4).
//!
//! Chain figures are read from the chain, not from the registry. A break stays until both sides
//! agree; its owner is an operator. A break of an issue halts the instrument. A break of CFA-RUB
//! stops the release of payouts and raises the alarm, and halts no market. A person lifts the halt,
//! once there is no open break.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use futures::stream::{self, StreamExt, TryStreamExt};
use service_clients::caused_by;
use tokio_util::sync::CancellationToken;
use types::subaccount;

use super::workers::log_failure;
use super::{InstrumentChange, RequestMeta, Service};
use crate::api::publish;
use crate::compare::{Subject, Verdict};
use crate::error::{Error, Refusal};
use crate::model::{CFA_RUB, Instrument, InstrumentStatus};
use crate::peers;
use crate::repo::{ChainBreak, OpenParties};
use chain::Address;

/// Holders whose turn it is, per round.
const IN_TURN: i64 = 16;
/// Concurrent reads of the chain.
const CHAIN_READS: usize = 8;
/// Who resolves a break.
pub const OWNER: &str = "operator";
/// Health finding, and part of the metrics' names.
const BREAKS: &str = "reconciliation";

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

/// What all subjects of a round share.
struct Round {
    instruments: HashMap<String, Instrument>,
    /// By address.
    users: HashMap<String, String>,
}

impl Service {
    /// Loads the open breaks of an earlier run.
    pub async fn load_breaks(&self) -> Result<(), Error> {
        for found in self.repo.open_breaks().await? {
            if let Some(of) = self.repo.instrument(&found.instrument_id).await? {
                self.comparison().follow(Subject {
                    token: of.contract_address,
                    address: found.address,
                });
            }
        }
        self.show_breaks(&self.repo.open_breaks().await?);
        Ok(())
    }

    /// Compares one round of holders and supplies.
    pub async fn compare_round(&self) -> Result<(), Error> {
        let pause_us = i64::try_from(self.config.compare_interval_ms).unwrap_or(i64::MAX / 1_000);
        let touched = self
            .comparison()
            .take_round(self.now_us(), pause_us.saturating_mul(1_000));
        let mut subjects = touched;
        subjects.extend(self.in_turn().await?);
        let round = self.round_of(&subjects).await?;
        subjects.retain(|subject| round.instruments.contains_key(&subject.token));
        let mut sides = self.sides(&subjects, &round).await?;
        self.deduct_burned(&mut sides, &round).await?;
        let differ = sides.iter().any(|(_, sides)| sides.chain != sides.ledger);
        // Only if something differs: all of it is small then.
        let (open, redeemed) = match differ {
            true => (
                self.repo.open_parties().await?,
                self.repo.redeemed_instruments().await?,
            ),
            false => (None, HashSet::new()),
        };
        for (subject, sides) in &sides {
            let instrument = &round.instruments[&subject.token];
            let is_redeemed = match instrument.instrument_id.as_str() {
                CFA_RUB => !redeemed.is_empty(),
                id => redeemed.contains(id),
            };
            let is_in_flight =
                is_redeemed || sides.is_unsettled || is_open(&open, subject, instrument, sides);
            let difference = sides.chain.saturating_sub(sides.ledger);
            let verdict = self
                .comparison()
                .judge(subject, difference, is_in_flight, self.now_us());
            self.on_verdict(verdict, subject, instrument, sides).await?;
        }
        let open = self.repo.open_breaks().await?;
        self.show_breaks(&open);
        self.halt_broken(&open).await
    }

    /// The next holders in turn, with the supplies of their tokens; after the last one the first.
    async fn in_turn(&self) -> Result<Vec<Subject>, Error> {
        let after = self
            .compared_through
            .lock()
            .expect("no panic under the lock")
            .clone();
        let holders = self.repo.holders_in_turn(&after, IN_TURN).await?;
        let last = holders.last().cloned().unwrap_or(Subject {
            token: String::new(),
            address: String::new(),
        });
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

    /// Instruments and users of the subjects. Leaves out quarantined tokens: their holders are
    /// unknown.
    async fn round_of(&self, subjects: &BTreeSet<Subject>) -> Result<Round, Error> {
        let tokens: BTreeSet<&str> = subjects.iter().map(|of| of.token.as_str()).collect();
        let mut instruments = HashMap::new();
        for token in tokens {
            let found = self.repo.instrument_by_token(token).await?;
            let Some(instrument) = found.filter(|of| of.status != InstrumentStatus::Draft) else {
                continue;
            };
            if !self.repo.is_quarantined(token).await? {
                instruments.insert(token.to_owned(), instrument);
            }
        }
        let addresses: Vec<&str> = subjects.iter().map(|of| of.address.as_str()).collect();
        let users = self.repo.users_of_addresses(&addresses).await?;
        Ok(Round {
            instruments,
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
            let units = match subject.address.parse::<Address>() {
                Ok(holder) => self.chain.balance_of(&token, &holder).await?,
                Err(_) => self.chain.total_supply(&token).await?.0,
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
        let mut sides: Vec<(Subject, Sides)> = sides.collect();
        self.note_unsettled(&mut sides).await?;
        Ok(sides)
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

    /// A seller's money and a buyer's units are unsettled in another sub-account than the one that
    /// the trade debits: asks for those of the holders that differ.
    async fn note_unsettled(&self, sides: &mut [(Subject, Sides)]) -> Result<(), Error> {
        let differs = |of: &Sides| of.chain != of.ledger && !of.is_unsettled;
        let mut asked: BTreeMap<String, bool> = BTreeMap::new();
        for (_, of) in sides.iter().filter(|(_, of)| differs(of)) {
            // A supply has no holder, and no trade changes it.
            if !of.user_id.is_empty() {
                asked.insert(of.user_id.clone(), false);
            }
        }
        let context = caused_by("");
        let is_system = |user: &str| user.starts_with("system:");
        if asked.keys().any(|user| is_system(user)) {
            // House accounts have a part in every trade.
            let all = self.peers.ledger.trial_balance(&context).await?;
            let is_unsettled = all.iter().any(|of| !of.unsettled.is_zero());
            for (_, value) in asked.iter_mut().filter(|(user, _)| is_system(user)) {
                *value = is_unsettled;
            }
        }
        for (user, is_unsettled) in asked.iter_mut().filter(|(user, _)| !is_system(user)) {
            let rows = self
                .peers
                .ledger
                .sub_accounts_of_user(&context, user)
                .await?;
            *is_unsettled = rows.iter().any(|row| !row.unsettled.is_zero());
        }
        for (_, of) in sides.iter_mut() {
            of.is_unsettled |= asked.get(&of.user_id).copied().unwrap_or_default();
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
        let place = match subject.address.as_str() {
            "" => "supply",
            address => address,
        };
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
                self.repo
                    .clear_break(id, &subject.address, now_us, &events)
                    .await?;
                tracing::info!(instrument_id = id, place, "break cleared");
            }
            Verdict::Break | Verdict::Known => {
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

    /// Shows the open breaks in health and metrics, and stops or resumes payouts.
    fn show_breaks(&self, open: &[ChainBreak]) {
        const NAMED_MAX: usize = 8;
        let is_of_money = open.iter().any(|of| of.instrument_id == CFA_RUB);
        self.is_money_broken
            .store(is_of_money, std::sync::atomic::Ordering::Release);
        let named = open.iter().take(NAMED_MAX).map(|of| {
            let place = match of.address.as_str() {
                "" => "supply",
                address => address,
            };
            let (id, chain, ledger) = (&of.instrument_id, of.chain_units, of.ledger_units);
            format!("{id} {place}: chain {chain}, ledger {ledger}")
        });
        let named = named.collect::<Vec<_>>().join("; ");
        let reason = match open.len() {
            0 => None,
            count => Some(format!("{count} open breaks: {named}")),
        };
        self.health.set_finding(BREAKS, reason.as_deref());
        metrics::gauge!("cfa_reconciliation_breaks_open").set(open.len() as f64);
        let oldest_us = open.first().map_or(0, |of| self.now_us() - of.found_at_us);
        metrics::gauge!("cfa_reconciliation_break_age_seconds").set(oldest_us.max(0) as f64 / 1e6);
    }

    /// Halts the instruments of open breaks. Repeated until it is done.
    async fn halt_broken(&self, open: &[ChainBreak]) -> Result<(), Error> {
        let mut oldest: BTreeMap<&str, i64> = BTreeMap::new();
        for of in open.iter().filter(|of| of.instrument_id != CFA_RUB) {
            oldest.entry(&of.instrument_id).or_insert(of.found_at_us);
        }
        for (instrument_id, found_at_us) in oldest {
            let instrument = self.require_instrument(instrument_id).await?;
            if instrument.status != InstrumentStatus::Active {
                continue;
            }
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
        }
        Ok(())
    }

    /// # Errors
    /// `BreakOpen` while chain and ledger differ in the instrument.
    pub(super) async fn require_no_break(&self, instrument_id: &str) -> Result<(), Error> {
        match self.repo.has_open_break(instrument_id).await? {
            true => Err(Refusal::BreakOpen.into()),
            false => Ok(()),
        }
    }

    /// # Errors
    /// `Unavailable` while chain and ledger differ in CFA-RUB: the sweep releases the payout later.
    pub(super) fn require_money_agrees(&self) -> Result<(), Error> {
        match self
            .is_money_broken
            .load(std::sync::atomic::Ordering::Acquire)
        {
            true => Err(Error::Unavailable(
                "Payouts while CFA-RUB has an open break",
            )),
            false => Ok(()),
        }
    }

    pub(super) fn comparison(&self) -> std::sync::MutexGuard<'_, crate::compare::Comparison> {
        self.comparison.lock().expect("no panic under the lock")
    }
}

/// Whether an open operation may explain the difference of a subject.
fn is_open(open: &OpenParties, subject: &Subject, instrument: &Instrument, sides: &Sides) -> bool {
    let Some(open) = open else {
        return true;
    };
    // A supply, an issuer's money and a house account change with the operations of any user.
    let is_shared = subject.address.is_empty()
        || sides.user_id.starts_with("system:")
        || sides.user_id == instrument.issuer_id;
    match is_shared {
        true => !open.is_empty(),
        false => open.contains(&sides.user_id),
    }
}
