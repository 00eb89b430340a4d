//! Transactions waiting for a block, by sender and nonce. In memory only.
//!
//! The pool has at most [`POOL_MAX`] transactions. The chain's own accounts (funded in block 0,
//! among them the platform's operator) have no lower limit. External accounts have at most
//! [`SENDER_MAX`] each and [`EXTERNAL_MAX`] together, so they always leave room for the platform. A
//! new external transaction evicts external ones older than [`EXTERNAL_LIFETIME`].

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::{Duration, Instant};

use alloy::consensus::transaction::Recovered;
use alloy::consensus::{Transaction as _, TxEnvelope};
use alloy::primitives::{Address, B256};

use super::rpc::RpcFailure;

/// Waiting transactions of all senders.
const POOL_MAX: usize = 4_096;
/// Waiting transactions of all external accounts.
const EXTERNAL_MAX: usize = 512;
/// Waiting transactions per external account.
const SENDER_MAX: usize = 64;
/// Age at which an external transaction can be evicted: a nonce gap before it may never be filled.
const EXTERNAL_LIFETIME: Duration = Duration::from_secs(600);

const _: () = assert!(SENDER_MAX < EXTERNAL_MAX && EXTERNAL_MAX < POOL_MAX);

#[derive(Debug)]
struct Waiting {
    transaction: Recovered<TxEnvelope>,
    since: Instant,
}

#[derive(Debug)]
pub struct Pool {
    own: HashSet<Address>,
    /// No empty entries.
    waiting: HashMap<Address, BTreeMap<u64, Waiting>>,
}

/// Transactions for one block.
#[derive(Debug, Default)]
pub struct Ready {
    pub transactions: Vec<Recovered<TxEnvelope>>,
    /// More transactions were ready and did not fit.
    pub has_more: bool,
}

impl Pool {
    /// An empty pool; `own` are the accounts that are not external.
    pub fn new(own: impl IntoIterator<Item = Address>) -> Self {
        Self {
            own: own.into_iter().collect(),
            waiting: HashMap::new(),
        }
    }

    pub fn is_own(&self, sender: &Address) -> bool {
        self.own.contains(sender)
    }

    /// Adds a transaction, or replaces one with the same nonce. The caller has checked that the
    /// nonce is not below the sender's.
    ///
    /// # Errors
    /// A limit is reached, or the replacement's fee is too low.
    pub fn insert(
        &mut self,
        transaction: Recovered<TxEnvelope>,
        now: Instant,
    ) -> Result<(), RpcFailure> {
        let (sender, nonce) = (transaction.signer(), transaction.inner().nonce());
        if !self.is_own(&sender) {
            self.expire(now);
        }
        let same_nonce = self
            .waiting
            .get(&sender)
            .and_then(|by_nonce| by_nonce.get(&nonce));
        match same_nonce {
            Some(waiting) => check_replacement(&waiting.transaction, &transaction)?,
            None => self.check_capacity(&sender)?,
        }
        let waiting = Waiting {
            transaction,
            since: now,
        };
        self.waiting
            .entry(sender)
            .or_default()
            .insert(nonce, waiting);
        Ok(())
    }

    fn check_capacity(&self, sender: &Address) -> Result<(), RpcFailure> {
        let count = |is_counted: &dyn Fn(&Address) -> bool| -> usize {
            let counted = self.waiting.iter().filter(|(from, _)| is_counted(from));
            counted.map(|(_, by_nonce)| by_nonce.len()).sum()
        };
        if count(&|_| true) >= POOL_MAX {
            return Err(RpcFailure::rejected("txpool is full"));
        }
        if self.is_own(sender) {
            return Ok(());
        }
        if count(&|from| from == sender) >= SENDER_MAX {
            return Err(RpcFailure::rejected(format!(
                "txpool is full for this account: {SENDER_MAX} transactions are waiting"
            )));
        }
        if count(&|from| !self.is_own(from)) >= EXTERNAL_MAX {
            return Err(RpcFailure::rejected("txpool is full"));
        }
        Ok(())
    }

    fn expire(&mut self, now: Instant) {
        let own = &self.own;
        self.waiting.retain(|sender, by_nonce| {
            if !own.contains(sender) {
                by_nonce.retain(|_, waiting| now.duration_since(waiting.since) < EXTERNAL_LIFETIME);
            }
            !by_nonce.is_empty()
        });
    }

    pub fn get(&self, tx_hash: B256) -> Option<&Recovered<TxEnvelope>> {
        self.waiting
            .values()
            .flat_map(BTreeMap::values)
            .map(|waiting| &waiting.transaction)
            .find(|transaction| *transaction.inner().tx_hash() == tx_hash)
    }

    /// The first nonce from `next` on that no waiting transaction of the sender has.
    pub fn next_nonce(&self, sender: Address, next: u64) -> u64 {
        let Some(by_nonce) = self.waiting.get(&sender) else {
            return next;
        };
        (next..)
            .find(|nonce| !by_nonce.contains_key(nonce))
            .unwrap_or(next)
    }

    /// Removes and returns the transactions that one block can execute. The nonces of a sender have
    /// no gap, and the gas limits sum to at most `gas_max`. Own accounts come first.
    pub fn take_ready(&mut self, gas_max: u64, next_nonce: impl Fn(Address) -> u64) -> Ready {
        let mut senders: Vec<Address> = self.waiting.keys().copied().collect();
        senders.sort_unstable_by_key(|sender| (!self.is_own(sender), *sender));
        let mut ready = Ready::default();
        let mut gas_left = gas_max;
        for sender in senders {
            let by_nonce = self
                .waiting
                .get_mut(&sender)
                .expect("the key was just listed");
            let mut next = next_nonce(sender);
            // Other transactions used the nonces below the sender's.
            by_nonce.retain(|nonce, _| *nonce >= next);
            while let Some(first) = by_nonce.first_entry()
                && *first.key() == next
            {
                let gas_limit = first.get().transaction.inner().gas_limit();
                if gas_limit > gas_left {
                    ready.has_more = true;
                    break;
                }
                gas_left -= gas_limit;
                ready.transactions.push(first.remove().transaction);
                next += 1;
            }
            if by_nonce.is_empty() {
                self.waiting.remove(&sender);
            }
        }
        ready
    }
}

/// Checks that a transaction may replace one with the same nonce: its fee cap is over 10 % higher.
fn check_replacement(
    waiting: &Recovered<TxEnvelope>,
    transaction: &Recovered<TxEnvelope>,
) -> Result<(), RpcFailure> {
    if waiting.inner().tx_hash() == transaction.inner().tx_hash() {
        return Err(RpcFailure::rejected("already known"));
    }
    let fee = waiting.inner().max_fee_per_gas();
    if transaction.inner().max_fee_per_gas() <= fee.saturating_add(fee / 10) {
        return Err(RpcFailure::rejected("replacement transaction underpriced"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use alloy::consensus::{SignableTransaction, TxEip1559};
    use alloy::primitives::Signature;

    use super::*;

    const OPERATOR: Address = Address::with_last_byte(1);

    fn external(n: u64) -> Address {
        Address::left_padding_from(&(0x100 + n).to_be_bytes())
    }

    fn with_gas(sender: Address, nonce: u64, gas_limit: u64) -> Recovered<TxEnvelope> {
        let tx = TxEip1559 {
            nonce,
            gas_limit,
            ..Default::default()
        };
        let signed = tx.into_signed(Signature::test_signature());
        Recovered::new_unchecked(signed.into(), sender)
    }

    fn transaction(sender: Address, nonce: u64) -> Recovered<TxEnvelope> {
        with_gas(sender, nonce, 21_000)
    }

    fn pool() -> (Pool, Instant) {
        (Pool::new([OPERATOR]), Instant::now())
    }

    fn is_full(result: Result<(), RpcFailure>) -> bool {
        result.is_err_and(|failure| failure.into_payload().message.starts_with("txpool is full"))
    }

    #[test]
    fn an_external_account_fills_its_places_and_not_one_more() {
        let (mut pool, now) = pool();
        // Nonces after a gap never leave the pool.
        for nonce in 1..=SENDER_MAX as u64 {
            pool.insert(transaction(external(0), nonce), now)
                .expect("within the bound");
        }
        let next = SENDER_MAX as u64 + 1;
        assert!(is_full(pool.insert(transaction(external(0), next), now)));
        pool.insert(transaction(external(1), next), now)
            .expect("another account");
        pool.insert(transaction(OPERATOR, next), now)
            .expect("the operator");
    }

    #[test]
    fn external_accounts_together_leave_room_for_the_operator() {
        let (mut pool, now) = pool();
        for n in 0..EXTERNAL_MAX as u64 {
            pool.insert(transaction(external(n), 1), now)
                .expect("within the bound");
        }
        let one_more = transaction(external(EXTERNAL_MAX as u64), 1);
        assert!(is_full(pool.insert(one_more, now)));
        for nonce in 0..(POOL_MAX - EXTERNAL_MAX) as u64 {
            pool.insert(transaction(OPERATOR, nonce), now)
                .expect("within the bound");
        }
        assert!(is_full(pool.insert(transaction(OPERATOR, 9_999), now)));
        let ready = pool.take_ready(u64::MAX, |_| 0);
        assert_eq!(ready.transactions.len(), POOL_MAX - EXTERNAL_MAX);
        pool.insert(transaction(OPERATOR, 9_999), now)
            .expect("there is room again");
    }

    #[test]
    fn a_refused_transaction_leaves_no_trace() {
        let (mut pool, now) = pool();
        for n in 0..EXTERNAL_MAX as u64 {
            pool.insert(transaction(external(n), 1), now).expect("room");
        }
        for n in 0..10 {
            let late = external(EXTERNAL_MAX as u64 + n);
            assert!(is_full(pool.insert(transaction(late, 1), now)));
        }
        assert_eq!(pool.waiting.len(), EXTERNAL_MAX);
    }

    #[test]
    fn only_an_external_transaction_expires() {
        let (mut pool, now) = pool();
        pool.insert(transaction(external(0), 1), now).expect("room");
        pool.insert(transaction(OPERATOR, 1), now).expect("room");
        let has = |pool: &Pool, sender| pool.waiting.contains_key(&sender);
        let just_before = now + EXTERNAL_LIFETIME - Duration::from_millis(1);
        pool.insert(transaction(external(1), 1), just_before)
            .expect("room");
        assert!(has(&pool, external(0)));
        pool.insert(transaction(external(2), 1), now + EXTERNAL_LIFETIME)
            .expect("room");
        assert!(!has(&pool, external(0)));
        assert!(has(&pool, external(1)) && has(&pool, OPERATOR));
    }

    #[test]
    fn a_block_is_filled_to_its_gas_limit_and_by_the_operator_first() {
        let (mut pool, now) = pool();
        let lowest = Address::ZERO;
        for transaction in [
            with_gas(lowest, 0, 50),
            with_gas(OPERATOR, 0, 60),
            with_gas(OPERATOR, 1, 40),
            with_gas(OPERATOR, 2, 1),
        ] {
            pool.insert(transaction, now).expect("room");
        }
        let nonces = |ready: &Ready| -> Vec<(Address, u64)> {
            let taken = ready.transactions.iter();
            taken
                .map(|taken| (taken.signer(), taken.inner().nonce()))
                .collect()
        };
        let first = pool.take_ready(100, |_| 0);
        assert_eq!(nonces(&first), [(OPERATOR, 0), (OPERATOR, 1)]);
        assert!(first.has_more);
        let next = |sender| if sender == OPERATOR { 2 } else { 0 };
        let second = pool.take_ready(100, next);
        assert_eq!(nonces(&second), [(OPERATOR, 2), (lowest, 0)]);
        assert!(!second.has_more);
    }
}
