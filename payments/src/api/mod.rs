//! Where the room meets generated messages: its RPC and HTTP shell, the events it writes, the peers it asks.

pub mod events;
pub mod http;
pub mod peers;
pub mod rpc;
mod wire;
