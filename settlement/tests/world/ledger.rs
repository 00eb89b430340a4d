//! A naive model of the ledger, which refuses everything that is not covered.

use std::collections::{BTreeMap, HashMap};

use settlement::batch::Batch;
use settlement::plan::{HoldMovement, Kind, Plan};
use settlement::split::LedgerHold;
use settlement::trading_state::TradingState;
use types::{Command, Id128, Minor};

use super::Record;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hold {
    pub parent: Option<Id128>,
    pub remaining: i64,
    pub amount: i64,
    pub added: i64,
    pub split_off: i64,
    pub returned: i64,
    pub consumed: i64,
    pub released: i64,
    pub is_active: bool,
}

#[derive(Clone, Debug, Default)]
pub struct Ledger {
    pub holds: HashMap<Id128, Hold>,
    /// By sub-account name.
    pub balances: BTreeMap<String, i64>,
    pub unsettled: BTreeMap<String, i64>,
    pub positions: HashMap<String, u64>,
    pub operations: HashMap<Id128, Vec<(String, String, i64)>>,
    pub final_operations: HashMap<Id128, String>,
    pub reversed: Vec<Id128>,
}

impl Ledger {
    /// Deposits and blocks the money of a Fund, as the gateway does before it journals one.
    pub fn fund(&mut self, trading_state: &TradingState, record: &Record) {
        if let Command::Fund(fund) = &record.command.command {
            let user = trading_state.user(fund.user);
            let instrument = trading_state.amount(fund.asset, Minor::ZERO).instrument;
            *self
                .balances
                .entry(format!("{user}:{instrument}"))
                .or_default() += fund.amount_minor.0;
            *self
                .balances
                .entry(format!("system:reserve:{instrument}"))
                .or_default() -= fund.amount_minor.0;
            let hold = self.holds.entry(fund.hold_id).or_default();
            hold.is_active = true;
            hold.amount += fund.amount_minor.0;
            hold.remaining += fund.amount_minor.0;
        }
    }

    /// Posts a batch as one transaction. `false` = already posted.
    pub fn post(&mut self, batch: &Batch) -> Result<bool, String> {
        let position = self.positions.entry(batch.source.clone()).or_default();
        if batch.through <= *position {
            return Ok(false);
        }
        if batch.first != *position + 1 {
            return Err(format!("gap: {} after {position}", batch.first));
        }
        let mut after = self.clone();
        after.positions.insert(batch.source.clone(), batch.through);
        after.execute(&batch.plan)?;
        after.check();
        *self = after;
        Ok(true)
    }

    fn execute(&mut self, plan: &Plan) -> Result<(), String> {
        let mut steps = plan.steps.iter().peekable();
        for (index, operation) in plan.operations.iter().enumerate() {
            while let Some(step) = steps.next_if(|s| s.before_operation as usize <= index) {
                self.step(&step.movement)?;
            }
            let leg = &plan.trades[operation.trade as usize];
            let (units, value) = (leg.units.minor.0, leg.value.minor.0);
            let (buyer, seller, paid) = (leg.buyer, leg.seller, leg.holds);
            let of = |user: &dyn std::fmt::Display, what: &str| format!("{user}:{what}");
            let instrument = leg.instrument.as_str();
            let id = operation.kind.operation_id(leg.trade);
            let (money_reserve, unit_reserve) = (
                "system:reserve:CFA-RUB".to_string(),
                format!("system:reserve:{instrument}"),
            );
            let postings = match operation.kind {
                Kind::TradeBuy => vec![
                    (
                        of(&buyer, "CFA-RUB"),
                        money_reserve,
                        value,
                        Some(paid.buyer_main),
                        false,
                    ),
                    (unit_reserve, of(&buyer, instrument), units, None, true),
                ],
                Kind::TradeSell => vec![
                    (money_reserve, of(&seller, "CFA-RUB"), value, None, true),
                    (
                        of(&seller, instrument),
                        unit_reserve,
                        units,
                        Some(paid.seller_main),
                        false,
                    ),
                ],
                Kind::Fee => vec![(
                    of(&buyer, "CFA-RUB"),
                    "system:fees:CFA-RUB".to_string(),
                    leg.fee.minor.0,
                    Some(paid.buyer_fee.unwrap()),
                    false,
                )],
            };
            let mut written = Vec::new();
            for (debit, credit, amount, hold, unsettled) in postings {
                if amount <= 0 {
                    return Err("amount must be positive".into());
                }
                if let Some(hold) = hold {
                    let hold = self.active(hold)?;
                    hold.remaining -= amount;
                    hold.consumed += amount;
                    if hold.remaining < 0 {
                        return Err("hold is exceeded".into());
                    }
                    hold.is_active = hold.remaining > 0;
                }
                *self.balances.entry(debit.clone()).or_default() -= amount;
                *self.balances.entry(credit.clone()).or_default() += amount;
                if unsettled {
                    *self.unsettled.entry(credit.clone()).or_default() += amount;
                }
                written.push((debit, credit, amount));
            }
            if self.operations.insert(id, written).is_some() {
                return Err("operation exists".into());
            }
        }
        for step in steps {
            self.step(&step.movement)?;
        }
        Ok(())
    }

    fn active(&mut self, id: Id128) -> Result<&mut Hold, String> {
        self.holds
            .get_mut(&id)
            .filter(|h| h.is_active)
            .ok_or_else(|| "Hold is not active".to_string())
    }

    fn step(&mut self, movement: &HoldMovement) -> Result<(), String> {
        match *movement {
            HoldMovement::Split {
                parent,
                hold,
                amount,
                ..
            } => {
                let amount = amount.minor.0;
                self.split_from(parent, amount)?;
                let child = Hold {
                    parent: Some(parent),
                    remaining: amount,
                    amount,
                    is_active: true,
                    ..Hold::default()
                };
                if self.holds.insert(hold, child).is_some() {
                    return Err("hold exists".into());
                }
            }
            HoldMovement::Grow { hold, amount } => {
                let amount = amount.minor.0;
                let child = *self.holds.get(&hold).ok_or("no hold")?;
                if !child.is_active && child.consumed == 0 {
                    return Err("Hold is not active".into());
                }
                self.split_from(child.parent.ok_or("no parent")?, amount)?;
                let child = self.holds.get_mut(&hold).unwrap();
                child.remaining += amount;
                child.amount += amount;
                child.is_active = true;
            }
            HoldMovement::Return { hold, amount, .. } => {
                let amount = amount.minor.0;
                let child = self.active(hold)?;
                if amount > child.remaining || amount <= 0 {
                    return Err("return is exceeded".into());
                }
                child.remaining -= amount;
                child.released += amount;
                child.is_active = child.remaining > 0;
                let parent = child.parent.ok_or("no parent")?;
                let parent = self.active(parent)?;
                parent.remaining += amount;
                parent.returned += amount;
            }
            HoldMovement::Release { hold, .. } => {
                let hold = self.active(hold)?;
                hold.released += hold.remaining;
                hold.remaining = 0;
                hold.is_active = false;
            }
        }
        Ok(())
    }

    fn split_from(&mut self, parent: Id128, amount: i64) -> Result<(), String> {
        let parent = self.active(parent)?;
        if amount <= 0 || amount > parent.remaining {
            return Err(format!("parent has {}, {amount} wanted", parent.remaining));
        }
        parent.remaining -= amount;
        parent.split_off += amount;
        Ok(())
    }

    /// Asserts the invariants of holds and balances.
    pub fn check(&self) {
        for (id, h) in &self.holds {
            assert_eq!(
                h.amount + h.returned,
                h.remaining + h.split_off + h.consumed + h.released,
                "equation of hold {id}"
            );
            assert!(h.remaining >= 0);
        }
        let mut sums: BTreeMap<&str, i64> = BTreeMap::new();
        for (name, balance) in &self.balances {
            assert!(
                *balance >= 0 || name.starts_with("system:reserve:"),
                "{name} {balance}"
            );
            *sums.entry(name.rsplit(':').next().unwrap()).or_default() += balance;
        }
        assert!(sums.values().all(|sum| *sum == 0), "{sums:?}");
        for (name, balance) in &self.balances {
            let unsettled = self.unsettled.get(name).copied().unwrap_or(0);
            assert!(unsettled <= (*balance).max(0), "{name}");
        }
    }

    /// Amount of a trading hold and its children.
    pub fn total(&self, hold: Id128) -> i64 {
        self.holds
            .iter()
            .filter(|(id, h)| **id == hold || h.parent == Some(hold))
            .map(|(_, h)| h.remaining)
            .sum()
    }

    pub fn active_holds(&self) -> HashMap<Id128, LedgerHold> {
        self.holds
            .iter()
            .filter(|(_, h)| h.is_active)
            .map(|(id, h)| {
                let hold = LedgerHold {
                    hold: *id,
                    parent: h.parent,
                    remaining: Minor(h.remaining),
                };
                (*id, hold)
            })
            .collect()
    }

    /// Asserts the invariant of `design.md` 4 for every trading hold.
    pub fn check_against(&self, trading_state: &TradingState) {
        for (ix, hold) in trading_state.holds() {
            assert_eq!(self.total(hold.hold_id), hold.held.0, "hold {ix}");
        }
    }
}
