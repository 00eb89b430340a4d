//! Log lines of a world.

use std::sync::{Arc, LazyLock, Mutex};

use serde_json::Value;
use tracing::{Dispatch, subscriber::DefaultGuard};

/// A second subscriber. With only one, `tracing` caches a callsite's interest from the thread that
/// reaches it first, and the threads of other tests may have no subscriber.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| {
    let subscriber = rpc::logging::subscriber("platform", "info", |_: &[u8]| ());
    Dispatch::new(subscriber.unwrap())
});

/// Records the log of this thread, which is a world's whole log: a test's runtime has one thread.
pub struct Lines {
    text: Arc<Mutex<Vec<u8>>>,
    _guard: DefaultGuard,
}

impl Lines {
    pub fn record() -> Lines {
        LazyLock::force(&SECOND);
        let text = Arc::<Mutex<Vec<u8>>>::default();
        let sink = text.clone();
        let write = move |line: &[u8]| sink.lock().unwrap().extend_from_slice(line);
        let subscriber = rpc::logging::subscriber("platform", "info", write).unwrap();
        Lines {
            text,
            _guard: tracing::subscriber::set_default(subscriber),
        }
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.text.lock().unwrap().clone()).unwrap()
    }

    /// Every line so far.
    pub fn all(&self) -> Vec<Value> {
        let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        self.text().lines().map(parse).collect()
    }

    /// The lines with this value.
    pub fn with(&self, field: &str, value: &str) -> Vec<Value> {
        let mut lines = self.all();
        lines.retain(|line| line[field] == value);
        lines
    }
}
