//! What a reading has read so far, for display.

use std::fmt;
use std::sync::Mutex;

/// Parts of a reading. The supplies of all instruments are read first, then the holders of each
/// instrument, in the ledger and on chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    ChainSupply,
    LedgerHolders,
    ChainHolders,
    Bank,
}

/// Counts of a reading so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Number of the reading, from 1.
    pub reading: u32,
    /// The part being read.
    pub part: Part,
    /// Instruments whose holders were read on both sides.
    pub instruments: usize,
    /// All instruments.
    pub instruments_total: usize,
    /// Sub-accounts in the ledger, of users and of the house.
    pub ledger_holders: usize,
    /// Holders on chain.
    pub chain_holders: usize,
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part = match self.part {
            Part::ChainSupply => "chain supply",
            Part::LedgerHolders => "ledger holders",
            Part::ChainHolders => "chain holders",
            Part::Bank => "bank",
        };
        let (read, total) = (self.instruments, self.instruments_total);
        let (ledger, chain) = (self.ledger_holders, self.chain_holders);
        write!(
            f,
            "reading {}, {part}: {read} of {total} instruments, {ledger} in the ledger, {chain} on chain",
            self.reading
        )
    }
}

/// A step of the proof.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A part of a reading began, or has read one more page.
    Reads(Counts),
    /// A reading has unexplained differences and is repeated.
    Repeats {
        reading: u32,
        differences: usize,
        /// Operations await the chain.
        is_settling: bool,
    },
}

/// Counts the rows of one reading and reports each change.
pub struct Meter<'a> {
    counts: Mutex<Counts>,
    report: &'a (dyn Fn(Progress) + Send + Sync),
}

impl<'a> Meter<'a> {
    pub fn new(reading: u32, report: &'a (dyn Fn(Progress) + Send + Sync)) -> Self {
        let counts = Counts {
            reading,
            part: Part::ChainSupply,
            instruments: 0,
            instruments_total: 0,
            ledger_holders: 0,
            chain_holders: 0,
        };
        Self {
            counts: Mutex::new(counts),
            report,
        }
    }

    pub fn update(&self, change: impl FnOnce(&mut Counts)) {
        let counts = {
            let mut counts = self.counts.lock().expect("no panic under the lock");
            change(&mut counts);
            *counts
        };
        (self.report)(Progress::Reads(counts));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_update_reports_the_counts_so_far() {
        let seen = Mutex::new(Vec::new());
        let report = |progress: Progress| seen.lock().unwrap().push(progress);
        let meter = Meter::new(2, &report);
        meter.update(|counts| counts.instruments_total = 3);
        meter.update(|counts| counts.ledger_holders += 1_000);
        meter.update(|counts| counts.part = Part::ChainHolders);
        meter.update(|counts| counts.chain_holders += 7);
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 4);
        let Progress::Reads(last) = seen[3] else {
            panic!("{:?}", seen[3]);
        };
        assert_eq!((last.ledger_holders, last.chain_holders), (1_000, 7));
        assert_eq!(
            last.to_string(),
            "reading 2, chain holders: 0 of 3 instruments, 1000 in the ledger, 7 on chain"
        );
    }
}
