//! The fold as it is written down, and read again.

use types::{InstrumentSpec, NodeId, Sequence, UserId};

use super::{Fold, Order, Pool};

/// Everything that the journal up to one sequence determines here.
#[derive(Clone, Debug, PartialEq, Eq, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
pub struct FoldImage {
    node: u8,
    position: Sequence,
    trades: u64,
    users: Vec<UserId>,
    instruments: Vec<InstrumentSpec>,
    pools: Vec<Pool>,
    /// Open ones in order of their slots.
    orders: Vec<Order>,
}

impl Fold {
    pub fn image(&self) -> FoldImage {
        FoldImage {
            node: self.node.get(),
            position: self.position,
            trades: self.trades,
            users: self.users.clone(),
            instruments: self.instruments.clone(),
            pools: self.pools.clone(),
            orders: self.orders().copied().collect(),
        }
    }

    /// The fold of an image, for the journal of `node`.
    ///
    /// # Errors
    /// A text: no journal of this node can have made it.
    pub fn restore(image: FoldImage, node: NodeId) -> Result<Self, String> {
        if image.node != node.get() {
            return Err(format!("it is of node {}", image.node));
        }
        let mut fold = Self::new(node);
        fold.position = image.position;
        fold.trades = image.trades;
        fold.users = image.users;
        fold.instruments = image.instruments;
        fold.pools = image.pools;
        for order in image.orders {
            fold.seat(order)?;
        }
        fold.check_pools()?;
        Ok(fold)
    }

    fn seat(&mut self, order: Order) -> Result<(), String> {
        let is_known = order.user.index() < self.users.len()
            && order.instrument.index() < self.instruments.len()
            && order.pool.index() < self.pools.len();
        if !is_known {
            return Err(format!("order {} names what is not there", order.id));
        }
        let slot = order.handle.slot as usize;
        // In order of their slots, so that a slot is neither there nor behind.
        if slot < self.orders.len() {
            return Err(format!("slot of order {} is taken", order.handle));
        }
        self.orders.resize(slot, None);
        self.orders.push(Some(order));
        Ok(())
    }

    /// What pools say of their orders is what the orders say.
    fn check_pools(&self) -> Result<(), String> {
        let mut pools = self.pools.clone();
        for order in self.orders() {
            let pool = &mut pools[order.pool.index()];
            pool.reserved = pool
                .reserved
                .checked_sub(order.reserve.total())
                .ok_or("a pool leaves 64 bits")?;
            pool.orders = pool
                .orders
                .checked_sub(1)
                .ok_or("a pool has more orders than it says")?;
        }
        let is_even = |pool: &Pool| pool.reserved.is_zero() && pool.orders == 0;
        match pools.iter().find(|pool| !is_even(pool)) {
            Some(pool) => Err(format!("hold {} reserves for no order", pool.hold)),
            None => Ok(()),
        }
    }
}
