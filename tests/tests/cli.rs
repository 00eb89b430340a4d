//! The command line: help on every level, a command for every call, JSON on request, exit codes.

use serde_json::{Value, json};
use testkit::pdf;
use tests::call::text;
use tests::process::{Platform, run as command};
use tests::shared::{platform, run};
use tests::wire::{methods, pool};
use tests::world::{User, amount};

/// Names under `Commands:` of a help text.
fn subcommands(help: &str) -> Vec<String> {
    let commands = help.split("Commands:\n").nth(1).unwrap_or_default();
    commands
        .lines()
        .take_while(|line| !line.trim().is_empty())
        .filter_map(|line| {
            line.strip_prefix("  ")
                .filter(|rest| !rest.starts_with(' '))
        })
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

async fn help(words: &[&str]) -> String {
    let folder = std::env::temp_dir();
    let mut args = words.to_vec();
    args.push("--help");
    let done = command(&folder, &args).await.success();
    assert!(
        done.stdout.contains("Usage:") && done.stdout.contains("--json"),
        "{args:?}: {}",
        done.stdout
    );
    done.stdout
}

/// Verbs of `ledger` that are not the command of a call: aliases, and reads of the ledger's file.
const NOT_CALLS: [&str; 4] = ["balance", "holds", "rebuild", "verify"];

#[test]
fn r350_there_is_help_on_every_level_and_a_command_for_every_call() {
    run(async {
        let top = help(&[]).await;
        let nouns = subcommands(&top);
        for expected in [
            "run",
            "demo",
            "replay",
            "load",
            "proof",
            "config",
            "intent",
            "payout",
            "order",
            "book",
            "op",
            "hold",
            "holders",
            "instrument",
            "user",
        ] {
            assert!(
                nouns.iter().any(|noun| noun == expected),
                "no `{expected}`: {nouns:?}"
            );
        }
        let mut calls = 0;
        for noun in &nouns {
            let text = help(&[noun]).await;
            for verb in subcommands(&text) {
                let text = help(&[noun, &verb]).await;
                let about = text.lines().next().unwrap_or_default();
                assert!(!about.trim().is_empty(), "{noun} {verb} has no description");
                // `events`, `journal`, `data` and `proto` work on files.
                let is_no_call = match noun.as_str() {
                    "events" | "journal" | "data" | "proto" => true,
                    "ledger" => NOT_CALLS.contains(&verb.as_str()),
                    _ => false,
                };
                calls += usize::from(!is_no_call);
            }
        }
        assert_eq!(
            calls,
            methods(&pool()).len(),
            "not one command for each call of the contract"
        );
    });
}

// rows: R350
#[test]
fn r350_commands_work_against_a_running_platform() {
    run(async {
        let platform = platform().await;
        let json = async |args: &[&str]| {
            let mut all = vec!["--json"];
            all.extend(args);
            platform.cli(&all).await.success().json()
        };
        let created = json(&[
            "user",
            "create",
            "--kyc-status",
            "standard",
            "--full-name",
            "Boris",
        ])
        .await;
        let user = text(&created, "/profile/userId");
        let found = json(&["user", "get", "--user-id", &user]).await;
        assert_eq!(found["profile"]["kycStatus"], json!("KYC_STATUS_STANDARD"));
        let intent = json(&[
            "intent",
            "create",
            "--user-id",
            &user,
            "--method",
            "sbp-qr",
            "--amount",
            "1500.00",
        ])
        .await;
        assert_eq!(
            intent["intent"]["amount"]["amount"]["value"],
            json!("1500.00"),
            "{intent}"
        );
        json(&[
            "bank",
            "pay",
            "--qr-payload",
            &text(&intent, "/intent/qrPayload"),
        ])
        .await;
        let subaccount = format!("{user}:CFA-RUB");
        platform.balance_is(&subaccount, "1500.00").await;
        let balance = json(&["subaccount", "balance", "--subaccount-id", &subaccount]).await;
        assert_eq!(balance["balance"]["value"], json!("1500.00"));
        let book = json(&["book", "get", "--instrument-id", &platform.bond().await]).await;
        assert!(
            book["snapshot"]["bids"]
                .as_array()
                .is_none_or(Vec::is_empty),
            "{book}"
        );
        for words in [
            ["instrument", "list"],
            ["op", "list"],
            ["hold", "list"],
            ["payout", "list"],
            ["order", "list"],
            ["trade", "list"],
            ["market", "status"],
            ["ledger", "trial-balance"],
            ["chain", "block"],
            ["bank", "balance"],
        ] {
            assert!(json(&words).await.is_object(), "{words:?}");
        }
        let holders = json(&["holders", "list", "--instrument-id", "CFA-RUB"]).await;
        assert!(
            holders["holders"]
                .as_array()
                .is_some_and(|all| all.iter().any(|one| one["userId"] == json!(user))),
            "{holders}"
        );

        // Human-readable output: a table with units.
        for noun in ["subaccount", "ledger"] {
            let words = [noun, "balance", "--subaccount-id", &subaccount];
            let shown = platform.cli(&words).await.success().stdout;
            let row = shown.lines().find(|line| line.starts_with(&subaccount));
            let columns: Vec<&str> = row.unwrap_or_default().split_whitespace().collect();
            assert_eq!(
                columns.get(1..3),
                Some(&["1500.00", "CFA-RUB"][..]),
                "{shown}"
            );
        }

        // Statements and registers as CSV, of all pages.
        let csv = async |words: &[&str]| platform.cli(words).await.success().stdout;
        let statement = [
            "ledger",
            "statement",
            "--subaccount-id",
            &subaccount,
            "--csv",
        ];
        let statement = csv(&statement).await;
        let rows: Vec<&str> = statement.lines().collect();
        assert!(rows[0].starts_with("\"at\",\"posting_id\","), "{statement}");
        assert!(rows.len() == 2 && rows[1].ends_with("\"1500.00\",\"1500.00\",\"1\""));
        let instruments = csv(&["instrument", "list", "--page-size", "1", "--csv"]).await;
        let listed = json(&["instrument", "list", "--page-size", "1000"]).await;
        let listed = listed["instruments"].as_array().map_or(0, Vec::len);
        assert!(
            listed > 1 && instruments.lines().count() == 1 + listed,
            "{instruments}"
        );
        let trades = csv(&["trade", "list", "--csv"]).await;
        assert!(trades.starts_with("\"trade_id\",") && trades.lines().count() == 1);

        // A repeated key is executed once.
        let key = [
            "intent",
            "create",
            "--user-id",
            &user,
            "--method",
            "sbp-qr",
            "--amount",
            "5.00",
            "--idempotency-key",
            "once",
        ];
        assert_eq!(
            json(&key).await["intent"]["paymentId"],
            json(&key).await["intent"]["paymentId"]
        );

        let proof = json(&["proof"]).await;
        assert_eq!(proof["ok"], json!(true), "{proof}");
    });
}

// rows: R350
#[test]
fn r350_a_list_is_written_as_pdf_to_a_new_file() {
    run(async {
        let platform = platform().await;
        let name = "Облигация «Ёлка»";
        let (bond, issuer) = platform.draft(json!({ "name": name })).await;
        platform.draft(json!({})).await;
        let export = async |words: &[&str], file: &str| {
            let mut all = words.to_vec();
            all.extend(["--pdf", file]);
            let done = platform.cli(&all).await.success();
            assert_eq!(done.stdout, "");
            let document = std::fs::read(platform.folder().join(file));
            pdf::pages(&document.expect("the file"))
        };
        let words = ["instrument", "list", "--page-size", "1"];
        let pages = export(&words, "instruments.pdf").await;
        let shown: String = pages.iter().map(|page| page.text.as_str()).collect();
        assert!(shown.starts_with("instrument list"), "{shown}");
        for text in [name, &bond, &issuer] {
            assert!(shown.contains(text), "{text}: {shown}");
        }

        // An empty list, of an issuer who has not traded.
        let words = ["trade", "list", "--user-id", &issuer];
        let pages = export(&words, "trades.pdf").await;
        assert_eq!(pages.len(), 1);
        let shown = &pages[0].text;
        for text in ["Rows: 0", "page 1 of 1", &format!("user_id: {issuer}")] {
            assert!(shown.contains(text), "{text}: {shown}");
        }

        let again = platform
            .cli(&["trade", "list", "--pdf", "trades.pdf"])
            .await;
        assert_eq!(again.status.code(), Some(1), "{again:?}");
        let exists = "error: trades.pdf exists: remove it or name another file";
        assert!(again.stderr.contains(exists), "{again:?}");
        // The file is created before the first call.
        let words = [
            "--url",
            "http://127.0.0.1:1",
            "trade",
            "list",
            "--pdf",
            "none/trades.pdf",
        ];
        let nowhere = command(platform.folder(), &words).await;
        assert_eq!(nowhere.status.code(), Some(1), "{nowhere:?}");
        assert!(
            nowhere.stderr.contains("cannot create none/trades.pdf"),
            "{nowhere:?}"
        );
        let words = ["trade", "list", "--csv", "--pdf", "both.pdf"];
        let both = platform.cli(&words).await;
        assert_eq!(both.status.code(), Some(2), "{both:?}");
        assert!(!platform.folder().join("both.pdf").exists());
    });
}

// rows: R350
#[test]
fn r350_what_goes_wrong_is_told_on_standard_error_with_exit_code_one() {
    run(async {
        let platform = platform().await;
        let refused = platform
            .cli(&["--json", "order", "get", "--order-id", "no-such-order"])
            .await;
        assert_eq!(refused.status.code(), Some(1), "{refused:?}");
        assert!(
            refused.stderr.contains("not_found") && refused.stderr.contains("Order not found"),
            "{refused:?}"
        );
        assert_eq!(refused.stdout, "");
        let nowhere = command(
            platform.folder(),
            &["--url", "http://127.0.0.1:1", "instrument", "list"],
        )
        .await;
        assert_eq!(nowhere.status.code(), Some(1), "{nowhere:?}");
        assert!(
            nowhere.stderr.contains("is the platform running?"),
            "{nowhere:?}"
        );
        let unproved = command(platform.folder(), &["--url", "127.0.0.1:1", "proof"]).await;
        assert_eq!(unproved.status.code(), Some(1), "{unproved:?}");
        let mut errors = unproved.stderr.lines();
        assert!(
            errors.any(|line| line.starts_with("error: ") && line.contains("http://127.0.0.1:1")),
            "{unproved:?}"
        );
        let other = platform
            .cli(&["--token", "sandbox.auditor", "user", "create"])
            .await;
        assert!(other.stderr.contains("permission_denied"), "{other:?}");
        let nonsense = platform.cli(&["order", "dance"]).await;
        assert_eq!(nonsense.status.code(), Some(2), "{nonsense:?}");
    });
}

// rows: R350
#[test]
fn r350_a_reconciliation_with_a_discrepancy_ends_with_exit_code_one() {
    run(async {
        let report =
            json!({ "report": { "unexplainedDifference": { "amount": { "value": "0.01" } } } });
        let server = axum::Router::new().fallback(async move || axum::Json(report));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
        let listener = listener.expect("a port");
        let url = listener.local_addr().expect("an address").to_string();
        let serving = tokio::spawn(async move { axum::serve(listener, server).await });
        let folder = tempfile::tempdir().expect("a folder");
        let done = command(folder.path(), &["--url", &url, "recon", "run"]).await;
        serving.abort();
        assert_eq!(done.status.code(), Some(1), "{done:?}");
        assert!(done.stderr.contains("discrepancy of 0.01 RUB"), "{done:?}");
        assert!(done.stdout.contains("0.01"), "{done:?}");
    });
}

// rows: R350
#[test]
fn r350_a_command_finds_its_platform_in_the_configuration() {
    run(async {
        let all = platform().await.address("all");
        let folder = tempfile::tempdir().expect("a folder");
        let list = ["--json", "instrument", "list"];
        let settings = |address: &str| {
            let text = format!("[listen]\nall = \"{address}\"\n");
            std::fs::write(folder.path().join("platform.toml"), text).expect("written");
        };
        settings(&all.to_string());
        let found = command(folder.path(), &list).await.success().json();
        assert!(found.is_object(), "{found}");
        // A listener on all addresses is reached on the loopback.
        settings(&format!("0.0.0.0:{}", all.port()));
        command(folder.path(), &list).await.success();
        settings("127.0.0.1:1");
        let nowhere = command(folder.path(), &list).await;
        assert_eq!(nowhere.status.code(), Some(1), "{nowhere:?}");
        assert!(nowhere.stderr.contains("http://127.0.0.1:1"), "{nowhere:?}");
    });
}

// rows: R350
#[test]
fn r350_config_prints_what_is_in_force() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let found = command(folder.path(), &["--json", "config"])
            .await
            .success()
            .json();
        assert_eq!(found["listen"]["all"], json!("127.0.0.1:8080"));
        assert_eq!(found["data_dir"], json!("data"));
        std::fs::write(
            folder.path().join("platform.toml"),
            "[listen]\nall = \"127.0.0.1:9999\"\n",
        )
        .expect("written");
        let mut with_env = tests::process::command(folder.path());
        let with_env = with_env
            .args(["--json", "--data-dir", "elsewhere", "config"])
            .env("PLATFORM_LISTEN__LEDGER", "127.0.0.1:7777")
            .env("PLATFORM_LISTEN__BANK", "127.0.0.1:9999")
            .env("PLATFORM_LISTEN__TRADING", "127.0.0.1:9998")
            .env("PLATFORM_LISTEN__PAYMENTS", "0.0.0.0:9997")
            .env("SLACK_WEBHOOK_URL", "https://hooks.example/T0/secret");
        let output = tokio::time::timeout(5 * tests::process::PATIENCE, with_env.output()).await;
        let output = output.expect("it ends").expect("the binary runs");
        let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        assert_eq!(found["listen"]["all"], json!("127.0.0.1:9999"), "the file");
        assert_eq!(
            found["listen"]["ledger"],
            json!("127.0.0.1:7777"),
            "the environment"
        );
        assert_eq!(found["data_dir"], json!("elsewhere"), "the command line");
        for (pointer, address) in [
            ("/bank/listen", "127.0.0.1:9999"),
            ("/payments/bank_url", "http://127.0.0.1:9999/"),
            ("/bank/webhook_url", "http://127.0.0.1:9997/webhook"),
            ("/market/quic_listen", "127.0.0.1:9998"),
            ("/alerts/slack_webhook_url", "***"),
        ] {
            assert_eq!(found.pointer(pointer), Some(&json!(address)), "{pointer}");
        }
        let text = command(folder.path(), &["config"]).await.success().stdout;
        assert!(
            text.contains("[listen]") && text.contains("127.0.0.1:9999"),
            "{text}"
        );
        std::fs::write(folder.path().join("platform.toml"), "no_such_setting = 1\n")
            .expect("configuration written");
        let refused = command(folder.path(), &["config"]).await;
        assert_eq!(refused.status.code(), Some(1));
        assert!(refused.stderr.contains("no_such_setting"), "{refused:?}");
    });
}

// rows: R350
#[test]
fn r350_a_check_of_another_folder_states_that_it_is_no_data_folder() {
    run(async {
        let folder = tempfile::tempdir().expect("a folder");
        let here = folder.path();
        std::fs::create_dir(here.join("other")).expect("made");
        std::fs::write(here.join("other/file"), "text").expect("written");
        for verb in [["data", "check"], ["proof", "--full"]] {
            for (name, problem) in [
                ("missing", "does not exist"),
                (
                    "other",
                    "is not a data folder of the platform: it has no manifest.toml",
                ),
            ] {
                let path = here.join(name).display().to_string();
                let args = ["--data-dir", path.as_str(), verb[0], verb[1]];
                let refused = command(here, &args).await;
                assert_eq!(refused.status.code(), Some(1), "{refused:?}");
                let text = format!("{path} {problem}");
                assert!(refused.stderr.contains(&text), "{verb:?}: {refused:?}");
            }
        }
    });
}

/// The history consists of the demonstration (deposits, an issue against payment, trades, a
/// redemption, a payout that the bank refuses, an early redemption), many settled trades of a
/// replay, and a transfer.
// rows: R217
#[test]
fn r217_rebuild_agrees_with_a_rich_history_and_names_a_balance_that_was_changed() {
    run(async {
        let mut platform = Platform::start().await;
        let demo = platform.cli(&["--json", "demo"]).await.success().json();
        let flow = ["replay", "--json", "--synthetic", "7", "--rows", "1000"];
        let replay = platform.cli(&flow).await.success().json();
        let count = |answer: &Value, name: &str| answer[name].as_u64().expect("a number");
        let trades = count(&demo, "trades_settled") + count(&replay, "trades_settled");
        assert!(trades > 20, "{demo}\n{replay}");
        let (user, other) = (platform.rich("100").await, platform.trader().await);
        let bond = platform.bond().await;
        platform.issue(&bond, &user, "5").await;
        let transfer = json!({ "instrumentId": bond, "fromUserId": user.id, "toUserId": other.id,
            "amount": amount(&bond, "2") });
        platform
            .ok(&user.token(), "cfa.TransferCfa", transfer)
            .await;
        platform.balance_is(&other.units(&bond), "2").await;

        let agreed = assert_rebuild_agrees(&platform).await;
        // Each trade is a transfer of units; the demonstration makes more than 12 other transfers.
        assert!(count(&agreed, "transfers") > trades + 12, "{agreed}");
        // Money and units of three users of the demonstration and of this test's two users.
        assert!(count(&agreed, "subaccounts") >= 10, "{agreed}");
        assert_tampering_is_found(&mut platform, &user).await;
    });
}

/// Asserts that a rebuild finds no difference; returns its report.
async fn assert_rebuild_agrees(platform: &Platform) -> Value {
    let rebuild = ["--json", "ledger", "rebuild"];
    let agreed = platform.cli(&rebuild).await.success().json();
    assert_eq!(agreed["ok"], json!(true), "{agreed}");
    assert_eq!(agreed["differences"], json!([]), "{agreed}");
    let text = platform.cli(&rebuild[1..]).await.success().stdout;
    assert!(text.contains("no difference"), "{text}");
    agreed
}

/// Credits the user with a rouble by a direct write to the ledger's file. Asserts that a rebuild
/// reports exactly this difference.
async fn assert_tampering_is_found(platform: &mut Platform, user: &User) {
    platform.stop().await;
    let file = platform.data_dir().join("ledger").join("ledger.sqlite");
    let rows = rusqlite::Connection::open(file).expect("the ledger's file");
    let sql = "UPDATE sub_accounts SET balance = balance + 100 WHERE subaccount_id = ?1";
    assert_eq!(rows.execute(sql, [user.cash()]), Ok(1));
    drop(rows);
    platform.restart().await;
    let differs = platform.cli(&["--json", "ledger", "rebuild"]).await;
    assert_eq!(differs.status.code(), Some(1), "{differs:?}");
    let text = "the ledger differs from the balances of the chain's log";
    assert!(differs.stderr.contains(text), "{differs:?}");
    let found = differs.json();
    assert_eq!(found["ok"], json!(false));
    let differences = found["differences"].as_array().expect("a list");
    assert_eq!(differences.len(), 1, "{found}");
    assert_eq!(differences[0]["subaccountId"], json!(user.cash()));
    let figure = |name: &str| {
        let text = differences[0][name].as_str().expect("a figure");
        text.parse::<types::Decimal>()
            .expect("a number")
            .to_minor(2)
    };
    assert_eq!(
        ["chain", "ledger", "difference"].map(figure),
        [Ok(10_000), Ok(10_100), Ok(-100)]
    );
}
