//! Move of all holders of an issue to a new token, for example one with other code.
//!
//! Trading of the issue is halted and nothing else may change its token. The new token has the old
//! one's name, terms, owner and roles. Its migration contract burns the units of a part of the
//! holders in the old token and gives them in the new one, with their freezes, in one transaction
//! per part (`docs/contracts.md`).
//!
//! | step | effect |
//! |---|---|
//! | PAUSE_OLD to GRANT_NEW | tokens paused, contracts deployed, rights of the migration |
//! | FIX_HOLDERS | the registry has the old token up to the pause, and stops following it |
//! | MOVE_HOLDERS | parts of the holders in the order of their addresses |
//! | MOVE_FROZEN | parts of the holders all of whose units are frozen: some have no units |
//! | VERIFY | the old supply is 0, the new one is that of the old token before |
//! | REVOKE_OLD to UNPAUSE_NEW | rights taken back, the new token active, the old one paused |
//! | SWITCH | one transaction: token of the instrument, registry, event and audit record |
//!
//! The row of the move excludes other writes: they check it in the transaction that stores them,
//! and its own transaction checks that none of them is open. So the exclusion outlasts a restart. A
//! batch of trades gets a transient answer and is sent again; a freeze is made in the ledger and
//! waits for the chain.
//!
//! Each step is stored after its transaction, whose key follows from the move, the step and the
//! reverted attempts, so a repeat after a crash sends nothing twice. A part's addresses are stored
//! before it is sent. A step whose transactions revert is tried a limited number of times, then by
//! a call only; health names it.
//!
//! Cost: a transaction per `PART` holders. The memory holds one part.

use std::time::Duration;

use chain::{Action, Address, Grant, Receipt, ReceiptStatus, RoleSet, TokenCode, Version};

use super::instruments::chain_terms;
use super::registry::{block_time_us, parse_token};
use super::workers::log_failure;
use super::{RequestMeta, Service, call_wait, unsigned};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::failpoint;
use crate::model::{CFA_RUB, Instrument, MoveStep, TokenMove};
use crate::peers::SOURCE;

/// Name of the call under which answers are stored (D50).
const MOVE: &str = "MoveHolders";
/// Holders per transaction. The gas limit of more of them is above that of a transaction.
const PART: i64 = 100;
/// Repeated reads of a supply that moves between two tokens.
const SUPPLY_READS: usize = 3;
const HEALTH_PART: &str = "holder moves";

impl Service {
    /// Starts a move of all holders of an issue, or continues one whose transactions have reverted
    /// as often as the sweep tries. Returns it as it is after `call_wait`; the sweep continues.
    /// True for a repeat.
    ///
    /// # Errors
    /// Nothing is stored: `OwnerElsewhere` unless the platform's signing account owns the tokens;
    /// `HoldersMoving`; what else may change the token or its holders: `TokenInUse` by trading, a
    /// coupon or a freeze, `OperationsOpen`, `PlacementUnderWay`, `TokenQuarantined`, `BreakOpen`;
    /// an invalid field for CFA-RUB, whose token the shared contracts name.
    pub async fn move_holders(
        &self,
        meta: &RequestMeta,
        instrument_id: &str,
        reason: &str,
    ) -> Result<(TokenMove, bool), Error> {
        let lock = self.lock_call(meta, MOVE, instrument_id).await;
        if let Some(known) = self.stored_answer(meta, MOVE).await? {
            return Ok((self.require_move(&known).await?, true));
        }
        let instrument = self.require_instrument(instrument_id).await?;
        let open = self.repo.open_move(instrument_id).await?;
        let is_asked = open.is_some();
        let of = match open {
            Some(of) if self.is_stopped(&of) => of,
            Some(_) => return Err(Refusal::HoldersMoving.into()),
            None => self.new_move(meta, &instrument, reason).await?,
        };
        self.record_move(meta, &of, is_asked, reason).await?;
        drop(lock);
        let wait = call_wait();
        let driven = self.drive_move(&of.move_id, wait, is_asked);
        // The end of the wait cancels a step as a crash would: every step is idempotent.
        if let Ok(driven) = tokio::time::timeout(wait, driven).await {
            log_failure("move of holders", &of.move_id, driven.map(drop));
        }
        Ok((self.require_move(&of.move_id).await?, false))
    }

    /// Stores a new move, or the call that continues a known one.
    async fn record_move(
        &self,
        meta: &RequestMeta,
        of: &TokenMove,
        is_known: bool,
        reason: &str,
    ) -> Result<(), Error> {
        let id = &of.instrument_id;
        let action = match is_known {
            true => "holders.move_continued",
            false => "holders.move_requested",
        };
        let record = publish::audit(
            action,
            id,
            &meta.actor,
            "",
            of.step.as_str(),
            reason,
            &meta.correlation_id,
            self.now_us(),
        );
        let mut tx = self.repo.begin().await?;
        if !is_known {
            self.repo.require_at_rest_in_tx(&mut tx, id).await?;
            self.repo.insert_move_in_tx(&mut tx, of).await?;
        }
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        self.store_call_in_tx(&mut tx, meta, MOVE, &of.move_id)
            .await?;
        Ok(tx.commit().await?)
    }

    /// The latest move of the holders of an issue.
    ///
    /// # Errors
    /// `InstrumentNotFound`, `MoveNotFound`.
    pub async fn holder_move(&self, instrument_id: &str) -> Result<TokenMove, Error> {
        self.require_instrument(instrument_id).await?;
        let found = self.repo.latest_move(instrument_id).await?;
        Ok(found.ok_or(Refusal::MoveNotFound)?)
    }

    /// Whether transactions of the step have reverted as often as the sweep tries.
    pub fn is_stopped(&self, of: &TokenMove) -> bool {
        of.attempts >= i64::from(self.config.submit_attempts_max)
    }

    async fn require_move(&self, move_id: &str) -> Result<TokenMove, Error> {
        let found = self.repo.token_move(move_id).await?;
        found.ok_or_else(|| Error::Damaged(format!("move {move_id}")))
    }

    /// A move that is not stored, after the checks that need the chain.
    async fn new_move(
        &self,
        meta: &RequestMeta,
        instrument: &Instrument,
        reason: &str,
    ) -> Result<TokenMove, Error> {
        if instrument.instrument_id == CFA_RUB {
            return Err(Refusal::field("instrument_id", "must be an issue").into());
        }
        let token = self.token(instrument)?;
        if !self.is_owner_of(&token).await? {
            return Err(Refusal::OwnerElsewhere.into());
        }
        let now_us = self.now_us();
        Ok(TokenMove {
            move_id: uuid::Uuid::now_v7().to_string(),
            instrument_id: instrument.instrument_id.clone(),
            reason: reason.to_owned(),
            actor: meta.actor.clone(),
            correlation_id: meta.correlation_id.clone(),
            old_token: instrument.contract_address.clone(),
            new_token: String::new(),
            migration: String::new(),
            new_block: 0,
            last_block: 0,
            supply_minor: 0,
            step: MoveStep::PauseOld,
            attempts: 0,
            parts_done: 0,
            part: Vec::new(),
            listed_through: String::new(),
            tx_hash: String::new(),
            moved_at_us: 0,
            created_at_us: now_us,
            updated_at_us: now_us,
            finished_at_us: None,
        })
    }

    /// Whether the signing account owns this token and those that are deployed from now on: it
    /// gives the migration contract its rights.
    async fn is_owner_of(&self, token: &Address) -> Result<bool, Error> {
        let operator = self.chain.operator();
        if self.chain.owner() != operator || self.chain.owner_of(token).await? != operator {
            return Ok(false);
        }
        // The owner of a token of version 1 gives rights, and an agent pauses: it has to be both.
        Ok(self.is_of_version_2(token).await? || self.chain.is_agent(token, &operator).await?)
    }

    async fn is_of_version_2(&self, token: &Address) -> Result<bool, Error> {
        Ok(match self.chain.token_code(token).await? {
            TokenCode::Token(Version::V2) => true,
            TokenCode::None | TokenCode::Unknown | TokenCode::Token(Version::V1) => false,
        })
    }

    /// Continues the moves under way, and reports those that wait for an operator.
    pub(super) async fn sweep_moves(&self) -> Result<(), Error> {
        let mut failing = None;
        for of in self.repo.open_moves().await? {
            // The next sweep reads the receipt of the transaction that this one sends.
            let driven = self.drive_move(&of.move_id, Duration::ZERO, false).await;
            let is_well = driven.as_ref().is_ok_and(|after| after.attempts == 0);
            if !is_well {
                let (id, step) = (&of.instrument_id, of.step.as_str());
                failing = Some(format!("holders of {id} are not moved yet: {step}"));
            }
            log_failure("move of holders", &of.move_id, driven.map(drop));
        }
        self.health.set(HEALTH_PART, failing.as_deref());
        Ok(())
    }

    /// Executes steps until one has waited `wait` for the chain, or the move ends. `is_asked`: by a
    /// call, which also retries a transaction that was reverted too often for the sweep. The sweep
    /// continues with the transaction that a call has sent.
    async fn drive_move(
        &self,
        move_id: &str,
        wait: Duration,
        is_asked: bool,
    ) -> Result<TokenMove, Error> {
        let _lock = self.object_locks.lock(move_id).await;
        let mut of = self.require_move(move_id).await?;
        while of.step != MoveStep::Done && (is_asked || self.is_driven(&of).await?) {
            let is_done = match of.step {
                MoveStep::FixHolders => self.fix_holders(&mut of).await?,
                MoveStep::MoveHolders | MoveStep::MoveFrozen => {
                    self.move_part(&mut of, wait).await?
                }
                MoveStep::Verify => self.verify_move(&mut of).await?,
                MoveStep::Switch => self.switch_token(&mut of).await?,
                _ => self.send_step_of_move(&mut of, wait).await?,
            };
            if !is_done {
                break;
            }
        }
        Ok(of)
    }

    /// Whether the sweep continues the move: it is not stopped, or a call has sent its transaction.
    async fn is_driven(&self, of: &TokenMove) -> Result<bool, Error> {
        Ok(!self.is_stopped(of) || self.chain.submission(&key_of_move(of)).await?.is_some())
    }

    async fn save_move(&self, of: &mut TokenMove) -> Result<(), Error> {
        of.updated_at_us = self.now_us();
        let mut tx = self.repo.begin().await?;
        self.repo.save_move_in_tx(&mut tx, of).await?;
        Ok(tx.commit().await?)
    }

    async fn end_move_step(&self, of: &mut TokenMove) -> Result<bool, Error> {
        of.step = of.step.next();
        self.save_move(of).await?;
        Ok(true)
    }

    /// A step that is one transaction. False while it is in no block.
    async fn send_step_of_move(&self, of: &mut TokenMove, wait: Duration) -> Result<bool, Error> {
        let Some(action) = self.action_of_move(of).await? else {
            return self.end_move_step(of).await;
        };
        let Some(receipt) = self.send_of_move(of, &action, wait).await? else {
            return Ok(false);
        };
        let name = of.step.as_str();
        let deployed = || {
            let contract = receipt
                .contract_address
                .map(|contract| contract.to_string());
            contract.ok_or_else(|| Error::Damaged(format!("{name} without an address")))
        };
        match of.step {
            MoveStep::DeployToken => {
                of.new_token = deployed()?;
                of.new_block = receipt.block_number;
                // Without a holder there is no part.
                of.last_block = receipt.block_number;
            }
            MoveStep::DeployMigration => of.migration = deployed()?,
            _ => {}
        }
        self.end_move_step(of).await
    }

    /// The transaction of a step; `None`: it has none.
    async fn action_of_move(&self, of: &TokenMove) -> Result<Option<Action>, Error> {
        let old = parse_token(&of.old_token)?;
        let [new, migration] = [&of.new_token, &of.migration].map(|text| parse_token(text));
        let pause = |token, paused| Some(Action::SetPaused { token, paused });
        let grant = |contract, account, roles| Action::SetRoles {
            contract,
            grant: Grant { account, roles },
        };
        Ok(match of.step {
            MoveStep::PauseOld => pause(old, true),
            MoveStep::DeployToken => Some(self.replacement(of, &old).await?),
            MoveStep::PauseNew => pause(new?, true),
            MoveStep::DeployMigration => Some(Action::DeployMigration {
                from: old,
                to: new?,
                owner: self.chain.owner(),
                grants: vec![Grant {
                    account: self.chain.operator(),
                    roles: RoleSet::MOVE,
                }],
            }),
            MoveStep::GrantOld => Some(match self.is_of_version_2(&old).await? {
                true => grant(old, migration?, RoleSet::REDEEM),
                false => Action::AddAgent {
                    contract: old,
                    agent: migration?,
                },
            }),
            MoveStep::GrantNew => Some(grant(new?, migration?, RoleSet::MOVE)),
            // An agent of version 1 stays: the token has no units and is paused.
            MoveStep::RevokeOld => match self.is_of_version_2(&old).await? {
                true => Some(grant(old, migration?, RoleSet::NONE)),
                false => None,
            },
            MoveStep::RevokeNew => Some(grant(new?, migration?, RoleSet::NONE)),
            MoveStep::UnpauseNew => pause(new?, false),
            MoveStep::FixHolders
            | MoveStep::MoveHolders
            | MoveStep::MoveFrozen
            | MoveStep::Verify
            | MoveStep::Switch
            | MoveStep::Done => None,
        })
    }

    /// The deployment of the new token: name, terms and rights are those of the old one.
    async fn replacement(&self, of: &TokenMove, old: &Address) -> Result<Action, Error> {
        let instrument = self.require_instrument(&of.instrument_id).await?;
        let terms = match self.is_of_version_2(old).await? {
            true => self.chain.token_terms(old).await?,
            // A token of version 1 has none.
            false => {
                let placement = self.repo.placement(&of.instrument_id).await?;
                let placed = placement.as_ref().map(|placement| &placement.terms);
                chain_terms(&instrument, placed)
            }
        };
        Ok(Action::DeployToken {
            name: instrument.name,
            symbol: instrument.instrument_id,
            decimals: instrument.decimals,
            registry: self.contracts.registry,
            owner: self.chain.owner(),
            grants: self.contracts.token_grants(self.chain.operator()),
            terms,
        })
    }

    /// Submits a transaction of a step. `None` while it is in no block, or after a revert, which is
    /// counted.
    async fn send_of_move(
        &self,
        of: &mut TokenMove,
        action: &Action,
        wait: Duration,
    ) -> Result<Option<Receipt>, Error> {
        let key = key_of_move(of);
        let submitted = self.chain.submit(&key, &action.call()).await?;
        failpoint::reach(failpoint::MOVE_SUBMITTED);
        let receipt = self.chain.wait_receipt(&submitted.tx_hash, wait);
        let Some(receipt) = receipt.await? else {
            return Ok(None);
        };
        of.tx_hash = receipt.tx_hash.to_string();
        if receipt.status == ReceiptStatus::Success {
            failpoint::reach(failpoint::MOVE_STEP);
            of.attempts = 0;
            return Ok(Some(receipt));
        }
        of.attempts += 1;
        tracing::error!(
            instrument_id = of.instrument_id,
            step = of.step.as_str(),
            tx_hash = of.tx_hash,
            attempts = of.attempts,
            severity = "critical",
            "a transaction of a move of holders reverted, retrying up to cfa.submit_attempts_max: \
             then find the cause and call MoveHolders again"
        );
        self.save_move(of).await?;
        Ok(None)
    }

    /// Reads the last transfers of the old token into the registry, which does not follow it from
    /// then on: it keeps the holders as of the pause, whose addresses the parts have.
    async fn fix_holders(&self, of: &mut TokenMove) -> Result<bool, Error> {
        // The pause is in a final block, so no transfer before it is missed.
        self.catch_up_registry().await?;
        let token = &of.old_token;
        self.require_not_quarantined(token).await?;
        let supply_minor = self.repo.registry_supply(token, None).await?;
        let (supply, _) = self.chain.total_supply(&parse_token(token)?).await?;
        if supply != unsigned(supply_minor) {
            return Err(Error::Damaged(format!(
                "supply of {token}: {supply} on the chain, {supply_minor} in the registry"
            )));
        }
        of.supply_minor = supply_minor;
        // No read of blocks that has begun with the old token is under way.
        let _registry = self.registry_lock.lock().await;
        self.end_move_step(of).await
    }

    /// Moves the next part, or ends the step if none is left. False while it is in no block.
    async fn move_part(&self, of: &mut TokenMove, wait: Duration) -> Result<bool, Error> {
        if of.part.is_empty() {
            let (part, through) = self.next_part_of_move(of).await?;
            let Some(through) = through else {
                of.listed_through.clear();
                return self.end_move_step(of).await;
            };
            (of.part, of.listed_through) = (part, through);
            self.save_move(of).await?;
            failpoint::reach(failpoint::MOVE_LISTED);
        }
        let holders = of.part.iter().map(|address| parse_token(address));
        let action = Action::MoveHolders {
            migration: parse_token(&of.migration)?,
            part: of.parts_done,
            holders: holders.collect::<Result<_, Error>>()?,
        };
        let Some(receipt) = self.send_of_move(of, &action, wait).await? else {
            return Ok(false);
        };
        of.part.clear();
        of.parts_done += 1;
        of.last_block = receipt.block_number;
        self.save_move(of).await?;
        Ok(true)
    }

    /// Addresses of the next part, and the last that was listed; `None`: there are no more.
    async fn next_part_of_move(
        &self,
        of: &TokenMove,
    ) -> Result<(Vec<String>, Option<String>), Error> {
        let (after, repo) = (&of.listed_through, &self.repo);
        if of.step == MoveStep::MoveHolders {
            let part = repo.holder_addresses(&of.old_token, after, PART).await?;
            let through = part.last().cloned();
            return Ok((part, through));
        }
        let users = repo.frozen_holders(&of.instrument_id, after, PART).await?;
        let part = users.iter().map(|id| Address::of_user(id).to_string());
        Ok((part.collect(), users.last().cloned()))
    }

    /// Checks that the new token has all units.
    async fn verify_move(&self, of: &mut TokenMove) -> Result<bool, Error> {
        let (old, new) = (parse_token(&of.old_token)?, parse_token(&of.new_token)?);
        let (left, _) = self.chain.total_supply(&old).await?;
        let (moved, _) = self.chain.total_supply(&new).await?;
        if left != 0 || moved != unsigned(of.supply_minor) {
            return Err(Error::Damaged(format!(
                "units of {}: {left} are left in the old token, the new one has {moved} of {}",
                of.instrument_id, of.supply_minor
            )));
        }
        let block = self.chain.block(Some(of.last_block)).await?;
        let block = block.ok_or(Refusal::BlockNotFound)?;
        of.moved_at_us = block_time_us(block.time_s);
        self.end_move_step(of).await
    }

    /// Ends the move: the instrument has the new token.
    async fn switch_token(&self, of: &mut TokenMove) -> Result<bool, Error> {
        // The instrument may have changed since the move began.
        let _lock = self.object_locks.lock(&of.instrument_id).await;
        let mut instrument = self.require_instrument(&of.instrument_id).await?;
        let now_us = self.now_us();
        instrument.contract_address = of.new_token.clone();
        instrument.updated_at_us = now_us;
        of.step = MoveStep::Done;
        of.updated_at_us = now_us;
        of.finished_at_us = Some(now_us);
        let events = [
            publish::instrument_updated(&instrument, &of.correlation_id),
            publish::audit(
                "holders.moved",
                &of.instrument_id,
                SOURCE,
                &of.old_token,
                &of.new_token,
                &of.reason,
                &of.correlation_id,
                now_us,
            ),
        ];
        let mut tx = self.repo.begin().await?;
        self.repo
            .save_instrument_in_tx(&mut tx, &instrument)
            .await?;
        self.repo
            .add_token_in_tx(&mut tx, &of.new_token, of.new_block)
            .await?;
        self.repo.save_move_in_tx(&mut tx, of).await?;
        self.repo.publish_in_tx(&mut tx, &events).await?;
        tx.commit().await?;
        self.comparison().replace(&of.old_token, &of.new_token);
        failpoint::reach(failpoint::MOVE_ENDED);
        Ok(true)
    }

    /// # Errors
    /// `HoldersMoving` while a move of the holders is under way.
    pub(super) async fn require_not_moving(&self, instrument_id: &str) -> Result<(), Error> {
        match self.repo.is_moving(instrument_id).await? {
            true => Err(Refusal::HoldersMoving.into()),
            false => Ok(()),
        }
    }

    /// The token to which the holders of the instrument's token are, or were, moved. `None`: there
    /// is none. Also of an instrument that was read before the end of a move.
    pub(super) async fn next_token(
        &self,
        instrument: &Instrument,
    ) -> Result<Option<Address>, Error> {
        let (id, token) = (&instrument.instrument_id, &instrument.contract_address);
        let next = self.repo.token_after(id, token).await?;
        next.map(|next| parse_token(&next)).transpose()
    }

    /// Units of a holder on the chain. A part of a move burns and gives them at once, so one of the
    /// two tokens has all of them.
    pub(super) async fn units_in(
        &self,
        token: &Address,
        next: Option<&Address>,
        holder: &Address,
    ) -> Result<u128, Error> {
        let units = self.chain.balance_of(token, holder).await?;
        match next {
            None => Ok(units),
            // Read after the old one: a part between the two reads hides no units.
            Some(next) => Ok(units.max(self.chain.balance_of(next, holder).await?)),
        }
    }

    /// Supply on the chain, of both tokens during a move, and the chain head before it was read.
    ///
    /// # Errors
    /// `Unavailable` if parts of a move follow each other between the reads.
    pub(super) async fn supply_in(
        &self,
        token: &Address,
        next: Option<&Address>,
    ) -> Result<(u128, u64), Error> {
        let Some(next) = next else {
            return Ok(self.chain.total_supply(token).await?);
        };
        for _ in 0..SUPPLY_READS {
            let (moved, _) = self.chain.total_supply(next).await?;
            let (left, block) = self.chain.total_supply(token).await?;
            if self.chain.total_supply(next).await?.0 == moved {
                return Ok((left.saturating_add(moved), block));
            }
        }
        Err(Error::Unavailable("Token whose holders move"))
    }
}

/// Key of the next transaction of a move.
fn key_of_move(of: &TokenMove) -> String {
    let name = match of.step {
        MoveStep::MoveHolders | MoveStep::MoveFrozen => format!("PART:{}", of.parts_done),
        step => step.as_str().to_owned(),
    };
    format!("move:{}:{name}:{}", of.move_id, of.attempts)
}
