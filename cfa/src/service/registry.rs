//! The holder registry, folded from the tokens' Transfer events block by block.
//!
//! The registry equals the state of the chain (specification 1.1, R030). A read first applies new
//! blocks. Events of other contracts are ignored: any account can emit one, with any amount.
//!
//! A token whose holders are moved to a new one keeps its rows as of the pause before the move:
//! they answer for times before the end of the move, later times are read from the new token.

use std::collections::{BTreeSet, HashMap};

use futures::stream::{self, StreamExt, TryStreamExt};
use service_clients::caused_by;
use types::{Decimal, subaccount};

use super::{InstrumentChange, RequestMeta, Service};
use crate::api::publish;
use crate::error::{Error, Refusal};
use crate::model::{CFA_RUB, Holder, Instrument, InstrumentStatus};
use crate::peers;
use crate::repo::{Correction, HolderMove};
use chain::{Address, TokenTransfer};

/// Limit of blocks per query of events.
const BLOCKS: u64 = 16;
/// A page of a replay ends with the query that reaches one of these limits.
const REPLAY_TRANSFERS: usize = 2_000;
const REPLAY_BLOCKS: u64 = 4_096;
/// Concurrent reads of balances on the chain.
const CHAIN_READS: usize = 8;
/// Scope of the idempotency keys of LiftQuarantine.
const LIFT: &str = "LiftQuarantine";

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
            self.note_moves(&moves);
            tokens.retain(|token| !quarantined.contains(&token.to_string()));
            next = through + 1;
        }
        Ok(())
    }

    /// The comparison with the ledger follows the holders that changed.
    fn note_moves(&self, moves: &[HolderMove]) {
        // A holder trades many times in a block.
        let touched = moves.iter().map(|of| [&of.token, &of.address]);
        let touched: BTreeSet<[&String; 2]> = touched.collect();
        let mut comparison = self.comparison();
        for [token, address] in touched {
            comparison.touch(token, address);
        }
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
        self.health.set_finding("quarantined tokens", reason);
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
        let mut texts = HashMap::new();
        let mut time = (u64::MAX, 0);
        for transfer in &transfers {
            if time.0 != transfer.block_number {
                let block = self
                    .chain
                    .block(Some(transfer.block_number))
                    .await?
                    .ok_or(Refusal::BlockNotFound)?;
                time = (transfer.block_number, block_time_us(block.time_s));
            }
            push_moves(&mut moves, &mut texts, transfer, time.1);
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
        let mut instruments = self.moved_instruments().await?;
        let mut tokens: BTreeSet<Address> = instruments.keys().copied().collect();
        for (token, _) in self.repo.tokens().await? {
            tokens.insert(parse_token(&token)?);
        }
        let tokens: Vec<Address> = tokens.into_iter().collect();
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

    /// Instruments by the tokens that their holders were, or are being, moved from and to.
    async fn moved_instruments(&self) -> Result<HashMap<Address, Instrument>, Error> {
        let mut instruments = HashMap::new();
        for (instrument_id, old, new) in self.repo.moved_tokens().await? {
            let instrument = self.require_instrument(&instrument_id).await?;
            instruments.insert(parse_token(&old)?, instrument.clone());
            instruments.insert(parse_token(&new)?, instrument);
        }
        Ok(instruments)
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
        let token = self.token_of(instrument, as_of_us).await?;
        self.require_not_quarantined(&token).await?;
        let holders = match as_of_us {
            Some(at_us) => self.repo.holders_at(&token, at_us, bound, limit).await?,
            None => self.repo.holders(&token, bound, limit).await?,
        };
        let supply = self.repo.registry_supply(&token, as_of_us).await?;
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

    /// The token whose registry has the holders, now or at a past time.
    async fn token_of(&self, instrument: &Instrument, at_us: Option<i64>) -> Result<String, Error> {
        match at_us {
            Some(at_us) => self.repo.token_at(&instrument.instrument_id, at_us).await,
            None => Ok(instrument.contract_address.clone()),
        }
    }

    /// A page of the registry's holders with their balances on the chain now.
    pub async fn chain_balances(
        &self,
        instrument: &Instrument,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<Vec<(Holder, u128)>, Error> {
        self.catch_up_registry().await?;
        let token = self.token(instrument)?;
        let next = self.next_token(instrument).await?;
        let holders = (self.repo)
            .holders(&instrument.contract_address, bound, limit)
            .await?;
        let reads = stream::iter(holders).map(|holder| async move {
            let units = self.units_of(&token, next.as_ref(), &holder.address);
            let units = units.await?;
            Ok::<_, Error>((holder, units))
        });
        reads.buffered(CHAIN_READS).try_collect().await
    }

    async fn units_of(
        &self,
        token: &Address,
        next: Option<&Address>,
        address: &str,
    ) -> Result<u128, Error> {
        let holder = address.parse();
        let holder = holder.map_err(|_| Error::Damaged(format!("holder {address}")))?;
        self.units_in(token, next, &holder).await
    }

    /// Ends the quarantine of a token: the registry continues with the balances that the chain has
    /// now, of every address that it knows or that an event since the quarantine names. The
    /// instrument stays halted. True: a repeat.
    ///
    /// # Errors
    /// `NotQuarantined`; `StillImpossible` if a balance or the supply has more than 64 bits, or
    /// they do not agree; `Unavailable` if the token moved meanwhile.
    pub async fn lift_quarantine(
        &self,
        meta: &RequestMeta,
        instrument_id: &str,
        reason: &str,
    ) -> Result<(Instrument, bool), Error> {
        let _lock = self.lock_call(meta, LIFT, instrument_id).await;
        if let Some(lifted) = self.stored_answer(meta, LIFT).await? {
            return Ok((self.require_instrument(&lifted).await?, true));
        }
        let instrument = self.require_instrument(instrument_id).await?;
        let text = &instrument.contract_address;
        let _registry = self.registry_lock.lock().await;
        let since = self.repo.quarantined_since(text).await?;
        let since = since.ok_or(Refusal::NotQuarantined)?;
        let token = self.token(&instrument)?;
        let head = self
            .repo
            .registry_block()
            .await?
            .ok_or(Error::Unavailable("Holder registry"))?;
        let mut addresses = self.repo.addresses_of(text).await?;
        addresses.extend(self.addresses_in(token, since, head).await?);
        let reads = stream::iter(addresses).map(|address| async move {
            let units = self.units_of(&token, None, &address).await?;
            let units = i64::try_from(units).map_err(|_| Refusal::StillImpossible)?;
            Ok::<_, Error>((address, units))
        });
        let units: Vec<(String, i64)> = reads.buffered(CHAIN_READS).try_collect().await?;
        let (supply, latest) = self.chain.total_supply(&token).await?;
        let sum: u128 = units
            .iter()
            .map(|(_, units)| u128::from(units.unsigned_abs()))
            .sum();
        if latest > head && !self.addresses_in(token, head + 1, latest).await?.is_empty() {
            return Err(Error::Unavailable("Token while it moves"));
        }
        let supply = i64::try_from(supply).ok().filter(|_| sum == supply);
        let supply = supply.ok_or(Refusal::StillImpossible)?;
        let block = self.chain.block(Some(head)).await?;
        let block = block.ok_or(Refusal::BlockNotFound)?;
        let time_us = block_time_us(block.time_s);
        let mut tx = self.repo.begin().await?;
        let correction = Correction {
            token: text,
            units: &units,
            supply,
            block_number: head,
            time_us,
        };
        self.repo.correct_token_in_tx(&mut tx, &correction).await?;
        let record = publish::audit(
            "quarantine.lifted",
            instrument_id,
            &meta.actor,
            &format!("impossible transfer in block {since}"),
            &format!("supply {supply} in block {head}"),
            reason,
            &meta.correlation_id,
            self.now_us(),
        );
        self.repo.publish_in_tx(&mut tx, &[record]).await?;
        self.store_call_in_tx(&mut tx, meta, LIFT, instrument_id)
            .await?;
        tx.commit().await?;
        tracing::info!(actor = meta.actor, instrument_id, "quarantine lifted");
        Ok((instrument, false))
    }

    /// Addresses that the token's events name in the blocks from..=through.
    async fn addresses_in(
        &self,
        token: Address,
        from: u64,
        through: u64,
    ) -> Result<BTreeSet<String>, Error> {
        let (mut found, mut next) = (BTreeSet::new(), from);
        while next <= through {
            let end = through.min(next + BLOCKS - 1);
            for transfer in self.chain.transfers(&[token], next, end).await? {
                let sides = [transfer.from, transfer.to];
                found.extend(sides.iter().flatten().map(ToString::to_string));
            }
            next = end + 1;
        }
        Ok(found)
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
        instrument: &Instrument,
        at_us: Option<i64>,
    ) -> Result<Vec<Holder>, Error> {
        const PAGE: i64 = 1_000;
        let token = self.token_of(instrument, at_us).await?;
        let token = token.as_str();
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

pub(super) fn block_time_us(time_s: u64) -> i64 {
    i64::try_from(time_s).unwrap_or(i64::MAX / 1_000_000) * 1_000_000
}

pub(super) fn parse_token(text: &str) -> Result<Address, Error> {
    let token = text.parse();
    token.map_err(|_| Error::Damaged(format!("token address {text}")))
}

/// Appends the moves of a transfer: one per side that is an address. `texts`: addresses as text,
/// whose checksum is a hash.
fn push_moves(
    moves: &mut Vec<HolderMove>,
    texts: &mut HashMap<Address, String>,
    transfer: &TokenTransfer,
    time_us: i64,
) {
    let mut text = |address: Address| {
        let known = texts.entry(address);
        known.or_insert_with(|| address.to_string()).clone()
    };
    let units = i128::try_from(transfer.units).unwrap_or(i128::MAX);
    let sides = [(transfer.from, -units), (transfer.to, units)];
    for (address, units) in sides {
        if let Some(address) = address {
            moves.push(HolderMove {
                token: text(transfer.token),
                address: text(address),
                units,
                block_number: transfer.block_number,
                time_us,
            });
        }
    }
}
