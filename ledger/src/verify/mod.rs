//! Verifies every block, posting, balance and hold of a ledger. Read-only.
//!
//! Checks in this order, up to the first fault:
//! - The blocks form a chain.
//! - The operations and postings of each block are complete, in order, and match its hash.
//! - Each posting follows the previous one on both of its sub-accounts.
//! - No operation or posting is outside the chain.
//! - Status, finality, transaction and reversal of every operation agree with one another. The
//!   chain does not seal them.
//! - Balance, version, held and unsettled of every sub-account match its postings and holds.
//! - The user index of operations is complete, and each link of a posting leads to the previous
//!   one.
//! - Every hold satisfies its equation, and postings that name it paid its consumed amount. Its
//!   terms agree with its sub-account and its parent hold.
//! - The balances of every instrument sum to zero.
//! - The audit records form a chain, and each matches its hash.
//!
//! A hash mismatch names only the block, so a posting that does not follow the previous one is
//! reported first. Memory: a page of rows and the last balances of [`BALANCES_MAX`] sub-accounts;
//! other balances are looked up.

mod checks;
mod found;
mod heads;
mod referenced;

use std::collections::HashMap;

pub use found::{Fault, Verified};
pub use heads::Heads;
pub use referenced::{ReferencedOperation, ReferencedOperations};

use crate::{
    Error, LedgerConfig,
    audit::{self, Hash, Head, Sealer},
    model::OperationStatus,
    repo::{self, BlockRow, LedgerSnapshot, SealedOperation, SealedPosting},
};
use async_recursion::async_recursion as boxed;

const NO_POSTING_BEFORE: &str = "posting of the previous version";

/// Sub-accounts whose last balance is kept in memory.
const BALANCES_MAX: usize = 100_000;

/// Verifies the configured ledger, which may be in use by a running node.
///
/// # Errors
/// [`Error::NoLedger`], [`Error::OldSchema`], [`Error::Url`], [`Error::Store`]: the ledger is
/// missing or unreadable. A fault in its records is not an error: see [`Verified::fault`].
#[boxed]
pub async fn verify(config: &LedgerConfig) -> Result<Verified, Error> {
    let mut check = Check {
        snapshot: repo::snapshot(config).await?,
        done: Verified::default(),
        balances: HashMap::new(),
    };
    let fault = check.run().await?;
    check.snapshot.close().await?;
    Ok(Verified {
        fault,
        ..check.done
    })
}

type Found = Result<Option<Fault>, Error>;

/// The block whose operations are being verified.
struct OpenBlock<'a> {
    row: &'a BlockRow,
    sealer: Sealer,
    operations: i64,
    postings: i64,
}

struct Check {
    snapshot: Box<dyn LedgerSnapshot>,
    done: Verified,
    /// Version and balance of the last posting seen, per sub-account.
    balances: HashMap<String, (i64, i64)>,
}

/// Returns the fault, if there is one.
macro_rules! stop {
    ($found:expr) => {
        if let Some(fault) = $found {
            return Ok(Some(fault));
        }
    };
}

impl Check {
    async fn run(&mut self) -> Found {
        if let Some(fault) = self.chain().await? {
            // The lookup follows links, so a broken link is the likely cause. Report it instead.
            if fault.differs == NO_POSTING_BEFORE {
                stop!(self.links().await?);
            }
            return Ok(Some(fault));
        }
        stop!(self.unsealed().await?);
        stop!(self.states().await?);
        stop!(self.subaccounts().await?);
        stop!(self.links().await?);
        stop!(self.holds().await?);
        for (instrument_id, sum) in self.snapshot.sums().await? {
            self.done.instruments += 1;
            if sum != 0 {
                return Ok(Some(Fault {
                    instrument_id: Some(instrument_id),
                    ..Fault::new("sum of all balances", 0, sum)
                }));
            }
        }
        self.records().await
    }

    async fn records(&mut self) -> Found {
        let mut last = (0, [0; 32]);
        loop {
            let page = self.snapshot.audit_records(last.0).await?;
            if page.is_empty() {
                return Ok(None);
            }
            for row in &page {
                stop!(checks::audit_record(last, row));
                self.done.audit_records += 1;
                let hash = Hash::try_from(row.hash.as_slice()).unwrap_or_default();
                last = (row.sequence, hash);
            }
        }
    }

    async fn chain(&mut self) -> Found {
        let mut head: Option<Head> = None;
        loop {
            let after = head.as_ref().map_or(-1, |head| head.block as i64);
            let blocks = self.snapshot.blocks(after).await?;
            let Some(last) = blocks.last() else {
                return Ok(head
                    .is_none()
                    .then(|| Fault::in_block(0, "block", "the first block", "none")));
            };
            let mut operations = Pages::new(after, last.block);
            for row in &blocks {
                stop!(checks::follows(head.as_ref(), row));
                let hash = Hash::try_from(row.hash.as_slice()).unwrap_or_default();
                if let Some(head) = &head {
                    stop!(self.block(head, row, &mut operations).await?);
                    self.done.blocks += 1;
                }
                self.done.head = audit::hex(&row.hash);
                head = Some(Head {
                    block: row.block.unsigned_abs(),
                    hash,
                    sealed_at_us: row.sealed_at_us,
                });
            }
        }
    }

    /// Verifies the operations, counts and hash of a block.
    async fn block(&mut self, head: &Head, row: &BlockRow, pages: &mut Pages) -> Found {
        let mut open = OpenBlock {
            row,
            sealer: Sealer::after(head, row.sealed_at_us),
            operations: 0,
            postings: 0,
        };
        while let Some((operation, postings)) =
            pages.next_of(&mut *self.snapshot, row.block).await?
        {
            stop!(self.operation(&mut open, &operation, &postings).await?);
        }
        let counts = [
            ("operations", row.operations, open.operations),
            ("postings", row.postings, open.postings),
        ];
        for (name, recorded, counted) in counts {
            if recorded != counted {
                return Ok(Some(Fault::in_block(
                    row.block,
                    &format!("number of {name}"),
                    recorded,
                    counted,
                )));
            }
        }
        let hash = open.sealer.seal().hash;
        let differs = "hash (terms or order of its operations and postings were changed)";
        Ok((row.hash != hash)
            .then(|| Fault::in_block(row.block, differs, audit::hex(&row.hash), audit::hex(&hash))))
    }

    async fn operation(
        &mut self,
        open: &mut OpenBlock<'_>,
        operation: &SealedOperation,
        postings: &[SealedPosting],
    ) -> Found {
        let block = open.row.block;
        let fault = |differs: &str, expected: i64, found: &dyn ToString| Fault {
            operation_id: Some(operation.operation_id.clone()),
            ..Fault::in_block(block, differs, expected, found.to_string())
        };
        let place = operation.place.unwrap_or(-1);
        if place != open.operations {
            return Ok(Some(fault("place in its block", open.operations, &place)));
        }
        if postings.is_empty() {
            return Ok(Some(fault("posting of ordinal", 0, &"none")));
        }
        open.operations += 1;
        self.done.operations += 1;
        open.sealer.operation(&operation.record());
        for (posting, ordinal) in postings.iter().zip(0..) {
            if posting.ordinal != ordinal {
                return Ok(Some(fault("posting of ordinal", ordinal.into(), &"none")));
            }
            open.postings += 1;
            self.done.postings += 1;
            open.sealer.posting(&posting.record());
            let debited = posting.debit_balance_after.checked_add(posting.amount);
            let credited = posting.credit_balance_after.checked_sub(posting.amount);
            let sides = [
                (
                    &posting.debit_subaccount_id,
                    posting.debit_version,
                    posting.debit_balance_after,
                    debited,
                ),
                (
                    &posting.credit_subaccount_id,
                    posting.credit_version,
                    posting.credit_balance_after,
                    credited,
                ),
            ];
            for (subaccount_id, version, after, before) in sides {
                let place = (block, place, ordinal);
                let found = self.side(place, subaccount_id, version, after, before);
                if let Some(fault) = found.await? {
                    return Ok(Some(Fault {
                        block: Some(block),
                        operation_id: Some(operation.operation_id.clone()),
                        posting_id: Some(posting.posting_id.clone()),
                        subaccount_id: Some(subaccount_id.clone()),
                        ..fault
                    }));
                }
            }
        }
        Ok(None)
    }

    /// Checks that a posting follows the previous one of this sub-account. `before` is the previous
    /// balance, computed from `after` and the amount.
    async fn side(
        &mut self,
        place: (i64, i64, i32),
        subaccount_id: &str,
        version: i64,
        after: i64,
        before: Option<i64>,
    ) -> Found {
        let known = match self.balances.get(subaccount_id) {
            Some(known) => Some(*known),
            None if version <= 1 => Some((0, 0)),
            None => self.look_up(place, subaccount_id, version - 1).await?,
        };
        let Some((last, balance)) = known else {
            return Ok(Some(Fault::new(NO_POSTING_BEFORE, version - 1, "none")));
        };
        if version != last + 1 {
            return Ok(Some(Fault::new("version", last + 1, version)));
        }
        if before != Some(balance) {
            let found =
                before.map_or_else(|| "out of range".to_owned(), |before| before.to_string());
            return Ok(Some(Fault::new(
                "previous balance (running balance and amount together)",
                balance,
                found,
            )));
        }
        if self.balances.len() >= BALANCES_MAX {
            self.balances.clear();
        }
        self.balances
            .insert(subaccount_id.to_owned(), (version, after));
        Ok(None)
    }

    /// Version and balance of the posting that produced a version; `None` if it is not before
    /// `place`.
    async fn look_up(
        &mut self,
        place: (i64, i64, i32),
        subaccount_id: &str,
        version: i64,
    ) -> Result<Option<(i64, i64)>, Error> {
        let found = self
            .snapshot
            .version_posting(subaccount_id, version)
            .await?;
        Ok(found
            .filter(|found| {
                let position = (found.block, found.place, found.ordinal);
                position < (Some(place.0), Some(place.1), place.2)
            })
            .map(|found| (version, found.balance)))
    }

    /// Checks that no operation or posting is outside the chain.
    async fn unsealed(&mut self) -> Found {
        if let Some((operation_id, block)) = self.snapshot.operation_without_block().await? {
            return Ok(Some(Fault {
                block,
                operation_id: Some(operation_id),
                ..Fault::new("sealed block", "a block of the chain", "none")
            }));
        }
        let dangling = self.snapshot.dangling_posting().await?;
        Ok(dangling.map(|(operation_id, posting_id, missing)| Fault {
            operation_id: Some(operation_id),
            posting_id: Some(posting_id),
            ..Fault::new("referenced row", missing, "none")
        }))
    }

    /// Checks the mutable columns of operations.
    async fn states(&mut self) -> Found {
        let found = self.snapshot.contradictory_operation().await?;
        Ok(found.map(|(operation_id, differs, status)| Fault {
            operation_id: Some(operation_id),
            ..Fault::new(differs, "agreeing columns", status_text(status))
        }))
    }

    /// Checks that the user index of operations is complete and that links lead to the previous
    /// posting.
    async fn links(&mut self) -> Found {
        if let Some((operation_id, user_id)) = self.snapshot.unindexed_operation().await? {
            return Ok(Some(Fault {
                operation_id: Some(operation_id),
                ..Fault::new(
                    "list of operations",
                    format!("in the list of {user_id}"),
                    "none",
                )
            }));
        }
        let broken = self.snapshot.broken_link().await?;
        Ok(
            broken.map(|(operation_id, posting_id, subaccount_id)| Fault {
                operation_id,
                posting_id,
                subaccount_id: Some(subaccount_id),
                ..Fault::new("linked posting", "the previous one", "another")
            }),
        )
    }

    async fn subaccounts(&mut self) -> Found {
        self.snapshot.fill_temp_tables().await?;
        let mut after = String::new();
        loop {
            let page = self.snapshot.subaccounts(&after).await?;
            let Some(last) = page.last() else {
                return Ok(None);
            };
            after.clone_from(&last.subaccount_id);
            for row in &page {
                self.done.sub_accounts += 1;
                stop!(checks::subaccount(row));
            }
        }
    }

    async fn holds(&mut self) -> Found {
        let mut after = String::new();
        loop {
            let page = self.snapshot.holds(&after).await?;
            let Some(last) = page.last() else {
                return Ok(None);
            };
            after.clone_from(&last.hold_id);
            for row in &page {
                self.done.holds += 1;
                stop!(checks::hold(row));
            }
        }
    }
}

fn status_text(code: i64) -> String {
    let status = i32::try_from(code)
        .ok()
        .and_then(OperationStatus::from_code);
    status.map_or_else(|| code.to_string(), |status| status.as_str().to_owned())
}

/// Reads operations in chain order, page by page.
struct Pages {
    read_to: (i64, i64),
    through: i64,
    page: std::collections::VecDeque<(SealedOperation, Vec<SealedPosting>)>,
    is_last: bool,
}

impl Pages {
    fn new(after_block: i64, through: i64) -> Self {
        Pages {
            read_to: (after_block, i64::MAX),
            through,
            page: std::collections::VecDeque::new(),
            is_last: false,
        }
    }

    /// Returns the next operation with its postings, if it belongs to this block.
    async fn next_of(
        &mut self,
        snapshot: &mut dyn LedgerSnapshot,
        block: i64,
    ) -> Result<Option<(SealedOperation, Vec<SealedPosting>)>, Error> {
        if self.page.is_empty() && !self.is_last {
            let page = snapshot.operations(self.read_to, self.through).await?;
            match page.last() {
                Some((last, _)) => {
                    self.read_to = (last.block.unwrap_or(block), last.place.unwrap_or(i64::MAX));
                }
                None => self.is_last = true,
            }
            self.page = page.into();
        }
        let is_of_block = |(operation, _): &(SealedOperation, _)| operation.block == Some(block);
        Ok(self
            .page
            .front()
            .is_some_and(is_of_block)
            .then(|| self.page.pop_front())
            .flatten())
    }
}
