//! Query plans of every statement that the development chain executes: none scans a table. After a
//! restart its transactions are read from the store.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use chain::contracts::Call;
use chain::{Address, ChainConfig, ChainDeps, ChainHandle, start_chain};
use testkit::plans::{self, Allowed};
use tokio_util::sync::CancellationToken;

const WAIT: Duration = Duration::from_secs(60);

async fn start(folder: &Path, shutdown: &CancellationToken) -> ChainHandle {
    let log = events::Embedded::open(folder.join("log")).await;
    let config = ChainConfig {
        data_dir: folder.join("chain"),
        ..ChainConfig::default()
    };
    let deps = ChainDeps {
        log: Arc::new(log.expect("log opens")),
    };
    let started = start_chain(config, deps, shutdown.clone()).await;
    started.expect("the chain starts")
}

#[tokio::test(flavor = "multi_thread")]
async fn no_statement_of_the_development_chain_scans_a_table() {
    let folder = tempfile::tempdir().expect("folder");
    plans::record();
    let shutdown = CancellationToken::new();
    let chain = start(folder.path(), &shutdown).await;
    let account = Address::of_user("account");
    let call = Call {
        to: Some(account),
        data: vec![1],
        gas_limit: Some(100_000),
    };
    let sent = chain.connector().submit("sent", &call).await;
    let sent = sent.expect("submitted");
    let receipt = chain.connector().wait_receipt(&sent.tx_hash, WAIT).await;
    let receipt = receipt.expect("asked").expect("final");
    shutdown.cancel();
    chain.stopped().await;

    let shutdown = CancellationToken::new();
    let chain = start(folder.path(), &shutdown).await;
    let connector = chain.connector();
    let again = connector.receipt(&sent.tx_hash).await;
    assert_eq!(again.expect("asked"), Some(receipt.clone()));
    let number = receipt.block_number;
    let block = connector.block(Some(number)).await.expect("asked");
    assert_eq!(block.expect("a block").tx_hashes, [sent.tx_hash]);
    let transfers = connector.transfers(&[account], 0, number).await;
    assert!(transfers.expect("asked").is_empty());
    shutdown.cancel();
    chain.stopped().await;

    let file = folder.path().join("chain/chain.sqlite");
    let explained = plans::explain(&[file.as_path()]).await;
    explained.assert_no_scans(&[
        Allowed {
            statement: "FROM _sqlx_migrations",
            reason: "one row per version, read at startup",
        },
        Allowed {
            statement: "FROM block ORDER BY number DESC LIMIT 1",
            reason: "the last row alone, by the primary key",
        },
        Allowed {
            statement: "SELECT hash, bytecode FROM code",
            reason: "the whole state is read at startup",
        },
        Allowed {
            statement: "SELECT address, nonce, balance, code_hash FROM account",
            reason: "the whole state is read at startup",
        },
        Allowed {
            statement: "SELECT address, key, value FROM slot",
            reason: "the whole state is read at startup",
        },
    ]);
    explained.assert_explained(&[
        "INSERT INTO transaction_",
        "SELECT hash FROM transaction_ WHERE block_number =",
        "FROM transaction_ WHERE hash =",
        "FROM transaction_ WHERE block_number BETWEEN",
        "FROM block WHERE number =",
        "FROM setting WHERE name =",
    ]);
}
