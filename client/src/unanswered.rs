//! Requests sent and not yet answered for good: what a resume compares with the server's last client sequence.
//!
//! Invariant: keys are client sequences in sending order. Cost: one small map entry a request in flight, bounded by [`UNANSWERED_MAX`].

use std::collections::BTreeMap;

use crate::wire::ClientMessage;

/// Most requests in flight; a client past it has lost contact with reality.
pub const UNANSWERED_MAX: usize = 1 << 20;

#[derive(Default)]
pub struct Unanswered(BTreeMap<u64, ClientMessage>);

impl Unanswered {
    pub fn is_full(&self) -> bool {
        self.0.len() >= UNANSWERED_MAX
    }

    pub fn sent(&mut self, client_seq: u64, message: ClientMessage) {
        let new = self.0.insert(client_seq, message).is_none();
        assert!(new, "a client sequence is used once");
    }

    pub fn answered(&mut self, client_seq: u64) {
        self.0.remove(&client_seq);
    }

    /// What the server has never seen, oldest first: to be sent again with the same sequences.
    pub fn after(&self, last_client_seq: u64) -> impl Iterator<Item = (u64, &ClientMessage)> {
        self.0
            .range(last_client_seq.saturating_add(1)..)
            .map(|(client_seq, message)| (*client_seq, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Cancel;

    // rows: R343
    #[test]
    fn r343_only_what_the_server_has_not_seen_is_sent_again() {
        let mut unanswered = Unanswered::default();
        for client_seq in 1..=5 {
            let message = Cancel {
                client_order_id: client_seq,
                engine_order_id: 0,
            };
            unanswered.sent(client_seq, message.into());
        }
        unanswered.answered(4);
        let again: Vec<_> = unanswered.after(2).map(|(seq, _)| seq).collect();
        assert_eq!(again, [3, 5]);
        assert_eq!(unanswered.after(u64::MAX).count(), 0);
    }
}
