//! Occupancy bitmap in three levels of 64-bit words: a few instructions find the next place.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

#[derive(Clone, Debug)]
pub(crate) struct Bits {
    /// One bit per place.
    low: Vec<u64>,
    /// One bit per nonzero word of `low`.
    mid: Vec<u64>,
    /// One bit per nonzero word of `mid`.
    top: Vec<u64>,
}

impl Bits {
    pub fn new(places: usize) -> Self {
        let low = places.div_ceil(64).max(1);
        let mid = low.div_ceil(64);
        let top = mid.div_ceil(64);
        Self {
            low: vec![0; low],
            mid: vec![0; mid],
            top: vec![0; top],
        }
    }

    /// True when the places around this one were free, as far as one word reaches.
    #[inline(always)]
    pub fn set(&mut self, place: usize) -> bool {
        let low = &mut self.low[place >> 6];
        let before = *low;
        *low |= 1 << (place & 63);
        // A nonzero word is already marked in the upper levels.
        if before == 0 {
            self.mid[place >> 12] |= 1 << ((place >> 6) & 63);
            self.top[place >> 18] |= 1 << ((place >> 12) & 63);
        }
        before == 0
    }

    /// True when the places around this one are free now, as far as one word reaches.
    #[inline(always)]
    pub fn clear(&mut self, place: usize) -> bool {
        let low = &mut self.low[place >> 6];
        *low &= !(1 << (place & 63));
        if *low == 0 {
            let mid = &mut self.mid[place >> 12];
            *mid &= !(1 << ((place >> 6) & 63));
            if *mid == 0 {
                self.top[place >> 18] &= !(1 << ((place >> 12) & 63));
            }
            return true;
        }
        false
    }

    /// Number of words with an occupied place among the words that `places` covers.
    pub fn used_words(&self, places: Range<usize>) -> usize {
        let end = places.end.div_ceil(64).min(self.low.len());
        let words = &self.low[places.start / 64..end];
        words.iter().filter(|word| **word != 0).count()
    }

    pub fn is_empty(&self) -> bool {
        self.top.iter().all(|word| *word == 0)
    }

    /// Every occupied place, from the lowest level only. Panics where the upper levels disagree.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        for (below, above) in [(&self.low, &self.mid), (&self.mid, &self.top)] {
            for (at, word) in below.iter().enumerate() {
                let mark = above[at >> 6] >> (at & 63) & 1;
                assert_eq!(
                    mark == 1,
                    *word != 0,
                    "upper bitmap level disagrees with the lower one"
                );
            }
        }
        self.low.iter().enumerate().flat_map(|(at, word)| {
            (0..64usize)
                .filter(move |bit| *word != 0 && *word >> bit & 1 == 1)
                .map(move |bit| (at << 6) + bit)
        })
    }

    /// Lowest occupied place at or above `from`.
    #[inline]
    pub fn up(&self, from: usize) -> Option<usize> {
        let word = first_from(&self.low, from)?;
        if let Found::Bit(place) = word {
            return Some(place);
        }
        let low = match first_from(&self.mid, (from >> 6) + 1)? {
            Found::Bit(word) => word,
            Found::Past => {
                let mut at = (((from >> 6) + 1) >> 6) + 1;
                let mid = loop {
                    match first_from(&self.top, at)? {
                        Found::Bit(word) => break word,
                        Found::Past => at = ((at >> 6) + 1) << 6,
                    }
                };
                (mid << 6) + self.mid[mid].trailing_zeros() as usize
            }
        };
        Some((low << 6) + self.low[low].trailing_zeros() as usize)
    }

    /// Highest occupied place at or below `from`.
    #[inline]
    pub fn down(&self, from: usize) -> Option<usize> {
        if let Some(place) = last_to(&self.low, from) {
            return Some(place);
        }
        let word = (from >> 6).checked_sub(1)?;
        let low = match last_to(&self.mid, word) {
            Some(word) => word,
            None => {
                let mut at = (word >> 6).checked_sub(1)?;
                let mid = loop {
                    match last_to(&self.top, at) {
                        Some(word) => break word,
                        None => at = ((at >> 6) << 6).checked_sub(1)?,
                    }
                };
                (mid << 6) + 63 - self.mid[mid].leading_zeros() as usize
            }
        };
        Some((low << 6) + 63 - self.low[low].leading_zeros() as usize)
    }
}

enum Found {
    Bit(usize),
    /// No set bit left in this word.
    Past,
}

/// First set bit at or above `from` in the word of `from`; `None` past the end.
#[inline]
fn first_from(words: &[u64], from: usize) -> Option<Found> {
    let word = words.get(from >> 6)? >> (from & 63);
    Some(if word == 0 {
        Found::Past
    } else {
        Found::Bit(from + word.trailing_zeros() as usize)
    })
}

/// Last set bit at or below `from` in the word of `from`.
#[inline]
fn last_to(words: &[u64], from: usize) -> Option<usize> {
    let word = words[from >> 6] << (63 - (from & 63));
    (word != 0).then(|| from - word.leading_zeros() as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 128,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]
        #[test]
        fn finds_the_same_places_as_a_sorted_set(
            places in prop::collection::btree_set(0usize..600_000, 0..40),
            gone in prop::collection::vec(any::<prop::sample::Index>(), 0..20),
            asked in prop::collection::vec(0usize..600_000, 40),
        ) {
            let mut plain = places.clone();
            let mut bits = Bits::new(600_000);
            for place in &places {
                bits.set(*place);
            }
            let list: Vec<usize> = places.iter().copied().collect();
            for index in gone {
                if !list.is_empty() {
                    let place = list[index.index(list.len())];
                    plain.remove(&place);
                    bits.clear(place);
                }
            }
            for from in asked.into_iter().chain(list) {
                prop_assert_eq!(bits.up(from), plain.range(from..).next().copied());
                prop_assert_eq!(bits.down(from), plain.range(..=from).next_back().copied());
            }
            prop_assert_eq!(bits.is_empty(), plain.is_empty());
            prop_assert!(bits.iter().eq(plain.iter().copied()));
        }
    }
}
