//! The connector on a chain that it shares: stuck transactions, reorganisations, nodes, signers.

#[allow(dead_code, reason = "each test target uses its part")]
#[path = "../common/mod.rs"]
mod common;
mod hashes;
mod node;
mod reorganised;
mod start;
mod stuck;

use chain::{ChainConfig, ChainError, StartError};
use common::{
    MOMENT, WAIT, call, config, executions, key_file, nodes, start, try_start, until, write_key,
};
use node::{CHAIN_ID, Node};
use testkit::eventually;
