//! The header of a block as its hash covers it.
//!
//! Nodes of a QBFT or IBFT 2.0 chain may store a block with different signatures of its validators
//! (seals) and in different rounds. Its hash covers neither. `extraData` is the RLP list of vanity,
//! validators, vote, round and seals.
//!
//! | chain | hashed `extraData` |
//! |---|---|
//! | QBFT (Besu, GoQuorum) | the list with round 0 and an empty list of seals |
//! | IBFT 2.0 (Besu) | the list of the first three items |
//! | other chains, genesis blocks | unchanged |

use alloy::consensus::Header;
use alloy::primitives::{B256, Bytes, keccak256};
use alloy::rlp::{self, EMPTY_LIST_CODE, EMPTY_STRING_CODE, PayloadView};

/// RLP bytes of the header in the form whose keccak256 is `hash`; unchanged if no form has it.
pub(super) fn hashed_header(header: &Header, hash: B256) -> Vec<u8> {
    let unchanged = rlp::encode(header);
    if keccak256(&unchanged) == hash {
        return unchanged;
    }
    let forms = unsealed(&header.extra_data).into_iter().flatten();
    let mut encoded = forms.map(|extra_data| {
        let header = Header {
            extra_data,
            ..header.clone()
        };
        rlp::encode(header)
    });
    let hashed = encoded.find(|bytes| keccak256(bytes) == hash);
    hashed.unwrap_or(unchanged)
}

/// `extraData` as QBFT and as IBFT 2.0 hash it. `None`: it is not of such a chain.
fn unsealed(mut extra_data: &[u8]) -> Option<[Bytes; 2]> {
    let Ok(PayloadView::List(items)) = rlp::Header::decode_raw(&mut extra_data) else {
        return None;
    };
    let [vanity, validators, vote, _round, _seals] = items[..] else {
        return None;
    };
    let ibft = [vanity, validators, vote].concat();
    let mut qbft = ibft.clone();
    qbft.extend([EMPTY_STRING_CODE, EMPTY_LIST_CODE]);
    Some([qbft, ibft].map(|items| list(&items)))
}

/// The RLP list of these encoded items.
fn list(items: &[u8]) -> Bytes {
    let mut encoded = Vec::new();
    let header = rlp::Header {
        list: true,
        payload_length: items.len(),
    };
    header.encode(&mut encoded);
    encoded.extend(items);
    encoded.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(extra_data: &[u8]) -> Header {
        Header {
            number: 7,
            gas_limit: 30_000_000,
            base_fee_per_gas: Some(0),
            extra_data: Bytes::copy_from_slice(extra_data),
            ..Header::default()
        }
    }

    fn bytes(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    /// `extraData` of two validators and two seals, and as the hash covers it: QBFT, then IBFT 2.0.
    /// The lengths are written by hand.
    fn sealed_and_hashed() -> [(Vec<u8>, Vec<u8>); 2] {
        let vanity = bytes(&[&[0xa0], &[0; 32]]);
        let validators = bytes(&[&[0xea, 0x94], &[0x11; 20], &[0x94], &[0x22; 20]]);
        let first = bytes(&[&vanity, &validators]);
        let seal = bytes(&[&[0xb8, 65], &[0x33; 65]]);
        let seals = bytes(&[&[0xf8, 134], &seal, &seal]);
        let (no_vote, round) = (0xc0, 2);
        let qbft = (
            bytes(&[&[0xf8, 214], &first, &[no_vote, round], &seals]),
            bytes(&[&[0xf8, 79], &first, &[no_vote, 0x80, 0xc0]]),
        );
        let (no_vote, round) = (0x80, [0x84, 0, 0, 0, 2]);
        let ibft = (
            bytes(&[&[0xf8, 218], &first, &[no_vote], &round, &seals]),
            bytes(&[&[0xf8, 77], &first, &[no_vote]]),
        );
        [qbft, ibft]
    }

    // rows: R032
    #[test]
    fn r032_a_qbft_or_ibft_header_is_hashed_without_round_and_seals() {
        for (sealed, hashed) in sealed_and_hashed() {
            let (sealed, hashed) = (header(&sealed), header(&hashed));
            let hash = hashed.hash_slow();
            assert_ne!(hash, sealed.hash_slow());
            assert_eq!(hashed_header(&sealed, hash), rlp::encode(&hashed));
        }
    }

    // rows: R032
    #[test]
    fn r032_a_header_is_unchanged_if_its_whole_hash_or_none_is_stated() {
        let [(qbft, _), (ibft, _)] = sealed_and_hashed();
        let truncated = &qbft[..qbft.len() - 1];
        let four_items = [0xc4, 0x80, 0xc0, 0xc0, 0x80];
        let all: [&[u8]; 6] = [&qbft, &ibft, truncated, &four_items, b"geth", b""];
        for extra_data in all {
            let header = header(extra_data);
            for hash in [header.hash_slow(), B256::repeat_byte(9)] {
                assert_eq!(hashed_header(&header, hash), rlp::encode(&header));
            }
        }
    }
}
