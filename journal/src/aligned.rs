//! Bytes at addresses that a disk takes without a copy in between: page-aligned buffers, and whole blocks of them.
//!
//! `O_DIRECT` wants address, length and offset at multiples of the device's block. Both types check that when they are made, so that a write
//! cannot fail for it later.

use rkyv::util::AlignedVec;

/// Alignment of a buffer's first byte: a page, which is a multiple of every device's block.
pub const ALIGNMENT: usize = 4096;

/// Bytes that begin at a page and can grow.
#[derive(Default)]
pub struct Buffer(AlignedVec<ALIGNMENT>);

impl Buffer {
    pub fn with_capacity(bytes: usize) -> Self {
        Self(AlignedVec::with_capacity(bytes))
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }

    #[inline]
    pub fn extend(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    /// Shortens, or grows with zeros.
    pub fn resize(&mut self, bytes: usize) {
        self.0.resize(bytes, 0);
    }

    /// Adds zeros up to a multiple of `block` and gives all of it as blocks.
    pub fn padded(&mut self, block: usize) -> Blocks<'_> {
        self.resize(self.len().next_multiple_of(block));
        Blocks::new(&self.0, block)
    }
}

/// Whole blocks at an aligned address.
#[derive(Clone, Copy)]
pub struct Blocks<'a>(&'a [u8]);

impl<'a> Blocks<'a> {
    /// # Panics
    /// Address or length is not aligned: a bug of the caller.
    pub fn new(bytes: &'a [u8], block: usize) -> Self {
        assert!(
            block.is_power_of_two() && block <= ALIGNMENT,
            "a block of a device"
        );
        assert_eq!(bytes.as_ptr().addr() % ALIGNMENT, 0, "aligned address");
        assert_eq!(bytes.len() % block, 0, "whole blocks");
        Self(bytes)
    }

    pub fn bytes(&self) -> &'a [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_stays_aligned_while_it_grows_and_gives_whole_blocks_only() {
        let mut buffer = Buffer::default();
        for size in [1, 511, 512, 513, 4_095, 4_097, 70_000] {
            buffer.resize(0);
            buffer.extend(&vec![7; size]);
            let blocks = buffer.padded(512);
            assert_eq!(blocks.bytes().as_ptr().addr() % ALIGNMENT, 0);
            assert_eq!(blocks.bytes().len(), size.next_multiple_of(512));
            assert!(blocks.bytes()[size..].iter().all(|byte| *byte == 0));
        }
        let bytes = buffer.bytes();
        assert!(std::panic::catch_unwind(|| Blocks::new(&bytes[8..520], 512)).is_err());
        assert!(std::panic::catch_unwind(|| Blocks::new(&bytes[..520], 512)).is_err());
    }
}
