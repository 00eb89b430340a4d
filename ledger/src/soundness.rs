//! Invariants of the working set, asserted in pairs: on rows after reading and on folded rows
//! before writing. A failed assertion is a bug and stops the writer. Cost: constant per row read or
//! changed; independent of the number of stored rows.

use std::collections::HashMap;

use foldhash::fast::RandomState;
use types::Minor;

use crate::{
    book::Book,
    model::{Hold, Id, SubAccount},
};

type Sums<'a> = HashMap<&'a Id, i128, RandomState>;

fn add<'a>(sums: &mut Sums<'a>, id: &'a Id, before: Minor, after: Minor) {
    if before != after {
        *sums.entry(id).or_default() += i128::from(after.0) - i128::from(before.0);
    }
}

impl Book {
    /// After reading: each hold satisfies its equation; each sub-account is covered, and its `held`
    /// is at least the remainder of its holds that were read.
    ///
    /// # Panics
    /// The stored rows violate an invariant.
    pub fn assert_read(&self) {
        let mut left = Sums::default();
        for hold in self.holds.values() {
            hold.assert_equation();
            add(
                &mut left,
                &hold.terms.subaccount_id,
                Minor::ZERO,
                hold.remaining,
            );
        }
        for subaccount in self.subaccounts.values() {
            assert!(
                !subaccount.held.is_negative()
                    && !subaccount.unsettled.is_negative()
                    && subaccount.is_covered(),
                "sub-account read from the store is not covered: {subaccount:?}"
            );
            let left = left.get(&subaccount.terms.subaccount_id);
            assert!(
                left.is_none_or(|left| *left <= i128::from(subaccount.held.0)),
                "holds of {left:?} exceed held of {subaccount:?}"
            );
        }
    }

    /// Before writing: balances of an instrument sum to an unchanged total, and `held` of a
    /// sub-account changes with the remainder of its holds.
    ///
    /// # Panics
    /// The fold created or lost money.
    pub fn assert_balanced(&self) {
        let (mut balances, mut reserved) = (Sums::default(), Sums::default());
        for change in self.subaccounts.changes() {
            let figure = |of: fn(&SubAccount) -> Minor| {
                let side = |row: Option<&SubAccount>| row.map_or(Minor::ZERO, of);
                (side(change.before), side(change.after))
            };
            if let Some(SubAccount { terms, .. }) = change.after.or(change.before) {
                let (before, after) = figure(|row| row.balance);
                add(&mut balances, &terms.instrument_id, before, after);
                let (before, after) = figure(|row| row.held);
                add(&mut reserved, &terms.subaccount_id, before, after);
            }
        }
        for change in self.holds.changes() {
            let left = |row: Option<&Hold>| row.map_or(Minor::ZERO, |hold| hold.remaining);
            if let Some(Hold { terms, .. }) = change.after.or(change.before) {
                // Sides swapped: the two changes of a sub-account must cancel out.
                let (before, after) = (left(change.before), left(change.after));
                add(&mut reserved, &terms.subaccount_id, after, before);
            }
        }
        let is_zero = |sums: &Sums<'_>| sums.values().all(|sum| *sum == 0);
        assert!(
            is_zero(&balances),
            "operations are not balanced: {balances:?}"
        );
        assert!(
            is_zero(&reserved),
            "held differs from the remainder of holds: {reserved:?}"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::SubAccountTerms;

    fn subaccount(user: &str, balance: i64, held: i64) -> SubAccount {
        SubAccount {
            terms: Arc::new(SubAccountTerms {
                subaccount_id: format!("{user}:CFA-RUB").into(),
                account_id: format!("{user}:MAIN").into(),
                user_id: user.into(),
                instrument_id: "CFA-RUB".into(),
                decimals: 2,
                may_be_negative: false,
                created_at_us: 0,
            }),
            balance: Minor(balance),
            held: Minor(held),
            unsettled: Minor::ZERO,
            version: 1,
            freeze: 0,
            closed: false,
            updated_at_us: 0,
            last_posting: 0,
        }
    }

    /// Two sub-accounts of 10 each, changed to these figures (balance, held).
    fn changed(to: [(i64, i64); 2]) -> Book {
        let mut book = Book::at(0);
        for user in ["u1", "u2"] {
            let row = subaccount(user, 10, 0);
            book.subaccounts.load(row.terms.subaccount_id.clone(), row);
        }
        book.assert_read();
        for (user, (balance, held)) in ["u1", "u2"].into_iter().zip(to) {
            let row = subaccount(user, balance, held);
            book.subaccounts.put(row.terms.subaccount_id.clone(), row);
        }
        book
    }

    #[test]
    fn money_that_only_moves_is_balanced() {
        changed([(3, 0), (17, 0)]).assert_balanced();
    }

    #[test]
    #[should_panic(expected = "not balanced")]
    fn a_created_amount_is_found_before_it_is_written() {
        changed([(3, 0), (18, 0)]).assert_balanced();
    }

    #[test]
    #[should_panic(expected = "held differs")]
    fn a_held_amount_without_a_hold_is_found_before_it_is_written() {
        changed([(3, 1), (17, 0)]).assert_balanced();
    }
}
