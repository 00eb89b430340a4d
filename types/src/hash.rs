//! Hash function for state hashes: order-dependent, cheap, the same on every machine.
//!
//! It detects divergence and does not resist an adversary.

/// Folds words into 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateHasher(u64);

impl Default for StateHasher {
    fn default() -> Self {
        Self::new()
    }
}

impl StateHasher {
    pub const fn new() -> Self {
        Self(0x6a09_e667_f3bc_c908)
    }

    pub const fn write_u64(&mut self, word: u64) {
        let mut x = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        x ^= x >> 32;
        self.0 = x.rotate_left(29).wrapping_add(word);
    }

    pub fn write_u64s(&mut self, words: &[u64]) {
        for word in words {
            self.write_u64(*word);
        }
    }

    /// Writes the length, then the bytes as little-endian words, zero-padded. `write_u64s` has no
    /// length prefix: variable-length input must add it.
    pub fn write_length_prefixed(&mut self, bytes: &[u8]) {
        self.write_u64(bytes.len() as u64);
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.write_u64(u64::from_le_bytes(word));
        }
    }

    pub const fn finish(self) -> u64 {
        let mut x = self.0;
        x ^= x >> 33;
        x = x.wrapping_mul(0xff51_afd7_ed55_8ccd);
        x ^= x >> 33;
        x
    }
}
