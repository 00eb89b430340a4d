//! Limits of members (`design.md` 7), by precedence: a user's own, its group's, the node's.

use types::command::{BoundsOf, MemberGroup, OrderBounds, SetMemberGroup, SetOrderBounds};
use types::{Command, Lots, Minor, RejectReason, StateHasher, UserIx};

use crate::admission::Admission;
use crate::request::{Reject, RejectDetails};
use crate::state::{BoundsRow, User};

/// Message rates of a user, per second; 0 = no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Each session.
    pub session: u32,
    /// All sessions of the user.
    pub user: u32,
    /// All sessions of the users of its group.
    pub group: u32,
}

impl Admission {
    /// The bounds that apply to a user.
    #[inline]
    pub fn bounds(&self, user: &User) -> &OrderBounds {
        match user.own_bounds == 0 && user.group.is_none() {
            true => &self.tables.order_bounds,
            false => self.special_bounds(user),
        }
    }

    #[cold]
    fn special_bounds(&self, user: &User) -> &OrderBounds {
        let own = user
            .own_bounds
            .checked_sub(1)
            .map(|at| &self.tables.bounds[at as usize]);
        let of_group = || self.groups_at.get(&user.group);
        own.and_then(|row| row.bounds.as_ref())
            .or_else(|| self.tables.bounds[*of_group()? as usize].bounds.as_ref())
            .unwrap_or(&self.tables.order_bounds)
    }

    /// The message rates of a user. The group's rate comes from the group's bounds, or from the
    /// node's if it has none. The users of a group share this rate, so a user's own bounds do not
    /// change it.
    pub fn rates(&self, user: &User) -> Rates {
        let bounds = self.bounds(user);
        let of_group = self.bounds_of(BoundsOf::Group(user.group));
        Rates {
            session: bounds.session_rate,
            user: bounds.user_rate,
            group: of_group.unwrap_or(self.tables.order_bounds).group_rate,
        }
    }

    /// Bounds set for the node, a group or a user. `None` if none are set; the node always has
    /// some.
    pub fn bounds_of(&self, of: BoundsOf) -> Option<OrderBounds> {
        let at = match of {
            BoundsOf::Node => return Some(self.tables.order_bounds),
            BoundsOf::Group(group) => *self.groups_at.get(&group)?,
            BoundsOf::User(user) => self.user(user)?.own_bounds.checked_sub(1)?,
        };
        self.tables.bounds[at as usize].bounds
    }

    /// Checks that an order's size and value are within its user's bounds.
    ///
    /// # Errors
    /// `ORDER_SIZE_LIMIT`, `ORDER_VALUE_LIMIT` with the bound.
    #[inline(always)]
    pub(crate) fn check_size(&self, user: &User, lots: Lots, value: Minor) -> Result<(), Reject> {
        let bounds = self.bounds(user);
        if lots > bounds.lots_per_order {
            let details = RejectDetails::Max(bounds.lots_per_order.0);
            return Err(Reject::with(RejectReason::OrderSizeLimit, details));
        }
        if value > bounds.value_per_order {
            let most = u64::try_from(bounds.value_per_order.0).unwrap_or(0);
            let details = RejectDetails::Max(most);
            return Err(Reject::with(RejectReason::OrderValueLimit, details));
        }
        Ok(())
    }

    pub(crate) fn admit_bounds(&self, r: &SetOrderBounds) -> Result<Command, Reject> {
        match r.of {
            BoundsOf::User(user) if self.user(user).is_none() => {
                return Err(RejectReason::UnknownUser.into());
            }
            BoundsOf::Group(MemberGroup::NONE) => return Err(RejectReason::Malformed.into()),
            BoundsOf::Node if r.bounds.is_none() => return Err(RejectReason::Malformed.into()),
            _ => {}
        }
        let is_same = self.bounds_of(r.of) == r.bounds;
        refuse_if_same(is_same, Command::SetOrderBounds(*r))
    }

    pub(crate) fn admit_group(&self, r: &SetMemberGroup) -> Result<Command, Reject> {
        let user = self.user(r.user).ok_or(RejectReason::UnknownUser)?;
        refuse_if_same(user.group == r.group, Command::SetMemberGroup(*r))
    }

    pub(crate) fn set_bounds(&mut self, c: &SetOrderBounds) {
        let at = match c.of {
            BoundsOf::Node => {
                self.tables.order_bounds = c.bounds.expect("the node's bounds are always set");
                return;
            }
            BoundsOf::Group(group) => self.groups_at.get(&group).copied(),
            BoundsOf::User(user) => self.tables.users[user.index()].own_bounds.checked_sub(1),
        };
        if let Some(at) = at {
            self.tables.bounds[at as usize].bounds = c.bounds;
            return;
        }
        let at = u32::try_from(self.tables.bounds.len()).expect("users and groups have 32 bits");
        self.tables.bounds.push(BoundsRow {
            of: c.of,
            bounds: c.bounds,
        });
        self.note_bounds(c.of, at);
    }

    /// Indexes row `at` of `tables.bounds`. The index of a user's own row is part of the state.
    pub(crate) fn note_bounds(&mut self, of: BoundsOf, at: u32) {
        match of {
            BoundsOf::Node => unreachable!("the node's bounds have no row"),
            BoundsOf::Group(group) => drop(self.groups_at.insert(group, at)),
            BoundsOf::User(user) => self.tables.users[user.index()].own_bounds = at + 1,
        }
    }

    pub(crate) fn hash_bounds(&self, hash: &mut StateHasher) {
        let mut put = |bounds: &OrderBounds| {
            hash.write_u64s(&[
                u64::from(bounds.per_user) << 32 | u64::from(bounds.per_instrument),
                bounds.lots_per_order.0,
                bounds.value_per_order.0 as u64,
                bounds.journal_bytes_per_minute,
                u64::from(bounds.messages_per_trade) << 32 | u64::from(bounds.sessions),
                u64::from(bounds.session_rate) << 32 | u64::from(bounds.user_rate),
                u64::from(bounds.group_rate),
            ]);
        };
        put(&self.tables.order_bounds);
        for row in &self.tables.bounds {
            put(&row.bounds.unwrap_or(OrderBounds::NONE));
        }
        for row in &self.tables.bounds {
            let (kind, of) = match row.of {
                BoundsOf::Node => (0, 0),
                BoundsOf::Group(group) => (1, group.0),
                BoundsOf::User(user) => (2, user.0),
            };
            hash.write_u64s(&[kind << 1 | u64::from(row.bounds.is_some()), u64::from(of)]);
        }
    }

    pub(crate) fn set_group(&mut self, user: UserIx, group: MemberGroup) {
        self.tables.users[user.index()].group = group;
    }
}

fn refuse_if_same(is_same: bool, command: Command) -> Result<Command, Reject> {
    match is_same {
        true => Err(Reject::with(
            RejectReason::DuplicateRequest,
            RejectDetails::None,
        )),
        false => Ok(command),
    }
}
