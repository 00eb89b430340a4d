//! Forbidden dependencies between crates. The rules state what `ARCHITECTURE.md` excludes on
//! purpose. A dependency that merely does not exist today is allowed.

use std::path::Path;

use anyhow::Context;
use serde_json::Value;

use super::{Finding, TEST_CRATES};
use crate::shell;

/// A dependency of a crate of the workspace, from `cargo metadata`.
#[derive(Clone, Debug)]
pub struct Edge {
    pub from: String,
    pub to: String,
    /// `to` is a crate of the workspace too.
    pub is_internal: bool,
    /// Dev-dependency.
    pub is_dev: bool,
    pub file: String,
    pub line: usize,
}

/// Crates that serve calls or settle. The layers below do not depend on them.
#[rustfmt::skip]
const SERVICES: &[&str] =
    &["approvals", "cfa", "chain", "gateway", "ledger", "payments", "sandbox", "settlement"];

/// The trading path and its clients.
#[rustfmt::skip]
const TRADING: &[&str] = &[
    "admission", "client", "engine", "gateway", "journal", "replica", "sequencer", "settlement", "wire",
];

/// Layers below the services.
#[rustfmt::skip]
const LOWER: &[&str] = &[
    "admission", "engine", "events", "journal", "latency", "proto", "rail", "rpc", "sequencer", "service-kit",
    "signatures", "transport", "types", "wire",
];

enum To {
    /// No crate of the workspace but these.
    Only(&'static [&'static str]),
    /// None of these.
    Never(&'static [&'static str]),
}
use To::{Never, Only};

/// From, to, why.
type Rule = (&'static [&'static str], To, &'static str);

const CONTRACT: &str = "services call each other over the contract in proto";
const OUTSIDE: &str = "the stand-ins are outside the platform and use the real contracts";
const PRODUCTION: &str = "test code does not run in production";

/// Build dependencies are treated as normal ones.
#[rustfmt::skip]
const RULES: &[Rule] = &[
    // Cores and formats: no I/O, and no crate that is built on them.
    (&["types"], Only(&[]), "the vocabulary of all crates depends on none of them"),
    (&["engine"], Only(&["types"]), "matching has no I/O, no time and no accounts' money"),
    (&["admission"], Only(&["types"]), "admission has no I/O and no order book; its state changes only by apply"),
    (&["wire"], Only(&["types"]), "the codec has no I/O and no sessions"),
    (&["transport"], Only(&[]), "the transport moves bytes and does not interpret them"),
    (&["journal"], Only(&["types"]), "the journal does not interpret its payloads"),
    (&["latency"], Only(&[]), "histograms and plots are independent of the measurement"),
    (&["service-kit"], Only(&[]), "tools of all services depend on none of them"),
    (&["events"], Only(&["service-kit"]), "the event log does not interpret its events"),
    (&["signatures"], Only(&[]), "a signature does not depend on the document's service"),
    (&["rail"], Only(&["events", "service-kit", "types"]), "the bank's contract depends on neither of its sides"),
    (&["proto"], Only(&["types"]), "the contracts have no rules"),
    (&["rpc"], Only(&["proto", "service-kit", "types"]), "the server side of every service depends on none of them"),
    (&["service-clients"], Only(&["proto", "rpc", "service-kit", "types"]), CONTRACT),
    (&["proof"], Only(&["rpc", "service-clients", "types"]), "the proof uses public calls only"),
    // The trading path.
    (&["sequencer"], Only(&["admission", "engine", "journal", "service-kit", "types"]), "it has no socket and no SQL"),
    (&["replica"], Only(&["admission", "engine", "journal", "sequencer", "types"]), "it does not depend on followers"),
    (&["client"], Only(&["transport", "types", "wire"]), "client and gateway share only the wire protocol"),
    (&["gateway"], Never(&["client"]), "client and gateway share only the wire protocol"),
    (&["gateway"], Never(&["engine"]), "order books belong to the engine and the replica"),
    (&["gateway", "settlement"], Never(&["journal"]), "the replica alone decodes the journal"),
    (&["settlement"], Never(&["admission", "client", "engine", "wire"]), "it neither admits nor matches orders"),
    // Services.
    (&["gateway"], Never(&["cfa", "chain", "ledger", "payments", "sandbox", "settlement"]), CONTRACT),
    (&["settlement"], Never(&["cfa", "chain", "gateway", "ledger", "payments", "sandbox"]), CONTRACT),
    (&["ledger"], Never(&["cfa", "chain", "payments", "sandbox"]), CONTRACT),
    // cfa submits chain::Action and reads chain::Receipt.
    (&["cfa"], Never(&["ledger", "payments", "sandbox"]), CONTRACT),
    (&["payments"], Never(&["cfa", "chain", "ledger", "sandbox"]), CONTRACT),
    (&["approvals"], Only(&["events", "proto", "rpc", "service-kit", "types"]), "it makes any call by its descriptor"),
    (&["chain"], Never(&["cfa", "ledger", "payments", "sandbox"]), "the chain has no instruments and no users"),
    (&["cfa", "chain", "ledger", "payments"], Never(TRADING), "they do not depend on trading"),
    (&["sandbox"], Never(&["cfa", "chain", "ledger", "payments"]), OUTSIDE),
    (&["sandbox"], Never(TRADING), OUTSIDE),
    // Crates outside production.
    (SERVICES, Never(TEST_CRATES), PRODUCTION),
    (&["node"], Never(TEST_CRATES), PRODUCTION),
    (&["xtask"], Only(&[]), "xtask builds without the other crates"),
];

/// Rules for dev-dependencies. A service's tests may use other services, `testkit`, `client` and
/// `sandbox`.
#[rustfmt::skip]
const DEV_RULES: &[Rule] = &[
    (LOWER, Never(SERVICES), "a lower layer is tested without the services"),
    (&["xtask"], Only(&[]), "xtask builds without the other crates"),
];

/// Crates that no crate may depend on, tests included.
#[rustfmt::skip]
const ROOTS: [&str; 7] = ["benches", "conformance", "fuzz", "harness", "node", "tests", "xtask"];

/// Dependencies of all crates of the workspace.
pub fn read(root: &Path) -> anyhow::Result<Vec<Edge>> {
    let args = ["metadata", "--format-version", "1", "--no-deps"];
    let metadata: Value = serde_json::from_str(&shell::output(root, "cargo", &args)?)?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let members: Vec<&str> = packages
        .iter()
        .filter_map(|package| package["name"].as_str())
        .collect();
    let mut edges = Vec::new();
    for package in packages {
        let from = package["name"]
            .as_str()
            .context("a package without a name")?;
        let manifest = Path::new(
            package["manifest_path"]
                .as_str()
                .context("a package without a manifest")?,
        );
        let text = std::fs::read_to_string(manifest)?;
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let to = dependency["name"]
                .as_str()
                .context("a dependency without a name")?;
            let is_dev = dependency["kind"] == "dev";
            edges.push(Edge {
                from: from.to_owned(),
                to: to.to_owned(),
                is_internal: members.contains(&to),
                is_dev,
                file: manifest.strip_prefix(root)?.to_string_lossy().into_owned(),
                line: line_of(&text, to, is_dev),
            });
        }
    }
    Ok(edges)
}

/// Line of a manifest that names a dependency.
fn line_of(manifest: &str, name: &str, is_dev: bool) -> usize {
    let mut is_here = false;
    for (index, line) in manifest.lines().enumerate() {
        if line.starts_with('[') {
            is_here = line.contains("dependencies") && line.contains("dev-") == is_dev;
        }
        let rest = line.strip_prefix(name).unwrap_or("-");
        if is_here && rest.starts_with(['.', ' ', '=']) {
            return index + 1;
        }
    }
    1
}

pub fn check(edges: &[Edge]) -> Vec<Finding> {
    edges
        .iter()
        .filter(|edge| edge.is_internal)
        .filter_map(violation)
        .collect()
}

fn violation(edge: &Edge) -> Option<Finding> {
    let (from, to) = (edge.from.as_str(), edge.to.as_str());
    let rules = if edge.is_dev { DEV_RULES } else { RULES };
    let forbids = |rule: &To| match rule {
        Only(allowed) => !allowed.contains(&to),
        Never(forbidden) => forbidden.contains(&to),
    };
    let why = if ROOTS.contains(&to) {
        "no crate may depend on a program or on tests"
    } else {
        rules
            .iter()
            .find(|(crates, rule, _)| crates.contains(&from) && forbids(rule))?
            .2
    };
    let dev = if edge.is_dev { " (dev)" } else { "" };
    Some(Finding {
        file: edge.file.clone(),
        line: edge.line,
        rule: "crate-edge",
        place: format!("{from}->{to}{}", dev.trim()),
        amount: 1,
        what: format!("{from} -> {to}{dev}: {why}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_forbidden(from: &str, to: &str, is_dev: bool) -> bool {
        let edge = Edge {
            from: from.to_owned(),
            to: to.to_owned(),
            is_internal: true,
            is_dev,
            file: format!("{from}/Cargo.toml"),
            line: 1,
        };
        !check(&[edge]).is_empty()
    }

    #[test]
    fn forbidden_edges_are_found() {
        let forbidden = [
            ("gateway", "engine"),
            ("gateway", "settlement"),
            ("gateway", "client"),
            ("gateway", "ledger"),
            ("wire", "gateway"),
            ("client", "gateway"),
            ("settlement", "gateway"),
            ("settlement", "ledger"),
            ("sandbox", "payments"),
            ("sandbox", "gateway"),
            ("payments", "ledger"),
            ("payments", "settlement"),
            ("ledger", "engine"),
            ("ledger", "journal"),
            ("ledger", "sequencer"),
            ("cfa", "ledger"),
            ("cfa", "gateway"),
            ("chain", "cfa"),
            ("engine", "admission"),
            ("types", "events"),
            ("admission", "rpc"),
            ("journal", "sequencer"),
            ("events", "proto"),
            ("proto", "rpc"),
            ("rpc", "ledger"),
            ("sequencer", "gateway"),
            ("replica", "settlement"),
            ("proof", "ledger"),
            ("service-clients", "ledger"),
            ("ledger", "testkit"),
            ("approvals", "ledger"),
            ("approvals", "service-clients"),
            ("node", "testkit"),
            ("ledger", "client"),
            ("testkit", "node"),
            ("tests", "node"),
        ];
        for (from, to) in forbidden {
            assert!(is_forbidden(from, to, false), "{from} -> {to}");
        }
        for (from, to) in [
            ("engine", "gateway"),
            ("events", "ledger"),
            ("ledger", "node"),
            ("gateway", "tests"),
        ] {
            assert!(is_forbidden(from, to, true), "{from} -> {to} in tests");
        }
    }

    #[test]
    fn other_edges_pass() {
        let allowed = [
            ("gateway", "admission"),
            ("gateway", "replica"),
            ("settlement", "service-clients"),
            ("cfa", "chain"),
            ("node", "client"),
            ("node", "gateway"),
            ("replica", "engine"),
            ("rpc", "proto"),
        ];
        for (from, to) in allowed {
            assert!(!is_forbidden(from, to, false), "{from} -> {to}");
        }
        for (from, to) in [
            ("gateway", "client"),
            ("payments", "sandbox"),
            ("cfa", "ledger"),
            ("admission", "engine"),
        ] {
            assert!(!is_forbidden(from, to, true), "{from} -> {to} in tests");
        }
    }

    #[test]
    fn rules_name_existing_crates() {
        let edges = read(&shell::root()).expect("metadata");
        let is_known = |name: &&str| edges.iter().any(|edge| edge.from == *name);
        for (from, to, _) in RULES.iter().chain(DEV_RULES) {
            let (Only(to) | Never(to)) = to;
            let unknown: Vec<_> = from
                .iter()
                .chain(*to)
                .filter(|name| !is_known(name))
                .collect();
            assert!(unknown.is_empty(), "{unknown:?}");
        }
        // A new production crate needs a rule.
        let is_production = |edge: &Edge| {
            let name = edge.from.as_str();
            !TEST_CRATES.contains(&name) && !ROOTS.contains(&name)
        };
        for edge in edges.into_iter().filter(is_production) {
            let has_rule = RULES
                .iter()
                .any(|(from, _, _)| from.contains(&edge.from.as_str()));
            assert!(has_rule, "no rule for the dependencies of {}", edge.from);
        }
    }

    #[test]
    fn a_finding_names_the_line_of_the_manifest() {
        let manifest = concat!(
            "[dependencies]\nengineering = \"1\"\nengine.workspace = true\n",
            "[dev-dependencies]\nengine.workspace = true\n"
        );
        assert_eq!(line_of(manifest, "engine", false), 3);
        assert_eq!(line_of(manifest, "engine", true), 5);
    }
}
