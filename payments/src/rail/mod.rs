//! The rail: everything that is the bank's and the fast-payment system's contract and nothing that is the platform's.
//!
//! Another bank is another folder like this one. The sandbox bank speaks the same messages from the other side.

pub mod account;
pub mod client;
pub mod keys;
pub mod messages;
pub mod policy;
pub mod purpose_code;
pub mod request_signature;
pub mod sbp_link;
pub mod webhook;
