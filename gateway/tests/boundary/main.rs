//! The market at its boundary, with real ledger, sequencer, journal, settlement and event log in a
//! temporary folder. Tests use the RPC client or the trading client. Identity and the registry are
//! doubles that record their requests. One test binary, because linking costs more than running.

mod abuse;
mod acts;
mod behind;
mod book;
mod bounds;
mod breaks;
mod budget;
mod changes;
mod checkpoints;
mod clock;
mod crash;
mod descriptors;
mod disconnects;
mod doubles;
mod entered;
mod feed;
mod findings;
mod forgetting;
mod history;
mod holds;
mod kyc;
mod login_answers;
mod logins;
mod look_ups;
mod measured;
mod money;
mod orders;
mod resend;
mod rows;
mod sessions;
mod shares;
mod shutdown;
mod spinning;
mod throttles;
#[path = "../../../events/tests/common/victim.rs"]
#[allow(dead_code, reason = "each test target uses its part")]
mod victim;
mod world;
