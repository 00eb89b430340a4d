//! ConfirmClock: an operator accepts the machine's clock after an unexplained step (`design.md` 8).

use admission::{RejectDetails, Request};
use replica::State;
use sequencer::SubmitError;
use tonic::Status;
use types::{Id128, RejectReason};

use crate::market::Market;
use crate::orders::Answered;
use crate::refusal;

/// Journals that the machine's clock, `offset_s` seconds ahead of the platform's, is correct.
/// Returns once the command is durable. From then on new orders are accepted.
///
/// # Errors
/// `CLOCK_NOT_SUSPECT` when there is nothing to confirm, `CLOCK_OFFSET` when the offset differs.
pub async fn confirm(
    market: &Market,
    offset_s: i64,
    key_hash: Id128,
) -> Result<Answered<()>, Status> {
    let seen = |state: &State| state.core().admission().keyed_call(key_hash);
    if market.answered(key_hash).await?.is_some() || market.state(seen).await?.is_some() {
        return Ok(Answered::replayed(()));
    }
    let clock = market.port.clock();
    let offset_ns = clock.state().suspect_ns();
    let offset_ns = offset_ns.ok_or_else(refusal::clock_not_suspect)?;
    if offset_ns / 1_000_000_000 != offset_s {
        return Err(refusal::clock_offset_differs(offset_ns / 1_000_000_000));
    }
    let request = Request::ConfirmClock {
        offset_ns,
        through_ns: clock.latest_ns(),
        key_hash,
    };
    let sequence = match market.submit(request).await {
        Ok(record) => record.command.sequence,
        Err(SubmitError::Refused(reject)) if reject.reason == RejectReason::DuplicateRequest => {
            let RejectDetails::Request(seen) = reject.details else {
                return Err(refusal::clock_not_suspect());
            };
            market.await_durable(seen.sequence).await?;
            return Ok(Answered::replayed(()));
        }
        Err(error) => return Err(refusal::submit_error(&error)),
    };
    market.await_durable(sequence).await?;
    market.note_answered(key_hash).await?;
    Ok(Answered::executed(()))
}
