//! Members on the spinning client, as fast as the protocol allows: generated flow, an echo over the
//! same transport for comparison, and their setup on the platform.

pub mod baselines;
pub mod echo;
pub mod flow;
pub mod idle;
pub mod reference;
pub mod sample;
pub mod settings;
pub mod setup;
