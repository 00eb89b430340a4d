//! CheckIntegrity (T33) and GetSupply (D22), read from the chain.

use sha2::Digest as _;
use streebog::Digest as _;
use types::Decimal;

use super::Service;
use crate::error::{Error, Refusal};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashAlgorithm {
    /// The chain's block hash, computed from the header.
    Keccak256,
    Sha256,
    /// GOST R 34.11-2012, 256 bits.
    Streebog256,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Integrity {
    /// The header has the hash that the node states, and the computed hash is the given one.
    pub valid: bool,
    pub computed_hash: String,
}

impl Service {
    /// Hashes the canonical header of a block and compares the result with `given`, ignoring case
    /// and `0x`. A header without the hash that the node states makes the answer not valid with
    /// every algorithm, and is logged as critical.
    ///
    /// # Errors
    /// `BlockNotFound`: the chain has no such block. `Unavailable`: the node does not answer.
    pub async fn check_integrity(
        &self,
        block_number: u64,
        given: &str,
        algorithm: HashAlgorithm,
    ) -> Result<Integrity, Error> {
        let block = self
            .chain
            .block(Some(block_number))
            .await?
            .ok_or(Refusal::BlockNotFound)?;
        // One read of the block: a second one could be of another block after a reorganisation.
        let block_hash = block.computed_hash();
        let has_stated_hash = block_hash == block.hash;
        if !has_stated_hash {
            tracing::error!(
                block_number,
                stated_hash = %block.hash,
                computed_hash = %block_hash,
                severity = "critical",
                "the header of a block does not have the hash that the node states: compare the \
                 block with that of another node of the chain"
            );
        }
        let computed_hash = match algorithm {
            HashAlgorithm::Keccak256 => block_hash.to_string(),
            HashAlgorithm::Sha256 => {
                format!("0x{}", hex::encode(sha2::Sha256::digest(&block.header)))
            }
            HashAlgorithm::Streebog256 => format!(
                "0x{}",
                hex::encode(streebog::Streebog256::digest(&block.header))
            ),
        };
        let bare = |text: &str| text.trim_start_matches("0x").to_lowercase();
        Ok(Integrity {
            valid: has_stated_hash && bare(given) == bare(&computed_hash),
            computed_hash,
        })
    }

    /// Total supply, and the chain head before it was read.
    pub async fn supply(&self, instrument_id: &str) -> Result<(Decimal, u64), Error> {
        let instrument = self.require_instrument(instrument_id).await?;
        if instrument.contract_address.is_empty() {
            return Ok((Decimal::ZERO, self.chain.block_number().await?));
        }
        let token = self.token(&instrument)?;
        let next = self.next_token(&instrument).await?;
        let (units, block_number) = self.supply_in(&token, next.as_ref()).await?;
        let units = i128::try_from(units).map_err(|_| Error::Damaged("supply".into()))?;
        let supply = Decimal::new(units, instrument.decimals)
            .map_err(|_| Error::Damaged("supply".into()))?;
        Ok((supply, block_number))
    }
}
