//! Checks of one block, sub-account or hold against the rows that it depends on. Pure.

use super::Fault;
use crate::{
    audit::{self, Hash, Head},
    model::HoldStatus,
    repo::{BlockRow, HoldState, RecordRow, SubAccountState},
};

/// Checks that a block follows the one before it.
pub fn follows(head: Option<&Head>, row: &BlockRow) -> Option<Fault> {
    let (number, previous) = head.map_or((0, [0; 32]), |head| (head.block as i64 + 1, head.hash));
    if row.block != number {
        return Some(Fault::in_block(number, "block", number, "none"));
    }
    if row.previous_hash != previous {
        return Some(Fault::in_block(
            number,
            "previous hash",
            audit::hex(&previous),
            audit::hex(&row.previous_hash),
        ));
    }
    let is_first_changed = number == 0 && row.hash != [0; 32];
    is_first_changed
        .then(|| Fault::in_block(0, "hash", audit::hex(&[0; 32]), audit::hex(&row.hash)))
}

/// Checks that an audit record follows the one before it (sequence, hash) and matches its hash.
pub fn audit_record(last: (i64, Hash), row: &RecordRow) -> Option<Fault> {
    let broken = row.check(audit::SERVICE, last)?;
    Some(Fault {
        audit_record: Some(broken.sequence),
        ..Fault::new(broken.differs, broken.expected, broken.found)
    })
}

pub fn subaccount(row: &SubAccountState) -> Option<Fault> {
    let (version, balance) = row.last_posting();
    let differs = [
        ("version", i128::from(version), row.version),
        ("balance", i128::from(balance), row.balance),
        ("held", row.active_holds_total(), row.held),
        ("unsettled", row.open_unsettled_total(), row.unsettled),
    ];
    differs
        .into_iter()
        .find(|(_, expected, found)| *expected != i128::from(*found))
        .map(|(name, expected, found)| Fault {
            subaccount_id: Some(row.subaccount_id.clone()),
            ..Fault::new(name, expected, found)
        })
}

pub fn hold(row: &HoldState) -> Option<Fault> {
    let fault = |differs: &str, expected: i128, found: i128| {
        Some(Fault {
            hold_id: Some(row.hold_id.clone()),
            ..Fault::new(differs, expected, found)
        })
    };
    if !row.terms_agree() {
        return Some(Fault {
            hold_id: Some(row.hold_id.clone()),
            ..Fault::new(
                "terms of the hold",
                "those of its sub-account and parent hold",
                "others",
            )
        });
    }
    let sum = |parts: &[i64]| parts.iter().copied().map(i128::from).sum::<i128>();
    let left = sum(&[row.amount, row.returned_by_children]);
    let right = sum(&[row.remaining, row.split_off, row.consumed, row.released]);
    if left != right {
        return fault("remaining + split off + consumed + released", left, right);
    }
    if row.status != HoldStatus::Active.code() && row.remaining != 0 {
        return fault(
            "remaining of a hold that has ended",
            0,
            row.remaining.into(),
        );
    }
    // Without a destination a hold may be consumed without a posting (T10).
    let consumed = i128::from(row.consumed);
    let is_paid = if row.destination_subaccount_id.is_some() {
        consumed == row.postings_total()
    } else {
        consumed >= row.postings_total()
    };
    if is_paid {
        None
    } else {
        fault(
            "consumed (sum of the postings that name the hold)",
            row.postings_total(),
            consumed,
        )
    }
}
