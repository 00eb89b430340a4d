//! A trading member as fast as the protocol allows: a spinning client on `transport` and `wire`, the
//! echo over the same transport that it is compared with, and what it needs on the platform.

pub mod echo;
pub mod flow;
pub mod sample;
pub mod setup;
pub mod trader;
