//! The ledger benchmark: load, service under load, bare statements and verification.

pub mod baseline;
pub mod capture;
pub mod database;
pub mod flow;
pub mod node;
pub mod postgres;
pub mod verify;
