//! SetMemberBounds and SetMemberGroup: journalled bounds and groups of members (`design.md` 7).

use admission::{RejectDetails, Request};
use sequencer::SubmitError;
use tonic::Status;
use types::command::{BoundsOf, MemberGroup, OrderBounds, SetMemberGroup, SetOrderBounds};
use types::{Id128, RejectReason};

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

/// Sets the bounds; `None` removes them. Setting the current bounds changes nothing.
pub async fn set_bounds(
    market: &Market,
    member: &Member,
    bounds: Option<OrderBounds>,
    key_hash: Id128,
) -> Result<Answered<()>, Status> {
    let of = match member {
        Member::User(user_id) => BoundsOf::User(market.bind_user(user_id).await?),
        Member::Group(group) => BoundsOf::Group(*group),
    };
    let request = Request::SetOrderBounds(SetOrderBounds {
        of,
        bounds,
        key_hash,
    });
    execute_once(market, request, key_hash).await
}

/// Assigns a user to a member group; [`MemberGroup::NONE`] removes the assignment. Messages of the
/// user's sessions count towards the group's rate.
pub async fn set_group(
    market: &Market,
    user_id: &str,
    group: MemberGroup,
    key_hash: Id128,
) -> Result<Answered<()>, Status> {
    let request = Request::SetMemberGroup(SetMemberGroup {
        user: market.bind_user(user_id).await?,
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
