//! Tests of the CFA lifecycle service at its boundary, with a real chain and a real ledger.
// `100_00` is a hundred roubles in kopecks.
#![allow(clippy::inconsistent_digit_grouping)]

mod adoption;
mod agreement;
mod breaks;
mod buybacks;
mod coupons;
mod crash;
mod decisions;
mod enforcement;
mod extracts;
mod faults;
mod holders;
mod holds;
mod issue;
mod issues;
mod limits;
mod lines;
mod losing;
mod maturity;
mod metrics;
mod missed;
mod moves;
mod node;
mod offers;
mod placement;
mod quarantine;
mod record_date;
mod records;
mod recovery;
mod redeem;
mod redemption;
mod redemption_faults;
mod refund;
mod repeats;
mod roles;
mod sequences;
mod strangers;
mod subscriptions;
mod terms;
mod trades;
mod versions;
mod world;
