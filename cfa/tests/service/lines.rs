//! Errors that a test's thread logs.

use std::sync::{Arc, LazyLock, Mutex};

use serde_json::Value;
use tracing::{Dispatch, subscriber::DefaultGuard};

/// A second subscriber. With only one, `tracing` caches a callsite's interest from the thread that
/// reaches it first, and the threads of other tests have no subscriber.
static SECOND: LazyLock<Dispatch> = LazyLock::new(|| {
    let subscriber = rpc::logging::subscriber("platform", "error", |_: &[u8]| ());
    Dispatch::new(subscriber.expect("a subscriber"))
});

/// Records the errors of this thread. It handles the calls that the test makes: a local channel
/// spawns no task.
pub struct Lines {
    text: Arc<Mutex<Vec<u8>>>,
    _guard: DefaultGuard,
}

impl Lines {
    pub fn record() -> Self {
        LazyLock::force(&SECOND);
        let text = Arc::<Mutex<Vec<u8>>>::default();
        let sink = text.clone();
        let write = move |line: &[u8]| sink.lock().expect("a lock").extend_from_slice(line);
        let subscriber = rpc::logging::subscriber("platform", "error", write);
        let subscriber = subscriber.expect("a subscriber");
        Self {
            text,
            _guard: tracing::subscriber::set_default(subscriber),
        }
    }

    /// Every line so far.
    pub fn all(&self) -> Vec<Value> {
        let text = self.text.lock().expect("a lock").clone();
        let text = String::from_utf8(text).expect("text");
        let parse = |line: &str| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"));
        text.lines().map(parse).collect()
    }
}
