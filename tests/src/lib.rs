//! Black-box scenarios across services.
//!
//! A test starts the real `platform` binary as a child process on free ports in a temporary folder.
//! It uses the public interfaces of the platform. Three modules also read files of the platform:
//! `chaos` the journal at rest, `bank` the webhook secret and `log` the embedded event log.
//!
//! | module | what |
//! |---|---|
//! | `process` | a platform as a child process: start, kill, restart, stop; other commands |
//! | `shared` | one runtime and one platform for all tests of a file |
//! | `call` | RPC by Connect with JSON, refusals with their reason, waiting for a state |
//! | `world` | users, deposits, bonds, orders, trades |
//! | `ledger` | state that a refusal must not change, and owners of holds |
//! | `member` | a trading session over the binary protocol |
//! | `attacks` | load of one member or stranger next to an honest member |
//! | `chaos` | kills of server and clients on a bad network; messages compared with the journal |
//! | `flow` | seeded order flow of a few members, and a record of the received messages |
//! | `wire` | the same call in every protocol of a port |
//! | `grpc` | a call as gRPC, by the method's name |
//! | `quic` | raw bytes to the trading gateway |
//! | `schema_fuzz` | mutated requests of every method, from the descriptors |
//! | `seed` | seeds of tests: fixed, or `TESTS_SEED` |
//! | `udp_proxy` | a UDP proxy that drops, delays, reorders and duplicates datagrams |
//! | `relay` | a platform whose chain can stall, or has old blocks |
//! | `kill` | calls amid which the platform aborts at a failpoint |
//! | `bank` | signed webhooks as the bank sends them |
//! | `log` | the event log of a running platform |
//!
//! `PLATFORM_BIN` names another binary. `TESTS_SEED` sets the seed of every seeded test.
//! `CHAOS_SEED`, `CHAOS_KILLS` and `CHAOS_MINUTES` configure chaos, `ATTACKS_*` the attacks,
//! `MATURITY_HOLDERS` and `MATURITY_MINUTES` the redemption of a large issue.
//! `TESTS_KEEP` (any value) keeps the folders with logs and state.
//!
//! A test waits for a state by polling with a deadline. It sleeps only to choose the moment of a
//! fault or to apply load for a time.

pub mod attacks;
pub mod bank;
pub mod call;
pub mod chaos;
pub mod flow;
pub mod grpc;
pub mod kill;
pub mod ledger;
pub mod log;
pub mod member;
pub mod process;
pub mod quic;
pub mod relay;
pub mod schema_fuzz;
#[path = "../../testkit/src/seed.rs"]
pub mod seed;
pub mod shared;
pub mod udp_proxy;
pub mod wire;
pub mod world;

pub use call::{Refusal, number, path_of, text};
pub use process::{Finished, Platform};
