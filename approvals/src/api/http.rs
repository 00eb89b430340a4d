//! HTTP read of one approval (D43).

use std::sync::Arc;

use axum::{
    Router,
    extract::{Path, State},
    routing::get,
};
use rpc::json::{HttpError, Json, resource};
use tonic::Status;

use super::convert;
use crate::service::{Approvals, Fault};

pub fn router(approvals: Arc<Approvals>) -> Router {
    Router::new()
        .route("/approvals/{approval_id}", get(approval))
        .with_state(approvals)
}

async fn approval(
    State(approvals): State<Arc<Approvals>>,
    Path(approval_id): Path<String>,
) -> Result<Json, HttpError> {
    let found = approvals.store.get(&approval_id).await;
    let found = found
        .map_err(|error| Status::from(Fault::from(error)))?
        .ok_or_else(|| Status::from(Fault::NotFound))?;
    let found = convert::approval(&found);
    Ok(resource(&found, "dfa.approvals.v1.Approval"))
}
