//! A running approvals service whose calls reach a real identity service.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use approvals::{ApprovalsConfig, ApprovalsDeps, ApprovalsHandle};
use axum::{
    extract::Request,
    middleware::{Next, from_fn},
};
use events::{Embedded, Log, StoreUrl};
use prost::Message;
use proto::{
    approvals::v1::{self as pb, approval_service_client::ApprovalServiceClient},
    audit::v1::{AuditRecord, AuditRecordEvent},
    common::v1::{KycStatus, PaginationRequest, RequestContext},
    identity::v1::{self as identity, identity_service_client::IdentityServiceClient},
};
use rpc::{Caller, Channel, LocalSlot};
use sandbox::identity::{IdentityConfig, IdentityDeps, IdentityHandle};
use service_kit::Clock;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tonic::{Status, service::Routes};

use crate::database::Database;

pub const UNBLOCK: &str = "dfa.identity.v1.IdentityService/UnblockUser";
pub const ANNA: &str = "sandbox.operator.anna";
pub const BORIS: &str = "sandbox.compliance.boris";
pub const HOUR_US: i64 = 3_600_000_000;

/// Calls of the approvals service, as identity gets them.
#[derive(Default)]
pub struct Calls {
    /// Subject of each call's caller.
    subjects: Mutex<Vec<String>>,
    /// Number of next answers that are lost after the call has acted.
    lost: AtomicU32,
}

impl Calls {
    pub fn subjects(&self) -> Vec<String> {
        self.subjects.lock().unwrap().clone()
    }

    pub fn lose_answers(&self, number: u32) {
        self.lost.store(number, Ordering::SeqCst);
    }

    /// Records the calls of these routes and loses answers.
    fn around(self: &Arc<Self>, routes: Routes) -> Routes {
        let calls = self.clone();
        let layer = from_fn(move |request: Request, next: Next| {
            let calls = calls.clone();
            async move {
                let caller = request.extensions().get::<Caller>().cloned();
                let subject = caller.expect("a caller").subject;
                calls.subjects.lock().unwrap().push(subject);
                let answer = next.run(request).await;
                let less = |left: u32| left.checked_sub(1);
                let order = Ordering::SeqCst;
                match calls.lost.fetch_update(order, order, less) {
                    Ok(_) => Status::unavailable("the answer is lost").into_http(),
                    Err(_) => answer,
                }
            }
        });
        Routes::from(routes.into_axum_router().layer(layer))
    }
}

pub struct World {
    pub folder: TempDir,
    pub log: Arc<Embedded>,
    pub clock: Clock,
    pub calls: Arc<Calls>,
    pub config: ApprovalsConfig,
    identity: IdentityHandle,
    identity_stop: CancellationToken,
    identity_slot: LocalSlot,
    /// Identity as the approvals service reaches it.
    pub target: LocalSlot,
    approvals: ApprovalsHandle,
    slot: LocalSlot,
    stop: CancellationToken,
    _database: Database,
}

impl World {
    /// With a user `alice`, and long pauses between attempts.
    pub async fn start(change: impl FnOnce(&mut ApprovalsConfig)) -> World {
        let folder = tempfile::tempdir().unwrap();
        let log = Arc::new(Embedded::open(folder.path().join("log")).await.unwrap());
        let identity_stop = CancellationToken::new();
        let config = IdentityConfig {
            data_dir: folder.path().into(),
            ..IdentityConfig::default()
        };
        let deps = IdentityDeps { log: log.clone() };
        let identity = sandbox::identity::start(config, deps, identity_stop.clone());
        let identity = identity.await.unwrap();
        let identity_slot = testkit::in_memory(identity.service().routes);
        let calls = Arc::new(Calls::default());
        let target = testkit::in_memory(calls.around(identity.service().routes));
        let database = Database::fresh().await;
        let mut config = ApprovalsConfig {
            data_dir: folder.path().into(),
            url: StoreUrl::new(database.url.clone()),
            retry_first_ms: 600_000,
            retry_most_ms: 600_000,
            ..ApprovalsConfig::default()
        };
        change(&mut config);
        let clock = Clock::manual(service_kit::clock::now_us());
        let stop = CancellationToken::new();
        let approvals = run(&config, &log, &target, &clock, &stop).await;
        let slot = testkit::in_memory(approvals.service().routes);
        let world = World {
            folder,
            log,
            clock,
            calls,
            config,
            identity,
            identity_stop,
            identity_slot,
            target,
            approvals,
            slot,
            stop,
            _database: database,
        };
        let create = identity::CreateUserRequest {
            context: context("create"),
            user_id: "alice".into(),
            kyc_status: KycStatus::Standard.into(),
            full_name: "A name".into(),
            ..Default::default()
        };
        world.identity().create_user(create).await.unwrap();
        world
    }

    /// Stops the approvals service and starts it again on the same store.
    pub async fn restart(mut self) -> World {
        self.stop.cancel();
        self.slot.clear();
        self.approvals.stopped().await;
        self.stop = CancellationToken::new();
        let started = run(
            &self.config,
            &self.log,
            &self.target,
            &self.clock,
            &self.stop,
        );
        self.approvals = started.await;
        self.slot = testkit::in_memory(self.approvals.service().routes);
        self
    }

    pub async fn stop(self) {
        self.stop.cancel();
        self.slot.clear();
        self.approvals.stopped().await;
        self.identity_stop.cancel();
        self.identity_slot.clear();
        self.target.clear();
        self.identity.stopped().await;
        self.log.close().await;
    }

    /// Identity's routes as the approvals service calls them.
    pub fn identity_routes(&self) -> Routes {
        let routes = self.calls.around(self.identity.service().routes);
        rpc::with_auth(routes, &rpc::Authenticator::Sandbox)
    }

    pub fn identity(&self) -> IdentityServiceClient<Channel> {
        IdentityServiceClient::new(Channel::local(&self.identity_slot, "sandbox.operator"))
    }

    pub fn as_caller(&self, credential: &str) -> ApprovalServiceClient<Channel> {
        ApprovalServiceClient::new(Channel::local(&self.slot, credential))
    }

    pub async fn block(&self, key: &str) {
        let block = identity::BlockUserRequest {
            context: context(key),
            user_id: "alice".into(),
            reason: "court order".into(),
        };
        self.identity().block_user(block).await.unwrap();
    }

    pub async fn is_blocked(&self) -> bool {
        let ask = identity::GetUserProfileRequest {
            context: None,
            user_id: "alice".into(),
        };
        let answer = self.identity().get_user_profile(ask).await.unwrap();
        let profile = answer.into_inner().profile.unwrap();
        profile.status == identity::UserStatus::Blocked as i32
    }

    /// Anna requests the end of the block.
    pub async fn request(&self, key: &str) -> pb::Approval {
        let answer = self.as_caller(ANNA).request_approval(unblock(key)).await;
        answer.unwrap().into_inner().approval.unwrap()
    }

    /// A person approves a request as it is shown.
    pub async fn approve(
        &self,
        credential: &str,
        approval: &pb::Approval,
        key: &str,
    ) -> Result<pb::Approval, Status> {
        let mut client = self.as_caller(credential);
        let answer = client.approve(approve(approval, key)).await?;
        Ok(answer.into_inner().approval.unwrap())
    }

    pub async fn get(&self, approval_id: &str) -> pb::Approval {
        let ask = pb::GetApprovalRequest {
            context: None,
            approval_id: approval_id.into(),
        };
        let answer = self.as_caller("sandbox.auditor").get_approval(ask).await;
        answer.unwrap().into_inner().approval.unwrap()
    }

    /// Waits until an approval has this status.
    pub async fn until(&self, approval_id: &str, status: pb::ApprovalStatus) -> pb::Approval {
        testkit::eventually(async || {
            let approval = self.get(approval_id).await;
            (approval.status() == status).then_some(approval)
        })
        .await
    }

    /// Audit records, newest first, read in pages of two.
    pub async fn records(&self, actor: &str, object_id: &str) -> Vec<AuditRecord> {
        let mut auditor = self.as_caller("sandbox.auditor");
        let (mut records, mut page_token) = (Vec::new(), String::new());
        loop {
            let ask = pb::ListAuditRecordsRequest {
                context: None,
                actor: actor.into(),
                object_id: object_id.into(),
                pagination: Some(PaginationRequest {
                    page_size: 2,
                    page_token,
                }),
            };
            let page = auditor.list_audit_records(ask).await.unwrap().into_inner();
            assert!(page.records.len() <= 2);
            records.extend(page.records);
            page_token = page.pagination.unwrap().next_page_token;
            if page_token.is_empty() {
                return records;
            }
        }
    }

    /// Actions and actors of the first audit records of approvals.
    pub async fn audit(&self, number: usize) -> Vec<(String, String)> {
        let topics = [events::topics::AUDIT];
        let mut subscription = self.log.subscribe("test", &topics).await.unwrap();
        let mut seen = Vec::new();
        while seen.len() < number {
            let next = tokio::time::timeout(testkit::PATIENCE, subscription.next());
            let event = next.await.expect("in time").unwrap().record.event;
            let record = AuditRecordEvent::decode(event.payload.as_slice()).unwrap();
            if record.service == "approvals" {
                seen.push((record.action, record.actor));
            }
        }
        seen
    }
}

async fn run(
    config: &ApprovalsConfig,
    log: &Arc<Embedded>,
    target: &LocalSlot,
    clock: &Clock,
    stop: &CancellationToken,
) -> ApprovalsHandle {
    let identity = Channel::local(target, testkit::APPROVED);
    let deps = ApprovalsDeps {
        log: log.clone(),
        services: HashMap::from([("identity", identity)]),
        clock: clock.clone(),
    };
    let started = approvals::start(config.clone(), deps, stop.clone());
    started.await.unwrap()
}

pub fn context(key: &str) -> Option<RequestContext> {
    testkit::messages::context(key)
}

pub fn unblock(key: &str) -> pb::RequestApprovalRequest {
    pb::RequestApprovalRequest {
        context: context(key),
        method: UNBLOCK.into(),
        request_json: r#"{"userId":"alice","reason":"the court has decided"}"#.into(),
        reason: "order 17".into(),
        ..Default::default()
    }
}

pub fn approve(approval: &pb::Approval, key: &str) -> pb::ApproveRequest {
    pb::ApproveRequest {
        context: context(key),
        approval_id: approval.approval_id.clone(),
        hash: approval.hash.clone(),
    }
}
