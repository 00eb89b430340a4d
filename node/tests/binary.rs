//! Makes `cargo test --workspace` build the platform binary, which the scenarios in `tests` start
//! as a process.

use std::process::Command;

#[test]
fn the_binary_prints_its_version() {
    let said = Command::new(env!("CARGO_BIN_EXE_platform"))
        .arg("--version")
        .output()
        .expect("the binary runs");
    assert!(said.status.success(), "{said:?}");
    let version = format!("platform {}", env!("CARGO_PKG_VERSION"));
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), version);
}
