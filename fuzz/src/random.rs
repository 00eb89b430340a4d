//! Seeded random numbers and mutations.

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn long(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.long() % bound.max(1) as u64) as usize
    }

    pub fn bytes(&mut self, length: usize) -> Vec<u8> {
        (0..length).map(|_| self.long() as u8).collect()
    }

    /// Applies one to four random changes: flips a bit, overwrites or inserts a byte, zeroes or
    /// duplicates a piece, or truncates the end.
    pub fn mutate(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            let length = self.below(40).min(bytes.len() - at);
            match self.below(7) {
                0 | 1 if !bytes.is_empty() => bytes[at] ^= 1 << self.below(8),
                2 if !bytes.is_empty() => bytes[at] = self.interesting(),
                3 => bytes[at..at + length].fill(0),
                4 => {
                    let piece = bytes[at..at + length].to_vec();
                    let to = self.below(bytes.len() + 1);
                    bytes.splice(to..to, piece);
                }
                5 => bytes.insert(at, self.interesting()),
                _ => bytes.truncate(bytes.len() - length),
            }
        }
    }

    /// A range limit, punctuation of text formats, or any byte.
    fn interesting(&mut self) -> u8 {
        const BYTES: &[u8] = b"\x00\x01\x7f\x80\xff09-+.,=&?|\"{}[] ";
        let at = self.below(2 * BYTES.len());
        BYTES.get(at).copied().unwrap_or(self.long() as u8)
    }
}
