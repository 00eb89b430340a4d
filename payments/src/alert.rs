//! Sinks of critical alerts besides the log: Slack and PagerDuty (specification 5.7, R022).
//!
//! The settings `[alerts]` name the receivers. Alerts are events of the payments topic. A consumer
//! delivers them at least once and retries while a receiver is unavailable. Without a receiver the
//! log is the only sink. The receivers are secrets and are never printed.

use std::{fmt, time::Duration};

use serde_json::json;

const PAGERDUTY_URL: &str = "https://events.pagerduty.com/v2/enqueue";
const TIMEOUT_MS: u64 = 10_000;

/// The configured receivers.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct AlertSinks {
    slack_url: Option<String>,
    pagerduty_key: Option<String>,
    pagerduty_url: Option<String>,
}

/// Shows which receivers are set, not their secrets.
impl fmt::Debug for AlertSinks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlertSinks")
            .field("slack", &self.slack_url.is_some())
            .field("pagerduty", &self.pagerduty_key.is_some())
            .finish()
    }
}

impl AlertSinks {
    /// Slack's webhook and PagerDuty's key. A blank text is no receiver.
    pub fn new(slack: Option<String>, pagerduty: Option<String>) -> AlertSinks {
        let non_blank = |text: &String| !text.trim().is_empty();
        AlertSinks {
            slack_url: slack.filter(non_blank),
            pagerduty_key: pagerduty.filter(non_blank),
            pagerduty_url: None,
        }
    }

    /// Replaces PagerDuty's address, for a proxy or a test double.
    pub fn with_pagerduty_url(mut self, url: &str) -> AlertSinks {
        self.pagerduty_url = Some(url.to_owned());
        self
    }

    /// Sends to every receiver, also after one has failed; returns the first error. A retry sends
    /// to all of them again: PagerDuty drops a repeat by its `dedup_key`, Slack shows it.
    pub(crate) async fn send(&self, report_id: &str, text: &str) -> Result<(), reqwest::Error> {
        if self.slack_url.is_none() && self.pagerduty_key.is_none() {
            return Ok(());
        }
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .timeout(Duration::from_millis(TIMEOUT_MS))
            .build()?;
        let mut deliveries = Vec::new();
        if let Some(url) = &self.slack_url {
            let body = json!({ "text": format!(":rotating_light: CRITICAL {text}") });
            deliveries.push(http.post(url).json(&body));
        }
        if let Some(key) = &self.pagerduty_key {
            let url = self.pagerduty_url.as_deref().unwrap_or(PAGERDUTY_URL);
            let body = json!({
                "routing_key": key,
                "event_action": "trigger",
                "dedup_key": report_id,
                "payload": { "summary": text, "severity": "critical", "source": "payments" },
            });
            deliveries.push(http.post(url).json(&body));
        }
        let mut outcome = Ok(());
        for delivery in deliveries {
            let sent = delivery.send().await;
            let accepted = sent.and_then(reqwest::Response::error_for_status);
            let accepted = accepted.map_err(reqwest::Error::without_url);
            outcome = outcome.and(accepted.map(drop));
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{Json, Router, extract::State, routing::post};
    use serde_json::Value;
    use tokio::net::TcpListener;

    use super::*;

    // rows: R022
    #[test]
    fn r022_a_blank_receiver_is_none_and_receivers_are_not_printed() {
        let blank = || Some(" ".to_owned());
        assert_eq!(AlertSinks::new(None, None), AlertSinks::default());
        assert_eq!(AlertSinks::new(blank(), blank()), AlertSinks::default());
        let both = AlertSinks::new(Some("secret a".into()), Some("secret b".into()));
        assert_eq!(both.slack_url.as_deref(), Some("secret a"));
        assert_eq!(both.pagerduty_key.as_deref(), Some("secret b"));
        assert!(!format!("{both:?}").contains("secret"));
    }

    // rows: R022
    #[tokio::test]
    async fn r022_pagerduty_receives_the_alert_while_slack_is_down() {
        type Received = Arc<Mutex<Vec<Value>>>;
        async fn record(State(received): State<Received>, Json(body): Json<Value>) {
            received.lock().unwrap().push(body);
        }
        let received = Received::default();
        let app = Router::new()
            .route("/", post(record))
            .with_state(received.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let pagerduty = format!("http://{}/", listener.local_addr().unwrap());
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        // A server without this path, and a port without a server.
        let missing = format!("{pagerduty}missing");
        let closed = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let refused = format!("http://{}/", closed.local_addr().unwrap());
        drop(closed);

        for slack in [missing, refused] {
            let sinks = AlertSinks::new(Some(slack.clone()), Some("key".into()))
                .with_pagerduty_url(&pagerduty);
            let error = sinks
                .send("report", "text")
                .await
                .expect_err("Slack is down");
            assert!(!error.to_string().contains(&slack), "{error}");
            let received = std::mem::take(&mut *received.lock().unwrap());
            assert_eq!(received.len(), 1, "{received:?}");
            assert_eq!(received[0]["dedup_key"], "report");
        }
    }
}
