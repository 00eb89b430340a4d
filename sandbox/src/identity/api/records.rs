//! Audit records of changes of users (D34): who changed what, also by way of a service.

use events::{Tx, audit};
use proto::identity::v1 as pb;
use rpc::{
    Caller,
    page::{self, Key},
};
use service_kit::audit::Act;
use tonic::{Response, Status};

use super::{Api, SOURCE, events_status};

/// The caller of a change and its request.
#[derive(Clone, Copy)]
pub struct By<'a> {
    pub caller: &'a Caller,
    pub context: &'a rpc::Context,
}

impl<'a> By<'a> {
    pub fn of(caller: &'a Caller, context: &'a rpc::Context) -> Self {
        By { caller, context }
    }
}

/// A change of a user.
pub struct Change<'a> {
    pub action: &'static str,
    pub user_id: &'a str,
    /// State before; empty: none.
    pub before: &'a str,
    pub after: &'a str,
    pub reason: &'a str,
}

impl Api {
    /// Records a change in its transaction.
    pub(super) async fn record(
        &self,
        tx: &mut Tx,
        by: By<'_>,
        change: Change<'_>,
    ) -> Result<(), Status> {
        let act = Act {
            before: change.before,
            after: change.after,
            reason: change.reason,
            ..rpc::audit::act(by.caller, by.context, change.action, change.user_id)
        };
        let now_us = self.0.clock.now_us();
        let done = audit::append_in_tx(tx, SOURCE, now_us, act, rpc::audit::event);
        done.await.map_err(events_status)
    }

    /// Lists audit records, newest first.
    pub(super) async fn audit_records(
        &self,
        ask: pb::ListAuditRecordsRequest,
    ) -> Result<Response<pb::ListAuditRecordsResponse>, Status> {
        rpc::context::record_read_context(ask.context);
        let page = page::parse(
            ask.pagination,
            page::filter_hash(&[&ask.actor, &ask.user_id]),
        )?;
        let (before, _) = page.bound();
        let filter = audit::RecordFilter {
            actor: &ask.actor,
            object_id: &ask.user_id,
        };
        let rows = audit::list(self.0.db.read(), filter, before, page.rows_limit()).await;
        let mut rows = rows.map_err(events_status)?;
        let pagination = page.finish(&mut rows, |row| Key {
            created_us: row.sequence,
            id: String::new(),
        });
        let listed = |row: &audit::RecordRow| {
            rpc::audit::listed(&row.record(), &row.previous_hash, &row.hash)
        };
        Ok(Response::new(pb::ListAuditRecordsResponse {
            records: rows.iter().map(listed).collect(),
            pagination: Some(pagination),
        }))
    }
}
