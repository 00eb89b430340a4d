//! Client of the audit records (D34) of a service. The ledger returns the end of its chain itself:
//! [`crate::LedgerClient::chain_head`].

use async_recursion::async_recursion as boxed;
use proto::approvals::v1::approval_service_client::ApprovalServiceClient;
use proto::common::v1::PaginationRequest;
use proto::identity::v1::identity_service_client::IdentityServiceClient;
use proto::market::v1::market_service_client::MarketServiceClient;
use proto::payments::v1::payments_service_client::PaymentsServiceClient;
use proto::settlement::v1::settlement_service_client::SettlementServiceClient;
use rpc::{Channel, Context};

use crate::Answer;
use crate::policy::{Peer, Policy};

/// A service whose audit records are read here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AuditedService {
    Approvals,
    Identity,
    Market,
    Payments,
    Settlement,
}

impl AuditedService {
    /// Name of the service in the hashes of its records.
    pub fn name(self) -> &'static str {
        match self {
            Self::Approvals => "approvals",
            Self::Identity => "identity",
            Self::Market => "market",
            Self::Payments => "payments",
            Self::Settlement => "settlement",
        }
    }
}

/// Client of the audit records of one service.
#[derive(Clone)]
pub struct AuditClient {
    service: AuditedService,
    peer: Peer<Channel>,
}

/// Lists the newest audit record over a service's own contract.
macro_rules! newest {
    ($peer:expr, $context:expr, $area:ident, $client:ident) => {{
        let request = proto::$area::v1::ListAuditRecordsRequest {
            context: $peer.context($context),
            pagination: Some(PaginationRequest {
                page_size: 1,
                page_token: String::new(),
            }),
            ..Default::default()
        };
        let listed = $peer.call(request, |channel, request| async move {
            $client::new(channel).list_audit_records(request).await
        });
        listed.await?.records
    }};
}

impl AuditClient {
    /// A client that calls `service` over `channel`, once per call: for callers with their own
    /// retries. `source` is the calling service's name in every context.
    pub fn new(service: AuditedService, channel: Channel, source: &'static str) -> Self {
        let peer = Peer {
            client: channel,
            service: service.name(),
            source,
            policy: Policy::once(),
        };
        Self { service, peer }
    }

    /// Name of the service in the hashes of its records.
    pub fn service(&self) -> &'static str {
        self.service.name()
    }

    /// Sequence and hash (hex) of the last audit record; `None`: there is none.
    #[boxed]
    pub async fn last_record(&self, context: &Context) -> Answer<Option<(u64, String)>> {
        let peer = &self.peer;
        let newest = match self.service {
            AuditedService::Approvals => newest!(peer, context, approvals, ApprovalServiceClient),
            AuditedService::Identity => newest!(peer, context, identity, IdentityServiceClient),
            AuditedService::Market => newest!(peer, context, market, MarketServiceClient),
            AuditedService::Payments => newest!(peer, context, payments, PaymentsServiceClient),
            AuditedService::Settlement => {
                newest!(peer, context, settlement, SettlementServiceClient)
            }
        };
        let last = newest.into_iter().next();
        Ok(last.map(|record| (record.sequence, record.hash)))
    }
}
