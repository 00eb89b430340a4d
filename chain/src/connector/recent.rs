//! Contents of the last final blocks that were read. A batch of a thousand logs is read from the
//! node once, for its receipt and for the transfers in its block.
//!
//! Only blocks whose receipts were read are kept, those with a transaction of this connector. A
//! final block never changes: after a reorganisation below it nothing is answered until the node
//! has it again.

use std::collections::VecDeque;

use super::{Receipt, TokenTransfer};
use crate::{Address, TxHash};

/// Limits of blocks and transfers.
const BLOCKS: usize = 64;
const TRANSFERS: usize = 100_000;

struct Block {
    number: u64,
    /// By submission.
    receipts: Vec<Receipt>,
    /// All transfers of any token, in chain order.
    transfers: Vec<TokenTransfer>,
}

#[derive(Default)]
pub(super) struct RecentBlocks {
    /// Ascending.
    blocks: VecDeque<Block>,
    transfers: usize,
}

impl RecentBlocks {
    /// Adds a final block, which is above all earlier ones.
    pub fn push(&mut self, number: u64, receipts: Vec<Receipt>, transfers: Vec<TokenTransfer>) {
        self.transfers += transfers.len();
        self.blocks.push_back(Block {
            number,
            receipts,
            transfers,
        });
        while self.blocks.len() > BLOCKS || self.transfers > TRANSFERS {
            if let Some(removed) = self.blocks.pop_front() {
                self.transfers -= removed.transfers.len();
            }
        }
    }

    /// The receipt of a submission in one of the blocks.
    pub fn receipt(&self, submission: &TxHash) -> Option<&Receipt> {
        let blocks = self.blocks.iter().rev();
        let mut receipts = blocks.flat_map(|block| &block.receipts);
        receipts.find(|receipt| receipt.tx_hash == *submission)
    }

    /// Transfers of these tokens in a block; `None`: the block is not kept.
    pub fn transfers(&self, tokens: &[Address], number: u64) -> Option<Vec<TokenTransfer>> {
        let at = self
            .blocks
            .binary_search_by_key(&number, |block| block.number);
        let block = &self.blocks[at.ok()?];
        let transfers = block.transfers.iter();
        let of_tokens = transfers.filter(|transfer| tokens.contains(&transfer.token));
        Some(of_tokens.cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn transfer(token: u64, block_number: u64) -> TokenTransfer {
        TokenTransfer {
            token: Address::of_user(&token.to_string()),
            from: None,
            to: None,
            units: 1,
            block_number,
        }
    }

    #[test]
    fn kept_blocks_answer_for_themselves_alone() {
        let mut recent = RecentBlocks::default();
        for number in [3, 5] {
            let transfers = vec![transfer(1, number), transfer(2, number)];
            recent.push(number, Vec::new(), transfers);
        }
        let token = transfer(1, 0).token;
        assert_eq!(recent.transfers(&[token], 4), None);
        assert_eq!(recent.transfers(&[token], 5), Some(vec![transfer(1, 5)]));
        assert_eq!(recent.transfers(&[], 5), Some(Vec::new()));
        for number in 6..6 + BLOCKS as u64 {
            recent.push(number, Vec::new(), Vec::new());
        }
        assert_eq!(
            recent.transfers(&[token], 5),
            None,
            "the oldest are removed"
        );
        assert_eq!((recent.blocks.len(), recent.transfers), (BLOCKS, 0));
        let many = vec![transfer(1, 200); TRANSFERS + 1];
        recent.push(200, Vec::new(), many);
        assert!(
            recent.blocks.is_empty(),
            "a block above the limit is not kept"
        );
    }
}
