//! A ledger as in a node: with its own store and event log, relay and sweeper. Clients in the same
//! process call it through its contract.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use hdrhistogram::Histogram;
use ledger::{LedgerConfig, LedgerDeps, LedgerHandle, StoreUrl};
use proto::ledger::v1::{
    GetTrialBalanceRequest, TrialBalanceLine, ledger_service_client::LedgerServiceClient,
};
use tokio::sync::Barrier;
use tokio_util::sync::CancellationToken;

use super::flow::{self, Request};
use crate::hop::histogram;

pub type Client = LedgerServiceClient<rpc::Channel>;

/// A running ledger.
pub struct Node {
    handle: LedgerHandle,
    log: events::Embedded,
    slot: rpc::LocalSlot,
    shutdown: CancellationToken,
}

/// Measurements of the clients.
pub struct Measured {
    pub operations: usize,
    pub elapsed: Duration,
    /// Nanoseconds from sending a request to its answer.
    pub latency: Histogram<u64>,
}

impl Node {
    /// Starts a ledger and creates its store if there is none. The store is the PostgreSQL database
    /// at `url`, or SQLite in the folder if `url` is empty.
    ///
    /// # Errors
    /// Store or log cannot be opened.
    pub async fn start(folder: &Path, url: &str) -> anyhow::Result<Self> {
        let log = events::Embedded::open(folder.join("log")).await?;
        let config = LedgerConfig {
            data_dir: folder.to_owned(),
            url: StoreUrl::new(url),
            ..LedgerConfig::default()
        };
        let shutdown = CancellationToken::new();
        // No CFA service: the load has no on-chain operations.
        let cfa = rpc::Channel::local(&rpc::LocalSlot::new(), "sandbox.service");
        let deps = LedgerDeps::new(Arc::new(log.clone()), cfa);
        let handle = ledger::start(config, deps, shutdown.clone()).await?;
        let slot = rpc::LocalSlot::new();
        slot.fill(rpc::with_auth(
            handle.service().routes,
            &rpc::Authenticator::Sandbox,
        ));
        Ok(Self {
            handle,
            log,
            slot,
            shutdown,
        })
    }

    pub fn client(&self) -> Client {
        LedgerServiceClient::new(rpc::Channel::local(&self.slot, "sandbox.service"))
            .max_decoding_message_size(rpc::MESSAGE_BYTES_MAX_SERVICE)
    }

    /// Funds every user of the load.
    ///
    /// # Errors
    /// The ledger refuses a request.
    pub async fn seed(&self) -> anyhow::Result<()> {
        for request in flow::seed_requests() {
            self.client().create_operations(request).await?;
        }
        Ok(())
    }

    /// Sends the requests of all clients for up to `limit`. Clients run concurrently, each with one
    /// request in flight.
    ///
    /// # Errors
    /// A request is refused.
    pub async fn run(
        &self,
        clients: Vec<Vec<Request>>,
        limit: Duration,
    ) -> anyhow::Result<Measured> {
        let start = Arc::new(Barrier::new(clients.len() + 1));
        let tasks: Vec<_> = clients
            .into_iter()
            .map(|requests| tokio::spawn(run_client(self.client(), requests, limit, start.clone())))
            .collect();
        start.wait().await;
        let began = Instant::now();
        let mut latency = histogram();
        let mut operations = 0;
        for task in tasks {
            let (own, count) = task.await.context("a client ended early")??;
            latency.add(own)?;
            operations += count;
        }
        Ok(Measured {
            operations,
            elapsed: began.elapsed(),
            latency,
        })
    }

    /// Reads the ledger's trial balance.
    ///
    /// # Errors
    /// The ledger does not answer.
    pub async fn trial_balance(&self) -> anyhow::Result<Vec<TrialBalanceLine>> {
        let request = GetTrialBalanceRequest::default();
        let answer = self.client().get_trial_balance(request).await?;
        Ok(answer.into_inner().lines)
    }

    /// Stops the ledger and closes the files.
    pub async fn stop(self) {
        self.shutdown.cancel();
        self.slot.clear();
        self.handle.stopped().await;
        self.log.close().await;
    }
}

async fn run_client(
    mut client: Client,
    requests: Vec<Request>,
    limit: Duration,
    start: Arc<Barrier>,
) -> anyhow::Result<(Histogram<u64>, usize)> {
    let mut latency = histogram();
    let mut operations = 0;
    start.wait().await;
    let began = Instant::now();
    for request in requests {
        let sent = Instant::now();
        if sent - began > limit {
            break;
        }
        let answer = client.create_operations(request.message).await?;
        latency.saturating_record(sent.elapsed().as_nanos().max(1) as u64);
        let outcomes = answer.into_inner().outcomes.len();
        anyhow::ensure!(
            outcomes == request.operations,
            "{outcomes} outcomes, expected {}",
            request.operations
        );
        operations += request.operations;
    }
    Ok((latency, operations))
}
