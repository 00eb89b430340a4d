//! The start of the poster, and its look at the ledger from time to time: taking over what is there, comparing, naming what differs.

use std::collections::HashMap;

use types::{HoldIx, Sequence, UserIx};

use super::ledger::{Ledger, Scales};
use super::now_ns;
use super::now_us;
use super::poster::{Halt, Poster};
use super::retry::until_done;
use crate::batch::Settler;
use crate::carve::{self, Break};
use crate::fold::Fold;
use crate::ids;
use crate::repo::BreakRow;

impl Poster {
    /// Folds the journal up to the ledger's position and takes over the holds carved there.
    pub(super) async fn recover(&mut self) -> Result<Settler, Halt> {
        let shared = self.shared.clone();
        let ledger = Ledger(shared.ledger.clone());
        let (source, carve_source) = (ids::source(shared.node), ids::carve_source(shared.node));
        let (position, carve_number) =
            until_done("ledger", &source, &shared.shutdown, &shared.health, || {
                let (mut ledger, source, carve_source) =
                    (ledger.clone(), source.clone(), carve_source.clone());
                async move {
                    Ok((
                        ledger.position(&source).await?,
                        ledger.position(&carve_source).await?,
                    ))
                }
            })
            .await?;
        let position = Sequence(position);
        let mut fold = Fold::new(shared.node);
        let mut changes = Vec::new();
        while fold.position() < position {
            let Some(record) = self.journal.try_next()? else {
                return Err(Halt::JournalLost {
                    journal: fold.position(),
                    ledger: position,
                });
            };
            changes.clear();
            fold.apply(&record.command, &record.events, &mut changes)?;
            if fold.position().0.is_multiple_of(4_096) {
                tokio::task::yield_now().await;
                let bytes = self.journal.bytes_behind();
                shared
                    .tracker
                    .moved(Sequence::ZERO, Sequence::ZERO, fold.trades(), 0, bytes);
            }
        }
        let scales = scales(&fold);
        let holds = until_done("ledger", &source, &shared.shutdown, &shared.health, || {
            let (mut ledger, scales) = (ledger.clone(), &scales);
            async move { ledger.holds(scales).await }
        })
        .await?;
        let (carved, mut breaks) = carve::carved_in_ledger(&fold, &holds);
        let mut totals: HashMap<_, types::Minor> = HashMap::new();
        for hold in holds.values() {
            *totals.entry(hold.parent.unwrap_or(hold.hold)).or_default() += hold.remaining;
        }
        for (ix, pool) in fold.pools() {
            let found = totals.get(&pool.hold).copied().unwrap_or_default();
            if let Some(found) = carve::compare(&fold, ix, found) {
                // Funding may be under way: looked at again before it is a break.
                self.checks.suspect(found.pool);
            }
        }
        for row in shared.repo.breaks().await? {
            let users = (0u32..).map(UserIx).take(fold.users());
            self.halted
                .extend(users.filter(|ix| fold.user(*ix).as_str() == row.user_id));
        }
        for found in breaks.drain(..) {
            self.raise(&fold, &found).await?;
        }
        tracing::info!(%position, orders = carved.len(), "settlement goes on");
        let settler = Settler::new(
            shared.node,
            shared.config.limits(),
            fold,
            carved,
            position,
            carve_number,
        );
        self.publish(&settler);
        Ok(settler)
    }

    /// Compares pools with the ledger. Only called when everything folded is posted.
    pub(super) async fn check(
        &mut self,
        settler: &Settler,
        pools: Vec<HoldIx>,
    ) -> Result<(), Halt> {
        let fold = settler.fold();
        let scales = scales(fold);
        let shared = self.shared.clone();
        for pool in self.checks.to_check(pools) {
            let hold = fold.pool(pool).hold;
            let ledger = Ledger(shared.ledger.clone());
            let found = until_done("ledger", "check", &shared.shutdown, &shared.health, || {
                let (mut ledger, scales) = (ledger.clone(), &scales);
                async move { ledger.total(hold, scales).await }
            })
            .await?;
            let difference = carve::compare(fold, pool, found);
            if let Some(found) = self.checks.judge(pool, difference, now_ns()) {
                self.raise(fold, &found).await?;
            }
        }
        Ok(())
    }

    /// A difference that stays is named, kept, and stops the user.
    async fn raise(&mut self, fold: &Fold, found: &Break) -> Result<(), Halt> {
        let user = fold.user(found.user);
        tracing::error!(
            name = found.name.as_str(), user_id = %user, hold_id = %found.hold, sequence = found.at.0,
            expected_minor = found.expected.0, found_minor = found.found.0, "journal and ledger differ: the user is not settled any more"
        );
        metrics::counter!("settlement_breaks_total", "name" => found.name.as_str()).increment(1);
        self.halted.insert(found.user);
        let row = BreakRow {
            name: found.name.as_str().to_owned(),
            hold_id: found.hold.to_string(),
            user_id: user.to_string(),
            sequence: found.at.0,
            expected: found.expected.0,
            found: found.found.0,
            found_at_us: now_us(),
        };
        self.shared.repo.add_break(&row).await?;
        Ok(())
    }
}

fn scales(fold: &Fold) -> Scales {
    fold.scales()
        .map(|(id, decimals)| (id.to_string(), decimals))
        .collect()
}
