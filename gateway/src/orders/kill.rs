//! SetKillSwitch (F11): one journalled command cancels the open orders and refuses later ones, so
//! that a crash cannot separate the two.

use admission::Request;
use tonic::Status;
use types::{Id128, UserIx};

use super::Answered;
use super::change::cancel_all;
use crate::market::Market;

/// Engages or lifts the switch of a user, or of all users (empty). Returns the number of cancelled
/// orders. Setting the current state changes nothing.
pub async fn set_kill_switch(
    market: &Market,
    user_id: &str,
    is_engaged: bool,
    key_hash: Id128,
) -> Result<Answered<u32>, Status> {
    if let Some(answer) = market.reduction_answered(key_hash).await {
        return Ok(Answered::replayed(answer.cancelled));
    }
    let user = match user_id {
        "" => UserIx::NONE,
        user_id => market.bind_user(user_id).await?,
    };
    let request = Request::SetKillSwitch {
        user,
        is_engaged,
        key_hash,
    };
    cancel_all(market, request, key_hash).await
}
