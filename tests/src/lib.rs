//! Room `tests`: scenarios across services, black box. They start the real `platform` binary as a
//! child process on free ports in a folder of its own and talk to it over public interfaces alone.
//!
//! | module | what |
//! |---|---|
//! | `process` | a platform as a child process: start, ready, kill, restart, stop; other commands of the binary |
//! | `shared` | one platform for all tests of a file, and the runtime they share |
//! | `call` | RPC by Connect with JSON, refusals with their reason, waiting for a state |
//! | `world` | people, deposits, bonds, orders, trades |
//! | `ledger` | what must never change by a refusal, and whose every hold is |
//! | `member` | a trading session over the binary protocol |
//! | `attacks` | load of one member or stranger beside an honest member |
//! | `chaos` | kills of server and clients on a bad network, and what the journal says of it |
//! | `flow` | seeded order flow of a few members, and a record of what was acknowledged |
//! | `wire` | the same call in every protocol of a port |
//! | `quic` | raw bytes to the trading gateway |
//! | `udp_proxy` | a UDP proxy that drops, delays, reorders and duplicates datagrams |
//! | `bank` | signed webhooks as the bank would send them |
//! | `log` | the event log of a running platform, read beside it |
//!
//! `PLATFORM_BIN` names another binary, `TESTS_SEED` another seed of the flow, `CHAOS_SEED`,
//! `CHAOS_KILLS` and `CHAOS_MINUTES` another chaos, `ATTACKS_*` other attacks; `TESTS_KEEP=1` keeps
//! the folders with logs and state. Waiting is polling with a deadline, never a sleep, but for
//! `attacks`, which load for a time; the only times asserted are that of a clean stop, in journal
//! time that of cancel-on-disconnect, and in long `attacks` those of the honest member. Only `chaos`
//! reads a file of the platform: the journal at rest, as `replica` reads it.

pub mod attacks;
pub mod bank;
pub mod call;
pub mod chaos;
pub mod flow;
pub mod ledger;
pub mod log;
pub mod member;
pub mod process;
pub mod quic;
pub mod shared;
pub mod udp_proxy;
pub mod wire;
pub mod world;

pub use call::{Refusal, number, path_of, text};
pub use process::{Finished, Platform};
