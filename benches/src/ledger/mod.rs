//! Parts of the ledger benchmark: its load, the service under load, the bare statements, the
//! verification.

pub mod baseline;
pub mod capture;
pub mod database;
pub mod flow;
pub mod node;
pub mod postgres;
pub mod verify;
