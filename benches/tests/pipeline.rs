//! The baselines of `pipeline`: the client of the measured run, and one that only counts, over
//! rings without a node.

use std::sync::Arc;

use benches::baseline::{self, BareRings, EchoLoad};
use benches::load::Load;
use benches::open_loop::{Client, Timing};
use sequencer::{Backlog, Bounds, Config, Layout, Volatile};

const TIMING: Timing = Timing {
    rate: 20_000,
    seconds: 1,
    warm_up: 0,
};

const ECHO: EchoLoad = EchoLoad {
    timing: TIMING,
    core: 0,
    writer_core: None,
    service_ns: 0,
};

#[test]
fn the_bare_rings_answer_every_request_of_the_client() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut config = Config::new(folder.path());
    config.layout = Layout::Fused;
    let node = Volatile::start(config, Arc::new(Backlog::new(Bounds::NONE))).expect("starts");
    let mut ring = node.port().rings(1_024, Arc::default()).expect("rings");
    let mut load = Load::open(&node.port(), &mut ring, 1, 1).expect("users and sessions");
    let (rings, thread) = BareRings::connect(ECHO);
    let mut client = Client::new(rings, &mut load, None);
    client.run(TIMING).expect("answered");
    let results = &client.results;
    assert_eq!(results.requests, TIMING.rate * TIMING.seconds);
    assert_eq!(results.accepted.len(), results.requests);
    assert_eq!(
        (results.rejected, results.not_submitted, results.events),
        (0, 0, 0)
    );
    drop(client);
    thread.join().expect("ends with the client");
}

#[test]
fn the_bare_rings_answer_a_client_that_only_counts() {
    let times = baseline::run_with_plain_client(ECHO, None).expect("answered");
    assert!(times.p50_ns > 0, "{times}");
}
