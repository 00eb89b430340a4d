//! The load generator and the client's examples against a running platform.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use tests::call::text;
use tests::process::{PATIENCE, Platform, command};
use tests::shared::{platform, run};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStdout};

#[allow(dead_code)]
#[path = "../../client/examples/async.rs"]
mod example_async;

#[allow(dead_code)]
#[path = "../../client/examples/spinning.rs"]
mod example_spinning;

fn count(report: &Value, pointer: &str) -> u64 {
    let value = report.pointer(pointer).and_then(Value::as_u64);
    value.unwrap_or_else(|| panic!("no number at {pointer}: {report}"))
}

/// Asserts that all percentiles are present, above zero and sorted.
fn assert_spread(spread: &Value) {
    let at = |name: &str| {
        let value = spread[name].as_f64();
        value.unwrap_or_else(|| panic!("no {name}: {spread}"))
    };
    let values = ["p50", "p90", "p99", "p999", "p9999", "max"].map(at);
    assert!(values[0] > 0.0 && values.is_sorted(), "{spread}");
}

/// Asserts that the rows of a distribution are sorted and that the last one counts all values.
fn assert_distribution(path: &Path, values: u64) {
    let text = std::fs::read_to_string(path).expect("the distribution");
    let mut last = (0.0, 0.0, 0);
    let rows = text.lines().skip(2).filter(|line| !line.starts_with('#'));
    for row in rows {
        let words: Vec<&str> = row.split_whitespace().collect();
        let word = |at: usize| words[at].parse::<f64>().expect("a number");
        let next = (word(0), word(1), words[2].parse::<u64>().expect("a count"));
        let grows = next.0 >= last.0 && next.1 >= last.1 && next.2 >= last.2;
        assert!(grows, "{last:?}, then {row}");
        last = next;
    }
    assert_eq!((last.1, last.2), (1.0, values), "{text}");
    assert!(text.contains(&format!("Total count    = {values:>12}]")));
}

/// Runs a load for two seconds; checks its report, its files and that it leaves no open order.
async fn load(platform: &Platform, name: &str, more: &[&str]) {
    let (file, hdr, plot) = (
        format!("{name}.json"),
        format!("{name}-hdr"),
        format!("{name}.svg"),
    );
    let mut args = vec![
        "load",
        "--json",
        "--rate",
        "200",
        "--seconds",
        "2",
        "--members",
        "2",
        "--sessions",
        "2",
        "--window",
        "64",
        "--seed",
        "7",
        "--report",
        &file,
        "--hdr",
        &hdr,
        "--plot",
        &plot,
    ];
    args.extend(more);
    let report = platform.cli(&args).await.success().json();
    let figure = |pointer: &str| count(&report, pointer);

    assert_eq!(figure("/offered"), 400, "{report}");
    assert_eq!(figure("/sent") + figure("/unsent"), figure("/offered"));
    let answered = figure("/acknowledged") + figure("/refused");
    assert_eq!(answered + figure("/unanswered"), figure("/sent"));
    let reasons = report["refused_by_reason"].as_object().expect("reasons");
    let refused: u64 = reasons.values().filter_map(Value::as_u64).sum();
    assert_eq!(refused, figure("/refused"), "{report}");
    assert_eq!(figure("/durable_us/count"), figure("/acknowledged"));
    let seconds = report["elapsed_s"].as_f64().expect("seconds");
    let per_s = figure("/acknowledged") as f64 / seconds;
    let difference = report["acknowledged_per_s"].as_f64().expect("a rate") - per_s;
    // Both figures are rounded.
    assert!(difference.abs() <= 1.0, "{report}");
    assert!(figure("/acknowledged") > 0 && figure("/accepted_us/count") <= figure("/sent"));
    assert!(figure("/late/held_by_window") <= figure("/late/over_1_ms") + figure("/unsent"));
    assert_spread(&report["accepted_us"]);
    assert_spread(&report["durable_us"]);
    assert_eq!(report["interrupted"], json!(false));

    let folder = platform.folder();
    let written = std::fs::read_to_string(folder.join(&file)).expect("the figures");
    assert_eq!(
        serde_json::from_str::<Value>(&written).ok(),
        Some(report.clone())
    );
    for which in ["accepted", "durable"] {
        let path = folder.join(&hdr).join(format!("{which}.hgrm"));
        assert_distribution(&path, figure(&format!("/{which}_us/count")));
    }
    let picture = std::fs::read_to_string(folder.join(&plot)).expect("the picture");
    assert_eq!(picture.matches("<polyline").count(), 2);
    // The load cancels its open orders at the end.
    let instrument = text(&report, "/instrument");
    let book = ["--json", "book", "get", "--instrument-id", &instrument];
    let book = platform.cli(&book).await.success().json();
    for side in ["bids", "asks"] {
        let levels = book["snapshot"][side].as_array();
        assert!(levels.is_none_or(Vec::is_empty), "{book}");
    }
}

// rows: R348
#[test]
fn r348_latency_and_throughput_are_measured_from_when_requests_are_due() {
    run(async {
        let platform = platform().await;
        load(platform, "async", &[]).await;
        load(platform, "spinning", &["--spin"]).await;
        let odd = platform.cli(&["load", "--members", "1"]).await;
        assert_eq!(odd.status.code(), Some(1), "{odd:?}");
        assert!(odd.stderr.contains("at least 2 members"), "{odd:?}");
    });
}

/// Starts a load and waits for its first orders in the book. Returns the process, and its output
/// after the instrument's id.
async fn start_load(platform: &Platform, more: &[&str]) -> (Child, BufReader<ChildStdout>) {
    let (url, trading) = (platform.url("all"), platform.address("trading").to_string());
    let args = [
        "--url",
        &url,
        "load",
        "--trading",
        &trading,
        "--members",
        "2",
    ];
    let mut child = command(platform.folder())
        .args(args)
        .args(more)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut lines = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    let instrument = loop {
        line.clear();
        let read = tokio::time::timeout(PATIENCE, lines.read_line(&mut line)).await;
        assert!(read.expect("in time").expect("text") > 0, "no instrument");
        if let Some((_, id)) = line.trim_end().split_once("instrument_id=") {
            break id.to_owned();
        }
    };
    let request = json!({ "instrumentId": instrument });
    let what = "orders in the book";
    let has_orders = |book: &Value| {
        let bids = book["snapshot"]["bids"].as_array();
        bids.is_some_and(|bids| !bids.is_empty())
    };
    let book = platform.until(what, "market.GetOrderBook", request, has_orders);
    book.await;
    (child, lines)
}

/// Sends a signal to a process.
async fn kill(signal: &str, pid: &str) {
    let kill = tokio::process::Command::new("kill")
        .args([signal, pid])
        .status();
    assert!(kill.await.expect("kill runs").success());
}

/// A stalled platform delays all requests that are due meanwhile, not only those in flight. With a
/// window of 64 the latter would be a twentieth of all and would not show in the 90th percentile.
// rows: R348
#[test]
fn r348_a_platform_that_stands_still_costs_every_request_that_was_due() {
    run(async {
        let mut platform = Platform::start().await;
        let more = [
            "--rate",
            "200",
            "--seconds",
            "6",
            "--window",
            "64",
            "--report",
            "still.json",
        ];
        let (mut child, mut lines) = start_load(&platform, &more).await;
        kill("-STOP", &platform.pid()).await;
        tokio::time::sleep(Duration::from_secs(2)).await;
        kill("-CONT", &platform.pid()).await;
        let mut rest = String::new();
        let read = tokio::time::timeout(PATIENCE, lines.read_to_string(&mut rest)).await;
        read.expect("in time").expect("text");
        assert!(child.wait().await.expect("it ends").success(), "{rest}");
        let written = std::fs::read_to_string(platform.folder().join("still.json"));
        let report: Value = serde_json::from_str(&written.expect("the figures")).expect("JSON");
        assert_eq!(count(&report, "/offered"), 1_200, "{report}");
        for which in ["accepted_us", "durable_us"] {
            let at = |name: &str| report[which][name].as_f64().expect("a number");
            assert!(at("p90") > 300_000.0, "{report}");
            assert!(at("max") > 1_500_000.0, "{report}");
        }
        // The window was full, and the latency of delayed requests counts from their due time.
        assert!(count(&report, "/late/held_by_window") > 0, "{report}");
        assert!(count(&report, "/late/max_us") > 500_000, "{report}");
        platform.stop().await;
    });
}

// rows: R348
#[test]
fn r348_an_interrupted_load_says_the_figures_so_far() {
    run(async {
        let platform = platform().await;
        let (mut child, mut lines) = start_load(platform, &["--seconds", "3600"]).await;
        let pid = child.id().expect("it runs").to_string();
        kill("-INT", &pid).await;
        let mut rest = String::new();
        let read = tokio::time::timeout(PATIENCE, lines.read_to_string(&mut rest)).await;
        read.expect("in time").expect("text");
        let status = child.wait().await.expect("it ends");
        assert!(status.success(), "{rest}");
        for wanted in ["interrupted: true", "acknowledged: ", "p9999: "] {
            assert!(rest.contains(wanted), "no `{wanted}`: {rest}");
        }
    });
}

#[test]
fn both_examples_of_the_client_place_an_order_and_cancel_it() {
    run(async {
        let platform = platform().await;
        platform.bond().await;
        let user = platform.rich("1000").await;
        let (gateway, token) = (platform.address("trading"), user.token());
        let id = example_async::trade(gateway, &token).await;
        let first = id.expect("the async example");
        let spinning = move || example_spinning::trade(gateway, &token);
        let id = tokio::task::spawn_blocking(spinning)
            .await
            .expect("no panic");
        let second = id.expect("the spinning example");
        for id in [first, second] {
            let get = ["--json", "order", "get", "--order-id", &id];
            let order = platform.cli(&get).await.success().json();
            let status = text(&order, "/order/status");
            assert_eq!(status, "ORDER_STATUS_CANCELLED", "{order}");
        }
    });
}
