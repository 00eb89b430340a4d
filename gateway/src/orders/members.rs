//! SetMemberBounds and SetMemberGroup: journalled bounds and groups of members (`design.md` 7).

use admission::{RejectDetails, Request};
use rpc::Caller;
use sequencer::SubmitError;
use tonic::Status;
use types::command::{BoundsOf, MemberGroup, OrderBounds, SetMemberGroup, SetOrderBounds};
use types::{Id128, RejectReason, UserIx};

use super::Answered;
use crate::market::Market;
use crate::refusal;

/// Target of SetMemberBounds: one user, or each user of a member group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Member {
    User(String),
    Group(MemberGroup),
}

/// The bounds of users that have neither bounds of their own nor of their group.
pub async fn default_bounds(market: &Market) -> Result<OrderBounds, Status> {
    let bounds = market.state(|state| state.core().admission().bounds_of(BoundsOf::Node));
    Ok(bounds.await?.unwrap_or_default())
}

/// Sets the bounds; `None` removes them. Setting the current bounds changes nothing. A person needs
/// an approval to allow what the present bounds refuse (D32).
pub async fn set_bounds(
    market: &Market,
    caller: &Caller,
    member: &Member,
    bounds: Option<OrderBounds>,
    key_hash: Id128,
) -> Result<Answered<()>, Status> {
    let of = match member {
        Member::User(user_id) => BoundsOf::User(market.bind_user(user_id).await?),
        Member::Group(group) => BoundsOf::Group(*group),
    };
    if needs_approval(market, caller, key_hash).await? {
        let [present, after] = bounds_after(market, of, bounds).await?;
        if after.is_above(&present) {
            caller.require_approval("dfa.market.v1.MarketService/SetMemberBounds")?;
        }
    }
    let request = Request::SetOrderBounds(SetOrderBounds {
        of,
        bounds,
        key_hash,
    });
    execute_once(market, request, key_hash).await
}

/// True for the first call of a person, whose raise needs an approval.
async fn needs_approval(market: &Market, caller: &Caller, key_hash: Id128) -> Result<bool, Status> {
    Ok(!caller.is_service() && market.answered(key_hash).await?.is_none())
}

/// The bounds that apply to a user or to the users of a group, now and after the change.
async fn bounds_after(
    market: &Market,
    of: BoundsOf,
    wanted: Option<OrderBounds>,
) -> Result<[OrderBounds; 2], Status> {
    let bounds = market.state(|state| {
        let admission = state.core().admission();
        let node = admission.bounds_of(BoundsOf::Node).unwrap_or_default();
        let BoundsOf::User(user) = of else {
            return [
                admission.bounds_of(of).unwrap_or(node),
                wanted.unwrap_or(node),
            ];
        };
        let user = admission.user(user);
        let present = user.map_or(node, |user| *admission.bounds(user));
        let group = user.map_or(MemberGroup::NONE, |user| user.group);
        let of_group = admission.bounds_of(BoundsOf::Group(group)).unwrap_or(node);
        let after = OrderBounds {
            // A user's own bounds do not change the rate of its group.
            group_rate: present.group_rate,
            ..wanted.unwrap_or(of_group)
        };
        [present, after]
    });
    bounds.await
}

/// The bounds that apply to a user, now and as a user of a group.
async fn bounds_in_group(
    market: &Market,
    user: UserIx,
    group: MemberGroup,
) -> Result<[OrderBounds; 2], Status> {
    let bounds = market.state(|state| {
        let admission = state.core().admission();
        let node = admission.bounds_of(BoundsOf::Node).unwrap_or_default();
        let known = admission.user(user);
        let present = known.map_or(node, |user| *admission.bounds(user));
        let group_rate = known.map_or(node.group_rate, |user| admission.rates(user).group);
        let of_group = admission.bounds_of(BoundsOf::Group(group)).unwrap_or(node);
        let own = admission.bounds_of(BoundsOf::User(user));
        let present = OrderBounds {
            group_rate,
            ..present
        };
        let after = OrderBounds {
            group_rate: of_group.group_rate,
            ..own.unwrap_or(of_group)
        };
        [present, after]
    });
    bounds.await
}

/// Assigns a user to a member group; [`MemberGroup::NONE`] removes the assignment. Messages of the
/// user's sessions count towards the group's rate. A person needs an approval to allow what the
/// user's present bounds refuse (D32).
pub async fn set_group(
    market: &Market,
    caller: &Caller,
    user_id: &str,
    group: MemberGroup,
    key_hash: Id128,
) -> Result<Answered<()>, Status> {
    let user = market.bind_user(user_id).await?;
    if needs_approval(market, caller, key_hash).await? {
        let [present, after] = bounds_in_group(market, user, group).await?;
        if after.is_above(&present) {
            caller.require_approval("dfa.market.v1.MarketService/SetMemberGroup")?;
        }
    }
    let request = Request::SetMemberGroup(SetMemberGroup {
        user,
        group,
        key_hash,
    });
    execute_once(market, request, key_hash).await
}

/// Executes the call once per idempotency key. A repeat must not undo a later change, even if the
/// first call changed nothing (D50).
async fn execute_once(
    market: &Market,
    request: Request,
    key_hash: Id128,
) -> Result<Answered<()>, Status> {
    if market.answered(key_hash).await?.is_some() {
        return Ok(Answered::replayed(()));
    }
    let answered = submit_and_wait(market, request).await?;
    market.note_answered(key_hash).await?;
    Ok(answered)
}

async fn submit_and_wait(market: &Market, request: Request) -> Result<Answered<()>, Status> {
    match market.submit(request).await {
        Ok(record) => {
            market.await_durable(record.command.sequence).await?;
            Ok(Answered::executed(()))
        }
        Err(SubmitError::Refused(reject)) if reject.reason == RejectReason::DuplicateRequest => {
            match reject.details {
                RejectDetails::Request(seen) => {
                    market.await_durable(seen.sequence).await?;
                    Ok(Answered::replayed(()))
                }
                // An earlier command set this state. It may not be durable yet.
                _ => {
                    market.await_durable(market.replica.assigned()).await?;
                    Ok(Answered::executed(()))
                }
            }
        }
        Err(error) => Err(refusal::submit_error(&error)),
    }
}
