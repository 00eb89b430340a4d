//! Continuous comparison of chain and ledger: what to compare next, and when a difference is a
//! break. Pure.
//!
//! Subjects are holders of tokens, and the supply of each token. A round compares those that
//! differ, those that the chain's events touched, and some of all subjects in turn, each up to a
//! limit. So its cost does not depend on the number of holders, and every holder has its turn.
//!
//! Ledger and chain change one after the other. A difference is in flight while an operation or a
//! trade of the holder is open. It is a break when it has stayed the same for the window without
//! being in flight. A difference that changes starts its window anew, so a fault of a holder who
//! trades without pause becomes a break at the first pause.

use std::collections::{BTreeMap, BTreeSet};

/// Subjects per round: that differ, and that events touched.
const DIFFERING_MAX: usize = 32;
const TOUCHED_MAX: usize = 64;
/// Touched subjects that are kept. Those beyond it are compared in their turn.
const WAITING_MAX: usize = 100_000;

/// A holder of a token, or a token's supply.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Subject {
    pub token: String,
    /// Empty: the supply.
    pub address: String,
}

/// Result of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No difference, or one that is not old enough.
    NoBreak,
    /// The difference has lasted: a break.
    Break,
    /// A break that is known.
    Known,
    /// Both sides of a break agree.
    Resolved,
}

/// State of a differing subject.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    difference: i128,
    since_us: i64,
    compared_us: i64,
    is_break: bool,
}

/// Subjects to compare, and those that differ.
#[derive(Debug, Default)]
pub struct Comparison {
    window_us: i64,
    touched: BTreeSet<Subject>,
    suspects: BTreeMap<Subject, Suspect>,
}

impl Comparison {
    pub fn new(window_us: i64) -> Self {
        Self {
            window_us,
            ..Self::default()
        }
    }

    /// Notes a holder whose units changed on chain, and the token's supply.
    pub fn touch(&mut self, token: &str, address: &str) {
        for address in [address, ""] {
            if self.touched.len() < WAITING_MAX {
                self.touched.insert(Subject {
                    token: token.to_owned(),
                    address: address.to_owned(),
                });
            }
        }
    }

    /// Goes on comparing the subject of a stored break.
    pub fn follow(&mut self, subject: Subject) {
        let suspect = Suspect {
            difference: 0,
            since_us: 0,
            compared_us: 0,
            is_break: true,
        };
        self.suspects.insert(subject, suspect);
    }

    /// Subjects of the next round, besides those whose turn it is. A suspect is compared at most
    /// once per `pause_us`.
    pub fn take_round(&mut self, now_us: i64, pause_us: i64) -> BTreeSet<Subject> {
        let mut due: Vec<(i64, &Subject)> = (self.suspects.iter())
            .filter(|(_, suspect)| now_us - suspect.compared_us >= pause_us)
            .map(|(subject, suspect)| (suspect.compared_us, subject))
            .collect();
        due.sort();
        let mut round: BTreeSet<Subject> = (due.into_iter())
            .take(DIFFERING_MAX)
            .map(|(_, subject)| subject.clone())
            .collect();
        for _ in 0..TOUCHED_MAX {
            let Some(subject) = self.touched.pop_first() else {
                break;
            };
            round.insert(subject);
        }
        round
    }

    /// Evaluates a comparison: `difference` is chain - ledger.
    pub fn judge(
        &mut self,
        subject: &Subject,
        difference: i128,
        is_in_flight: bool,
        now_us: i64,
    ) -> Verdict {
        if difference == 0 {
            let was_break = self.suspects.remove(subject).is_some_and(|of| of.is_break);
            return match was_break {
                true => Verdict::Resolved,
                false => Verdict::NoBreak,
            };
        }
        let suspect = (self.suspects.entry(subject.clone())).or_insert(Suspect {
            difference,
            since_us: now_us,
            compared_us: now_us,
            is_break: false,
        });
        suspect.compared_us = now_us;
        if suspect.is_break {
            suspect.difference = difference;
            return Verdict::Known;
        }
        if is_in_flight || suspect.difference != difference {
            (suspect.difference, suspect.since_us) = (difference, now_us);
        }
        if is_in_flight || now_us - suspect.since_us < self.window_us {
            return Verdict::NoBreak;
        }
        suspect.is_break = true;
        Verdict::Break
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(address: &str) -> Subject {
        Subject {
            token: "t".to_owned(),
            address: address.to_owned(),
        }
    }

    // rows: R188
    #[test]
    fn r188_a_difference_is_a_break_once_it_has_lasted_out_of_flight() {
        let mut comparison = Comparison::new(100);
        let anna = subject("anna");
        let mut judge = |difference, is_in_flight, now_us| {
            comparison.judge(&anna, difference, is_in_flight, now_us)
        };
        assert_eq!(judge(5, false, 0), Verdict::NoBreak);
        assert_eq!(judge(5, false, 99), Verdict::NoBreak);
        // Another difference, and one in flight, start the window anew.
        assert_eq!(judge(6, false, 100), Verdict::NoBreak);
        assert_eq!(judge(6, true, 150), Verdict::NoBreak);
        assert_eq!(judge(6, true, 400), Verdict::NoBreak);
        assert_eq!(judge(6, false, 499), Verdict::NoBreak);
        assert_eq!(judge(6, false, 500), Verdict::Break);
        assert_eq!(judge(7, true, 600), Verdict::Known);
        assert_eq!(judge(0, false, 700), Verdict::Resolved);
        assert_eq!(judge(0, false, 800), Verdict::NoBreak);
    }

    #[test]
    fn a_round_has_a_limit_however_many_subjects_there_are() {
        let mut comparison = Comparison::new(100);
        for number in 0..1_000 {
            let address = format!("a{number:04}");
            comparison.touch("t", &address);
            comparison.judge(&subject(&format!("s{number}")), 1, false, number);
        }
        let round = comparison.take_round(10_000, 1);
        assert_eq!(round.len(), DIFFERING_MAX + TOUCHED_MAX);
        // The supply, once; then each touched holder in some round.
        let mut seen = round.len();
        for _ in 0..20 {
            seen += comparison.take_round(0, i64::MAX).len();
        }
        assert_eq!(seen, DIFFERING_MAX + 1_001);
        // The suspects that were compared longest ago first, and none twice within its pause.
        assert!(round.contains(&subject("s0")) && !round.contains(&subject("s40")));
        assert!(comparison.take_round(1_000, 10_000).is_empty());
    }
}
