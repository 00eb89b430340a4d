//! `[listen]`.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use serde::{Deserialize, Serialize};

/// Listening addresses of the services. Port 0 selects a free one.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Listen {
    /// All RPCs on one port, with reflection.
    pub all: SocketAddr,
    pub ledger: SocketAddr,
    pub cfa: SocketAddr,
    pub payments: SocketAddr,
    pub market: SocketAddr,
    pub identity: SocketAddr,
    pub approvals: SocketAddr,
    /// The bank's HTTP API.
    pub bank: SocketAddr,
    pub chain: SocketAddr,
    /// JSON-RPC of devchain.
    pub chain_rpc: SocketAddr,
    /// Trading sessions, QUIC.
    pub trading: SocketAddr,
}

/// The address to connect to for a listener of this machine: loopback for an unspecified address.
pub fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.is_ipv4() {
            true => Ipv4Addr::LOCALHOST.into(),
            false => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

impl Default for Listen {
    fn default() -> Self {
        Self {
            all: local(8080),
            ledger: local(8081),
            cfa: local(8082),
            payments: local(8083),
            market: local(8084),
            identity: local(8085),
            approvals: local(8088),
            bank: local(8086),
            chain: local(8087),
            chain_rpc: local(8545),
            trading: local(8090),
        }
    }
}

impl Listen {
    /// A free port for every service.
    pub fn on_free_ports() -> Self {
        let any = local(0);
        Self {
            all: any,
            ledger: any,
            cfa: any,
            payments: any,
            market: any,
            identity: any,
            approvals: any,
            bank: any,
            chain: any,
            chain_rpc: any,
            trading: any,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn services_reach_a_listener_on_all_addresses_on_the_loopback() {
        let mut config = Config::default();
        config.listen.payments = "0.0.0.0:8083".parse().expect("an address");
        config.listen.bank = "[::]:8086".parse().expect("an address");
        let config = config.with_derived_settings();
        assert_eq!(config.bank.webhook_url, "http://127.0.0.1:8083/webhook");
        assert_eq!(config.payments.bank_url, "http://[::1]:8086");
        assert_eq!(config.bank.listen, config.listen.bank, "the listener stays");
    }
}
