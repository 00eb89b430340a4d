//! The only module that uses generated messages: the RPC and HTTP shell, and the published events.

mod convert;
pub mod http;
pub mod publish;
pub mod rpc;
