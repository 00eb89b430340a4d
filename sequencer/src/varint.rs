//! Zero-byte suppression for journal records.
//!
//! The archive of a command or an event is a fixed number of 8-byte words, most of them small. A
//! payload has a nibble per word with the number of its low bytes, then those bytes, little-endian.
//! That is a third of the archive's size.
//!
//! ```text
//! | word lengths, 4 bits each, the first in the low half | low bytes of word 1 | of word 2 | ...
//! ```

use rkyv::util::Align;

use crate::codec::{Put, WORDS_MAX};

/// Longest payload, in bytes.
pub(crate) const PACKED_BYTES_MAX: usize = WORDS_MAX * 8 + tag_bytes(WORDS_MAX * 8);

// All lengths fit one word.
const _: () = assert!(WORDS_MAX * 4 <= 64);

/// Size of the word lengths, in bytes.
const fn tag_bytes(archive: usize) -> usize {
    (archive / 8).div_ceil(2)
}

/// Packs an archive of `COUNT` words into a payload, word by word. Trailing words that are not put
/// are zero and take no bytes.
pub(crate) struct Packer<'a, const COUNT: usize> {
    /// At least [`PACKED_BYTES_MAX`] long.
    out: &'a mut [u8],
    at: usize,
    tags: u64,
    /// Four bits per word put.
    shift: u32,
}

impl<'a, const COUNT: usize> Packer<'a, COUNT> {
    /// Bytes of the word lengths.
    const TAG_BYTES: usize = tag_bytes(COUNT * 8);

    #[inline(always)]
    pub fn new(out: &'a mut [u8]) -> Self {
        Self {
            out,
            at: Self::TAG_BYTES,
            tags: 0,
            shift: 0,
        }
    }

    /// Writes the word lengths and returns the payload's size.
    #[inline(always)]
    pub fn finish(self) -> usize {
        self.out[..Self::TAG_BYTES].copy_from_slice(&self.tags.to_le_bytes()[..Self::TAG_BYTES]);
        self.at
    }
}

impl<const COUNT: usize> Put for Packer<'_, COUNT> {
    #[inline(always)]
    fn put(&mut self, word: u64) {
        // 0 for a zero word.
        let length = (71 - word.leading_zeros()) / 8;
        self.tags |= u64::from(length) << self.shift;
        self.shift += 4;
        self.out[self.at..self.at + 8].copy_from_slice(&word.to_le_bytes());
        self.at += length as usize;
    }
}

/// Unpacks an archive of `N` bytes; `None` when the payload is malformed.
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

    const SMALL_BYTES: usize = journal::SMALL_BYTES;

    #[test]
    fn packing_round_trips() {
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
            let mut out = [0xff; SMALL_BYTES];
            let mut packer = Packer::<13>::new(&mut out);
            for bytes in archive.as_chunks::<8>().0 {
                packer.put(u64::from_le_bytes(*bytes));
            }
            let length = packer.finish();
            let packed = &out[..length];
            assert!(packed.len() <= 104 + 7);
            assert_eq!(unpack::<104>(packed).map(|found| found.0), Some(archive));
            // A payload that is longer or shorter is refused.
            let mut longer = packed.to_vec();
            longer.push(0);
            assert!(unpack::<104>(&longer).is_none());
            assert!(unpack::<104>(&packed[..packed.len() - 1]).is_none());
        }
    }

    #[test]
    fn malformed_payloads_are_refused() {
        assert!(unpack::<104>(&[]).is_none());
        assert!(unpack::<104>(&[0xff; 100]).is_none());
        assert!(unpack::<104>(&[0; 7]).is_some_and(|archive| archive.0 == [0; 104]));
    }
}
