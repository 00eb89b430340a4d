//! Checks where in the sources a library or a formula is used.

use super::Finding;
use super::source::Source;
use super::tokens::{Path, Token, paths};

pub fn check(source: &Source) -> Vec<Finding> {
    let tokens = source.production_tokens();
    let mut found = Vec::new();
    check_contract_types(source, &tokens, &mut found);
    check_sql(source, &tokens, &mut found);
    check_chain(source, &tokens, &mut found);
    check_reserve(source, &tokens, &mut found);
    found
}

/// Adds one finding for all `uses`, at the first one: an exception covers a file, not a single use.
fn report(
    source: &Source,
    rule: &'static str,
    mut uses: Vec<(String, usize)>,
    why: &str,
    found: &mut Vec<Finding>,
) {
    uses.sort_by_key(|(_, line)| *line);
    let Some((first, line)) = uses.first() else {
        return;
    };
    let more = match uses.len() {
        1 => String::new(),
        count => format!(" and {} more", count - 1),
    };
    found.push(Finding {
        file: source.path.clone(),
        line: *line,
        rule,
        place: source.path.clone(),
        amount: 1,
        what: format!("`{first}`{more}: {why}"),
    });
}

/// Uses of paths below one of `roots` that are not exempt by `is_free`, with their lines.
fn uses<'a>(
    tokens: &[Token<'a>],
    roots: &[&str],
    is_free: impl Fn(&Path<'a>) -> bool,
) -> Vec<(String, usize)> {
    let all = roots.iter().flat_map(|root| paths(tokens, root));
    all.filter(|path| !is_free(path))
        .map(|path| (path.segments.join("::"), path.line))
        .collect()
}

/// Messages of the contracts may be used in `proto`, `rpc`, `service-clients`, and in a service's
/// `api` and `publish.rs`.
fn check_contract_types(source: &Source, tokens: &[Token], found: &mut Vec<Finding>) {
    if ["proto", "rpc", "service-clients"].contains(&source.crate_name())
        || source
            .parts()
            .any(|part| ["api", "publish"].contains(&part))
    {
        return;
    }
    // Conversion of numbers and times, the descriptors, and serving a service are allowed anywhere.
    let is_free = |path: &Path| {
        path.segments.first() == Some(&"proto")
            && path.segments.iter().any(|segment| {
                ["convert", "times", "FILE_DESCRIPTOR_SET", "SOURCES"].contains(segment)
                    || segment.ends_with("_service_server")
            })
    };
    let why = "contract types stay in proto, rpc, service-clients, a service's api and publish.rs";
    report(
        source,
        "contract-types",
        uses(tokens, &["prost", "prost_types", "proto"], is_free),
        why,
        found,
    );
}

/// SQL may be used in files and folders named `repo` or `migrations`, and in `events`.
fn check_sql(source: &Source, tokens: &[Token], found: &mut Vec<Finding>) {
    if source.crate_name() == "events"
        || source
            .parts()
            .any(|part| ["repo", "migrations"].contains(&part))
    {
        return;
    }
    // Neither an error that is passed on nor the migrations of a service's store count as SQL.
    let is_free = |path: &Path| {
        ["Error", "Result", "migrate"]
            .iter()
            .any(|name| path.segments.get(1) == Some(name))
    };
    let why = "SQL stays in files and folders named repo";
    report(
        source,
        "sql",
        uses(tokens, &["sqlx", "rusqlite"], is_free),
        why,
        found,
    );
}

fn check_chain(source: &Source, tokens: &[Token], found: &mut Vec<Finding>) {
    if source.crate_name() != "chain" {
        let why = "the chain library stays in chain";
        report(
            source,
            "chain-library",
            uses(tokens, &["alloy", "revm"], |_| false),
            why,
            found,
        );
    }
}

/// Only admission and the gateway's check before a gRPC order may compute an order's money.
fn check_reserve(source: &Source, tokens: &[Token], found: &mut Vec<Finding>) {
    let is_allowed = ["types", "admission"].contains(&source.crate_name())
        || source.path == "gateway/src/orders/place.rs";
    if is_allowed {
        return;
    }
    let why =
        "only admission and the gateway's check before a gRPC order compute an order's reserve";
    let is_free = |path: &Path| match path.segments.as_slice() {
        [.., "reserve" | "fee"] => path.segments.contains(&"subaccount"),
        // A glob import or another name of the module would hide uses of its functions.
        ["types", "*"] | ["types", "money", "*"] | ["money", "*"] => false,
        [.., "types" | "money" | "self"] => !path.is_rebound,
        _ => true,
    };
    let mut uses = uses(tokens, &["types", "money"], is_free);
    let methods = tokens
        .windows(2)
        .filter(|pair| [".", "::"].contains(&pair[0].text) && pair[1].text == "after_trade");
    uses.extend(methods.map(|pair| ("after_trade".to_owned(), pair[1].line)));
    report(source, "reserve-arithmetic", uses, why, found);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rules that a file with this text violates.
    fn rules(path: &str, text: &str) -> Vec<&'static str> {
        let source = Source::new(path.to_owned(), text.to_owned());
        check(&source)
            .into_iter()
            .map(|finding| finding.rule)
            .collect()
    }

    #[test]
    fn contract_types_stay_at_the_edge() {
        for text in [
            "use prost::Message;",
            "fn a(at: &prost_types::Timestamp) {}",
            "use proto::{convert, ledger::v1 as wire};",
            "fn a() { select! { x = proto::cfa::v1::Issue::default() => {} } }",
        ] {
            assert_eq!(
                rules("ledger/src/book.rs", text),
                ["contract-types"],
                "{text}"
            );
            for path in [
                "ledger/src/api/mod.rs",
                "chain/src/api.rs",
                "cfa/src/publish.rs",
                "service-clients/src/ledger.rs",
                "proto/src/convert.rs",
                "rpc/src/page.rs",
                "ledger/tests/boundary/reads.rs",
                "tests/src/call.rs",
            ] {
                assert!(rules(path, text).is_empty(), "{path}: {text}");
            }
        }
        for text in [
            "use proto::convert::decimal;",
            "use proto::market::v1::market_service_server::MarketServiceServer;",
            "// use prost::Message\nconst A: &str = \"prost::Message\";",
            "#[cfg(test)] mod tests { use prost::Message; }",
            "use crate::proto::Task;",
        ] {
            assert!(rules("ledger/src/book.rs", text).is_empty(), "{text}");
        }
    }

    #[test]
    fn sql_stays_in_repo() {
        let text = "fn a() { sqlx::query(x) }";
        assert_eq!(rules("ledger/src/book.rs", text), ["sql"]);
        assert_eq!(
            rules("ledger/src/book.rs", "use rusqlite::Connection;"),
            ["sql"]
        );
        for path in [
            "ledger/src/repo/rows.rs",
            "cfa/src/repo.rs",
            "chain/src/dev/repo.rs",
            "events/src/inbox.rs",
        ] {
            assert!(rules(path, text).is_empty(), "{path}");
        }
        assert!(rules("ledger/src/lib.rs", "enum E { S(#[from] sqlx::Error) }").is_empty());
    }

    #[test]
    fn the_chain_library_stays_in_chain() {
        assert_eq!(
            rules("cfa/src/plan.rs", "use alloy::primitives::Address;"),
            ["chain-library"]
        );
        assert_eq!(
            rules("node/src/run.rs", "revm::context::Context"),
            ["chain-library"]
        );
        assert!(rules("chain/src/dev/state.rs", "use {alloy::x, revm::y};").is_empty());
    }

    #[test]
    fn only_admission_computes_an_orders_money() {
        for text in [
            "use types::{FillTotals, reserve};",
            "use types::{self, money::{fee as charge}};",
            "let a = types::reserve(b);",
            "use types::money; fn a() { money::fee(b) }",
            "use types::money::*; fn a() { fee(b) }",
            "use types::*; fn a() { reserve(b) }",
            "use types as t; fn a() { t::reserve(b) }",
            "use types::{Lots, money as m}; fn a() { m::fee(b) }",
            "use types::money::{self as m}; fn a() { m::fee(b) }",
            "use {std::mem, types as t}; fn a() { t::reserve(b) }",
            "fn a() { return ::types::reserve(b); }",
            "pub use types::money;",
            "order.fill_totals = order.fill_totals.after_trade(side, value, rate);",
            "FillTotals::after_trade(fill_totals, side, value, rate)",
        ] {
            assert_eq!(
                rules("settlement/src/fold/step.rs", text),
                ["reserve-arithmetic"],
                "{text}"
            );
            for path in [
                "types/src/money.rs",
                "admission/src/orders.rs",
                "gateway/src/orders/place.rs",
            ] {
                assert!(rules(path, text).is_empty(), "{path}: {text}");
            }
        }
        for text in [
            "rows.reserve(4);",
            "use types::command::*;",
            "use types::{self, Side::*}; pub use types::Lots;",
            "types::subaccount::reserve(id)",
            "order.fee",
            "let fee = fee_of(trade);",
        ] {
            assert!(
                rules("settlement/src/fold/step.rs", text).is_empty(),
                "{text}"
            );
        }
    }
}
