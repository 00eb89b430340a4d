//! `platform events dlq`: lists and replays dead letters of the event log (D26).
//!
//! Opens the configured log directly, embedded or Kafka. The platform may run at the same time;
//! with Kafka it may run on any machine.

use std::collections::HashMap;

use anyhow::{Context, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, builder::PossibleValuesParser};
use events::{
    Embedded, Kafka, Log,
    dlq::{self, DeadLetter},
    topics,
};
use serde_json::{Value, json};

use super::output;
use crate::config::Config;

/// The command line of the noun.
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
                    .help("Topic of the events; may be repeated [default: every topic]"),
            )
            .arg(
                Arg::new("group")
                    .long("group")
                    .value_name("GROUP")
                    .help("Only dead letters of this consumer group [default: every group]"),
            )
    };
    let list = verb("list", "List dead letters").arg(
        Arg::new("all")
            .long("all")
            .action(ArgAction::SetTrue)
            .help("Include dead letters that were replayed already"),
    );
    let replay = verb(
        "replay",
        "Redeliver dead letters to their consumer group, once each",
    );
    Command::new("events")
        .about("The event log")
        .subcommand_required(true)
        .subcommand(
            Command::new("dlq")
                .about("Dead letters: events that a consumer group gave up after its retries")
                .subcommand_required(true)
                .subcommands([list, replay]),
        )
}

/// Runs the command parsed by [`command`].
///
/// # Errors
/// The log cannot be opened or reached.
pub async fn run(matches: &ArgMatches, config: &Config, json: bool) -> anyhow::Result<()> {
    let Some((verb, matches)) = matches
        .subcommand()
        .and_then(|(_, matches)| matches.subcommand())
    else {
        bail!("unknown command");
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
            // Opening would create a missing log.
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
) -> anyhow::Result<Vec<DeadLetter>> {
    let failing = log.failing();
    let letters = if verb == "replay" {
        dlq::replay(log, topics, group).await
    } else {
        dlq::list(log, topics, group).await
    };
    // A read of an unreachable log may return no letters: report the reason instead.
    if let Some(reason) = failing.borrow().as_deref() {
        bail!("event log: {reason}");
    }
    letters.context("event log")
}

fn to_json(letter: &DeadLetter) -> Value {
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
