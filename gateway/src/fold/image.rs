//! The fold as it is written down, and read again.

use types::{InstrumentSpec, NodeId, PoolKind, Sequence, UserId};

use super::{Fold, Order, Pool, Session};

/// Everything that the journal up to one sequence determines here.
#[derive(Clone, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct FoldImage {
    node: u8,
    pub sequence: Sequence,
    users: Vec<UserId>,
    instruments: Vec<InstrumentSpec>,
    pub sessions: Vec<Session>,
    pools: Vec<Pool>,
    /// Open ones, oldest first.
    orders: Vec<Order>,
}

impl Fold {
    pub fn image(&self) -> FoldImage {
        let mut orders: Vec<Order> = self.orders.values().copied().collect();
        orders.sort_unstable_by_key(|order| order.sequence);
        FoldImage {
            node: self.node.get(),
            sequence: self.sequence,
            users: self.users.clone(),
            instruments: self.instruments.clone(),
            sessions: self.sessions.clone(),
            pools: self.pools.clone(),
            orders,
        }
    }

    /// The fold of an image, for the journal of `node`.
    ///
    /// # Errors
    /// A text: no journal of this node can have made it.
    pub fn restore(image: FoldImage, node: NodeId) -> Result<Self, String> {
        image.check(node)?;
        let mut fold = Self::new(node);
        fold.sequence = image.sequence;
        fold.users = image.users;
        fold.instruments = image.instruments;
        fold.sessions = image.sessions;
        for pool in image.pools {
            fold.pools_by_id.insert(pool.hold_id, pool.hold);
            if pool.kind == PoolKind::Trading {
                fold.trading.push(pool.hold);
            }
            fold.pools.push(pool);
        }
        for order in image.orders {
            if fold.orders.insert(order.handle, order).is_some() {
                return Err(format!("two orders have the handle {}", order.handle));
            }
        }
        Ok(fold)
    }
}

impl FoldImage {
    /// Every index names something.
    fn check(&self, node: NodeId) -> Result<(), String> {
        if self.node != node.get() {
            return Err(format!("it is of node {}", self.node));
        }
        let in_place = |(at, session): (usize, &Session)| session.session.index() == at;
        let holds = |(at, pool): (usize, &Pool)| pool.hold.index() == at;
        if !self.sessions.iter().enumerate().all(in_place)
            || !self.pools.iter().enumerate().all(holds)
        {
            return Err("sessions or pools are out of order".to_owned());
        }
        let mut open = vec![0; self.pools.len()];
        for order in &self.orders {
            let is_known = order.user.index() < self.users.len()
                && order.instrument.index() < self.instruments.len()
                && (order.session.is_none() || order.session.index() < self.sessions.len());
            if !is_known {
                return Err(format!("order {} names what is not there", order.id));
            }
            if let Some(count) = open.get_mut(order.pool.index()) {
                *count += 1;
            }
        }
        let counted = self.pools.iter().map(|pool| pool.open_orders);
        match counted.eq(open) {
            true => Ok(()),
            false => Err("pools have other orders than they say".to_owned()),
        }
    }
}
