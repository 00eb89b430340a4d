//! The binary as cargo builds it. That this file exists makes `cargo test --workspace` build it at
//! all: the scenarios of the room `tests` start it as a process.

use std::process::Command;

#[test]
fn the_binary_says_what_it_is() {
    let said = Command::new(env!("CARGO_BIN_EXE_platform"))
        .arg("--version")
        .output()
        .expect("the binary runs");
    assert!(said.status.success(), "{said:?}");
    let version = format!("platform {}", env!("CARGO_PKG_VERSION"));
    assert_eq!(String::from_utf8_lossy(&said.stdout).trim(), version);
}
