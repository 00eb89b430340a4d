//! Freezes of units that a redemption takes. The claim ends with the issue and the freeze continues
//! on the money that is paid for it (229-FZ).
//!
//! Units in the hold of a freeze become available in the ledger transaction that redeems them, so
//! the holder cannot use them in between. The contract burns frozen units (`burn`). The payment for
//! frozen units is frozen as CFA-RUB by a new act with the same document, at once after the part
//! has ended; the sweep repeats it. A freeze of all units stays, and the whole payment is frozen.
//! Units of a part that the chain has reverted are frozen again. A coupon is not frozen.

use std::collections::{HashMap, HashSet};

use events::Tx;
use service_clients::ledger::{HoldChange, HoldStep, Operation as LedgerOperation};
use tokio::sync::OwnedMutexGuard;
use types::derived;

use super::Service;
use super::workers::log_failure;
use crate::api::publish;
use crate::error::Error;
use crate::model::{ActStatus, CFA_RUB, EnforcementAct, Instrument, Operation};
use crate::peers::SOURCE;

/// Reason of the release of a freeze's hold.
const REDEEMED: &str = "Redeemed";

/// Freezes that end with a part, with their locks: no step of a freeze is executed meanwhile.
pub(super) struct TakenFreezes {
    acts: Vec<EnforcementAct>,
    _locks: Vec<OwnedMutexGuard<()>>,
}

impl Service {
    /// The freezes of the operations' holders that the ledger has made.
    pub(super) async fn freezes_of(
        &self,
        instrument: &Instrument,
        rows: &[Operation],
    ) -> Result<Vec<EnforcementAct>, Error> {
        let holders: Vec<&str> = rows.iter().map(|row| row.user_id.as_str()).collect();
        let mut live = (self.repo)
            .live_freezes(&instrument.instrument_id, &holders)
            .await?;
        live.retain(|act| act.held);
        Ok(live)
    }

    /// Locks the freezes of a part and reads them again.
    pub(super) async fn take_freezes(
        &self,
        instrument: &Instrument,
        rows: &[Operation],
        freezes: &[EnforcementAct],
    ) -> Result<TakenFreezes, Error> {
        let mut ids: Vec<&str> = freezes.iter().map(|act| act.act_id.as_str()).collect();
        if ids.is_empty() {
            return Ok(TakenFreezes {
                acts: Vec::new(),
                _locks: Vec::new(),
            });
        }
        ids.sort_unstable();
        let mut locks = Vec::with_capacity(ids.len());
        for id in &ids {
            locks.push(self.object_locks.lock(*id).await);
        }
        let known: HashSet<&str> = ids.into_iter().collect();
        let mut acts = self.freezes_of(instrument, rows).await?;
        acts.retain(|act| known.contains(act.act_id.as_str()));
        Ok(TakenFreezes {
            acts,
            _locks: locks,
        })
    }

    /// Ends the freezes whose units a part has taken and freezes what replaces the units: the
    /// payment, or the units again if the chain has reverted the part. Returns the events and the
    /// ids of the new freezes. A repeat changes nothing.
    pub(super) async fn replace_freezes_in_tx(
        &self,
        tx: &mut Tx,
        taken: &TakenFreezes,
        instrument: &Instrument,
        rows: &[Operation],
        is_redeemed: bool,
    ) -> Result<(Vec<events::Event>, Vec<String>), Error> {
        let now_us = self.now_us();
        let (mut made, mut ids) = (Vec::new(), Vec::new());
        let paid: HashMap<&str, i64> = match is_redeemed {
            true => payments_of(&taken.acts, rows),
            false => HashMap::new(),
        };
        for act in &taken.acts {
            let is_lifting = act.status == ActStatus::Lifting;
            let new = match (is_redeemed, is_lifting) {
                (_, true) => None,
                (true, false) => money_freeze(act, paid.get(act.act_id.as_str()).copied(), now_us),
                (false, false) => (!act.is_whole()).then(|| again(act, now_us)),
            };
            // A freeze of all units covers later ones too.
            let ends = !act.is_whole() && (is_redeemed || !is_lifting);
            if ends {
                let mut ended = act.clone();
                ended.left_minor = 0;
                ended.updated_at_us = now_us;
                ended.status = match is_lifting {
                    true => ActStatus::Lifted,
                    false => ActStatus::Used,
                };
                self.repo.end_freeze_in_tx(tx, &ended).await?;
                let before = act.status.as_str();
                made.push(self.record(&ended, "freeze.redeemed", before, SOURCE));
                made.push(publish::enforcement(&ended, instrument.decimals));
            }
            let Some(new) = new else { continue };
            if self.repo.insert_act_in_tx(tx, &new).await? {
                self.repo.save_act_in_tx(tx, &new).await?;
                made.push(self.record(&new, "freeze.requested", "", SOURCE));
                ids.push(new.act_id);
            }
        }
        Ok((made, ids))
    }

    /// Freezes in the ledger what has replaced units of freezes. The sweep does what fails.
    pub(super) async fn freeze_replaced(&self, act_ids: &[String]) {
        for act_id in act_ids {
            log_failure("freeze", act_id, self.freeze_first(act_id).await);
        }
    }
}

/// The steps that make the units of freezes available to the operations that redeem them. A repeat
/// does nothing on a hold that has ended.
pub(super) fn release_steps(
    freezes: &[EnforcementAct],
    operations: &[LedgerOperation],
) -> Vec<HoldStep> {
    let mut steps = Vec::new();
    for (index, operation) in operations.iter().enumerate() {
        let is_of = |act: &&EnforcementAct| act.holder_id == operation.user_id && !act.is_whole();
        for act in freezes.iter().filter(is_of) {
            steps.push(HoldStep {
                before_operation: u32::try_from(index).unwrap_or(u32::MAX),
                hold: derived::enforcement_hold(&act.act_id),
                change: HoldChange::Shrink,
                amount: None,
                reason: REDEEMED.to_owned(),
            });
        }
    }
    steps
}

/// The payment for the units of each freeze, in kopecks rounded down, by act. A freeze of all units
/// has the rest of the holder's payment.
fn payments_of<'a>(acts: &'a [EnforcementAct], rows: &[Operation]) -> HashMap<&'a str, i64> {
    let mut paid = HashMap::new();
    for row in rows {
        let of_holder = move || acts.iter().filter(move |act| act.holder_id == row.user_id);
        let mut rest = row.payment_minor;
        for act in of_holder().filter(|act| !act.is_whole()) {
            let share = i128::from(row.payment_minor) * i128::from(act.left_minor)
                / i128::from(row.units_minor.max(1));
            let share = i64::try_from(share).unwrap_or(i64::MAX).min(rest);
            rest -= share;
            paid.insert(act.act_id.as_str(), share);
        }
        for act in of_holder().filter(|act| act.is_whole()) {
            paid.insert(act.act_id.as_str(), std::mem::take(&mut rest));
        }
    }
    paid
}

/// The freeze of the payment for frozen units. `None` without a payment.
fn money_freeze(act: &EnforcementAct, paid: Option<i64>, now_us: i64) -> Option<EnforcementAct> {
    let units_minor = paid.filter(|paid| *paid > 0)?;
    Some(EnforcementAct {
        instrument_id: CFA_RUB.to_owned(),
        units_minor,
        left_minor: units_minor,
        frozen: false,
        ..again(act, now_us)
    })
}

/// A new freeze of the units of an act whose hold was released. The contract still has frozen what
/// it had.
fn again(act: &EnforcementAct, now_us: i64) -> EnforcementAct {
    EnforcementAct {
        act_id: uuid::Uuid::now_v7().to_string(),
        units_minor: act.left_minor,
        status: ActStatus::Pending,
        held: false,
        attempts: 0,
        tx_hash: String::new(),
        idempotency_key: format!("{}:redeemed", act.act_id),
        actor: SOURCE.to_owned(),
        created_at_us: now_us,
        updated_at_us: now_us,
        ..act.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{ActBasis, ActKind, Flow};

    fn act(id: &str, units_minor: i64) -> EnforcementAct {
        EnforcementAct {
            act_id: id.to_owned(),
            kind: ActKind::Freeze,
            basis: ActBasis::Court,
            instrument_id: "BOND-1".into(),
            holder_id: "alice".into(),
            to_user_id: String::new(),
            units_minor,
            left_minor: units_minor,
            document: "Decision".into(),
            lift_document: String::new(),
            freeze_id: String::new(),
            status: ActStatus::Active,
            held: true,
            frozen: true,
            attempts: 0,
            tx_hash: String::new(),
            idempotency_key: "k".into(),
            actor: "anna".into(),
            correlation_id: "c".into(),
            created_at_us: 1,
            updated_at_us: 1,
        }
    }

    #[test]
    fn freezes_share_the_payment_by_their_units_and_never_exceed_it() {
        let mut row = Operation::new(Flow::Maturity, "alice", "k", "c", 1);
        (row.units_minor, row.payment_minor) = (3, 100);
        let part = [act("one", 1), act("two", 1)];
        let paid = payments_of(&part, std::slice::from_ref(&row));
        assert_eq!((paid["one"], paid["two"]), (33, 33));
        let with_whole = [act("one", 1), act("all", 0)];
        let paid = payments_of(&with_whole, std::slice::from_ref(&row));
        assert_eq!((paid["one"], paid["all"]), (33, 67));
        let whole = money_freeze(&with_whole[1], Some(67), 2).expect("a payment");
        assert_eq!((whole.units_minor, whole.left_minor), (67, 67));
        assert_eq!(whole.instrument_id, CFA_RUB);
        assert_eq!(money_freeze(&with_whole[1], Some(0), 2), None);
    }
}
