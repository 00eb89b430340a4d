//! What the connectors of this process log.

use std::fmt::{Debug, Write};
use std::sync::{Mutex, Once};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Fields of all events of the crate `chain`, one event a line.
static LOGGED: Mutex<String> = Mutex::new(String::new());

struct Recorder;

struct Fields<'a>(&'a mut String);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let _ = write!(self.0, "{}={value:?} ", field.name());
    }
}

impl Subscriber for Recorder {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("chain")
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut text = LOGGED.lock().expect("a lock");
        event.record(&mut Fields(&mut text));
        text.push('\n');
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Records from now on, for all threads: connectors log on those of their tasks.
pub fn record() {
    static RECORDING: Once = Once::new();
    RECORDING.call_once(|| tracing::subscriber::set_global_default(Recorder).expect("the first"));
}

/// The events of one signing account after its first `known` ones.
pub fn of_account(account: &str, known: usize) -> Vec<String> {
    let text = LOGGED.lock().expect("a lock");
    let lines = text.lines().filter(|line| line.contains(account));
    lines.skip(known).map(str::to_owned).collect()
}
