//! Number of connections by source. An IPv6 /64 network is one source, as on the RPC ports.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;

use rpc::connections::source_of;

/// Number of connections by source. Each function takes any address of the source.
#[derive(Debug, Default)]
pub struct Sources(HashMap<IpAddr, u32>);

impl Sources {
    pub fn count(&self, address: IpAddr) -> u32 {
        let count = self.0.get(&source_of(address));
        count.copied().unwrap_or(0)
    }

    pub fn add(&mut self, address: IpAddr) {
        *self.0.entry(source_of(address)).or_default() += 1;
    }

    pub fn remove(&mut self, address: IpAddr) {
        if let Entry::Occupied(mut count) = self.0.entry(source_of(address)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_an_ipv6_network_count_as_those_of_one_address() {
        let address = |text: &str| text.parse::<IpAddr>().expect("an address");
        let mut sources = Sources::default();
        for text in ["2001:db8::1", "2001:db8::2", "10.0.0.1", "::ffff:10.0.0.1"] {
            sources.add(address(text));
        }
        let count = |sources: &Sources| {
            let texts = ["2001:db8::ffff", "2001:db8:0:1::1", "10.0.0.1", "10.0.0.2"];
            texts.map(|text| sources.count(address(text)))
        };
        assert_eq!(count(&sources), [2, 0, 2, 0]);
        sources.remove(address("2001:db8::1"));
        sources.remove(address("2001:db8::2"));
        assert_eq!(count(&sources), [0, 0, 2, 0]);
        assert_eq!(
            sources.0.len(),
            1,
            "a source without connections leaves no entry"
        );
    }
}
