//! A user's on-chain address, a pure function of the user id (T14, specification 4.1.3).
//!
//! If the id consists of at least 40 hexadecimal digits (hyphens aside), the address is the first
//! 40 of them, as specified. A UUID has 32 digits and is padded with eight zeros on the right. Any
//! other id is hashed: the last 20 bytes of its keccak256. No private key is known for any of these
//! addresses. A service that stores the mapping must refuse two users with the same address.

use alloc::string::String;

use sha3::{Digest, Keccak256};

/// Returns the user's address.
pub fn onchain_address(user_id: &str) -> [u8; 20] {
    let mut digits = [0_u8; 40];
    let mut count = 0;
    for byte in user_id.bytes().filter(|byte| *byte != b'-') {
        let Some(digit) = (byte as char).to_digit(16) else {
            return hashed(user_id);
        };
        if count < digits.len() {
            digits[count] = digit as u8;
        }
        count += 1;
    }
    if count != 32 && count < 40 {
        return hashed(user_id);
    }
    let mut address = [0; 20];
    for (byte, pair) in address.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = pair[0] << 4 | pair[1];
    }
    address
}

/// Formats an address as `0x` and 40 digits in the mixed case of EIP-55.
pub fn eip55(address: &[u8; 20]) -> String {
    let mut lower = [0_u8; 40];
    for (pair, byte) in lower.chunks_exact_mut(2).zip(address) {
        pair[0] = digit(byte >> 4);
        pair[1] = digit(byte & 15);
    }
    let hash = Keccak256::digest(lower);
    let mut text = String::with_capacity(42);
    text.push_str("0x");
    for (index, letter) in lower.iter().enumerate() {
        let nibble = hash[index / 2] >> (4 * (1 - index % 2)) & 15;
        let letter = if nibble >= 8 {
            letter.to_ascii_uppercase()
        } else {
            *letter
        };
        text.push(letter as char);
    }
    text
}

fn hashed(user_id: &str) -> [u8; 20] {
    let hash = Keccak256::digest(user_id.as_bytes());
    let mut address = [0; 20];
    address.copy_from_slice(&hash[12..]);
    address
}

const fn digit(nibble: u8) -> u8 {
    if nibble < 10 {
        b'0' + nibble
    } else {
        b'a' + nibble - 10
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t14_uuid_digits_lead_and_eight_zeros_follow() {
        let address = onchain_address("0190f2a1-7c3d-7e10-8a55-1234567890ab");
        assert_eq!(
            eip55(&address).to_lowercase(),
            "0x0190f2a17c3d7e108a551234567890ab00000000"
        );
    }

    #[test]
    fn t14_first_forty_digits_are_taken_literally() {
        let id = "0190f2a17c3d7e108a551234567890abDEADBEEFcafe";
        assert_eq!(
            eip55(&onchain_address(id)).to_lowercase(),
            "0x0190f2a17c3d7e108a551234567890abdeadbeef"
        );
    }

    #[test]
    fn t14_other_ids_are_hashed() {
        // keccak256("") ends in 7bfad8045d85a470; keccak256("abc") in 6e45, public vectors.
        assert_eq!(
            eip55(&onchain_address("")).to_lowercase(),
            "0xdcc703c0e500b653ca82273b7bfad8045d85a470"
        );
        assert_ne!(onchain_address("alice"), onchain_address("bob"));
        assert_ne!(onchain_address("abcdef"), [0; 20]);
    }

    #[test]
    fn t14_mixed_case_follows_the_public_vectors_of_eip_55() {
        for text in [
            "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
            "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
            "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
            "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
        ] {
            // Forty digits without a hyphen: the id is the address.
            assert_eq!(eip55(&onchain_address(&text[2..])), text);
        }
    }
}
