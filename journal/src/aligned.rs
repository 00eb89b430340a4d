//! Page-aligned buffers and whole blocks, for direct I/O without a copy.
//!
//! `O_DIRECT` requires address, length and offset at multiples of the device's block. [`Buffer`]
//! aligns the address. [`Blocks`] checks address and length when it is made.

use rkyv::util::AlignedVec;

/// Alignment of a buffer's first byte: a page, a multiple of every device's block.
pub const ALIGNMENT: usize = 4096;

/// Growable byte buffer whose first byte is page-aligned.
#[derive(Default)]
pub struct Buffer {
    /// Initialised bytes. Those after the first `used` are spare and have any content.
    room: AlignedVec<ALIGNMENT>,
    used: usize,
}

/// Growth of the initialised bytes, as far as the capacity allows.
const ROOM_STEP: usize = 64 * 1024;

impl Buffer {
    pub fn with_capacity(bytes: usize) -> Self {
        Self {
            room: AlignedVec::with_capacity(bytes),
            used: 0,
        }
    }

    #[inline]
    pub fn len(&self) -> usize {
        self.used
    }

    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    pub fn bytes(&self) -> &[u8] {
        &self.room[..self.used]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.room[..self.used]
    }

    #[inline]
    pub fn extend(&mut self, bytes: &[u8]) {
        let end = self.used + bytes.len();
        if end > self.room.len() {
            self.grow(end);
        }
        self.room[self.used..end].copy_from_slice(bytes);
        self.used = end;
    }

    /// The `N` bytes after the end. [`Buffer::extend_into_spare`] adds what the caller wrote there.
    #[inline]
    pub fn spare<const N: usize>(&mut self) -> &mut [u8; N] {
        if self.used + N > self.room.len() {
            self.grow(self.used + N);
        }
        self.room[self.used..]
            .first_chunk_mut()
            .expect("the buffer has N spare bytes")
    }

    /// Extends the length over bytes written through [`Buffer::spare`].
    #[inline]
    pub fn extend_into_spare(&mut self, bytes: usize) {
        assert!(
            bytes <= self.room.len() - self.used,
            "more bytes than the buffer has spare"
        );
        self.used += bytes;
    }

    /// Shortens, or grows with zeros.
    pub fn resize(&mut self, bytes: usize) {
        if bytes > self.room.len() {
            self.grow(bytes);
        }
        if bytes > self.used {
            self.room[self.used..bytes].fill(0);
        }
        self.used = bytes;
    }

    /// Initialises at least `bytes`; more if the capacity allows it without a reallocation.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, bytes: usize) {
        let more = (self.room.len() + ROOM_STEP).min(self.room.capacity());
        self.room.resize(bytes.max(more), 0);
    }

    /// Pads with zeros to a multiple of `block` and returns all of it as blocks.
    pub fn padded(&mut self, block: usize) -> Blocks<'_> {
        self.resize(self.len().next_multiple_of(block));
        Blocks::new(self.bytes(), block)
    }
}

/// Whole blocks at an aligned address.
#[derive(Clone, Copy)]
pub struct Blocks<'a>(&'a [u8]);

impl<'a> Blocks<'a> {
    /// # Panics
    /// Address or length is not aligned.
    pub fn new(bytes: &'a [u8], block: usize) -> Self {
        assert!(
            block.is_power_of_two() && block <= ALIGNMENT,
            "block size must be a power of two and at most a page"
        );
        assert_eq!(bytes.as_ptr().addr() % ALIGNMENT, 0, "unaligned address");
        assert_eq!(bytes.len() % block, 0, "length is not whole blocks");
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
    fn a_buffer_stays_aligned_while_it_grows_and_returns_whole_blocks_only() {
        let mut buffer = Buffer::default();
        for size in [1, 511, 512, 513, 4_095, 4_097, 70_000] {
            buffer.resize(0);
            buffer.extend(&vec![7; size]);
            let blocks = buffer.padded(512);
            assert_eq!(blocks.bytes().as_ptr().addr() % ALIGNMENT, 0);
            assert_eq!(blocks.bytes().len(), size.next_multiple_of(512));
            assert!(blocks.bytes()[size..].iter().all(|byte| *byte == 0));
            *buffer.spare() = [9; 100];
            buffer.extend_into_spare(size.min(100));
            let end = buffer.len() - size.min(100);
            assert!(buffer.bytes()[end..].iter().all(|byte| *byte == 9));
        }
        buffer.resize(0);
        buffer.extend(&[7; 70_000]);
        buffer.padded(512);
        let bytes = buffer.bytes();
        assert!(std::panic::catch_unwind(|| Blocks::new(&bytes[8..520], 512)).is_err());
        assert!(std::panic::catch_unwind(|| Blocks::new(&bytes[..520], 512)).is_err());
    }
}
