//! The `wire` benchmark: setup of members on a platform, order flow over the spinning client, and
//! baselines.

pub mod baselines;
pub mod closed_loop;
pub mod echo;
pub mod flow;
pub mod idle;
pub mod reference;
pub mod report;
pub mod sample;
pub mod settings;
pub mod setup;
