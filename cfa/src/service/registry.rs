//! Who holds what: the registry of holders, folded from the tokens' own Transfer events block by block, so it is what the chain is
//! (specification 1.1, R030). Reads catch up first.

use std::collections::HashMap;

use types::Decimal;

use super::Service;
use crate::chain::TokenTransfer;
use crate::error::{Error, Refusal};
use crate::model::{Holder, Instrument};
use crate::repo::HolderMove;

/// Blocks whose events are asked for at once.
const BLOCKS: u64 = 16;
/// A part of a replay ends with the step that reaches one of these.
const REPLAY_TRANSFERS: usize = 2_000;
const REPLAY_BLOCKS: u64 = 4_096;

/// A part of the chain's log, straight from the chain.
#[derive(Debug)]
pub struct Replayed {
    /// With the token's instrument, `None` for a token that is none of ours.
    pub transfers: Vec<(TokenTransfer, Option<Instrument>)>,
    /// The last block of this part.
    pub through: u64,
    /// The last block that was read.
    pub last: u64,
}

/// A holder as ListHolders shows him.
#[derive(Debug)]
pub struct ListedHolder {
    pub holder: Holder,
    /// Reserved in the ledger; not known for a moment in the past.
    pub locked: Option<Decimal>,
}

impl Service {
    /// Brings the registry up to the last block that was read.
    pub async fn catch_up_registry(&self) -> Result<(), Error> {
        let _turn = self.registry_turn.lock().await;
        let head = self.chain.last_read().await?;
        let mut next = self
            .repo
            .registry_block()
            .await?
            .map_or(0, |block| block + 1);
        while next <= head {
            let through = head.min(next + BLOCKS - 1);
            let transfers = self.chain.transfers(next, through).await?;
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
                push_moves(&mut moves, transfer, time.1)?;
            }
            self.repo.apply_moves(&moves, through).await?;
            next = through + 1;
        }
        Ok(())
    }

    /// Reads the log of token transfers again from block `from` on: a part of bounded size. Nothing that is stored here is asked, but which
    /// token is which instrument.
    pub async fn replay_transfers(&self, from: u64) -> Result<Replayed, Error> {
        let last = self.chain.last_read().await?;
        let mut transfers = Vec::new();
        let mut instruments: HashMap<String, Option<Instrument>> = HashMap::new();
        let mut next = from;
        while next <= last && next - from < REPLAY_BLOCKS && transfers.len() < REPLAY_TRANSFERS {
            let through = last.min(next + BLOCKS - 1);
            for transfer in self.chain.transfers(next, through).await? {
                let token = transfer.token.to_string();
                let instrument = match instruments.get(&token) {
                    Some(known) => known.clone(),
                    None => {
                        let found = self.repo.instrument_by_token(&token).await?;
                        instruments.insert(token, found.clone());
                        found
                    }
                };
                transfers.push((transfer, instrument));
            }
            next = through + 1;
        }
        Ok(Replayed {
            transfers,
            // Nothing was read where nothing is yet.
            through: next.saturating_sub(1).min(last),
            last,
        })
    }

    /// Holders with units, newest holder first; `as_of_us` looks back to the last block sealed by then.
    pub async fn holders(
        &self,
        instrument: &Instrument,
        as_of_us: Option<i64>,
        bound: (i64, &str),
        limit: i64,
    ) -> Result<(Vec<ListedHolder>, i64), Error> {
        self.catch_up_registry().await?;
        let token = &instrument.contract_address;
        let holders = match as_of_us {
            Some(at_us) => self.repo.holders_at(token, at_us, bound, limit).await?,
            None => self.repo.holders(token, bound, limit).await?,
        };
        let supply = match as_of_us {
            Some(at_us) => self
                .all_holders(token, Some(at_us))
                .await?
                .iter()
                .map(|holder| holder.units_minor)
                .sum(),
            None => self.repo.registry_supply(token).await?,
        };
        let mut listed = Vec::with_capacity(holders.len());
        for holder in holders {
            let locked = match as_of_us {
                None if !holder.user_id.is_empty() => Some(
                    self.peers
                        .held(&format!("{}:{}", holder.user_id, instrument.instrument_id))
                        .await?,
                ),
                _ => None,
            };
            listed.push(ListedHolder { holder, locked });
        }
        Ok((listed, supply))
    }

    /// Every holder with units, now or at an instant.
    pub(super) async fn all_holders(
        &self,
        token: &str,
        at_us: Option<i64>,
    ) -> Result<Vec<Holder>, Error> {
        const PAGE: i64 = 1_000;
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

fn push_moves(
    moves: &mut Vec<HolderMove>,
    transfer: &TokenTransfer,
    time_us: i64,
) -> Result<(), Error> {
    let units = i64::try_from(transfer.units)
        .map_err(|_| Error::Damaged("a transfer beyond 64 bits".into()))?;
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
    Ok(())
}
