//! Audit records (D34): one per act, in a chain.

use proto::audit::v1::AuditRecord;
use proto::cfa::v1 as pb;
use proto::common::v1::PaginationRequest;
use sqlx::Connection as _;

use crate::redeem::redeem;
use crate::world::*;

/// Records, newest first, read in pages of three.
pub async fn records(world: &World, actor: &str, object_id: &str) -> Vec<AuditRecord> {
    let mut auditor = world.as_caller("sandbox.auditor");
    let (mut records, mut page_token) = (Vec::new(), String::new());
    loop {
        let ask = pb::ListAuditRecordsRequest {
            context: None,
            actor: actor.into(),
            object_id: object_id.into(),
            pagination: Some(PaginationRequest {
                page_size: 3,
                page_token,
            }),
        };
        let page = auditor.list_audit_records(ask).await.expect("listed");
        let page = page.into_inner();
        assert!(page.records.len() <= 3);
        records.extend(page.records);
        page_token = page.pagination.expect("pagination").next_page_token;
        if page_token.is_empty() {
            return records;
        }
    }
}

fn actions(records: &[AuditRecord]) -> Vec<&str> {
    records
        .iter()
        .map(|record| record.action.as_str())
        .collect()
}

/// Changes a record past the service, as the owner of the file can.
async fn alter_record(folder: &std::path::Path) {
    let options = sqlx::sqlite::SqliteConnectOptions::new().filename(folder.join("cfa/cfa.sqlite"));
    let store = sqlx::SqliteConnection::connect_with(&options).await;
    let mut store = store.expect("store");
    for statement in [
        "DROP TRIGGER audit_records_never_change",
        "UPDATE audit_records SET actor = 'x' WHERE sequence = 2",
    ] {
        let done = sqlx::query(statement).execute(&mut store).await;
        done.expect("altered");
    }
    store.close().await.expect("closed");
}

// rows: R215
#[tokio::test(flavor = "multi_thread")]
async fn d34_each_act_leaves_one_record_and_an_altered_one_is_found() {
    let folder = tempfile::tempdir().expect("folder");
    let mut world = World::start(folder.path()).await;
    world.register(|_| {}).await.expect("registered");
    world.issue("BOND-1", "alice", "3").await;
    world.holders("BOND-1").await;
    let deposit = world.deposit("alice", "10.00").await;
    let redeemed = redeem(&mut world, "1.00", "payout-1").await;
    let request = pb::IssueExtractRequest {
        context: context(&key()),
        instrument_id: "BOND-1".into(),
        holder_id: "alice".into(),
        ..Default::default()
    };
    let mut ids = Vec::new();
    for _ in 0..2 {
        let mut anna = world.as_caller("sandbox.compliance.anna");
        let issued = anna.issue_extract(request.clone()).await.expect("issued");
        ids.push(issued.into_inner().extract.expect("extract").extract_id);
    }
    assert_eq!(ids[0], ids[1]);

    let of_extract = records(&world, "", &ids[0]).await;
    assert_eq!(actions(&of_extract), ["extract.issued"]);
    assert_eq!(records(&world, "anna", "").await, of_extract);
    let of_deposit = records(&world, "", &deposit.operation_id).await;
    assert_eq!(
        actions(&of_deposit),
        ["issuance.finalized", "issuance.requested"]
    );
    // The service causes the end; who asked for the deposit is in the first record.
    assert_eq!(
        [&of_deposit[0], &of_deposit[1]].map(|record| record.actor.as_str()),
        ["cfa", "service"]
    );
    assert_eq!(of_deposit[0].after, "FINALIZED");
    assert!(!of_deposit[0].correlation_id.is_empty());
    let of_redemption = records(&world, "alice", &redeemed.operation_id).await;
    assert_eq!(actions(&of_redemption), ["redemption.requested"]);
    let all = records(&world, "", "").await;
    assert_eq!(
        all.first().map(|record| record.sequence),
        Some(all.len() as u64)
    );
    for pair in all.windows(2) {
        assert_eq!(pair[0].previous_hash, pair[1].hash);
    }
    // Each has an event.
    let mut published = 0;
    let events = world.events_until(events::topics::AUDIT, |event| {
        event.key == ids[0] && event.source == "cfa"
    });
    for event in events.await {
        published += usize::from(event.source == "cfa");
    }
    assert_eq!(published, all.len());

    world.stop().await;
    let config = cfa::CfaConfig {
        data_dir: folder.path().join("cfa"),
        ..Default::default()
    };
    let verified = cfa::verify_audit(&config).await.expect("read");
    assert_eq!(
        (verified.records, verified.broken),
        (all.len() as u64, None)
    );
    assert_eq!(verified.head, all[0].hash);
    alter_record(folder.path()).await;
    let verified = cfa::verify_audit(&config).await.expect("read");
    assert_eq!(verified.broken.map(|broken| broken.sequence), Some(2));
}
