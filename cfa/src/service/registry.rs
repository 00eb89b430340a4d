//! The holder registry, folded from the tokens' Transfer events block by block.
//!
//! The registry equals the state of the chain (specification 1.1, R030). A read first applies new
//! blocks. Events of other contracts are ignored: any account can emit one, with any amount.

use std::collections::HashMap;

use service_clients::caused_by;
use types::{Decimal, subaccount};

use super::{InstrumentChange, RequestMeta, Service};
use crate::error::{Error, Refusal};
use crate::model::{CFA_RUB, Holder, Instrument, InstrumentStatus};
use crate::peers;
use crate::repo::HolderMove;
use chain::{Address, TokenTransfer};

/// Limit of blocks per query of events.
const BLOCKS: u64 = 16;
/// A page of a replay ends with the query that reaches one of these limits.
const REPLAY_TRANSFERS: usize = 2_000;
const REPLAY_BLOCKS: u64 = 4_096;

/// A page of the chain's transfers, read from the chain.
#[derive(Debug)]
pub struct Replayed {
    /// With the token's instrument.
    pub transfers: Vec<(TokenTransfer, Instrument)>,
    /// Number of the last block of this page.
    pub through: u64,
    /// Number of the last read block.
    pub last: u64,
}

/// A holder in ListHolders.
#[derive(Debug)]
pub struct ListedHolder {
    pub holder: Holder,
    /// Held in the ledger. `None` for a past time and for a holder without a user id.
    pub locked: Option<Decimal>,
}

impl Service {
    /// Applies all read blocks to the registry.
    pub async fn catch_up_registry(&self) -> Result<(), Error> {
        let _lock = self.registry_lock.lock().await;
        // Reads the head before the tokens: a token is stored before its first transfer is sent, so
        // no transfer up to the head is missed.
        let head = self.chain.stored_last_read_block().await?;
        let mut next = self
            .repo
            .registry_block()
            .await?
            .map_or(0, |block| block + 1);
        let mut tokens = Vec::new();
        for (text, backlog) in self.repo.tokens().await? {
            let token = parse_token(&text)?;
            if let Some(from_block) = backlog {
                self.read_backlog(&text, token, from_block, next).await?;
            }
            tokens.push(token);
        }
        while next <= head {
            let through = head.min(next + BLOCKS - 1);
            let moves = self.moves(&tokens, next, through).await?;
            let quarantined = self.repo.apply_moves(&moves, through).await?;
            tokens.retain(|token| !quarantined.contains(&token.to_string()));
            next = through + 1;
        }
        Ok(())
    }

    /// # Errors
    /// `TokenQuarantined` if the token's events contradict each other.
    pub(super) async fn require_not_quarantined(&self, token: &str) -> Result<(), Error> {
        match self.repo.is_quarantined(token).await? {
            true => Err(Refusal::TokenQuarantined.into()),
            false => Ok(()),
        }
    }

    /// Halts the instruments of quarantined tokens and reports them to health. Not part of
    /// `catch_up_registry`, whose caller may hold an instrument's lock.
    pub(super) async fn halt_quarantined(&self) -> Result<(), Error> {
        let quarantined = self.repo.quarantined().await?;
        let mut failed = Ok(());
        for (instrument_id, status, block) in &quarantined {
            // CFA-RUB is not traded.
            if *status == InstrumentStatus::Active && instrument_id != CFA_RUB {
                let meta = RequestMeta {
                    idempotency_key: format!("quarantine:{instrument_id}:{block}"),
                    correlation_id: format!("quarantine:{block}"),
                    actor: peers::SOURCE.to_owned(),
                    digest: 0,
                };
                let halt = InstrumentChange {
                    status: Some(InstrumentStatus::Halted),
                    ..InstrumentChange::default()
                };
                let halted = self.update_instrument(&meta, instrument_id, halt).await;
                failed = halted.map(drop).and(failed);
            }
        }
        let named = quarantined.iter().map(|(instrument_id, _, block)| {
            format!("{instrument_id}: impossible transfer in block {block}")
        });
        let named = named.collect::<Vec<_>>().join(", ");
        let reason = (!named.is_empty()).then_some(named.as_str());
        self.health.set("quarantined tokens", reason);
        failed
    }

    /// Applies a new token's events of the blocks from `from_block` to before `end`. From `end` on
    /// the registry includes the token.
    async fn read_backlog(
        &self,
        text: &str,
        token: Address,
        from_block: u64,
        end: u64,
    ) -> Result<(), Error> {
        let mut from = from_block;
        loop {
            let next = end.min(from.saturating_add(BLOCKS));
            let moves = if from < next {
                self.moves(&[token], from, next - 1).await?
            } else {
                Vec::new()
            };
            let is_last = next >= end;
            let rest = (!is_last).then_some(next);
            let quarantined = self.repo.apply_backlog(text, &moves, rest).await?;
            if is_last || !quarantined.is_empty() {
                return Ok(());
            }
            from = next;
        }
    }

    /// Holder moves from the tokens' events in the blocks from..=through.
    async fn moves(
        &self,
        tokens: &[Address],
        from: u64,
        through: u64,
    ) -> Result<Vec<HolderMove>, Error> {
        let transfers = self.chain.transfers(tokens, from, through).await?;
        let mut moves = Vec::with_capacity(2 * transfers.len());
        let mut time = (u64::MAX, 0);
        for transfer in &transfers {
            if time.0 != transfer.block_number {
                let block = self
                    .chain
                    .block(Some(transfer.block_number))
                    .await?
                    .ok_or(Refusal::BlockNotFound)?;
                time = (
                    transfer.block_number,
                    i64::try_from(block.time_s).unwrap_or(i64::MAX / 1_000_000) * 1_000_000,
                );
            }
            push_moves(&mut moves, transfer, time.1);
        }
        Ok(moves)
    }

    /// Rereads the tokens' transfers from the chain, one page from block `from` on. The store
    /// supplies only the tokens and their instruments. Quarantined tokens are left out.
    pub async fn replay_transfers(&self, from: u64) -> Result<Replayed, Error> {
        // Finds the quarantined tokens.
        self.catch_up_registry().await?;
        let last = self.chain.stored_last_read_block().await?;
        let mut transfers = Vec::new();
        let tokens = self.repo.tokens().await?;
        let tokens = tokens
            .iter()
            .map(|(token, _)| parse_token(token))
            .collect::<Result<Vec<_>, Error>>()?;
        let mut instruments: HashMap<Address, Instrument> = HashMap::new();
        let mut next = from;
        while next <= last && next - from < REPLAY_BLOCKS && transfers.len() < REPLAY_TRANSFERS {
            let through = last.min(next + BLOCKS - 1);
            for transfer in self.chain.transfers(&tokens, next, through).await? {
                let instrument = match instruments.get(&transfer.token) {
                    Some(known) => known.clone(),
                    None => {
                        let token = transfer.token.to_string();
                        let found = self.repo.instrument_by_token(&token).await?;
                        let found = found.ok_or(Refusal::InstrumentNotFound)?;
                        instruments.insert(transfer.token, found.clone());
                        found
                    }
                };
                transfers.push((transfer, instrument));
            }
            next = through + 1;
        }
        Ok(Replayed {
            transfers,
            // `from` may be after the last read block.
            through: next.saturating_sub(1).min(last),
            last,
        })
    }

    /// A page of holders with units, newest holder first, and the supply. With `as_of_us`, after
    /// the last block sealed at or before that time.
    pub async fn holders(
        &self,
        instrument: &Instrument,
        as_of_us: Option<i64>,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<(Vec<ListedHolder>, i64), Error> {
        self.catch_up_registry().await?;
        let token = &instrument.contract_address;
        self.require_not_quarantined(token).await?;
        let holders = match as_of_us {
            Some(at_us) => self.repo.holders_at(token, at_us, bound, limit).await?,
            None => self.repo.holders(token, bound, limit).await?,
        };
        let supply = self.repo.registry_supply(token, as_of_us).await?;
        let mut locked = match as_of_us {
            Some(_) => HashMap::new(),
            None => self.locked(&holders, &instrument.instrument_id).await?,
        };
        let listed = holders.into_iter().map(|holder| ListedHolder {
            locked: locked.remove(&holder.user_id),
            holder,
        });
        Ok((listed.collect(), supply))
    }

    /// Units held in the ledger, by the holder's user id. Leaves out holders without one.
    async fn locked(
        &self,
        holders: &[Holder],
        instrument_id: &str,
    ) -> Result<HashMap<String, Decimal>, Error> {
        let users: Vec<&String> = holders
            .iter()
            .map(|holder| &holder.user_id)
            .filter(|user_id| !user_id.is_empty())
            .collect();
        let ids: Vec<String> = users
            .iter()
            .map(|user_id| subaccount::of_user(user_id, instrument_id))
            .collect();
        let ledger = &self.peers.ledger;
        let found = ledger.sub_accounts_by_id(&caused_by(""), &ids).await?;
        let held: HashMap<String, Decimal> = found
            .into_iter()
            .map(|row| (row.subaccount_id, row.held))
            .collect();
        // The ledger may not have the sub-account of a new holder yet: nothing is held.
        let of = |id: &String| held.get(id).copied().unwrap_or(Decimal::ZERO);
        let locked = users.into_iter().zip(&ids);
        Ok(locked.map(|(user, id)| (user.clone(), of(id))).collect())
    }

    /// All holders with units, now or at `at_us`.
    pub(super) async fn all_holders(
        &self,
        token: &str,
        at_us: Option<i64>,
    ) -> Result<Vec<Holder>, Error> {
        const PAGE: i64 = 1_000;
        self.require_not_quarantined(token).await?;
        let mut all: Vec<Holder> = Vec::new();
        loop {
            let bound = all
                .last()
                .map_or((i64::MAX, "\u{10FFFF}".to_owned()), |last| {
                    (last.since_us, last.address.clone())
                });
            let page = match at_us {
                Some(at_us) => {
                    self.repo
                        .holders_at(token, at_us, (bound.0, &bound.1), PAGE)
                        .await?
                }
                None => self.repo.holders(token, (bound.0, &bound.1), PAGE).await?,
            };
            let is_last = (page.len() as i64) < PAGE;
            all.extend(page);
            if is_last {
                return Ok(all);
            }
        }
    }
}

fn parse_token(text: &str) -> Result<Address, Error> {
    let token = text.parse();
    token.map_err(|_| Error::Damaged(format!("token address {text}")))
}

/// Appends the moves of a transfer: one per side that is an address.
fn push_moves(moves: &mut Vec<HolderMove>, transfer: &TokenTransfer, time_us: i64) {
    let units = i128::try_from(transfer.units).unwrap_or(i128::MAX);
    let sides = [(transfer.from, -units), (transfer.to, units)];
    for (address, units) in sides {
        if let Some(address) = address {
            moves.push(HolderMove {
                token: transfer.token.to_string(),
                address: address.to_string(),
                units,
                block_number: transfer.block_number,
                time_us,
            });
        }
    }
}
