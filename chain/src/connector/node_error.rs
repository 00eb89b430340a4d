//! What the error text of a node means. Nodes have no common error codes, only texts.
//!
//! The texts are those of geth, Besu, anvil, Nethermind and the embedded chain, compared in any
//! letter case. A text that is not listed is [`Meaning::Unknown`]: the node may have accepted the
//! transaction, so its nonce must not be reused.

/// Meaning of an error response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meaning {
    /// The node has the transaction already.
    AlreadyKnown,
    /// A block contains a transaction with this nonce.
    NonceTooLow,
    /// The pool has another transaction with this nonce, whose fee is too high to replace it.
    NonceTaken,
    /// The fee is below what the node accepts now.
    Underpriced,
    /// The account cannot pay for the gas.
    NoFunds,
    /// The gas limit is above what the chain allows a transaction (EIP-7825).
    GasAboveCap,
    /// No block can contain the transaction as it is.
    Invalid,
    /// Execution of a call or estimate failed.
    Reverted,
    Unknown,
}

/// Substrings in lower case. The first match counts.
const MEANINGS: &[(&str, Meaning)] = &[
    ("unknown transaction", Meaning::Invalid),
    ("already known", Meaning::AlreadyKnown),
    ("alreadyknown", Meaning::AlreadyKnown),
    ("known transaction", Meaning::AlreadyKnown),
    ("already imported", Meaning::AlreadyKnown),
    ("nonce too low", Meaning::NonceTooLow),
    ("nonce is too low", Meaning::NonceTooLow),
    ("oldnonce", Meaning::NonceTooLow),
    ("replacement transaction underpriced", Meaning::NonceTaken),
    (
        "replacement transaction is underpriced",
        Meaning::NonceTaken,
    ),
    ("replacementnotallowed", Meaning::NonceTaken),
    ("underpriced", Meaning::Underpriced),
    ("feetoolow", Meaning::Underpriced),
    ("gas price below", Meaning::Underpriced),
    ("gas price is less than", Meaning::Underpriced),
    ("gas price too low", Meaning::Underpriced),
    ("less than block base fee", Meaning::Underpriced),
    ("insufficient funds", Meaning::NoFunds),
    ("insufficientfunds", Meaning::NoFunds),
    ("upfront cost exceeds account balance", Meaning::NoFunds),
    ("gas limit too high", Meaning::GasAboveCap),
    ("tx_gas_limit_cap", Meaning::GasAboveCap),
    ("intrinsic gas", Meaning::Invalid),
    ("exceeds block gas limit", Meaning::Invalid),
    ("gaslimitexceeded", Meaning::Invalid),
    ("fee cap exceeded", Meaning::Invalid),
    ("exceeds the configured cap", Meaning::Invalid),
    ("invalid sender", Meaning::Invalid),
    ("invalid signature", Meaning::Invalid),
    ("invalid chain id", Meaning::Invalid),
    ("was meant for chain id", Meaning::Invalid),
    ("transaction type", Meaning::Invalid),
    ("initcode size", Meaning::Invalid),
    ("oversized data", Meaning::Invalid),
    ("execution reverted", Meaning::Reverted),
    ("execution halted", Meaning::Reverted),
    ("evm error", Meaning::Reverted),
    ("invalid opcode", Meaning::Reverted),
    ("gas required exceeds allowance", Meaning::Reverted),
];

pub(super) fn meaning(message: &str) -> Meaning {
    let message = message.to_lowercase();
    let known = MEANINGS.iter().find(|(text, _)| message.contains(text));
    known.map_or(Meaning::Unknown, |(_, meaning)| *meaning)
}

#[cfg(test)]
mod tests {
    use super::*;

    // rows: R064
    #[test]
    fn r064_refusals_of_geth_besu_and_anvil_are_known_in_any_case() {
        for (text, expected) in [
            ("already known", Meaning::AlreadyKnown),
            ("Known transaction", Meaning::AlreadyKnown),
            ("transaction already imported", Meaning::AlreadyKnown),
            (
                "nonce too low: next nonce 5, tx nonce 3",
                Meaning::NonceTooLow,
            ),
            ("Nonce too low", Meaning::NonceTooLow),
            ("replacement transaction underpriced", Meaning::NonceTaken),
            ("Replacement transaction underpriced", Meaning::NonceTaken),
            (
                "transaction underpriced: tip needed 1, tip permitted 0",
                Meaning::Underpriced,
            ),
            (
                "Gas price below configured minimum gas price",
                Meaning::Underpriced,
            ),
            (
                "max fee per gas less than block base fee: address 0x1",
                Meaning::Underpriced,
            ),
            (
                "insufficient funds for gas * price + value",
                Meaning::NoFunds,
            ),
            ("Upfront cost exceeds account balance", Meaning::NoFunds),
            (
                "intrinsic gas too low: gas 1, minimum needed 21000",
                Meaning::Invalid,
            ),
            ("Intrinsic gas exceeds gas limit", Meaning::Invalid),
            (
                "intrinsic gas too high -- tx.gas_limit > env.block.gas_limit",
                Meaning::Invalid,
            ),
            (
                "intrinsic gas too high -- tx.gas_limit > env.cfg.tx_gas_limit_cap",
                Meaning::GasAboveCap,
            ),
            (
                "transaction gas limit too high (cap: 16777216, tx: 17000000)",
                Meaning::GasAboveCap,
            ),
            (
                "transaction gas price below minimum: gas tip cap 0, minimum needed 1",
                Meaning::Underpriced,
            ),
            ("exceeds block gas limit", Meaning::Invalid),
            (
                "Transaction gas limit exceeds block gas limit",
                Meaning::Invalid,
            ),
            ("execution reverted: ERC20: not enough", Meaning::Reverted),
            ("EVM error InvalidFEOpcode", Meaning::Reverted),
            ("invalid opcode: INVALID", Meaning::Reverted),
            (
                "Out of gas: gas required exceeds allowance: 30000000",
                Meaning::Reverted,
            ),
            ("txpool is full", Meaning::Unknown),
            ("Unknown transaction type", Meaning::Invalid),
            ("Internal error", Meaning::Unknown),
            ("node is syncing", Meaning::Unknown),
        ] {
            assert_eq!(meaning(text), expected, "{text}");
        }
    }
}
