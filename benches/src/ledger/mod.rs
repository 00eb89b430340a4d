//! What the benchmark of the ledger is made of: its load, the service under it, the bare statements
//! beside it, the judge after it.

pub mod bare;
pub mod capture;
pub mod flow;
pub mod judge;
pub mod node;
pub mod place;
pub mod postgres;
