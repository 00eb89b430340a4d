//! Places of connections by source. An IPv6 /64 network is one source, as on the RPC ports. Sources
//! share the places (`shares`), so that a few of them do not take all.

use std::net::IpAddr;

use rpc::connections::source_of;

use super::shares::Shares;

/// Number of connections by source. Each function takes any address of the source.
pub struct Sources {
    places: Shares<IpAddr>,
    per_source_max: usize,
}

impl Sources {
    pub fn new(connections_max: usize, per_source_max: usize) -> Self {
        Self {
            places: Shares::new(connections_max),
            per_source_max,
        }
    }

    /// True if the source may have another connection.
    pub fn has_place(&self, address: IpAddr) -> bool {
        let source = source_of(address);
        self.places.count(&source) < self.per_source_max && self.places.has_place(&source)
    }

    /// Takes a place; call it only if [`Sources::has_place`].
    pub fn begin(&mut self, address: IpAddr) {
        self.places.begin(source_of(address));
    }

    pub fn end(&mut self, address: IpAddr) {
        self.places.end(source_of(address));
    }

    /// Number of connections of all sources.
    pub fn connections(&self) -> usize {
        self.places.in_use()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    /// Takes places until the source gets none. Returns their number.
    fn fill(sources: &mut Sources, text: &str) -> usize {
        let address = address(text);
        let taken = (0..100).take_while(|_| {
            let has_place = sources.has_place(address);
            if has_place {
                sources.begin(address);
            }
            has_place
        });
        taken.count()
    }

    #[test]
    fn connections_of_an_ipv6_network_count_as_those_of_one_address() {
        let mut sources = Sources::new(100, 3);
        assert_eq!(fill(&mut sources, "2001:db8::1"), 3);
        assert_eq!(fill(&mut sources, "2001:db8::ffff"), 0);
        assert_eq!(fill(&mut sources, "2001:db8:0:1::1"), 3);
        assert_eq!(fill(&mut sources, "::ffff:10.0.0.1"), 3);
        assert_eq!(fill(&mut sources, "10.0.0.1"), 0);
        sources.end(address("2001:db8::2"));
        assert_eq!(fill(&mut sources, "2001:db8::3"), 1);
        assert_eq!(sources.connections(), 9);
    }

    // rows: R341
    #[test]
    fn r341_the_connections_of_a_few_addresses_leave_places_for_others() {
        let mut sources = Sources::new(64, 32);
        let filled = ["10.0.0.1", "10.0.0.2", "10.0.0.3"].map(|text| fill(&mut sources, text));
        assert_eq!(filled, [32, 16, 8]);
        assert!(fill(&mut sources, "10.0.0.4") > 0);
    }
}
