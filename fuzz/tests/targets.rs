//! Runs every target over its seeds, the committed seeds and a few thousand seeded mutations.

use std::panic::catch_unwind;
use std::path::Path;

use fuzz::{Random, TARGETS, Target, target};

/// Minimum number of inputs per target.
const INPUTS_MIN: usize = 2_000;

/// Seeds that the target builds, then the files in `fuzz/seeds/<name>`, sorted by name.
fn seeds(of: &Target) -> Vec<Vec<u8>> {
    let mut seeds = (of.seeds)();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("seeds")
        .join(of.name);
    let Ok(entries) = std::fs::read_dir(folder) else {
        return seeds;
    };
    let mut files: Vec<_> = entries
        .map(|entry| entry.expect("an entry").path())
        .collect();
    files.sort();
    seeds.extend(files.iter().map(|file| std::fs::read(file).expect("read")));
    seeds
}

/// Runs one input. A failure prints the input, so that it can be reproduced without a fuzzer.
fn check(of: &Target, input: &[u8]) {
    let outcome = catch_unwind(|| (of.check)(input));
    assert!(
        outcome.is_ok(),
        "{}: input {:?}",
        of.name,
        input.escape_ascii().to_string()
    );
}

fn run(name: &str) {
    let target = target(name).expect("a target");
    let seeds = seeds(target);
    let mut inputs = 0;
    for (number, seed) in seeds.iter().enumerate() {
        check(target, seed);
        let mut random = Random(number as u64);
        for _ in 0..target.mutations {
            let mut input = seed.clone();
            random.mutate(&mut input);
            check(target, &input);
        }
        inputs += 1 + target.mutations;
    }
    assert!(inputs >= INPUTS_MIN, "{name}: {inputs} inputs");
}

macro_rules! targets {
    ($($name:ident = $target:literal;)+) => {
        $(
            #[test]
            fn $name() {
                run($target);
            }
        )+

        #[test]
        fn every_target_is_run_here() {
            let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
            assert_eq!(names, [$($target),+]);
        }
    };
}

// rows: R174
targets! {
    client_messages = "client-messages";
    server_messages = "server-messages";
    r174_frames = "frames";
    r174_commands = "commands";
    snapshots = "snapshots";
    r174_checkpoints = "checkpoints";
    packed_events = "packed-events";
    bank_messages = "bank-messages";
    signatures = "signatures";
    links = "links";
    requests = "requests";
    numbers = "numbers";
    order_flow = "order-flow";
}
