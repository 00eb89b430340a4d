//! Starts the service (store, keys, workers) and stops it: workers first, outbox last.

use futures::{FutureExt, future::BoxFuture};
use std::{path::PathBuf, sync::Arc, time::Duration};

use proto::payments::v1::payments_service_server::PaymentsServiceServer;
use rail::{
    client::{BankClient, BankError},
    keys::{Keys, KeysError},
    purpose_code::{self, SeparatorInField},
    webhook::Verifier,
};
use service_clients::{CfaClient, ChainClient, IdentityClient, Policy};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tracing::Instrument;

use crate::{
    alert::AlertSinks,
    api::{http, rpc::Api},
    config::PaymentsConfig,
    repo::MIGRATOR,
    service::{Gateway, SERVICE},
    tokens::Tokens,
    worker,
};

/// Source name in outgoing calls.
const SOURCE: &str = "payments";

/// Dependencies of the gateway.
pub struct PaymentsDeps {
    pub log: Arc<dyn events::Log>,
    pub identity: rpc::Channel,
    pub cfa: rpc::Channel,
    pub chain: rpc::Channel,
    pub alerts: AlertSinks,
}

/// Why the service cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("payments store: {0}")]
    Store(#[from] events::Error),
    #[error("payments keys: {0}")]
    Keys(#[from] KeysError),
    #[error(transparent)]
    Bank(#[from] BankError),
    #[error("payments.{0}")]
    Requisites(#[from] SeparatorInField),
}

fn file(config: &PaymentsConfig) -> PathBuf {
    config.data_dir.join("payments.db")
}

/// Checks the audit records (D34), with or without a running service.
///
/// # Errors
/// [`events::Error`]: no store of this release, or one that cannot be read.
pub async fn verify_audit(
    config: &PaymentsConfig,
) -> Result<events::audit::Verified, events::Error> {
    events::audit::verify(&file(config), SERVICE).await
}

/// The running service.
pub struct PaymentsHandle {
    gateway: Arc<Gateway>,
    workers: JoinSet<()>,
    relay: JoinSet<()>,
    relay_shutdown: CancellationToken,
}

/// The store, all of whose rows have seals.
pub fn sealed_store(config: &PaymentsConfig) -> events::SealedStore {
    events::SealedStore {
        name: "payments",
        path: file(config),
        sealing: &events::Sealing::ALL,
    }
}

/// Opens the store and starts the workers. They stop when `shutdown` is cancelled.
///
/// # Errors
/// [`Error`].
pub fn start(
    config: PaymentsConfig,
    deps: PaymentsDeps,
    shutdown: CancellationToken,
) -> BoxFuture<'static, Result<PaymentsHandle, Error>> {
    Box::pin(async move {
        purpose_code::check(&config.requisites, &config.deposit_purpose)?;
        let store = sealed_store(&config);
        let db = events::Sqlite::open_sealed(store.path, &MIGRATOR, store.sealing).await?;
        let keys = Keys::load_or_create(&config.keys_dir)?;
        let bank = BankClient::new(
            &config.bank_url,
            &config.requisites.account_number,
            keys.signer,
            config.client.clone(),
        )?;
        let daily = config.daily_reconciliation;
        let limits = &config.client;
        let policy = Policy {
            call_timeout: Duration::from_millis(limits.call_timeout_ms),
            max_attempts: limits.tries,
            initial_backoff: Duration::from_millis(limits.retry_pause_ms),
        };
        let gateway = Arc::new(Gateway::new(
            config.clone(),
            db.clone(),
            bank,
            Verifier::new(keys.webhook_secrets),
            IdentityClient::new(deps.identity, SOURCE).with_policy(policy),
            Tokens {
                cfa: CfaClient::new(deps.cfa, SOURCE).with_policy(policy),
                chain: ChainClient::new(deps.chain, SOURCE).with_policy(policy),
            },
            rpc::Health::new("payments"),
        ));

        let span = || tracing::info_span!("worker", service_name = "payments");
        let mut workers = JoinSet::new();
        workers.spawn(
            worker::run_payouts(gateway.clone(), shutdown.clone())
                .instrument(span())
                .boxed(),
        );
        workers.spawn(
            worker::run_intents(gateway.clone(), shutdown.clone())
                .instrument(span())
                .boxed(),
        );
        if daily {
            workers.spawn(
                worker::run_cut_off(gateway.clone(), shutdown.clone())
                    .instrument(span())
                    .boxed(),
            );
        }
        let difference = worker::run_difference(gateway.clone(), shutdown.clone());
        workers.spawn(difference.instrument(span()).boxed());
        let users = worker::run_users(gateway.clone(), deps.log.clone(), shutdown.clone());
        workers.spawn(users.instrument(span()).boxed());
        let alerts = worker::run_alerts(deps.log.clone(), deps.alerts, shutdown.clone());
        workers.spawn(alerts.instrument(span()).boxed());
        let health = gateway.health.clone();
        workers.spawn(worker::run_log_health(health, deps.log.clone(), shutdown).boxed());
        let relay_shutdown = CancellationToken::new();
        let mut relay = JoinSet::new();
        relay.spawn(
            events::outbox::Relay::run(db, deps.log, relay_shutdown.clone()).instrument(span()),
        );
        Ok(PaymentsHandle {
            gateway,
            workers,
            relay,
            relay_shutdown,
        })
    })
}

impl PaymentsHandle {
    /// RPC and HTTP of the service, for its server and its local slot.
    pub fn service(&self) -> rpc::Service {
        let server = PaymentsServiceServer::new(Api(self.gateway.clone()));
        rpc::Service {
            name: "payments",
            routes: Routes::new(rpc::grpc_server!(server)),
            http: http::router(self.gateway.clone()),
            health: self.gateway.health.clone(),
        }
    }

    /// Waits for the workers to end after the shutdown passed to [`start`], publishes the rest of
    /// the outbox and closes the store.
    pub fn stopped(mut self) -> BoxFuture<'static, ()> {
        Box::pin(async move {
            while self.workers.join_next().await.is_some() {}
            self.relay_shutdown.cancel();
            while self.relay.join_next().await.is_some() {}
            self.gateway.db.close().await;
        })
    }
}
