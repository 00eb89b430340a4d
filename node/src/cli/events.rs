//! `platform events dlq`: dead letters of the event log, and the way back (D26).
//!
//! Works on the log itself, embedded or Kafka, as the configuration names it: the platform may run
//! meanwhile, and on Kafka anywhere.

use std::collections::HashMap;

use anyhow::{Context, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, builder::PossibleValuesParser};
use events::{
    Embedded, Kafka, Log,
    dlq::{self, Letter},
    topics,
};
use serde_json::{Value, json};

use super::output;
use crate::config::Config;

/// The command line of this noun.
pub fn command() -> Command {
    let verb = |name, about| {
        Command::new(name)
            .about(about)
            .arg(
                Arg::new("topic")
                    .long("topic")
                    .value_name("TOPIC")
                    .value_parser(PossibleValuesParser::new(topics::ALL))
                    .action(ArgAction::Append)
                    .help("Topic the events came from; may be repeated [default: every topic]"),
            )
            .arg(
                Arg::new("group")
                    .long("group")
                    .value_name("GROUP")
                    .help("Only what this group of consumers gave up [default: every group]"),
            )
    };
    let list = verb("list", "List the events that consumers gave up").arg(
        Arg::new("all")
            .long("all")
            .action(ArgAction::SetTrue)
            .help("Those too that were put back already"),
    );
    let replay = verb(
        "replay",
        "Put events back, once each, for the group that gave them up",
    );
    Command::new("events")
        .about("The event log")
        .subcommand_required(true)
        .subcommand(
            Command::new("dlq")
                .about("Events that consumers gave up (dead letters)")
                .subcommand_required(true)
                .subcommands([list, replay]),
        )
}

/// Runs what was parsed by [`command`].
///
/// # Errors
/// The log cannot be opened or reached.
pub async fn run(matches: &ArgMatches, config: &Config, json: bool) -> anyhow::Result<()> {
    let Some((verb, matches)) = matches
        .subcommand()
        .and_then(|(_, matches)| matches.subcommand())
    else {
        bail!("there is no such command");
    };
    let named: Vec<&str> = matches
        .get_many::<String>("topic")
        .into_iter()
        .flatten()
        .map(String::as_str)
        .collect();
    let topics = if named.is_empty() {
        topics::ALL.to_vec()
    } else {
        named
    };
    let group = matches.get_one::<String>("group").map(String::as_str);
    let letters = match &config.events.kafka_brokers {
        Some(brokers) => {
            let kafka = Kafka::connect(brokers, &HashMap::new()).context("Kafka")?;
            letters(&kafka, verb, &topics, group).await?
        }
        None => {
            let folder = config.data_dir.join("events");
            // Opening would make what is missing.
            if !["log.db", "offsets.db"]
                .iter()
                .all(|name| folder.join(name).is_file())
            {
                bail!("there is no event log in {}", folder.display());
            }
            let embedded = Embedded::open(folder).await.context("event log")?;
            let letters = letters(&embedded, verb, &topics, group).await;
            embedded.close().await;
            letters?
        }
    };
    let shows_all = verb != "list" || matches.get_flag("all");
    let shown: Vec<Value> = letters
        .iter()
        .filter(|letter| shows_all || !letter.is_replayed)
        .map(to_json)
        .collect();
    let shown = json!({ "letters": shown });
    if json {
        println!("{}", serde_json::to_string_pretty(&shown)?);
    } else {
        print!("{}", output::text(&shown));
    }
    Ok(())
}

async fn letters(
    log: &dyn Log,
    verb: &str,
    topics: &[&str],
    group: Option<&str>,
) -> anyhow::Result<Vec<Letter>> {
    let failing = log.failing();
    let letters = if verb == "replay" {
        dlq::replay(log, topics, group).await
    } else {
        dlq::list(log, topics, group).await
    };
    // A log that is away has no letters to show, which is not the same as none.
    if let Some(reason) = failing.borrow().as_deref() {
        bail!("event log: {reason}");
    }
    letters.context("event log")
}

fn to_json(letter: &Letter) -> Value {
    json!({
        "topic": letter.topic,
        "position": letter.position.to_string(),
        "eventId": letter.event_id.to_string(),
        "type": letter.type_name,
        "key": letter.key,
        "group": letter.group,
        "attempts": letter.attempts,
        "reason": letter.reason,
        "givenUpAt": letter.given_up_at,
        "replayed": letter.is_replayed,
    })
}
