//! The workload of the query plan tests: every statement of the service runs.

use proto::approvals::v1::{self as pb, ApprovalStatus};

use crate::world::{ANNA, BORIS, HOUR_US, World, unblock};

pub async fn run(world: &World) {
    world.block("b-1").await;
    let asked = world.request("r-1").await;
    let mut anna = world.as_caller(ANNA);
    anna.request_approval(unblock("r-1")).await.unwrap();
    world.approve(BORIS, &asked, "a-1").await.unwrap();
    let expiring = world.request("r-2").await;
    world.clock.advance_us(25 * HOUR_US);
    let id = &expiring.approval_id;
    world.until(id, ApprovalStatus::Expired).await;
    for status in [
        ApprovalStatus::Unspecified,
        ApprovalStatus::Executed,
        ApprovalStatus::Failed,
    ] {
        let list = pb::ListApprovalsRequest {
            status: status.into(),
            ..Default::default()
        };
        anna.list_approvals(list).await.unwrap();
    }
    let mut auditor = world.as_caller("sandbox.auditor");
    for (actor, object_id) in [("", ""), ("anna", ""), ("", id), ("anna", id)] {
        let list = pb::ListAuditRecordsRequest {
            actor: actor.into(),
            object_id: object_id.into(),
            ..Default::default()
        };
        let page = auditor.list_audit_records(list).await.unwrap();
        let records = page.into_inner().records;
        assert!(!records.is_empty(), "{actor} {object_id}");
    }
}
