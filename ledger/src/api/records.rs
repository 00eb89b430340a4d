//! RPC that lists audit records, for staff (D34).

use proto::ledger::v1 as wire;
use rpc::{
    Caller,
    page::{self, Key},
};
use tonic::{Response, Status};

use super::{Api, convert, reads, refused};
use crate::repo::{RecordFilter, RecordRow};

impl Api {
    pub(super) async fn list_audit_records(
        &self,
        _: &Caller,
        message: wire::ListAuditRecordsRequest,
    ) -> Result<Response<wire::ListAuditRecordsResponse>, Status> {
        rpc::context::record_read_context(message.context);
        convert::check_text("actor", &message.actor).map_err(refused)?;
        reads::check_id_filter("object_id", &message.object_id)?;
        let hash = page::filter_hash(&[&message.actor, &message.object_id]);
        let page = page::parse(message.pagination, hash)?;
        let (before, _) = page.bound();
        let filter = RecordFilter {
            actor: &message.actor,
            object_id: &message.object_id,
        };
        let rows = self
            .store
            .audit_records(&filter, before, page.rows_limit())
            .await;
        let mut rows = rows.map_err(reads::failed)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.sequence,
            id: String::new(),
        });
        let listed =
            |row: &RecordRow| rpc::audit::listed(&row.record(), &row.previous_hash, &row.hash);
        Ok(Response::new(wire::ListAuditRecordsResponse {
            records: rows.iter().map(listed).collect(),
            pagination: Some(pagination),
        }))
    }
}
