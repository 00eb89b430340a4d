//! Two persons, the exact call, once.

use prost::Message;
use proto::{
    approvals::v1::{self as pb, ApprovalStatus},
    common::v1::PaginationRequest,
    identity::v1::UnblockUserRequest,
};
use tonic::{Code, Response, Status};

use crate::world::{ANNA, BORIS, HOUR_US, UNBLOCK, World, approve, context, unblock};

#[track_caller]
fn refused<T: std::fmt::Debug>(answer: Result<T, Status>, code: Code, reason: &str) {
    let status = answer.unwrap_err();
    let found = rpc::status::reason(&status).unwrap_or_default();
    assert_eq!((status.code(), found.as_str()), (code, reason), "{status}");
}

fn is_repeat<T>(answer: &Response<T>) -> bool {
    answer.metadata().contains_key(rpc::context::REPLAYED)
}

// rows: R332 R333
#[tokio::test]
async fn d32_another_person_approves_and_the_call_is_made_once() {
    let world = World::start(|_| ()).await;
    world.block("b-1").await;
    let asked = world.request("r-1").await;
    assert_eq!(asked.status(), ApprovalStatus::Pending);
    assert_eq!(
        (asked.requested_by.as_str(), asked.method.as_str()),
        ("anna", UNBLOCK)
    );
    assert!(
        asked.request_json.contains("the court has decided"),
        "{asked:?}"
    );
    let sent = UnblockUserRequest::decode(asked.request.clone()).unwrap();
    let key = sent.context.unwrap().idempotency_key;
    assert_eq!(
        key, asked.approval_id,
        "the approval id is the key of the call"
    );
    assert!(world.is_blocked().await && world.calls.subjects().is_empty());

    let done = world.approve(BORIS, &asked, "a-1").await.unwrap();
    assert_eq!(done.status(), ApprovalStatus::Executed, "{done:?}");
    assert_eq!((done.result_code, done.attempts), (0, 1));
    assert!(done.result_text.contains("alice"), "{}", done.result_text);
    assert_eq!(done.request, asked.request);
    assert!(!world.is_blocked().await);
    let id = &asked.approval_id;
    assert_eq!(
        world.calls.subjects(),
        [format!("anna, approved by boris (approval {id})")]
    );
    // Ended for good.
    let again = world.approve("sandbox.operator.vera", &asked, "a-2").await;
    refused(again, Code::FailedPrecondition, "APPROVAL_NOT_PENDING");
    let records = world.audit(3).await;
    let records: Vec<_> = records
        .iter()
        .map(|(action, actor)| (&**action, &**actor))
        .collect();
    assert_eq!(
        records,
        [
            ("approval.requested", "anna"),
            ("approval.approved", "boris"),
            ("approval.executed", "boris"),
        ]
    );
    world.stop().await;
}

// rows: R332 R333
#[tokio::test]
async fn d32_one_person_with_two_tokens_is_one_and_a_nameless_one_is_none() {
    let world = World::start(|_| ()).await;
    world.block("b-1").await;
    let asked = world.request("r-1").await;
    let own = world
        .approve("sandbox.compliance.anna", &asked, "a-1")
        .await;
    refused(own, Code::PermissionDenied, "SAME_PERSON");
    for token in ["sandbox.operator", "sandbox.operator+compliance"] {
        let nameless = world.approve(token, &asked, "a-1").await;
        refused(nameless, Code::PermissionDenied, "PERSON_REQUIRED");
        let asks = world
            .as_caller(token)
            .request_approval(unblock("r-2"))
            .await;
        refused(asks, Code::PermissionDenied, "PERSON_REQUIRED");
    }
    // Roles: of the service's call, and of the requested one.
    for token in [
        "sandbox.auditor.ivan",
        "sandbox.service",
        "sandbox.treasury.ivan",
    ] {
        let foreign = world.approve(token, &asked, "a-1").await;
        refused(foreign, Code::PermissionDenied, "ROLE_REQUIRED");
        let asks = world
            .as_caller(token)
            .request_approval(unblock("r-2"))
            .await;
        refused(asks, Code::PermissionDenied, "ROLE_REQUIRED");
    }
    let mut other = asked.clone();
    other.hash = "0".repeat(64);
    let blind = world.approve(BORIS, &other, "a-1").await;
    refused(blind, Code::FailedPrecondition, "HASH_MISMATCH");
    other.approval_id = "no such".into();
    let unknown = world.approve(BORIS, &other, "a-1").await;
    refused(unknown, Code::NotFound, "APPROVAL_NOT_FOUND");
    assert_eq!(
        world.get(&asked.approval_id).await.status(),
        ApprovalStatus::Pending
    );
    assert!(world.is_blocked().await);
    world.stop().await;
}

#[tokio::test]
async fn d50_a_repeat_is_answered_from_the_store() {
    let world = World::start(|_| ()).await;
    world.block("b-1").await;
    let asked = world.request("r-1").await;
    let mut other = unblock("r-1");
    other.reason = "another".into();
    for repeat in [unblock("r-1"), other] {
        let repeat = world
            .as_caller(ANNA)
            .request_approval(repeat)
            .await
            .unwrap();
        assert!(is_repeat(&repeat));
        assert_eq!(repeat.into_inner().approval, Some(asked.clone()));
    }
    // A key belongs to its person.
    let hers = world
        .as_caller("sandbox.operator.vera")
        .request_approval(unblock("r-1"))
        .await;
    let hers = hers.unwrap();
    assert!(!is_repeat(&hers));
    let hers = hers.into_inner().approval.unwrap();

    let done = world.approve(BORIS, &asked, "a-1").await.unwrap();
    world.block("b-2").await;
    // With other content too: the key of `asked`'s approval does not approve `hers`.
    for repeat in [approve(&asked, "a-1"), approve(&hers, "a-1")] {
        let repeat = world.as_caller(BORIS).approve(repeat).await.unwrap();
        assert!(is_repeat(&repeat));
        assert_eq!(repeat.into_inner().approval, Some(done.clone()));
    }
    assert_eq!(world.calls.subjects().len(), 1);
    assert!(world.is_blocked().await, "a repeat does not act again");
    assert_eq!(
        world.get(&hers.approval_id).await.status(),
        ApprovalStatus::Pending
    );
    world.stop().await;
}

/// The call acts, its answer is lost, the process ends, the user is blocked again: the repeat gets
/// the stored answer and lifts nothing.
#[tokio::test]
async fn d32_a_call_whose_answer_is_lost_is_repeated_and_acts_once() {
    let world = World::start(|_| ()).await;
    world.block("b-1").await;
    let asked = world.request("r-1").await;
    world.calls.lose_answers(1);
    let waiting = world.approve(BORIS, &asked, "a-1").await.unwrap();
    assert_eq!(waiting.status(), ApprovalStatus::Approved, "{waiting:?}");
    assert_eq!(
        (waiting.result_code, waiting.attempts),
        (Code::Unavailable as i32, 1)
    );
    assert!(!world.is_blocked().await);
    world.block("b-2").await;
    let world = world.restart().await;
    world.clock.advance_us(HOUR_US / 4);
    let done = world
        .until(&asked.approval_id, ApprovalStatus::Executed)
        .await;
    assert_eq!((done.result_code, done.attempts), (0, 2));
    assert_eq!(world.calls.subjects().len(), 2);
    assert!(world.is_blocked().await, "the repeat does not act");
    world.stop().await;
}

#[tokio::test]
async fn an_unavailable_service_is_called_until_the_approval_is_too_old() {
    let world = World::start(|_| ()).await;
    world.block("b-1").await;
    let (first, second) = (world.request("r-1").await, world.request("r-2").await);
    world.target.clear();
    for (asked, key) in [(&first, "a-1"), (&second, "a-2")] {
        let waiting = world.approve(BORIS, asked, key).await.unwrap();
        assert_eq!(waiting.status(), ApprovalStatus::Approved);
    }
    // The service is back, too late for these approvals.
    world.target.fill(world.identity_routes());
    world.clock.advance_us(2 * HOUR_US);
    for asked in [&first, &second] {
        let failed = world
            .until(&asked.approval_id, ApprovalStatus::Failed)
            .await;
        assert_eq!(failed.result_code, Code::Unavailable as i32, "{failed:?}");
    }
    assert!(world.is_blocked().await && world.calls.subjects().is_empty());
    // A refusal is final at once.
    let mut unknown = unblock("r-3");
    unknown.request_json = r#"{"userId":"ghost"}"#.into();
    let asked = world
        .as_caller(ANNA)
        .request_approval(unknown)
        .await
        .unwrap();
    let asked = asked.into_inner().approval.unwrap();
    let failed = world.approve(BORIS, &asked, "a-3").await.unwrap();
    assert_eq!(failed.status(), ApprovalStatus::Failed);
    assert_eq!(
        (failed.result_code, failed.result_text.as_str()),
        (Code::NotFound as i32, "User not found")
    );
    world.stop().await;
}

#[tokio::test]
async fn d32_an_undecided_request_expires() {
    let world = World::start(|_| ()).await;
    world.block("b-1").await;
    let asked = world.request("r-1").await;
    let mut short = unblock("r-2");
    short.expires_in_s = 60;
    let short = world.as_caller(ANNA).request_approval(short).await.unwrap();
    let short = short.into_inner().approval.unwrap();
    world.clock.advance_us(HOUR_US);
    let late = world.approve(BORIS, &short, "a-1").await;
    refused(late, Code::FailedPrecondition, "APPROVAL_EXPIRED");
    world
        .until(&short.approval_id, ApprovalStatus::Expired)
        .await;
    assert_eq!(
        world.get(&asked.approval_id).await.status(),
        ApprovalStatus::Pending
    );
    world.clock.advance_us(23 * HOUR_US);
    world
        .until(&asked.approval_id, ApprovalStatus::Expired)
        .await;
    assert!(world.is_blocked().await && world.calls.subjects().is_empty());
    let mut long = unblock("r-3");
    long.expires_in_s = 7 * 24 * 3_600 + 1;
    let long = world.as_caller(ANNA).request_approval(long).await;
    refused(long, Code::InvalidArgument, "INVALID_ARGUMENT");
    world.stop().await;
}

#[tokio::test]
async fn open_requests_of_a_person_are_bounded_and_a_rejection_ends_one() {
    let world = World::start(|config| config.open_per_person_max = 2).await;
    let first = world.request("r-1").await;
    world.request("r-2").await;
    let third = world.as_caller(ANNA).request_approval(unblock("r-3")).await;
    refused(third, Code::ResourceExhausted, "TOO_MANY_APPROVALS");
    let mut vera = world.as_caller("sandbox.operator.vera");
    vera.request_approval(unblock("r-1")).await.unwrap();
    let reject = |key: &str, reason: &str| pb::RejectRequest {
        context: context(key),
        approval_id: first.approval_id.clone(),
        reason: reason.into(),
    };
    let mut anna = world.as_caller(ANNA);
    let silent = anna.reject(reject("x-1", "")).await;
    refused(silent, Code::InvalidArgument, "INVALID_ARGUMENT");
    // The requester withdraws the own request.
    let rejected = anna.reject(reject("x-1", "a mistake")).await.unwrap();
    let rejected = rejected.into_inner().approval.unwrap();
    assert_eq!(rejected.status(), ApprovalStatus::Rejected);
    assert_eq!(rejected.decision_reason, "a mistake");
    assert!(is_repeat(
        &anna.reject(reject("x-1", "a mistake")).await.unwrap()
    ));
    let late = world.approve(BORIS, &first, "a-1").await;
    refused(late, Code::FailedPrecondition, "APPROVAL_NOT_PENDING");
    world.request("r-3").await;
    world.stop().await;
}

#[tokio::test]
async fn d49_a_request_is_checked_when_it_is_made() {
    let world = World::start(|_| ()).await;
    let mut anna = world.as_caller(ANNA);
    type Ask = pb::RequestApprovalRequest;
    let ask = || unblock("r-1");
    let with_json = |json: &str| Ask {
        request_json: json.into(),
        ..ask()
    };
    let no_method = Ask {
        method: "dfa.no.v1.Such/Method".into(),
        ..ask()
    };
    let no_reason = Ask {
        reason: " ".into(),
        ..ask()
    };
    let both_forms = Ask {
        request: vec![1].into(),
        ..ask()
    };
    for (bad, field) in [
        (no_method, "method"),
        (no_reason, "reason"),
        (both_forms, "request_json"),
        (with_json("{}{}"), "request"),
        (with_json(r#"{"user":"alice"}"#), "request"),
        (with_json(r#"{"userId":" alice"}"#), "request.user_id"),
        (with_json(&"x".repeat(64 * 1_024 + 1)), "request_json"),
    ] {
        let status = anna.request_approval(bad).await.unwrap_err();
        assert_eq!(status.code(), Code::InvalidArgument, "{field}: {status}");
        let begins = format!("{field}: ");
        assert!(status.message().starts_with(&begins), "{field}: {status}");
    }
    // Only calls of the table: an approval does not give the rights of a service.
    for method in [
        "dfa.identity.v1.IdentityService/CreateUser",
        "dfa.ledger.v1.LedgerService/CreateOperations",
        "dfa.approvals.v1.ApprovalService/Approve",
    ] {
        let other = Ask {
            method: method.into(),
            ..ask()
        };
        let asked = anna.request_approval(other).await;
        refused(asked, Code::FailedPrecondition, "NO_APPROVAL");
    }
    // The binary form is equivalent.
    let call = UnblockUserRequest {
        context: context("mine"),
        user_id: "alice".into(),
        reason: "r".into(),
    };
    let binary = Ask {
        request: call.encode_to_vec().into(),
        ..with_json("")
    };
    let asked = anna.request_approval(binary).await.unwrap().into_inner();
    let asked = asked.approval.unwrap();
    let sent = UnblockUserRequest::decode(asked.request).unwrap();
    assert_eq!(
        (sent.user_id.as_str(), sent.reason.as_str()),
        ("alice", "r")
    );
    assert_eq!(sent.context.unwrap().idempotency_key, asked.approval_id);
    world.stop().await;
}

// rows: R010
#[tokio::test]
async fn r010_lists_are_paged_and_show_no_calls() {
    let world = World::start(|_| ()).await;
    let mut ids = Vec::new();
    for key in ["r-1", "r-2", "r-3"] {
        world.clock.advance_us(1);
        ids.insert(0, world.request(key).await.approval_id);
    }
    world.block("b-1").await;
    let second = world.get(&ids[1]).await;
    world.approve(BORIS, &second, "a-1").await.unwrap();
    let mut auditor = world.as_caller("sandbox.auditor");
    for (status, expected) in [
        (ApprovalStatus::Unspecified, vec![&ids[0], &ids[1], &ids[2]]),
        (ApprovalStatus::Pending, vec![&ids[0], &ids[2]]),
        (ApprovalStatus::Executed, vec![&ids[1]]),
        (ApprovalStatus::Failed, vec![]),
    ] {
        let (mut seen, mut page_token) = (Vec::new(), String::new());
        loop {
            let list = pb::ListApprovalsRequest {
                context: None,
                status: status.into(),
                pagination: Some(PaginationRequest {
                    page_size: 1,
                    page_token,
                }),
            };
            let page = auditor.list_approvals(list).await.unwrap().into_inner();
            assert!(page.approvals.iter().all(|row| row.request.is_empty()));
            seen.extend(page.approvals.into_iter().map(|row| row.approval_id));
            page_token = page.pagination.unwrap().next_page_token;
            if page_token.is_empty() {
                break;
            }
        }
        assert_eq!(seen.iter().collect::<Vec<_>>(), expected, "{status:?}");
    }
    let mut user = world.as_caller("sandbox.trader.alice");
    let foreign = user
        .list_approvals(pb::ListApprovalsRequest::default())
        .await;
    refused(foreign, Code::PermissionDenied, "ROLE_REQUIRED");
    world.stop().await;
}

// rows: R215
#[tokio::test(flavor = "multi_thread")]
async fn d34_each_step_of_an_approval_leaves_one_record_and_an_altered_one_is_found() {
    let world = World::start(|_| ()).await;
    world.block("b-1").await;
    let asked = world.request("r-1").await;
    let again = world.request("r-1").await;
    assert_eq!(again.approval_id, asked.approval_id);
    for _ in 0..2 {
        let done = world.approve(BORIS, &asked, "a-1").await.unwrap();
        assert_eq!(done.status(), ApprovalStatus::Executed, "{done:?}");
    }
    let second = world.request("r-2").await;
    for _ in 0..2 {
        let reject = pb::RejectRequest {
            context: context("j-1"),
            approval_id: second.approval_id.clone(),
            reason: "not now".into(),
        };
        world.as_caller(BORIS).reject(reject).await.unwrap();
    }

    let records = world.records("", "").await;
    let mut seen: Vec<_> = records
        .iter()
        .map(|record| (&*record.action, &*record.actor, &*record.before))
        .collect();
    seen.reverse();
    assert_eq!(
        seen,
        [
            ("approval.requested", "anna", ""),
            ("approval.approved", "boris", "PENDING"),
            ("approval.executed", "boris", "APPROVED"),
            ("approval.requested", "anna", ""),
            ("approval.rejected", "boris", "PENDING"),
        ]
    );
    for pair in records.windows(2) {
        assert_eq!(pair[0].previous_hash, pair[1].hash);
    }
    // The exact call, and the id under which it was made.
    let executed = &records[2];
    assert!(executed.after.ends_with(&asked.hash), "{executed:?}");
    assert_eq!(executed.request_id, asked.approval_id);
    let rejected = &records[0];
    assert_eq!(
        (&*rejected.object_id, &*rejected.reason),
        (&*second.approval_id, "not now")
    );
    assert_eq!(world.records("", &asked.approval_id).await, records[2..]);
    assert_eq!(world.records("boris", "").await.len(), 3);
    assert_eq!(world.records("anna", &second.approval_id).await.len(), 1);
    let mut user = world.as_caller("sandbox.trader.alice");
    let foreign = user.list_audit_records(pb::ListAuditRecordsRequest::default());
    refused(foreign.await, Code::PermissionDenied, "ROLE_REQUIRED");

    let verified = approvals::verify_audit(&world.config).await.unwrap();
    assert_eq!((verified.records, verified.broken), (5, None));
    assert_eq!(verified.head, records[0].hash);
    let url = world.config.url.postgres().unwrap_or_default();
    let file = world.folder.path().join("approvals.db");
    let last = match url {
        "" => events::audit::record_hash(&file, 5).await,
        url => events::postgres::audit::record_hash(url, "approvals", 5).await,
    };
    assert_eq!(last.unwrap(), Some(verified.head));
    crate::database::alter_record(url, &file).await;
    let verified = approvals::verify_audit(&world.config).await.unwrap();
    let broken = verified.broken.expect("an altered record");
    assert_eq!((verified.records, broken.sequence), (1, 2));
    world.stop().await;
}

// Acts that commit at the same time continue one chain.
#[tokio::test(flavor = "multi_thread")]
async fn d34_concurrent_requests_leave_a_gapless_chain() {
    let world = World::start(|_| ()).await;
    let requests = (0..16).map(|number| {
        let (mut anna, ask) = (world.as_caller(ANNA), unblock(&format!("r-{number}")));
        tokio::spawn(async move { anna.request_approval(ask).await })
    });
    let requests: Vec<_> = requests.collect();
    for request in requests {
        request.await.unwrap().unwrap();
    }
    let sequences: Vec<u64> = world
        .records("", "")
        .await
        .iter()
        .map(|r| r.sequence)
        .collect();
    assert_eq!(sequences, (1..=16).rev().collect::<Vec<u64>>());
    let verified = approvals::verify_audit(&world.config).await.unwrap();
    assert_eq!((verified.records, verified.broken), (16, None));
    world.stop().await;
}
