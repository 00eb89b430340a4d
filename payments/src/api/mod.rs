//! Where the room meets generated messages: its RPC and HTTP shell, the events it writes.

mod convert;
pub mod http;
pub mod publish;
pub mod rpc;
