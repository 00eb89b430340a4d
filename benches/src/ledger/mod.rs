//! Parts of the ledger benchmark: its load, the service under load, the bare statements, the
//! verification.

pub mod bare;
pub mod capture;
pub mod flow;
pub mod judge;
pub mod node;
pub mod place;
pub mod postgres;
