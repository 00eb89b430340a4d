//! SetKillSwitch (F11): one journalled command ends the open orders and keeps every other one out, so that no crash can come between the two.

use admission::{Known, Request};
use sequencer::NotTaken;
use tonic::Status;
use types::{Event, Id128, RejectReason, UserIx};

use super::Answered;
use crate::market::Market;
use crate::refusal;

/// Engages or lifts the switch of a user, or of everybody (empty); answers how many orders it ended. One that stands so already is left as it is.
pub async fn set_kill_switch(
    market: &Market,
    user_id: &str,
    is_engaged: bool,
    key_hash: Id128,
) -> Result<Answered<u32>, Status> {
    if let Some(answer) = market.answered(key_hash).await? {
        return Ok(Answered::before(answer.cancelled));
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
    let record = match market.ask(request).await {
        Ok(record) => record,
        Err(NotTaken::Refused(reject)) if reject.reason == RejectReason::DuplicateRequest => {
            if !matches!(reject.known, Known::Request(_)) {
                market.note_answered(key_hash).await?;
            }
            let answer = market.answered_by(&reject, key_hash).await?;
            return Ok(Answered::now(answer.map_or(0, |answer| answer.cancelled)));
        }
        Err(error) => return Err(refusal::not_taken(&error)),
    };
    let sequence = record.command.sequence;
    market.durable(sequence).await?;
    market.written(sequence).await?;
    let count = record.events.iter().map(|e| match e.event {
        Event::MassCancelled(done) => done.count,
        _ => 0,
    });
    Ok(Answered::now(count.sum()))
}
