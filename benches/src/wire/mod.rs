//! Members on the spinning client, as fast as the protocol allows: generated flow, the echo over
//! the same transport that they are compared with, and what they need on the platform.

pub mod echo;
pub mod floors;
pub mod flow;
pub mod idle;
pub mod reference;
pub mod sample;
pub mod setup;
