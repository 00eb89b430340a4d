//! The market's holds in the ledger, in minor units.

use std::collections::HashMap;

use rpc::Context;
use service_clients::ledger::Hold;
use service_clients::{Answer, CallError, LedgerClient};
use types::{Id128, Minor};

use crate::request::SOURCE;
use crate::split::LedgerHold;

/// Owner of trading holds and their children (T49).
const OWNER: &str = "market";

/// Decimals per instrument.
pub type Scales = HashMap<String, u8>;

/// Every active hold of the market.
pub async fn holds(ledger: &LedgerClient, scales: &Scales) -> Answer<HashMap<Id128, LedgerHold>> {
    let context = Context::new(SOURCE);
    let holds = ledger.active_holds(&context, OWNER, None).await?;
    let read = holds
        .iter()
        .filter_map(|hold| read(hold, scales).transpose());
    read.map(|hold| hold.map(|hold| (hold.hold, hold)))
        .collect()
}

/// Remaining amount of a hold, without its children.
pub async fn remaining(ledger: &LedgerClient, id: Id128, scales: &Scales) -> Answer<Minor> {
    let Some(found) = ledger.hold(&Context::new(SOURCE), id).await? else {
        return Ok(Minor::ZERO);
    };
    let read = read(&found, scales)?;
    Ok(read.map_or(Minor::ZERO, |hold| hold.remaining))
}

/// Remaining amount of a trading hold and its children.
pub async fn total(ledger: &LedgerClient, id: Id128, scales: &Scales) -> Answer<Minor> {
    let mut total = remaining(ledger, id, scales).await?;
    let context = Context::new(SOURCE);
    for child in ledger.active_holds(&context, "", Some(id)).await? {
        total += read(&child, scales)?.map_or(Minor::ZERO, |hold| hold.remaining);
    }
    Ok(total)
}

/// A hold in minor units. `None`: its instrument is not traded.
fn read(hold: &Hold, scales: &Scales) -> Answer<Option<LedgerHold>> {
    let Some(decimals) = scales.get(&hold.instrument_id) else {
        return Ok(None);
    };
    let remaining = hold.remaining.to_minor(*decimals);
    let remaining = remaining.map_err(|error| CallError::Unreadable {
        service: LedgerClient::SERVICE,
        what: format!(
            "hold {}: remaining amount {}: {error}",
            hold.hold_id, hold.remaining
        ),
    })?;
    Ok(Some(LedgerHold {
        hold: hold.hold_id,
        parent: hold.parent,
        remaining: Minor(remaining),
    }))
}
