//! Room `tests`: black-box scenarios across services. They start the real `platform` binary as a
//! child process on free ports in a temporary folder and use only its public interfaces.
//!
//! | module | what |
//! |---|---|
//! | `process` | a platform as a child process: start, ready, kill, restart, stop; other commands |
//! | `shared` | one platform for all tests of a file, and the runtime they share |
//! | `call` | RPC by Connect with JSON, refusals with their reason, waiting for a state |
//! | `world` | users, deposits, bonds, orders, trades |
//! | `ledger` | state that a refusal must not change, and owners of holds |
//! | `member` | a trading session over the binary protocol |
//! | `attacks` | load of one member or stranger next to an honest member |
//! | `chaos` | kills of server and clients on a bad network, compared with the journal |
//! | `flow` | seeded order flow of a few members, and a record of what was acknowledged |
//! | `wire` | the same call in every protocol of a port |
//! | `grpc` | a call as gRPC, by the method's name |
//! | `quic` | raw bytes to the trading gateway |
//! | `seed` | seeds of tests, fixed or given |
//! | `udp_proxy` | a UDP proxy that drops, delays, reorders and duplicates datagrams |
//! | `bank` | signed webhooks as the bank sends them |
//! | `log` | the event log of a running platform |
//!
//! `PLATFORM_BIN` names another binary. `TESTS_SEED` sets the seed of every seeded test.
//! `CHAOS_SEED`, `CHAOS_KILLS` and `CHAOS_MINUTES` configure chaos, `ATTACKS_*` the attacks;
//! `TESTS_KEEP=1` keeps the folders with logs and state. Waiting is polling with a deadline, never
//! a sleep, except in `attacks`, which load for a time. The only times asserted are that of a clean
//! stop, that of cancel-on-disconnect in journal time, and in long `attacks` those of the honest
//! member. Only `chaos` reads a file of the platform: the journal at rest, as `replica` reads it.

pub mod attacks;
pub mod bank;
pub mod call;
pub mod chaos;
pub mod flow;
pub mod grpc;
pub mod ledger;
pub mod log;
pub mod member;
pub mod process;
pub mod quic;
#[path = "../../testkit/src/seed.rs"]
pub mod seed;
pub mod shared;
pub mod udp_proxy;
pub mod wire;
pub mod world;

pub use call::{Refusal, number, path_of, text};
pub use process::{Finished, Platform};
