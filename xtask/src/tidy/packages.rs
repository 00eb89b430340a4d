//! Which crates may depend on the libraries whose types must not spread.

use super::edges::Edge;
use super::{Finding, TEST_CRATES};

/// Packages, crates that may depend on them, reason.
type Wall = (
    &'static [&'static str],
    &'static [&'static str],
    &'static str,
);

const CHAIN: &[&str] = &["alloy", "revm"];

/// Tests and [`TEST_CRATES`] are exempt from all but the wall of the chain library.
#[rustfmt::skip]
const WALLS: [Wall; 5] = [
    (
        &["prost", "prost-types", "tonic", "tonic-prost", "tonic-types"],
        &[
            "approvals", "cfa", "chain", "gateway", "ledger", "payments", "proto", "rpc", "sandbox",
            "service-clients", "settlement",
        ],
        "contract types stay with the contracts, their clients and the services",
    ),
    (
        &["sqlx"],
        &["approvals", "cfa", "chain", "events", "gateway", "ledger", "payments", "sandbox", "settlement"],
        "SQL stays with the crates that have a store",
    ),
    (&["rusqlite"], &["events", "ledger"], "only the ledger's writer uses SQLite without sqlx"),
    (&["quinn-proto", "quinn-udp"], &["transport"], "only transport polls QUIC without an async runtime"),
    (CHAIN, &["chain"], "the chain library stays in chain"),
];

/// Crates without I/O, and the packages that they may use. Add a package only after checking that
/// it uses no I/O, no clock and no threads. Of `memmap2` they use anonymous mappings only.
const PURE: [&str; 4] = ["admission", "engine", "types", "wire"];
#[rustfmt::skip]
const PURE_PACKAGES: [&str; 9] =
    ["bytes", "foldhash", "memmap2", "rkyv", "serde", "sha3", "thiserror", "uuid", "zerocopy"];

pub fn check(edges: &[Edge]) -> Vec<Finding> {
    edges
        .iter()
        .filter(|edge| !edge.is_internal)
        .filter_map(violation)
        .collect()
}

fn violation(edge: &Edge) -> Option<Finding> {
    let (from, package) = (edge.from.as_str(), edge.to.as_str());
    let is_impure = PURE.contains(&from) && !edge.is_dev && !PURE_PACKAGES.contains(&package);
    let why = if is_impure {
        "a crate without I/O uses only packages checked to have none"
    } else {
        let wall = WALLS
            .iter()
            .find(|(packages, ..)| packages.contains(&package))?;
        let is_test = edge.is_dev || TEST_CRATES.contains(&from);
        let is_free = is_test && !CHAIN.contains(&package);
        if is_free || wall.1.contains(&from) {
            return None;
        }
        wall.2
    };
    Some(Finding {
        file: edge.file.clone(),
        line: edge.line,
        rule: "package",
        place: format!("{from}->{package}"),
        amount: 1,
        what: format!("{from} -> {package}: {why}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_forbidden(from: &str, to: &str, is_dev: bool) -> bool {
        let edge = Edge {
            from: from.to_owned(),
            to: to.to_owned(),
            is_internal: false,
            is_dev,
            file: format!("{from}/Cargo.toml"),
            line: 1,
        };
        !check(&[edge]).is_empty()
    }

    #[test]
    fn a_library_stays_in_its_crates() {
        for (from, package) in [
            ("sequencer", "prost"),
            ("replica", "tonic"),
            ("node", "sqlx"),
            ("gateway", "rusqlite"),
            ("cfa", "alloy"),
            ("tests", "alloy"),
            ("node", "revm"),
            ("types", "tokio"),
            ("engine", "tracing"),
            ("admission", "rand"),
            ("wire", "quinn"),
            ("gateway", "quinn-proto"),
        ] {
            assert!(is_forbidden(from, package, false), "{from} -> {package}");
        }
        for (from, package) in [
            ("proto", "prost"),
            ("service-clients", "tonic"),
            ("ledger", "rusqlite"),
            ("settlement", "sqlx"),
            ("tests", "prost"),
            ("chain", "revm"),
            ("types", "rkyv"),
            ("node", "tokio"),
        ] {
            assert!(!is_forbidden(from, package, false), "{from} -> {package}");
        }
        assert!(
            !is_forbidden("engine", "proptest", true),
            "tests of a pure crate are exempt"
        );
        assert!(
            !is_forbidden("replica", "tonic", true),
            "tests may serve the contracts of other services"
        );
        assert!(
            is_forbidden("cfa", "alloy", true),
            "tests must not use the chain library either"
        );
    }
}
