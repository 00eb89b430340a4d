//! Ids of new rows and events: UUIDs of version 7, increasing within a group, so that its rows are
//! adjacent in every index. One random draw per group, not per id.

use rand::Rng;
use uuid::{Builder, Uuid};

use crate::model::Id;

/// Makes the ids of one group.
pub struct IdGenerator {
    millis: u64,
    /// Sub-millisecond part of the time.
    head: [u8; 2],
    /// Counts up from a random number. Two groups of one millisecond collide with probability
    /// 2^-60.
    next: u64,
}

impl IdGenerator {
    pub fn at(now_us: i64) -> Self {
        let now_us = now_us.max(0).unsigned_abs();
        // As RFC 9562 6.2 method 3: the fraction of the millisecond in 12 bits.
        let fraction = (now_us % 1_000) * 4_096 / 1_000;
        IdGenerator {
            millis: now_us / 1_000,
            head: (fraction as u16).to_be_bytes(),
            // Two bits go to the variant, one leaves room to count.
            next: rand::rng().random::<u64>() >> 3,
        }
    }

    pub fn uuid(&mut self) -> Uuid {
        self.next += 1;
        let mut tail = [0; 10];
        tail[..2].copy_from_slice(&self.head);
        tail[2..].copy_from_slice(&self.next.to_be_bytes());
        Builder::from_unix_timestamp_millis(self.millis, &tail).into_uuid()
    }

    pub fn id(&mut self) -> Id {
        let mut text = Uuid::encode_buffer();
        Id::from(&*self.uuid().as_hyphenated().encode_lower(&mut text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_a_group_grow_and_groups_do_not_meet() {
        let mut groups: Vec<IdGenerator> = (0..3)
            .map(|_| IdGenerator::at(1_780_000_000_123_456))
            .collect();
        let mut all = Vec::new();
        for group in &mut groups {
            let own: Vec<Uuid> = (0..1_000).map(|_| group.uuid()).collect();
            assert!(own.is_sorted());
            all.extend(own);
        }
        assert!(all.iter().all(|id| id.get_version_num() == 7));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 3_000);
        let later = IdGenerator::at(1_780_000_000_123_999).uuid();
        assert!(all.iter().all(|id| *id < later));
    }
}
