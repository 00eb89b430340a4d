//! Continuous comparison of chain and ledger: what to compare next, and when a difference is a
//! break. Pure.
//!
//! Subjects are holders of tokens, and the supply of each token. A round compares those that
//! differ, those that the chain's events touched, and some of all subjects in turn, each up to a
//! limit. So its cost does not depend on the number of holders, and every holder has its turn.
//!
//! Ledger and chain change one after the other. A difference that has stayed the same for the
//! window is *due*: the caller finds out whether it is in flight, that is whether an operation or a
//! trade of the holder is open, or a distribution moves as much ([`Pending`]). If it is, the window
//! starts anew, as it does for a difference that changes: a fault of a holder who trades without
//! pause becomes a break at the first pause. If it is not, twice in a row, the difference is a
//! break. Once is not enough: an operation may end between the reads of both sides and of the open
//! operations.
//!
//! A difference that two persons have accepted counts as none until it changes.

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
    /// Both sides of a break agree, or its difference is accepted. It stays a break until
    /// [`Comparison::forget`].
    Resolved,
    /// An accepted difference has gone. It stays accepted until [`Comparison::forget_accepted`].
    Agreed,
}

/// The differences of a subject that its pending moves explain. Each move may have been made on one
/// side alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pending {
    least: i128,
    most: i128,
}

impl Pending {
    /// Adds a move. `difference`: chain - ledger while one side alone has made it.
    pub fn add(&mut self, difference: i128) {
        self.least += difference.min(0);
        self.most += difference.max(0);
    }

    /// True if some of the moves, made on one side alone, may cause the difference.
    pub fn explains(&self, difference: i128) -> bool {
        (self.least..=self.most).contains(&difference)
    }
}

/// State of a differing subject.
#[derive(Clone, Copy, Debug)]
struct Suspect {
    difference: i128,
    since_us: i64,
    compared_us: i64,
    /// Found due and not in flight by the last comparison.
    is_suspected: bool,
    is_break: bool,
}

/// Subjects to compare, and those that differ.
#[derive(Debug, Default)]
pub struct Comparison {
    window_us: i64,
    touched: BTreeSet<Subject>,
    suspects: BTreeMap<Subject, Suspect>,
    accepted: BTreeMap<Subject, i128>,
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
            is_suspected: false,
            is_break: true,
        };
        self.suspects.insert(subject, suspect);
    }

    /// Counts a difference as none from now on.
    pub fn accept(&mut self, subject: Subject, difference: i128) {
        self.accepted.insert(subject, difference);
    }

    /// Continues with the subjects of a token at the one that replaces it.
    pub fn replace(&mut self, old: &str, new: &str) {
        let moved = |subject: Subject| match subject.token == old {
            true => Subject {
                token: new.to_owned(),
                ..subject
            },
            false => subject,
        };
        let touched = std::mem::take(&mut self.touched);
        self.touched = touched.into_iter().map(moved).collect();
        let suspects = std::mem::take(&mut self.suspects).into_iter();
        self.suspects = suspects.map(|(of, state)| (moved(of), state)).collect();
        let accepted = std::mem::take(&mut self.accepted).into_iter();
        self.accepted = accepted.map(|(of, units)| (moved(of), units)).collect();
    }

    /// Ends a break whose end is stored.
    pub fn forget(&mut self, subject: &Subject) {
        self.suspects.remove(subject);
    }

    /// Ends an acceptance whose end is stored.
    pub fn forget_accepted(&mut self, subject: &Subject) {
        self.accepted.remove(subject);
    }

    /// Puts the subjects of a failed round back.
    pub fn put_back(&mut self, subjects: BTreeSet<Subject>) {
        for subject in subjects {
            if self.touched.len() < WAITING_MAX {
                self.touched.insert(subject);
            }
        }
    }

    /// True if the difference is a break unless it is in flight.
    pub fn is_due(&self, subject: &Subject, difference: i128, now_us: i64) -> bool {
        let is_old = |suspect: &Suspect| {
            !suspect.is_break
                && suspect.difference == difference
                && now_us - suspect.since_us >= self.window_us
        };
        self.suspects.get(subject).is_some_and(is_old)
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
        // Also if it will not be compared, since its token is quarantined: others have their turn.
        for subject in &round {
            if let Some(suspect) = self.suspects.get_mut(subject) {
                suspect.compared_us = now_us;
            }
        }
        for _ in 0..TOUCHED_MAX {
            let Some(subject) = self.touched.pop_first() else {
                break;
            };
            round.insert(subject);
        }
        round
    }

    /// Evaluates a comparison: `difference` is chain - ledger. `is_in_flight` matters if
    /// [`Self::is_due`].
    pub fn judge(
        &mut self,
        subject: &Subject,
        difference: i128,
        is_in_flight: bool,
        now_us: i64,
    ) -> Verdict {
        let accepted = self.accepted.get(subject).copied();
        if difference == 0 || accepted == Some(difference) {
            if self.suspects.get(subject).is_some_and(|of| of.is_break) {
                return Verdict::Resolved;
            }
            self.suspects.remove(subject);
            return match accepted {
                Some(_) if difference == 0 => Verdict::Agreed,
                _ => Verdict::NoBreak,
            };
        }
        let suspect = (self.suspects.entry(subject.clone())).or_insert(Suspect {
            difference,
            since_us: now_us,
            compared_us: now_us,
            is_suspected: false,
            is_break: false,
        });
        suspect.compared_us = now_us;
        if suspect.is_break {
            suspect.difference = difference;
            return Verdict::Known;
        }
        if is_in_flight || suspect.difference != difference {
            (suspect.difference, suspect.since_us) = (difference, now_us);
            suspect.is_suspected = false;
        }
        if is_in_flight || now_us - suspect.since_us < self.window_us {
            return Verdict::NoBreak;
        }
        if !suspect.is_suspected {
            suspect.is_suspected = true;
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
        // Twice in a row.
        assert_eq!(judge(6, false, 500), Verdict::NoBreak);
        assert_eq!(judge(6, true, 501), Verdict::NoBreak);
        assert_eq!(judge(6, false, 601), Verdict::NoBreak);
        assert_eq!(judge(6, false, 602), Verdict::Break);
        assert_eq!(judge(7, true, 700), Verdict::Known);
        // Until its end is stored.
        assert_eq!(judge(0, false, 800), Verdict::Resolved);
        assert_eq!(judge(0, false, 801), Verdict::Resolved);
        comparison.forget(&anna);
        assert_eq!(comparison.judge(&anna, 0, false, 900), Verdict::NoBreak);
    }

    // rows: R188
    #[test]
    fn r188_breaks_and_accepted_differences_go_on_in_a_replaced_token() {
        let mut comparison = Comparison::new(0);
        let [anna, boris, other] = ["anna", "boris", "other"].map(subject);
        let other = Subject {
            token: "u".to_owned(),
            ..other
        };
        comparison.follow(anna.clone());
        comparison.accept(boris.clone(), 5);
        comparison.touch("u", "other");
        comparison.replace("t", "new");
        let replaced = |of: &Subject| Subject {
            token: "new".to_owned(),
            address: of.address.clone(),
        };
        let [of_anna, of_boris] = [&anna, &boris].map(replaced);
        let round = comparison.take_round(1, 0);
        assert!(round.contains(&of_anna) && round.contains(&other));
        assert!(!round.contains(&anna));
        assert_eq!(comparison.judge(&of_anna, 3, false, 2), Verdict::Known);
        assert_eq!(comparison.judge(&of_boris, 5, false, 2), Verdict::NoBreak);
    }

    // rows: R188
    #[test]
    fn r188_an_accepted_difference_is_none_until_it_changes() {
        let mut comparison = Comparison::new(0);
        let anna = subject("anna");
        assert!(!comparison.is_due(&anna, 5, 0));
        assert_eq!(comparison.judge(&anna, 5, false, 0), Verdict::NoBreak);
        assert!(comparison.is_due(&anna, 5, 0) && !comparison.is_due(&anna, 6, 0));
        assert_eq!(comparison.judge(&anna, 5, false, 1), Verdict::Break);
        comparison.accept(anna.clone(), 5);
        assert_eq!(comparison.judge(&anna, 5, false, 2), Verdict::Resolved);
        comparison.forget(&anna);
        assert_eq!(comparison.judge(&anna, 5, false, 3), Verdict::NoBreak);
        assert_eq!(comparison.judge(&anna, 6, false, 4), Verdict::NoBreak);
        assert_eq!(comparison.judge(&anna, 6, false, 5), Verdict::Break);
        assert_eq!(comparison.judge(&anna, 0, false, 6), Verdict::Resolved);
        comparison.forget(&anna);
        assert_eq!(comparison.judge(&anna, 0, false, 7), Verdict::Agreed);
        comparison.forget_accepted(&anna);
        assert_eq!(comparison.judge(&anna, 0, false, 8), Verdict::NoBreak);
        assert_eq!(comparison.judge(&anna, 5, false, 9), Verdict::NoBreak);
        assert_eq!(comparison.judge(&anna, 5, false, 10), Verdict::Break);
    }

    // rows: R188
    #[test]
    fn r188_pending_moves_explain_differences_up_to_their_amounts() {
        let mut pending = Pending::default();
        assert!(!pending.explains(1));
        pending.add(5);
        pending.add(2);
        pending.add(-3);
        let explained = (-9i128..=9).filter(|difference| pending.explains(*difference));
        assert!(explained.eq(-3i128..=7));
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
