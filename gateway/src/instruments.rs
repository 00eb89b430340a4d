//! Imports the CFA service's instrument registry into the journal: instruments and their phases.
//!
//! Tick, lot and decimals are fixed with the first `SetInstrument`; band and fee may change. The
//! phase follows the registry's status only when the status *changes*. Between changes the market
//! supervisor sets the phase (`SetTradingPhase`). The phase survives restarts.

use admission::{RejectDetails, Request};
use rpc::Context;
use sequencer::SubmitError;
use service_clients::CallError;
use service_clients::cfa::{Instrument, InstrumentStatus};
use tonic::Status;
use types::RejectReason::{self, DuplicateRequest};
use types::{
    FeeRate, Id128, InstrumentId, InstrumentIx, InstrumentParams, InstrumentSpec, Phase,
    VelocityRule,
};

use crate::Error;
use crate::market::Market;
use crate::orders::Answered;
use crate::projection::repo;
use crate::refusal;

const SET_TRADING_PHASE: &str = "dfa.market.v1.MarketService/SetTradingPhase";

/// Imports every instrument of the registry.
pub async fn sync_all(market: &Market, context: &Context) -> Result<(), Error> {
    let listed = market.cfa.instruments(context).await;
    for listed in listed.map_err(registry)? {
        sync(market, &listed).await?;
    }
    Ok(())
}

/// Imports one instrument of the registry, as it is now.
pub async fn sync_one(market: &Market, context: &Context, id: &str) -> Result<(), Error> {
    let listed = market.cfa.instrument(context, id).await;
    match listed.map_err(registry)? {
        Some(listed) => sync(market, &listed).await,
        None => Ok(()),
    }
}

fn registry(error: CallError) -> Error {
    Error::Registry(error.into())
}

async fn sync(market: &Market, listed: &Instrument) -> Result<(), Error> {
    // A DRAFT takes no place in the market: its activation publishes an event.
    if listed.is_money || listed.status == InstrumentStatus::Draft {
        return Ok(());
    }
    let status = listed.status;
    let spec = match spec_of(market, listed) {
        Ok(spec) => spec,
        Err(reason) => {
            tracing::error!(
                instrument_id = listed.instrument_id,
                reason,
                "instrument of the registry cannot be traded"
            );
            return Ok(());
        }
    };
    let (ix, is_new) = match market.submit(Request::SetInstrument(spec)).await {
        Ok(record) => match record.command.command {
            types::Command::SetInstrument(set) => {
                // A new instrument starts in the phase of its status. It needs no SetPhase.
                (
                    set.spec.ix,
                    set.spec.phase == spec.phase && market.spec(set.spec.ix).is_none(),
                )
            }
            _ => unreachable!("SetInstrument is journalled as SetInstrument"),
        },
        Err(SubmitError::Refused(reject)) => match reject.details {
            RejectDetails::Instrument(ix) => {
                if reject.reason != DuplicateRequest {
                    tracing::error!(
                        instrument_id = listed.instrument_id,
                        "tick, lot or decimals of a traded instrument changed in the registry: \
                         the market keeps the old ones"
                    );
                }
                (ix, false)
            }
            _ => return Err(Error::Refused(reject.to_string())),
        },
        Err(error) => return Err(Error::Refused(error.to_string())),
    };
    let earlier = repo::listed_status(&market.projection.db, &listed.instrument_id).await?;
    if !is_new && earlier != Some(status_code(status)) {
        follow_status(market, ix, status).await?;
    }
    repo::save_listed_status(
        &market.projection.db,
        &listed.instrument_id,
        status_code(status),
    )
    .await
}

/// Sets the phase for the registry's status. A halted instrument stays halted: only the market
/// supervisor lifts a halt (`design.md` 10).
async fn follow_status(
    market: &Market,
    instrument: InstrumentIx,
    status: InstrumentStatus,
) -> Result<(), Error> {
    let request = Request::SetPhase {
        instrument,
        phase: phase_of(status),
        cancel_orders: status == InstrumentStatus::Ended,
        lifts_halt: false,
        key_hash: Id128::NONE,
    };
    match market.submit(request).await {
        // The caller stores the status only after the phase is durable.
        Ok(record) => {
            let durable = market.await_durable(record.command.sequence).await;
            durable.map_err(Error::Registry)
        }
        Err(SubmitError::Refused(reject)) => match reject.reason {
            // The phase is already set, or the instrument has matured, which is final.
            DuplicateRequest | RejectReason::InstrumentMatured => Ok(()),
            RejectReason::InstrumentHalted => {
                tracing::warn!(
                    instrument = instrument.0,
                    "the registry activated a halted instrument: call SetTradingPhase to lift the halt"
                );
                Ok(())
            }
            _ => Err(Error::Refused(reject.to_string())),
        },
        Err(error) => Err(Error::Refused(error.to_string())),
    }
}

/// SetTradingPhase: changes the phase once per key, so that a late repeat does not undo a later
/// change. Setting the current phase succeeds.
///
/// # Errors
/// APPROVAL_REQUIRED for a change that would lift a halt without `lifts_halt` (D32). The hot thread
/// decides, so a halt that is set meanwhile stays.
pub async fn set_phase_once(
    market: &Market,
    instrument: InstrumentIx,
    phase: Phase,
    lifts_halt: bool,
    key_hash: Id128,
) -> Result<Answered<()>, Status> {
    if market.answered(key_hash).await?.is_some() {
        return Ok(Answered::replayed(()));
    }
    let request = Request::SetPhase {
        instrument,
        phase,
        cancel_orders: false,
        lifts_halt,
        key_hash,
    };
    match market.submit(request).await {
        Ok(record) => market.await_durable(record.command.sequence).await?,
        Err(SubmitError::Refused(reject)) if reject.reason == DuplicateRequest => {
            if let RejectDetails::Request(seen) = reject.details {
                market.await_durable(seen.sequence).await?;
                return Ok(Answered::replayed(()));
            }
        }
        Err(SubmitError::Refused(reject))
            if reject.reason == RejectReason::InstrumentHalted && !lifts_halt =>
        {
            return Err(rpc::status::approval_required(SET_TRADING_PHASE));
        }
        Err(error) => return Err(refusal::submit_error(&error)),
    }
    market.note_answered(key_hash).await?;
    Ok(Answered::executed(()))
}

fn phase_of(status: InstrumentStatus) -> Phase {
    match status {
        InstrumentStatus::Draft => Phase::Closed,
        InstrumentStatus::Active => Phase::Open,
        InstrumentStatus::Halted => Phase::Halt,
        InstrumentStatus::Ended => Phase::Matured,
    }
}

fn status_code(status: InstrumentStatus) -> u8 {
    match status {
        InstrumentStatus::Draft => 1,
        InstrumentStatus::Active => 2,
        InstrumentStatus::Halted => 3,
        InstrumentStatus::Ended => 4,
    }
}

/// The trading path's view of an instrument. The error states why it cannot be traded.
fn spec_of(market: &Market, listed: &Instrument) -> Result<InstrumentSpec, String> {
    let config = &market.config;
    let id = InstrumentId::new(&listed.instrument_id).map_err(|error| error.to_string())?;
    let decimals = u8::try_from(listed.decimals).map_err(|error| error.to_string())?;
    let (tick_size, lot_size) = (listed.tick_size, listed.lot_size);
    let band = (listed.band_low, listed.band_high);
    let params = InstrumentParams::listed(id, decimals, tick_size, lot_size, band);
    let params = InstrumentParams {
        fee_rate: FeeRate(config.fee_ppm),
        collar_ppm: config.collar_ppm,
        velocity: VelocityRule {
            width_ppm: config.velocity_ppm,
            window_ms: config.velocity_window_ms,
        },
        phase: phase_of(listed.status),
        ..params.map_err(|error| error.to_string())?
    };
    InstrumentSpec::new(&params).map_err(|error| error.to_string())
}
