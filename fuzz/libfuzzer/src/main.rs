//! Runs the target named by `FUZZ_TARGET` under libFuzzer. With `FUZZ_LIST` the program prints the
//! names, with `FUZZ_SEEDS` it writes the target's seeds into that folder; in both cases it then
//! exits.
#![no_main]

use std::path::Path;
use std::sync::OnceLock;

static CHECK: OnceLock<fn(&[u8])> = OnceLock::new();

libfuzzer_sys::fuzz_target!(init: prepare(), |bytes: &[u8]| {
    let check = CHECK.get().expect("set before the first input");
    check(bytes);
});

fn prepare() {
    if std::env::var_os("FUZZ_LIST").is_some() {
        for target in fuzz::TARGETS {
            println!("{}", target.name);
        }
        std::process::exit(0);
    }
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let Some(target) = fuzz::target(&name) else {
        eprintln!("unknown FUZZ_TARGET `{name}`: FUZZ_LIST=1 prints the names");
        std::process::exit(2);
    };
    if let Some(folder) = std::env::var_os("FUZZ_SEEDS") {
        for (number, seed) in (target.seeds)().iter().enumerate() {
            std::fs::write(Path::new(&folder).join(format!("seed-{number}")), seed)
                .expect("seed written");
        }
        std::process::exit(0);
    }
    CHECK.set(target.check).expect("set once");
}
