//! `platform proof`: prints the proof of balances of a running platform (crate `proof`).

use ::proof::{Proof, ProofDeps, ProofOptions, prove};
use anyhow::{Context, bail};
use rpc::Channel;

use crate::cli::call::Target;

/// Reads the proof over the public contract.
///
/// # Errors
/// A service does not answer.
pub async fn take(target: &Target) -> anyhow::Result<Proof> {
    let channel =
        |credential| Channel::remote(&target.url, credential).context("address of the platform");
    let deps = ProofDeps {
        ledger: channel("sandbox.auditor")?,
        cfa: channel("sandbox.auditor")?,
        // Reconciliation is a treasury call.
        payments: Some(channel("sandbox.treasury")?),
    };
    prove(&deps, ProofOptions::default())
        .await
        .context("proof of balances")
}

/// Prints the proof; an unexplained difference is an error.
pub async fn run(target: &Target, json: bool) -> anyhow::Result<()> {
    let proof = take(target).await?;
    let value = serde_json::to_value(&proof)?;
    if json {
        println!("{}", serde_json::to_string_pretty(&value)?);
    } else {
        print!("{}", crate::cli::output::text(&value));
    }
    if !proof.ok {
        bail!("the balances differ");
    }
    Ok(())
}
