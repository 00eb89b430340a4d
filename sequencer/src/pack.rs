//! Archives without their zeros. A command or an event is a fixed number of 8-byte words, most of them small: a journal payload is a nibble a word, how
//! many low bytes of it follow, then those bytes, little-endian. A third of the archive's size.
//!
//! ```text
//! | lengths of the words, 4 bits each, the first in the low half | low bytes of the first word | of the second | ...
//! ```

use journal::SMALL_BYTES;
use rkyv::util::Align;

use crate::flat::{Flat, WORDS_MAX};

/// Longest payload, in bytes.
pub(crate) const PACKED_BYTES_MAX: usize = WORDS_MAX * 8 + tag_bytes(WORDS_MAX * 8);

// All lengths fit one word.
const _: () = assert!(WORDS_MAX * 4 <= 64);

/// Bytes of the lengths in front.
const fn tag_bytes(archive: usize) -> usize {
    (archive / 8).div_ceil(2)
}

/// Packs an archive of `COUNT` words into `out`; gives the payload's length.
#[inline]
pub(crate) fn pack<const COUNT: usize>(flat: &Flat, out: &mut [u8; SMALL_BYTES]) -> usize {
    let (words, used) = flat;
    let front = const { tag_bytes(COUNT * 8) };
    let mut at = front;
    let mut tags = 0u64;
    let mut shift = 0;
    // What is not used is zero: no length, no bytes.
    for word in &words[..COUNT.min(*used)] {
        // 0 for a word that is 0.
        let length = (71 - word.leading_zeros()) / 8;
        tags |= u64::from(length) << shift;
        shift += 4;
        out[at..at + 8].copy_from_slice(&word.to_le_bytes());
        at += length as usize;
    }
    out[..front].copy_from_slice(&tags.to_le_bytes()[..front]);
    at
}

/// The archive of `N` bytes in a payload; `None` when there is none.
pub(crate) fn unpack<const N: usize>(payload: &[u8]) -> Option<Align<[u8; N]>> {
    let mut archive = Align([0; N]);
    let mut at = const { tag_bytes(N) };
    let tags = payload.get(..at)?;
    for (number, word) in archive.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let length = usize::from(tags[number / 2] >> (number % 2 * 4) & 0xf);
        if length > 8 {
            return None;
        }
        if let Some(bytes) = payload.get(at..at + 8) {
            let bytes: [u8; 8] = bytes.try_into().expect("eight bytes");
            let kept = u64::MAX.checked_shr(64 - 8 * length as u32).unwrap_or(0);
            *word = (u64::from_le_bytes(bytes) & kept).to_le_bytes();
        } else {
            word[..length].copy_from_slice(payload.get(at..at + length)?);
        }
        at += length;
    }
    (at == payload.len()).then_some(archive)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_packed_comes_back() {
        let mut state = 1u64;
        for round in 0..20_000u32 {
            let mut archive = [0; 104];
            for byte in &mut archive {
                state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                let random = (state >> 56) as u8;
                // From nearly empty to nearly full.
                *byte = if u32::from(random % 8) < round % 9 {
                    (state >> 48) as u8
                } else {
                    0
                };
            }
            let mut words = [0; WORDS_MAX];
            for (word, bytes) in words.iter_mut().zip(archive.as_chunks::<8>().0) {
                *word = u64::from_le_bytes(*bytes);
            }
            let mut out = [0xff; SMALL_BYTES];
            let length = pack::<13>(&(words, WORDS_MAX), &mut out);
            let packed = &out[..length];
            assert!(packed.len() <= 104 + 7);
            assert_eq!(unpack::<104>(packed).map(|found| found.0), Some(archive));
            // Neither more nor less than what was packed.
            let mut longer = packed.to_vec();
            longer.push(0);
            assert!(unpack::<104>(&longer).is_none());
            assert!(unpack::<104>(&packed[..packed.len() - 1]).is_none());
        }
    }

    #[test]
    fn nonsense_is_refused() {
        assert!(unpack::<104>(&[]).is_none());
        assert!(unpack::<104>(&[0xff; 100]).is_none());
        assert!(unpack::<104>(&[0; 7]).is_some_and(|archive| archive.0 == [0; 104]));
    }
}
