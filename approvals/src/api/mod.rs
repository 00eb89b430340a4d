//! `ApprovalService` and its HTTP read: decodes requests, calls use cases, encodes responses.

mod convert;
pub mod http;

use std::sync::Arc;

use events::audit::{RecordFilter, RecordRow};
use proto::approvals::v1::{self as pb, approval_service_server::ApprovalService};
use rpc::{
    context::{answered, digest},
    page::{self, Key},
    status::invalid_argument,
};
use tonic::{Request, Response, Status};

use crate::{
    repo::PageBound,
    service::{Approvals, Fault, NewDecision, NewRequest, Verdict},
};

/// The RPC shell.
pub struct Api(pub Arc<Approvals>);

#[tonic::async_trait]
impl ApprovalService for Api {
    async fn request_approval(
        &self,
        request: Request<pb::RequestApprovalRequest>,
    ) -> Result<Response<pb::RequestApprovalResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let digest = digest(&ask);
        let new = NewRequest {
            method: ask.method,
            request: ask.request.to_vec(),
            request_json: ask.request_json,
            reason: ask.reason,
            document: ask.document,
            expires_in_s: ask.expires_in_s,
            digest,
        };
        let (approval, replayed) = self.0.request(&caller, &context, new).await?;
        let answer = pb::RequestApprovalResponse {
            approval: Some(convert::approval(&approval)),
        };
        Ok(answered(answer, replayed))
    }

    async fn approve(
        &self,
        request: Request<pb::ApproveRequest>,
    ) -> Result<Response<pb::ApproveResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let new = NewDecision {
            digest: digest(&ask),
            approval_id: ask.approval_id,
            verdict: Verdict::Approve { hash: ask.hash },
        };
        let (approval, replayed) = self.0.decide(&caller, &context, new).await?;
        let answer = pb::ApproveResponse {
            approval: Some(convert::approval(&approval)),
        };
        Ok(answered(answer, replayed))
    }

    async fn reject(
        &self,
        request: Request<pb::RejectRequest>,
    ) -> Result<Response<pb::RejectResponse>, Status> {
        let caller = rpc::caller(&request)?.clone();
        let mut ask = request.into_inner();
        let context = rpc::context::write(ask.context.take())?;
        let digest = digest(&ask);
        if ask.reason.trim().is_empty() {
            return Err(invalid_argument("reason", "must not be empty"));
        }
        let new = NewDecision {
            digest,
            approval_id: ask.approval_id,
            verdict: Verdict::Reject { reason: ask.reason },
        };
        let (approval, replayed) = self.0.decide(&caller, &context, new).await?;
        let answer = pb::RejectResponse {
            approval: Some(convert::approval(&approval)),
        };
        Ok(answered(answer, replayed))
    }

    async fn get_approval(
        &self,
        request: Request<pb::GetApprovalRequest>,
    ) -> Result<Response<pb::GetApprovalResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let found = self.0.store.get(&ask.approval_id).await;
        let found = found.map_err(Fault::from)?.ok_or(Fault::NotFound)?;
        Ok(Response::new(pb::GetApprovalResponse {
            approval: Some(convert::approval(&found)),
        }))
    }

    async fn list_approvals(
        &self,
        request: Request<pb::ListApprovalsRequest>,
    ) -> Result<Response<pb::ListApprovalsResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let status = convert::status(ask.status)?;
        let filter = status.map_or("", |status| status.as_str());
        let page = page::parse(ask.pagination, page::filter_hash(&[filter]))?;
        let (created_at_us, id) = page.bound();
        let bound = PageBound {
            created_at_us,
            id,
            limit: page.rows_limit(),
        };
        let rows = self.0.store.list(status, bound).await;
        let mut rows = rows.map_err(Fault::from)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.created_at_us,
            id: row.approval_id.clone(),
        });
        Ok(Response::new(pb::ListApprovalsResponse {
            approvals: rows.iter().map(convert::approval).collect(),
            pagination: Some(pagination),
        }))
    }

    async fn list_audit_records(
        &self,
        request: Request<pb::ListAuditRecordsRequest>,
    ) -> Result<Response<pb::ListAuditRecordsResponse>, Status> {
        let ask = request.into_inner();
        rpc::context::record_read_context(ask.context);
        let filter_hash = page::filter_hash(&[&ask.actor, &ask.object_id]);
        let page = page::parse(ask.pagination, filter_hash)?;
        let (before, _) = page.bound();
        let filter = RecordFilter {
            actor: &ask.actor,
            object_id: &ask.object_id,
        };
        let store = &self.0.store;
        let rows = store.audit_records(filter, before, page.rows_limit()).await;
        let mut rows = rows.map_err(Fault::from)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.sequence,
            id: String::new(),
        });
        let listed =
            |row: &RecordRow| rpc::audit::listed(&row.record(), &row.previous_hash, &row.hash);
        Ok(Response::new(pb::ListAuditRecordsResponse {
            records: rows.iter().map(listed).collect(),
            pagination: Some(pagination),
        }))
    }
}
