//! State machine of a sealed batch: `sealed -> posted -> submitted -> included -> final`, as a
//! table of next steps and transitions.
//!
//! Every step is idempotent: the ledger answers a posted batch with the stored result, the chain
//! accepts a batch id once, an operation is finalized once and reversed once. The caller executes a
//! step and stores the state; after a crash it repeats the step. No chain step precedes the ledger
//! posting (`design.md` 4). Each attempt on chain is a batch of its own, numbered from 1.
//!
//! An attempt that fails as a whole says nothing about its trades, for example if they need more
//! gas than a block has: each half is submitted in an attempt of its own, down to single trades.
//! Trades that an attempt leaves out, and a trade that fails alone, are submitted once more at the
//! end. Those that fail again are bust, and their operations are reversed (T21). Trades that an
//! operator withdraws before their submission are bust at the batch's end. Trades that leave the
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
        attempt: u32,
        trades: Vec<u32>,
    },
    /// Wait for the outcome of this attempt's batch.
    Await {
        attempt: u32,
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
    /// The attempt failed as a whole: no trade executed.
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

/// One batch in flight. The store contains its JSON form.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Saga {
    pub state: State,
    /// Number of the current attempt, below four times the number of trades.
    pub attempt: u32,
    /// Trades of the current attempt, as indices into the batch.
    pub open: Vec<u32>,
    /// Trades that this attempt did not execute.
    pub failed: Vec<u32>,
    /// Trades of the next attempts, the last ones first. A store of an older release has no such
    /// field, as for the next two.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<Vec<u32>>,
    /// Trades that earlier attempts did not execute. After the parts they are submitted once more,
    /// or bust.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub left_out: Vec<u32>,
    /// The trades of this attempt and of the parts are bust if they fail again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_retry: bool,
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
            parts: Vec::new(),
            left_out: Vec::new(),
            is_retry: false,
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
                    // Reached only after the last attempt, with nothing to finalize.
                    _ => Step::Bust {
                        trades: self.bust.clone(),
                    },
                }
            }
            State::Final => Step::Done,
        }
    }

    /// Trades of the current and of later attempts.
    pub fn undecided(&self) -> impl Iterator<Item = &u32> {
        let later = self.parts.iter().flatten().chain(&self.left_out);
        self.open.iter().chain(later)
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
                    self.after_attempt();
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
                let mut first = std::mem::take(&mut self.open);
                if first.len() > 1 {
                    let second = first.split_off(first.len().div_ceil(2));
                    self.parts.extend([second, first]);
                } else {
                    self.failed = first;
                }
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

    /// Continues with the next part, then with the trades that were left out, or busts them. All
    /// executed trades are finalized in the ledger.
    fn after_attempt(&mut self) {
        self.left_out.append(&mut self.failed);
        if self.parts.is_empty() && !self.is_retry && !self.left_out.is_empty() {
            self.is_retry = true;
            // In the order of execution: a trade may move what an earlier one delivers.
            self.left_out.sort_unstable();
            self.parts.push(std::mem::take(&mut self.left_out));
        }
        if let Some(next) = self.parts.pop() {
            self.attempt += 1;
            self.open = next;
            self.tx_hash = None;
            self.state = State::Posted;
        } else if self.left_out.is_empty() && self.withdrawn.is_empty() {
            self.state = State::Final;
        } else {
            self.bust_all();
        }
    }

    /// Busts the trades that were left out and the withdrawn ones; all others are final.
    fn bust_all(&mut self) {
        let mut bust = std::mem::take(&mut self.left_out);
        bust.extend(&self.withdrawn);
        bust.sort_unstable();
        self.open = Vec::new();
        self.bust = bust;
        self.tx_hash = None;
        self.state = State::Included;
    }
}
