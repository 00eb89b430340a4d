//! The life of a sealed batch: `sealed -> posted -> submitted -> included -> final`, a table of what to do next
//! and what an answer changes.
//!
//! Every step may be repeated: the ledger answers a posted batch with the stored result, the chain accepts a
//! batch id once, an operation is finalized once, a reversal is made once. So the shell does the step, keeps
//! the state, and after a crash simply does the step again. No chain step is asked for before the ledger has
//! the batch (`design.md` 4). A trade that the contract leaves out is sent once more in a batch of its own;
//! left out again it is bust: its operations are reversed (T21).

types::code_enum! {
    /// How far a batch is.
    #[derive(PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "SCREAMING_SNAKE_CASE")]
    State: i32 {
        /// Membership frozen, not yet known to be in the ledger.
        Sealed = 1 "SEALED",
        /// The ledger has it.
        Posted = 2 "POSTED",
        /// The chain service has taken it.
        Submitted = 3 "SUBMITTED",
        /// Final on chain, not yet in the ledger.
        Included = 4 "INCLUDED",
        Final = 5 "FINAL",
    }
}

/// What to do next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Post the stored request to the ledger.
    Post,
    /// Send these trades to the chain under the batch id of this attempt.
    Submit {
        attempt: u8,
        trades: Vec<u32>,
    },
    /// Ask how the batch of this attempt does.
    Await {
        attempt: u8,
    },
    /// Finalize the operations of these trades with the transaction's hash.
    Finalize {
        trades: Vec<u32>,
        tx_hash: String,
    },
    /// Reverse the operations of these trades.
    Bust {
        trades: Vec<u32>,
    },
    Done,
}

/// What came of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Posted,
    Submitted,
    /// The transaction is final; these trades were left out.
    Included {
        tx_hash: String,
        failed: Vec<u32>,
    },
    /// Nothing of the batch went through.
    Dropped,
    Finalized,
    Busted,
}

/// An answer that does not belong to the step that was asked for: our own bug or a store that was tampered with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("batch is {state:?} and cannot take {answer:?}")]
pub struct Misplaced {
    pub state: State,
    pub answer: Answer,
}

/// Attempts to bring a trade to the chain before it is bust.
pub const ATTEMPTS_MAX: u8 = 2;

/// One batch under way. Serialized as it stands into the store.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Saga {
    pub state: State,
    /// From 1.
    pub attempt: u8,
    /// Trades of the running attempt, as indices into the batch.
    pub open: Vec<u32>,
    /// Trades that this attempt left out.
    pub failed: Vec<u32>,
    /// Trades given up.
    pub bust: Vec<u32>,
    /// Hash of the running attempt's transaction, once final.
    pub tx_hash: Option<String>,
}

impl Saga {
    pub fn new(trades: u32) -> Self {
        Self {
            state: State::Sealed,
            attempt: 1,
            open: (0..trades).collect(),
            failed: Vec::new(),
            bust: Vec::new(),
            tx_hash: None,
        }
    }

    /// What to do next; the same until an answer is handled.
    pub fn next(&self) -> Step {
        match self.state {
            State::Sealed => Step::Post,
            State::Posted => Step::Submit {
                attempt: self.attempt,
                trades: self.open.clone(),
            },
            State::Submitted => Step::Await {
                attempt: self.attempt,
            },
            State::Included => {
                let done: Vec<u32> = self
                    .open
                    .iter()
                    .copied()
                    .filter(|trade| !self.failed.contains(trade))
                    .collect();
                match &self.tx_hash {
                    Some(tx_hash) if !done.is_empty() => Step::Finalize {
                        trades: done,
                        tx_hash: tx_hash.clone(),
                    },
                    // Only the last attempt comes here with nothing to finalize.
                    _ => Step::Bust {
                        trades: self.bust.clone(),
                    },
                }
            }
            State::Final => Step::Done,
        }
    }

    /// Takes the answer to [`Self::next`].
    pub fn handle_answer(&mut self, answer: Answer) -> Result<(), Misplaced> {
        match (self.state, &answer) {
            (State::Sealed, Answer::Posted) => {
                self.state = if self.open.is_empty() {
                    State::Final
                } else {
                    State::Posted
                };
            }
            (State::Posted, Answer::Submitted) => self.state = State::Submitted,
            (State::Submitted, Answer::Included { tx_hash, failed }) => {
                self.tx_hash = Some(tx_hash.clone());
                self.failed = failed
                    .iter()
                    .copied()
                    .filter(|trade| self.open.contains(trade))
                    .collect();
                self.state = State::Included;
                if self.failed.len() == self.open.len() {
                    self.after_attempt();
                }
            }
            (State::Submitted, Answer::Dropped) => {
                self.tx_hash = None;
                self.failed = self.open.clone();
                self.state = State::Included;
                self.after_attempt();
            }
            (State::Included, Answer::Finalized) if self.bust.is_empty() => self.after_attempt(),
            (State::Included, Answer::Busted) if !self.bust.is_empty() => {
                self.state = State::Final;
            }
            (state, _) => return Err(Misplaced { state, answer }),
        }
        Ok(())
    }

    /// What went through is in the ledger: the rest is tried again or given up.
    fn after_attempt(&mut self) {
        if self.failed.is_empty() {
            self.state = State::Final;
            return;
        }
        let failed = std::mem::take(&mut self.failed);
        self.tx_hash = None;
        if self.attempt < ATTEMPTS_MAX {
            self.attempt += 1;
            self.open = failed;
            self.state = State::Posted;
        } else {
            self.open = Vec::new();
            self.bust = failed;
            self.state = State::Included;
        }
    }
}
