//! Makes a data folder for later versions to open (`tests/tests/data_formats.rs`): the stores of
//! every service after a demonstration, a short load and the acts of `rows`, with an open order.
//!
//! The archive contains `data`, the folder, and `facts.json`: commands with their answers, which a
//! later version must repeat.

mod rows;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::platform::{self, Running};
use crate::shell;

/// Limit of the archive, in bytes.
const ARCHIVE_MAX: u64 = 2 << 20;
/// Time limit of a state, for example the settlement of all trades.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Price of the open order, above all trades and within the band of the load's instrument.
const OPEN_PRICE: &str = "190.00";

/// Reads whose answers depend on the stores alone, without those on the load's instrument. Lists
/// of what retention removes, and figures of the running process, are left out.
const READS: [&[&str]; 7] = [
    &["user", "list"],
    &["instrument", "list"],
    &["subaccount", "list", "--page-size", "1000"],
    &["ledger", "trial-balance"],
    &["intent", "list"],
    &["payout", "list"],
    &["order", "list", "--status", "OPEN"],
];

/// Objects that the facts name.
struct Filled {
    /// Issue of the load.
    instrument: String,
    /// Extract from the register.
    extract: String,
}

/// A running platform and its command line.
struct Made<'a> {
    binary: &'a Path,
    folder: &'a Path,
    url: String,
    trading: String,
}

impl Made<'_> {
    /// Runs a command on the platform; returns its answer.
    fn ask(&self, args: &[&str]) -> anyhow::Result<Value> {
        let options = ["--json", "--url", self.url.as_str()];
        let all = [&options[..], args].concat();
        let printed = shell::output(self.folder, &self.binary.to_string_lossy(), &all)?;
        serde_json::from_str(&printed).with_context(|| format!("answer of {args:?}"))
    }

    /// Makes a call with this credential; returns its answer.
    fn call(&self, token: &str, command: [&str; 2], request: &Value) -> anyhow::Result<Value> {
        let [noun, verb] = command;
        let data = request.to_string();
        self.ask(&["--token", token, noun, verb, "--data", data.as_str()])
    }

    /// Repeats a read until it shows the awaited state.
    fn until(
        &self,
        what: &str,
        read: &[&str],
        is_reached: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let answer = self.ask(read)?;
            if is_reached(&answer) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "waited for {what}: {answer}");
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// Issues, trades, redemptions and payouts, then trades of an issue that stays, and the acts of
    /// `rows`.
    fn fill(&self) -> anyhow::Result<Filled> {
        let trading = self.trading.as_str();
        self.ask(&["demo", "--connect", "--trading", trading])?;
        let load = ["load", "--trading", trading, "--rate", "200"];
        let load = [&load[..], &["--seconds", "3", "--members", "4"]].concat();
        let load = self.ask(&load)?;
        let instrument = load["instrument"].as_str().context("the load's issue")?;
        let trades = load["trades"].as_u64().unwrap_or_default();
        ensure!(trades > 0, "the load made no trades: {load}");
        self.until_settled()?;
        let extract = self.make_rows()?;
        self.place(instrument)?;
        Ok(Filled {
            instrument: instrument.to_owned(),
            extract,
        })
    }

    /// Waits until the chain has all trades.
    fn until_settled(&self) -> anyhow::Result<()> {
        let is_settled = |status: &Value| status["finalizedSequence"] == status["journalSequence"];
        self.until("settlement", &["settle", "status"], is_settled)
    }

    /// Offers a unit of a holder at a price above all bids.
    fn place(&self, instrument: &str) -> anyhow::Result<()> {
        let holders = self.ask(&["holders", "list", "--instrument-id", instrument])?;
        let holder = text(&holders, "/holders/0/userId")?;
        let placed = self.order(&holder, instrument, "SELL", OPEN_PRICE)?;
        let status = placed.pointer("/order/status");
        ensure!(
            status == Some(&json!("ORDER_STATUS_OPEN")),
            "the order is not open: {placed}"
        );
        Ok(())
    }

    /// Places an order for one unit.
    fn order(
        &self,
        user: &str,
        instrument: &str,
        side: &str,
        price: &str,
    ) -> anyhow::Result<Value> {
        let order = json!({
            "userId": user, "instrumentId": instrument, "side": format!("ORDER_SIDE_{side}"),
            "type": "ORDER_TYPE_LIMIT", "timeInForce": "TIME_IN_FORCE_GTC",
            "price": { "value": price }, "quantity": { "value": "1" },
        });
        let order = json!({ "order": order });
        self.call(&investor(user), ["order", "place"], &order)
    }

    /// The answers that a later version must repeat.
    fn facts(&self, filled: &Filled) -> anyhow::Result<Vec<Value>> {
        let instrument = filled.instrument.as_str();
        let of_issue = |noun| {
            [
                noun,
                "list",
                "--instrument-id",
                instrument,
                "--page-size",
                "1000",
            ]
        };
        let (holders, trades) = (of_issue("holders"), of_issue("trade"));
        let money = ["holders", "list", "--instrument-id", "CFA-RUB"];
        let extract = ["cfa", "audit", "--object-id", filled.extract.as_str()];
        let reads = READS.into_iter().chain(rows::READS);
        let reads = reads.chain([&holders[..], &trades[..], &money[..], &extract[..]]);
        reads.map(|command| self.fact(command)).collect()
    }

    /// A command with its answer, which lists something.
    fn fact(&self, command: &[&str]) -> anyhow::Result<Value> {
        let mut answer = self.ask(command)?;
        let fields = answer.as_object_mut().context("an answer")?;
        // A page token is no fact.
        fields.remove("pagination");
        let mut lists = fields.values().filter_map(Value::as_array);
        ensure!(
            lists.any(|rows| !rows.is_empty()),
            "{command:?} lists nothing"
        );
        Ok(json!({ "command": command, "answer": answer }))
    }
}

/// Credential of a user.
fn investor(user: &str) -> String {
    format!("sandbox.investor.{user}")
}

/// A text field of an answer.
fn text(answer: &Value, pointer: &str) -> anyhow::Result<String> {
    let found = answer.pointer(pointer).and_then(Value::as_str);
    let found = found.with_context(|| format!("no text at {pointer}: {answer}"))?;
    Ok(found.to_owned())
}

/// Makes `tests/data/NAME.tar.gz`. Builds the platform for release.
///
/// # Errors
/// The archive exists: a released folder never changes. A step fails, or the archive is too large.
pub fn run(name: &str) -> anyhow::Result<()> {
    let is_plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    ensure!(
        name.starts_with("stores-") && name.chars().all(is_plain),
        "the name must be `stores-` and lower-case letters, digits or `-`"
    );
    let archive = shell::root().join(format!("tests/data/{name}.tar.gz"));
    ensure!(!archive.exists(), "{} exists", archive.display());
    let binary = shell::build_release("node", "platform")?;
    let folder = shell::target()?.join("data-directory");
    if folder.exists() {
        std::fs::remove_dir_all(&folder).context("remains of an earlier run")?;
    }
    std::fs::create_dir_all(&folder)?;
    make(&binary, &folder)?;
    pack(&folder, &archive)?;
    println!("{} was written.", archive.display());
    Ok(())
}

/// Fills a data folder, stops the platform cleanly and checks every row.
fn make(binary: &Path, folder: &Path) -> anyhow::Result<()> {
    let mut program = Command::new(binary);
    program.args(["--json", "run", "--data-dir", "data"]);
    program.current_dir(folder);
    platform::on_free_ports(&mut program);
    let running = Running::start(program)?;
    let address = |listener: &str| {
        let address = running.ready["listen"][listener].as_str();
        address.map(str::to_owned).context("a listener's address")
    };
    let made = Made {
        binary,
        folder,
        url: format!("http://{}", address("all")?),
        trading: address("trading")?,
    };
    let filled = made.fill()?;
    let facts = made.facts(&filled)?;
    running.stop("INT")?;
    let facts = serde_json::to_string_pretty(&facts)?;
    std::fs::write(folder.join("facts.json"), facts)?;
    let check = ["--data-dir", "data", "data", "check"];
    shell::run(folder, &binary.to_string_lossy(), &check)
}

fn pack(folder: &Path, archive: &Path) -> anyhow::Result<()> {
    let path = archive.to_string_lossy();
    let tar = ["-czf", &*path, "data", "facts.json"];
    shell::run(folder, "tar", &tar)?;
    let size = std::fs::metadata(archive)?.len();
    if size > ARCHIVE_MAX {
        std::fs::remove_file(archive)?;
        bail!("the archive has {size} bytes, {ARCHIVE_MAX} at most");
    }
    Ok(())
}
