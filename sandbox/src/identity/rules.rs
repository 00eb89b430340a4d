//! Limit checks, pure. A check reserves and uses nothing (T24).

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use types::{BusinessDay, Decimal, LimitType, code_enum};

use super::{Error, IdentityConfig};

/// Which amount of an order or trade counts against the trading limit (T23).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TradingBasis {
    #[default]
    Quantity,
    Notional,
}

/// Default limits.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    deposit: Decimal,
    withdrawal: Decimal,
    trading: Decimal,
    investment: Decimal,
}

impl Defaults {
    pub fn read(config: &IdentityConfig) -> Result<Defaults, Error> {
        let amount = |setting, text: &str| {
            Decimal::from_str(text)
                .ok()
                .filter(|amount| !amount.is_negative())
                .ok_or_else(|| Error::Setting {
                    setting,
                    value: text.to_owned(),
                })
        };
        Ok(Defaults {
            deposit: amount("deposit_daily", &config.deposit_daily)?,
            withdrawal: amount("withdrawal_daily", &config.withdrawal_daily)?,
            trading: amount("trading_daily", &config.trading_daily)?,
            investment: amount("investment_yearly", &config.investment_yearly)?,
        })
    }

    pub fn of(&self, limit_type: LimitType) -> Limit {
        let daily = match limit_type {
            LimitType::Deposit => self.deposit,
            LimitType::Withdrawal => self.withdrawal,
            LimitType::Trading => self.trading,
            LimitType::Investment => self.investment,
        };
        Limit {
            daily,
            refuse_with: String::new(),
        }
    }
}

code_enum! {
    /// State of a limit reservation.
    ReservationState: i32 {
        Reserved = 1 "RESERVED",
        Refused = 2 "REFUSED",
        Confirmed = 3 "CONFIRMED",
        /// The amount is available again.
        Cancelled = 4 "CANCELLED",
    }
}

/// First day of the period in which a limit counts: the day, of INVESTMENT the calendar year (F35).
pub fn period(limit_type: LimitType, day: BusinessDay) -> BusinessDay {
    match limit_type {
        LimitType::Deposit | LimitType::Withdrawal | LimitType::Trading => day,
        LimitType::Investment => day.year_start(),
    }
}

/// A user's limit of one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Per day, of INVESTMENT per year.
    pub daily: Decimal,
    /// If not empty, refuses every check with this text, for tests and demonstrations.
    pub refuse_with: String,
}

impl Limit {
    /// Describes the limit in an audit record.
    pub fn audit_text(&self, limit_type: LimitType) -> String {
        let period = match limit_type {
            LimitType::Investment => "year",
            LimitType::Deposit | LimitType::Withdrawal | LimitType::Trading => "day",
        };
        let daily = format!("{limit_type} at most {} RUB a {period}", self.daily);
        match self.refuse_with.as_str() {
            "" => daily,
            text => format!("{daily}, refused ({text})"),
        }
    }

    /// True if it allows what the other limit refuses: such a change takes two persons (D32).
    pub fn is_above(&self, other: &Limit) -> bool {
        let ends_refusal = self.refuse_with.is_empty() && !other.refuse_with.is_empty();
        self.daily > other.daily || ends_refusal
    }
}

/// The state of a user that affects checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Standing {
    pub blocked: bool,
    pub sanctioned: bool,
    /// A qualified investor: the INVESTMENT limit does not apply (F35).
    pub qualified: bool,
}

impl Standing {
    /// Whether a limit of this type applies to the user.
    pub fn has_limit(self, limit_type: LimitType) -> bool {
        limit_type != LimitType::Investment || !self.qualified
    }
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// `Err` is the refusal text, returned to the client verbatim.
    pub allowed: Result<(), String>,
    pub remaining: Decimal,
}

pub const SANCTIONS_HIT: &str = "Sanctions list hit";
pub const INVESTMENT_EXCEEDED: &str =
    "Yearly investment limit exceeded: the user is not a qualified investor";

/// Checks an amount against the rest of a limit in its period. A block outranks a sanctions hit,
/// which outranks a custom refusal and the limit.
pub fn check(
    standing: Standing,
    limit_type: LimitType,
    limit: &Limit,
    used: Decimal,
    amount: Decimal,
) -> Verdict {
    let left = limit.daily.checked_sub(used).unwrap_or(Decimal::ZERO);
    let remaining = if left.is_negative() {
        Decimal::ZERO
    } else {
        left
    };
    let exceeded = match limit_type {
        LimitType::Deposit => "Daily deposit limit exceeded",
        LimitType::Withdrawal => "Daily withdrawal limit exceeded",
        LimitType::Trading => "Daily trading limit exceeded",
        LimitType::Investment => INVESTMENT_EXCEEDED,
    };
    let allowed = if standing.blocked {
        Err("User is blocked".to_owned())
    } else if standing.sanctioned {
        Err(SANCTIONS_HIT.to_owned())
    } else if !limit.refuse_with.is_empty() {
        Err(limit.refuse_with.clone())
    } else if standing.has_limit(limit_type) && amount > remaining {
        Err(exceeded.to_owned())
    } else {
        Ok(())
    };
    Verdict { allowed, remaining }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn d(text: &str) -> Decimal {
        text.parse().unwrap()
    }

    const GOOD: Standing = Standing {
        blocked: false,
        sanctioned: false,
        qualified: false,
    };

    fn limit(daily: &str) -> Limit {
        Limit {
            daily: d(daily),
            refuse_with: String::new(),
        }
    }

    // rows: R340
    #[test]
    fn r340_the_limit_allows_its_bound_and_refuses_one_kopeck_more() {
        let ask = |used, amount| {
            check(
                GOOD,
                LimitType::Deposit,
                &limit("600000"),
                d(used),
                d(amount),
            )
        };
        assert_eq!(ask("0", "600000.00").allowed, Ok(()));
        assert_eq!(ask("599999.99", "0.01").allowed, Ok(()));
        let over = ask("599999.99", "0.02");
        assert_eq!(over.allowed, Err("Daily deposit limit exceeded".into()));
        assert_eq!(over.remaining, d("0.01"));
        assert_eq!(ask("700000", "1").remaining, Decimal::ZERO);
    }

    // rows: R012
    #[test]
    fn r012_each_limit_type_has_its_own_text() {
        for (limit_type, text) in [
            (LimitType::Deposit, "Daily deposit limit exceeded"),
            (LimitType::Withdrawal, "Daily withdrawal limit exceeded"),
            (LimitType::Trading, "Daily trading limit exceeded"),
            (LimitType::Investment, INVESTMENT_EXCEEDED),
        ] {
            let verdict = check(GOOD, limit_type, &limit("1"), Decimal::ZERO, d("2"));
            assert_eq!(verdict.allowed, Err(text.into()));
        }
    }

    #[test]
    fn a_block_outranks_a_sanctions_hit_and_a_custom_text() {
        let own = Limit {
            refuse_with: "KYC is out of date".into(),
            ..limit("10")
        };
        let ask = |blocked, sanctioned| {
            let standing = Standing {
                blocked,
                sanctioned,
                qualified: false,
            };
            check(standing, LimitType::Trading, &own, Decimal::ZERO, d("1"))
                .allowed
                .unwrap_err()
        };
        assert_eq!(ask(true, true), "User is blocked");
        assert_eq!(ask(false, true), "Sanctions list hit");
        assert_eq!(ask(false, false), "KYC is out of date");
    }

    #[test]
    fn f35_the_yearly_limit_binds_only_investors_who_are_not_qualified() {
        let qualified = Standing {
            qualified: true,
            ..GOOD
        };
        let ask = |standing, limit_type| {
            check(standing, limit_type, &limit("600000"), d("599999"), d("2")).allowed
        };
        let exceeded = Err(INVESTMENT_EXCEEDED.to_owned());
        assert_eq!(ask(GOOD, LimitType::Investment), exceeded);
        assert_eq!(ask(qualified, LimitType::Investment), Ok(()));
        assert!(ask(qualified, LimitType::Trading).is_err());
        // 2027-01-01 is day 20,819.
        let day = BusinessDay::from_number(20_819 + 364);
        let first = BusinessDay::from_number(20_819);
        assert_eq!(period(LimitType::Investment, day), first);
        assert_eq!(period(LimitType::Trading, day), day);
    }
}
