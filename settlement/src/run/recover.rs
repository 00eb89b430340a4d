//! The poster's start at the ledger's position, and its comparisons with the ledger.

use std::collections::HashMap;

use replica::Follower;
use rpc::Context;
use types::{HoldIx, HoldPart, Id128, Minor, Sequence, derived};

use super::check::{Subject, Verdict};
use super::ledger::{self, Scales};
use super::poster::{Poster, READING};
use super::retry::{retry_call, retry_store};
use super::{Halt, failure, monotonic_ns, now_us};
use crate::batch::Settler;
use crate::repo::BreakRow;
use crate::request::SOURCE;
use crate::split::{self, Break};
use crate::trading_state::TradingState;

impl Poster {
    /// Copies the replica's state at the ledger's position and loads the split order holds.
    pub(super) async fn recover(&mut self) -> Result<(Settler, Follower), Halt> {
        let shared = self.shared.clone();
        let ledger = &shared.ledger;
        let context = Context::new(SOURCE);
        let (source, split_source) = (
            derived::settlement_source(shared.node),
            derived::split_source(shared.node),
        );
        let (position, split_number) = retry_call(&shared, failure::LEDGER, &source, || {
            futures::future::try_join(
                ledger.source_position(&context, &source),
                ledger.source_position(&context, &split_source),
            )
        })
        .await?;
        let position = Sequence(position);
        let (trading_state, follower) = self.begin(position).await?;
        let scales = scales(&trading_state);
        let holds = retry_call(&shared, failure::LEDGER, &source, || {
            ledger::holds(ledger, &scales)
        })
        .await?;
        let (split_holds, mut breaks) = split::splits_in_ledger(&trading_state, &holds);
        let mut totals: HashMap<_, Minor> = HashMap::new();
        for hold in holds.values() {
            *totals.entry(hold.parent.unwrap_or(hold.hold)).or_default() += hold.remaining;
        }
        for (ix, hold) in trading_state.holds() {
            let found = totals.get(&hold.hold_id).copied().unwrap_or_default();
            if let Some(found) = split::compare(&trading_state, ix, found) {
                // Funding may be in progress: the hold is compared again before it is a break.
                self.checks.suspect(found.trading_hold);
            }
        }
        for found in breaks.drain(..) {
            self.report_break(&trading_state, &found).await?;
        }
        self.follow_breaks(&trading_state).await?;
        tracing::info!(%position, orders = split_holds.len(), "settlement resumes at the ledger's position");
        let settler = Settler::new(
            shared.node,
            shared.config.limits(),
            trading_state,
            split_holds,
            position,
            split_number,
        );
        self.publish(&settler);
        self.shared.is_recovered.notify_one();
        Ok((settler, follower))
    }

    /// Returns the trading state at the ledger's position and a follower of the later records.
    async fn begin(&mut self, position: Sequence) -> Result<(TradingState, Follower), Halt> {
        let journal = self.replica.durable();
        if journal < position {
            return Err(Halt::JournalLost {
                journal,
                ledger: position,
            });
        }
        self.durable.set(position);
        self.position = position;
        self.others = position;
        self.shared.tracker.set_applied(position);
        // The live replica has the names. It may have just started.
        self.wait_for_replica(position).await?;
        let shared = self.shared.clone();
        loop {
            let names = self.replica.names().clone();
            let copy = move |state: &replica::State| TradingState::of(state, names);
            let following = self.replica.follow_from(failure::JOURNAL, position, copy);
            match shared.unless_stopped(following).await? {
                Ok(begun) => {
                    shared.failures.clear(failure::JOURNAL, READING);
                    return Ok(begun);
                }
                Err(error) if error.is_transient() => self.pause(&error.to_string()).await?,
                Err(error) => return Err(Halt::following(error, position)),
            }
        }
    }

    /// Compares trading holds with the ledger. Requires that everything applied is posted.
    pub(super) async fn check(
        &mut self,
        settler: &Settler,
        trading_holds: Vec<HoldIx>,
    ) -> Result<(), Halt> {
        let trading_state = settler.trading_state();
        let scales = scales(trading_state);
        for subject in self.checks.to_check(trading_holds) {
            let difference = match subject {
                Subject::TradingHold(trading_hold) => {
                    let found = self
                        .ledger_remaining(trading_state.hold(trading_hold).hold_id, true, &scales)
                        .await?;
                    split::compare(trading_state, trading_hold, found)
                }
                Subject::Part(hold) => {
                    let found = self.ledger_remaining(hold, false, &scales).await?;
                    self.part_difference(settler, hold, found)
                }
            };
            match self.checks.judge(subject, difference, monotonic_ns()) {
                Verdict::NoBreak => {}
                Verdict::Break(found) => self.report_break(trading_state, &found).await?,
                Verdict::Resolved => {
                    let hold = match subject {
                        Subject::TradingHold(trading_hold) => {
                            trading_state.hold(trading_hold).hold_id
                        }
                        Subject::Part(hold) => hold,
                    };
                    self.clear_break(hold).await?;
                }
            }
        }
        Ok(())
    }

    /// Remaining amount of a hold, with or without its children.
    async fn ledger_remaining(
        &self,
        hold: Id128,
        with_children: bool,
        scales: &Scales,
    ) -> Result<Minor, Halt> {
        let ledger = &self.shared.ledger;
        let id = hold.to_string();
        let found = retry_call(&self.shared, failure::LEDGER, &id, || async move {
            if with_children {
                ledger::total(ledger, hold, scales).await
            } else {
                ledger::remaining(ledger, hold, scales).await
            }
        });
        found.await
    }

    /// Compares one hold of an order. A difference of an ended order shows in its trading hold.
    fn part_difference(&self, settler: &Settler, hold: Id128, found: Minor) -> Option<Break> {
        let (handle, part) = self.parts.get(&hold)?;
        let order = settler.trading_state().order(*handle)?;
        let split_holds = settler.splitter().holds_of(order.handle)?;
        let expected = match part {
            HoldPart::Main => split_holds.main.remaining,
            HoldPart::Fee => split_holds.fee.remaining,
        };
        split::compare_part(settler.trading_state(), order, hold, expected, found)
    }

    /// Continues the comparison of stored breaks, from earlier runs or just found.
    async fn follow_breaks(&mut self, trading_state: &TradingState) -> Result<(), Halt> {
        let shared = self.shared.clone();
        let rows = retry_store(&shared, "breaks", || shared.repo.breaks()).await?;
        if rows.is_empty() {
            return self.publish_suspensions().await;
        }
        let mut parts = HashMap::new();
        for order in trading_state.orders() {
            for part in [HoldPart::Main, HoldPart::Fee] {
                parts.insert(derived::order_hold(order.id, part), (order.handle, part));
            }
        }
        let holds = trading_state.holds().map(|(ix, hold)| (hold.hold_id, ix));
        let trading_holds: HashMap<Id128, HoldIx> = holds.collect();
        for row in rows {
            let Some(hold) = Id128::parse(&row.hold_id) else {
                tracing::error!(
                    hold_id = row.hold_id,
                    "stored break has an unreadable hold id; it is not compared"
                );
                continue;
            };
            if let Some(trading_hold) = trading_holds.get(&hold) {
                self.checks.follow(Subject::TradingHold(*trading_hold));
                continue;
            }
            // Without an entry the order has ended, and its hold too.
            if let Some(order) = parts.get(&hold) {
                self.parts.insert(hold, *order);
            }
            self.checks.follow(Subject::Part(hold));
        }
        self.publish_suspensions().await
    }

    /// Logs and stores a break, which blocks the user. Settlement continues: the ledger refuses
    /// what is not covered.
    async fn report_break(
        &mut self,
        trading_state: &TradingState,
        found: &Break,
    ) -> Result<(), Halt> {
        let user = trading_state.user(found.user);
        tracing::error!(
            name = found.name.as_str(), user_id = %user, hold_id = %found.hold, sequence = found.at.0,
            expected_minor = found.expected.0, found_minor = found.found.0, severity = "critical",
            "journal and ledger differ: the user may not trade until they agree"
        );
        metrics::counter!("settlement_breaks_total", "name" => found.name.as_str()).increment(1);
        let asset = trading_state.hold(found.trading_hold).asset;
        let expected = trading_state.amount(asset, found.expected);
        let row = BreakRow {
            name: found.name.as_str().to_owned(),
            hold_id: found.hold.to_string(),
            user_id: user.to_string(),
            instrument_id: expected.instrument.to_string(),
            decimals: expected.decimals,
            sequence: found.at.0,
            expected: found.expected.0,
            found: found.found.0,
            found_at_us: now_us(),
            cleared_at_us: None,
        };
        let shared = self.shared.clone();
        retry_store(&shared, &row.hold_id, || shared.repo.add_break(&row)).await?;
        self.publish_suspensions().await
    }

    /// Clears a break in the store, which unblocks the user.
    async fn clear_break(&mut self, hold: Id128) -> Result<(), Halt> {
        let (shared, hold_id) = (self.shared.clone(), hold.to_string());
        tracing::info!(hold_id, "journal and ledger agree again");
        self.parts.remove(&hold);
        retry_store(&shared, &hold_id, || {
            shared.repo.clear_break(&hold_id, now_us())
        })
        .await?;
        self.publish_suspensions().await
    }

    async fn publish_suspensions(&self) -> Result<(), Halt> {
        let shared = &self.shared;
        retry_store(shared, "suspensions", || shared.publish_suspensions()).await
    }
}

fn scales(trading_state: &TradingState) -> Scales {
    trading_state
        .scales()
        .map(|(id, decimals)| (id.to_string(), decimals))
        .collect()
}
