//! UUIDv7 ids of new rows and events. Ids increase within a group, so its rows are adjacent in
//! indexes by id. One random draw per group, not per id.

use rand::Rng;
use uuid::{Builder, Uuid};

use crate::model::Id;

/// Generates the ids of one group.
pub struct IdGenerator {
    millis: u64,
    /// Sub-millisecond part of the time.
    fraction: [u8; 2],
    /// Counter with a random start. Two groups in the same fraction of a millisecond collide with
    /// probability 2^-60 per id.
    next: u64,
}

impl IdGenerator {
    pub fn at(now_us: i64) -> Self {
        let now_us = now_us.max(0).unsigned_abs();
        // As RFC 9562 6.2 method 3: the fraction of the millisecond in 12 bits.
        let fraction = (now_us % 1_000) * 4_096 / 1_000;
        IdGenerator {
            millis: now_us / 1_000,
            fraction: (fraction as u16).to_be_bytes(),
            // Two bits hold the UUID variant. One bit leaves room for the counter.
            next: rand::rng().random::<u64>() >> 3,
        }
    }

    pub fn uuid(&mut self) -> Uuid {
        self.next += 1;
        let mut tail = [0; 10];
        tail[..2].copy_from_slice(&self.fraction);
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
    fn ids_increase_within_a_group_and_differ_between_groups() {
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
