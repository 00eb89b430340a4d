//! What settlement reads from the ledger: its own position, and the holds kept for the market.

use std::collections::HashMap;

use proto::common::v1::PaginationRequest;
use proto::convert;
use proto::ledger::v1 as wire;
use proto::ledger::v1::ledger_service_client::LedgerServiceClient;
use tonic::{Code, Status};
use types::{Id128, Minor};

use crate::carve::LedgerHold;

/// Owner of trading holds and their children (T49).
const OWNER: &str = "market";

/// Decimals per instrument.
pub type Scales = HashMap<String, u8>;

/// Reads of the ledger.
#[derive(Clone)]
pub struct Ledger(pub LedgerServiceClient<rpc::Channel>);

impl Ledger {
    /// Last sequence of a source that the ledger has; 0 when none.
    pub async fn position(&mut self, source: &str) -> Result<u64, Status> {
        let request = wire::GetSourcePositionRequest {
            source: source.to_owned(),
            ..Default::default()
        };
        Ok(self
            .0
            .get_source_position(request)
            .await?
            .into_inner()
            .through_sequence)
    }

    /// Every active hold of the market.
    pub async fn holds(&mut self, scales: &Scales) -> Result<HashMap<Id128, LedgerHold>, Status> {
        let filter = wire::ListHoldsRequest {
            status: wire::HoldStatus::Active.into(),
            owner: OWNER.to_owned(),
            ..Default::default()
        };
        let holds = self.list(filter, scales).await?;
        Ok(holds.into_iter().map(|hold| (hold.hold, hold)).collect())
    }

    /// What is left in a hold by itself.
    pub async fn remaining(&mut self, hold: Id128, scales: &Scales) -> Result<Minor, Status> {
        let request = wire::GetHoldRequest {
            hold_id: hold.to_string(),
            ..Default::default()
        };
        let found = match self.0.get_hold(request).await {
            Ok(found) => found.into_inner().hold,
            Err(status) if status.code() == Code::NotFound => None,
            Err(status) => return Err(status),
        };
        Ok(match found {
            Some(found) => read(&found, scales)?.map_or(Minor::ZERO, |hold| hold.remaining),
            None => Minor::ZERO,
        })
    }

    /// What is left in a trading hold and its children, together.
    pub async fn total(&mut self, hold: Id128, scales: &Scales) -> Result<Minor, Status> {
        let own = self.remaining(hold, scales).await?;
        let filter = wire::ListHoldsRequest {
            status: wire::HoldStatus::Active.into(),
            parent_hold_id: hold.to_string(),
            ..Default::default()
        };
        let children = self.list(filter, scales).await?;
        Ok(own + children.iter().map(|child| child.remaining).sum())
    }

    async fn list(
        &mut self,
        filter: wire::ListHoldsRequest,
        scales: &Scales,
    ) -> Result<Vec<LedgerHold>, Status> {
        let mut holds = Vec::new();
        let mut page_token = String::new();
        loop {
            let mut request = filter.clone();
            request.pagination = Some(PaginationRequest {
                page_size: 1_000,
                page_token,
            });
            let page = self.0.list_holds(request).await?.into_inner();
            for hold in &page.holds {
                holds.extend(read(hold, scales)?);
            }
            page_token = page
                .pagination
                .map(|p| p.next_page_token)
                .unwrap_or_default();
            if page_token.is_empty() {
                return Ok(holds);
            }
        }
    }
}

/// A hold in minor units. `None` for one that is not of the market's making: its id is no UUID, or its instrument is not traded here.
fn read(hold: &wire::Hold, scales: &Scales) -> Result<Option<LedgerHold>, Status> {
    let bad = || Status::data_loss(format!("hold {} has no readable remainder", hold.hold_id));
    let remaining = hold.remaining_amount.as_ref().ok_or_else(bad)?;
    let (Some(hold_id), Some(decimals)) = (
        Id128::parse(&hold.hold_id),
        scales.get(&remaining.currency_code),
    ) else {
        return Ok(None);
    };
    let minor = convert::decimal(remaining.amount.as_ref())
        .ok()
        .and_then(|value| value.to_minor(*decimals).ok())
        .ok_or_else(bad)?;
    Ok(Some(LedgerHold {
        hold: hold_id,
        parent: hold.parent_hold_id.as_deref().and_then(Id128::parse),
        remaining: Minor(minor),
    }))
}
