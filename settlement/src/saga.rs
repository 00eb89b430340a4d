//! State machine of a sealed batch: `sealed -> posted -> submitted -> included -> final`, as a
//! table of next steps and transitions.
//!
//! Every step is idempotent: the ledger answers a posted batch with the stored result, the chain
//! accepts a batch id once, an operation is finalized once and reversed once. The caller executes a
//! step and stores the state; after a crash it repeats the step. No chain step precedes the ledger
//! posting (`design.md` 4). Trades that an attempt does not execute are submitted once more, in a
//! new batch. Trades that fail again are bust, and their operations are reversed (T21). Trades that
//! an operator withdraws before their submission are bust at the batch's end. Trades that leave the
//! batch before it is posted have no operations to reverse.

types::code_enum! {
    /// State of a batch.
    #[derive(PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
    #[serde(rename_all = "SCREAMING_SNAKE_CASE")]
    State: i32 {
        /// Contents fixed, not known to be in the ledger.
        Sealed = 1 "SEALED",
        /// In the ledger.
        Posted = 2 "POSTED",
        /// Accepted by the chain service.
        Submitted = 3 "SUBMITTED",
        /// Final on chain, not finalized in the ledger.
        Included = 4 "INCLUDED",
        Final = 5 "FINAL",
    }
}

/// Next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Post the stored request to the ledger.
    Post,
    /// Submit these trades to the chain under the batch id of this attempt.
    Submit {
        attempt: u8,
        trades: Vec<u32>,
    },
    /// Wait for the outcome of this attempt's batch.
    Await {
        attempt: u8,
    },
    /// Finalize the operations of these trades with the transaction's hash.
    Finalize {
        trades: Vec<u32>,
        tx_hash: String,
    },
    /// Reverse the operations of these trades, except of those in [`Saga::unposted`].
    Bust {
        trades: Vec<u32>,
    },
    Done,
}

/// Result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StepResult {
    Posted,
    Submitted,
    /// The transaction is final; the contract skipped these trades.
    Included {
        tx_hash: String,
        failed: Vec<u32>,
    },
    /// Instead of the posting or the submission: these trades leave the batch, which the ledger or
    /// the chain service does not have.
    Withdrawn {
        trades: Vec<u32>,
    },
    /// The batch failed: no trade executed.
    Failed,
    Finalized,
    Busted,
}

/// A result that does not match the pending step: a bug or a corrupted store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("batch is {state:?}: unexpected step result {result:?}")]
pub struct UnexpectedResult {
    pub state: State,
    pub result: StepResult,
}

/// Attempts per trade before it is bust.
pub const ATTEMPTS_MAX: u8 = 2;

/// One batch in flight. The store contains its JSON form.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Saga {
    pub state: State,
    pub attempt: u8,
    /// Trades of the current attempt, as indices into the batch.
    pub open: Vec<u32>,
    /// Trades that this attempt did not execute.
    pub failed: Vec<u32>,
    /// Bust trades.
    pub bust: Vec<u32>,
    /// Trades that an operator withdrew. A store of an older release has no such field.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub withdrawn: Vec<u32>,
    /// Those of them without operations in the ledger.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unposted: Vec<u32>,
    /// Transaction hash of the current attempt, once final.
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
            withdrawn: Vec::new(),
            unposted: Vec::new(),
            tx_hash: None,
        }
    }

    /// The next step; unchanged until a result is handled.
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
                    // Reached only in the last attempt, with nothing to finalize.
                    _ => Step::Bust {
                        trades: self.bust.clone(),
                    },
                }
            }
            State::Final => Step::Done,
        }
    }

    /// Applies the result of [`Self::next`].
    pub fn handle_result(&mut self, result: StepResult) -> Result<(), UnexpectedResult> {
        match (self.state, &result) {
            (State::Sealed, StepResult::Posted) => {
                self.state = State::Posted;
                if self.open.is_empty() {
                    self.after_attempt();
                }
            }
            (State::Sealed, StepResult::Withdrawn { trades }) => {
                let withdrawn = self.withdraw(trades);
                self.unposted.extend(withdrawn);
            }
            (State::Posted, StepResult::Submitted) => self.state = State::Submitted,
            (State::Posted, StepResult::Withdrawn { trades }) => {
                self.withdraw(trades);
                if self.open.is_empty() {
                    self.bust_all(Vec::new());
                }
            }
            (State::Submitted, StepResult::Included { tx_hash, failed }) => {
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
            (State::Submitted, StepResult::Failed) => {
                self.tx_hash = None;
                self.failed = self.open.clone();
                self.state = State::Included;
                self.after_attempt();
            }
            (State::Included, StepResult::Finalized) if self.bust.is_empty() => {
                self.after_attempt()
            }
            (State::Included, StepResult::Busted) if !self.bust.is_empty() => {
                self.state = State::Final;
            }
            (state, _) => return Err(UnexpectedResult { state, result }),
        }
        Ok(())
    }

    /// Removes trades from the open ones; returns those that were open.
    fn withdraw(&mut self, trades: &[u32]) -> Vec<u32> {
        let open = std::mem::take(&mut self.open).into_iter();
        let (withdrawn, open): (Vec<u32>, Vec<u32>) =
            open.partition(|trade| trades.contains(trade));
        self.withdrawn.extend(&withdrawn);
        self.open = open;
        withdrawn
    }

    /// Retries the failed trades or busts them. All executed trades are finalized in the ledger.
    fn after_attempt(&mut self) {
        if self.failed.is_empty() && self.withdrawn.is_empty() {
            self.state = State::Final;
            return;
        }
        let failed = std::mem::take(&mut self.failed);
        self.tx_hash = None;
        if self.attempt < ATTEMPTS_MAX && !failed.is_empty() {
            self.attempt += 1;
            self.open = failed;
            self.state = State::Posted;
        } else {
            self.bust_all(failed);
        }
    }

    /// Busts these trades and the withdrawn ones; all others are final.
    fn bust_all(&mut self, mut failed: Vec<u32>) {
        failed.extend(&self.withdrawn);
        failed.sort_unstable();
        self.open = Vec::new();
        self.bust = failed;
        self.tx_hash = None;
        self.state = State::Included;
    }
}
